"""What was compiled, as data and as one page of HTML: `plait.report`, `plait report`,
`Report.to_json`.

`data.py` makes plain data of records (docs/report.md describes it), `collect.py` gathers them while
a program runs, `draw.py` lays out the pictures, `render.py` writes the page, `command.py` is the
command line.
"""
