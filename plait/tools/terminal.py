"""A report on a terminal: the summary of `Report.text` as tables, as wide as the terminal.

In: a `Report`. Out: nothing; it prints. Where standard output is no terminal, the plain text is
printed instead (`explain.py`), which programs may read.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plait.schedule.text import time_text
from plait.tools.report import KERNELS, MANY, Report, same_kernels

_BAD = ("graph breaks", "compiled again in this process", "functions that Dynamo leaves to eager")


def show(report: Report, details: bool, console: Console | None = None) -> None:
    """Prints a report. details: the page a graph after it. console: in place of standard output."""
    out = console or Console(highlight=False)
    if report.note:
        out.print(Text(report.note, "yellow"))
    out.print(Text(report.head, "bold"))
    graphs = _table("graph", "ATen operators", "kernels", "calls", "to compile", "and")
    for row in report.graph_rows:
        graphs.add_row(*map(Text, row))
    out.print(graphs)
    for title, lines in report.sections:
        out.print(Text(f"\n{title}", "bold yellow" if title.startswith(_BAD) else "bold"))
        if title == KERNELS:
            out.print(_kernels(report))
        else:
            rest = [f"... and {len(lines) - MANY} more"] if len(lines) > MANY else []
            for line in (*lines[:MANY], *rest):
                out.print(Padding(Text(line, overflow="fold"), (0, 0, 0, 2)))
    if details:
        out.print(Text(f"\n{report.details}"))


def _kernels(report: Report) -> Table:
    """Kernels of the same operators in a row, those with the most work first."""
    table = _table("launches", "kernel", "of the operators", "about, on one core")
    rows = same_kernels(report.graphs)
    for row in rows[:MANY]:
        table.add_row(*map(Text, (str(row.n), row.name, row.ops, time_text(row.work_ns))))
    if len(rows) > MANY:
        table.add_row("", f"... and {len(rows) - MANY} more", "", "")
    return table


def _table(*heads: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    numbers: Sequence[str] = ("ATen operators", "kernels", "calls", "to compile", "launches")
    for head in heads:
        right = head in numbers or head.startswith("about")
        table.add_column(head, justify="right" if right else "left", overflow="fold")
    return table
