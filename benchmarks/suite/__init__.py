"""A race over a whole suite of models: `make bench-suite`, or `python -m benchmarks.suite.run`.

models.py lists the models, own.py has those that no library has; worker.py runs one case in a
process of its own, run.py hands cases out and keeps the clock, table.py, page.py and plot.py turn
what they found into results/suite-DEVICE.json and .md and docs/suite-DEVICE.svg.
"""
