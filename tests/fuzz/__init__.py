"""The graph fuzzer: random programs against eager, on every road that leads to plait.

    python -m tests.fuzz --count 1000 --jobs 2 --state run.json  look for failures
    python -m tests.fuzz --seed 17                               look at one program and shrink it

values.py makes tensors, program.py is a program as data, maker.py and the catalogue (catalog.py,
indexing.py, special.py) put statements together, make.py draws a program of a seed, check.py runs
and compares, worker.py and pool.py do so in other processes, shrink.py makes failures small.
"""
