"""The page: one file of HTML that needs nothing else.

In: the data of a report. Out: text. What is short is written here, by the templates beside this
file. What is long is built by the page's script when somebody comes to it: rows of steps from a
short text each, and the rest (loops, sources, instructions, drawings of large graphs) from the data
of the report, which stands in the page as JSON that is not read before.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from plait.tools.page.draw import DETAILED, graph_svg, memory_svg, number_text, time_text
from plait.tools.page.lives import bytes_text

Data = Mapping[str, Any]
SLOWEST = 12  # kernels and calls in the overview
OPEN = 12  # graphs whose drawings stand in the page, and that its head leads to
FOLDER = Path(__file__).parent / "templates"


def page(data: Data) -> str:
    """The whole page."""
    graphs = data["graphs"]
    drawings = {n: graph_svg(g, n) for n, g in enumerate(graphs)}
    shown = {n: svg for n, svg in drawings.items() if len(graphs[n]["steps"]) <= DETAILED}
    shown = {n: svg for n, svg in shown.items() if n < OPEN}
    later = {n: svg for n, svg in drawings.items() if n not in shown}
    return (
        _environment()
        .get_template("page.html")
        .render(
            data=data,
            lines=_lines(data),
            slowest=_slowest(data),
            kinds=_kinds(data),
            all_ns=_all_ns(data) or 1,
            stages=_stages,
            total_ms=_total_ms,
            number=number_text,
            buffer=_buffer,
            called=_called,
            drawings={n: Markup(svg) for n, svg in shown.items()},
            memory=lambda g, n: Markup(memory_svg(g["programs"][0], n)) if g["programs"] else "",
            compile_stages=_compile_stages(data),
            from_cache=[g["cache_hit"] for g in graphs if g["cache_hit"] is not None],
            files=_files,
            busy=_busy,
            open=OPEN,
            rows=Markup(_json([[_row(s) for s in g["steps"]] for g in graphs])),
            embedded=Markup(_json({**data, "drawings": later})),
            style=Markup((FOLDER / "page.css").read_text()),
            script=Markup((FOLDER / "page.js").read_text()),
        )
    )


def _lines(data: Data) -> dict[str, str]:
    """The user's lines of the whole report."""
    parts = (*data["graphs"], *data["breaks"], *data["recompiles"])
    return {where: text for part in parts for where, text in part["lines"].items()}


def _total_ms(graph: Data) -> float:
    return float(sum(ms for stage, ms in graph["times_ms"].items() if "/" not in stage))


def _stages(graph: Data) -> list[tuple[str, float]]:
    """The stages of a compile in order, each before its parts."""
    times = graph["times_ms"]
    return [
        (part, times[part])
        for stage in times
        if "/" not in stage
        for part in (stage, *(p for p in times if p.startswith(f"{stage}/")))
    ]


def _compile_stages(data: Data) -> list[tuple[str, float]]:
    """Milliseconds by stage of the compiles of all graphs, most first."""
    found: dict[str, float] = {}
    for g in data["graphs"]:
        for stage, ms in g["times_ms"].items():
            if "/" not in stage:
                found[stage] = found.get(stage, 0.0) + ms
    return sorted(found.items(), key=lambda row: -row[1])


def _row(s: Data) -> list[str]:
    """A step's row: how it is drawn, its name, and what stands in the columns."""
    time = time_text(s["time_ns"]) if s["time_ns"] else ""
    if not time and s["estimate_ns"]:
        time = f"about {time_text(s['estimate_ns'])}"
    return [
        "call fell" if s["fell_back"] else s["what"],
        s["name"],
        _places(s),
        bytes_text(s["read_nbytes"] + s["written_nbytes"]),
        number_text(s["operations"]),
        time,
        _share(s["roofline"]),
    ]


def _files(graph: Data) -> str:
    """The user's files that a graph's code is in, those with most steps first."""
    files = Counter(o["where"].partition(":")[0] for s in graph["steps"] for o in s["origin"])
    found = [name for name, _ in files.most_common() if name]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _busy(graph: Data, at: int) -> str:
    """The step that runs at an instruction of the graph's own program, or next."""
    later = [
        (s["instruction"], s["name"])
        for s in graph["steps"]
        if s["program"] == 0 and s["instruction"] is not None and s["instruction"] >= at
    ]
    return str(min(later)[1]) if later else ""


def _slowest(data: Data) -> list[dict[str, Any]]:
    """What takes most time: launches of one kernel in a row, and calls of one operator that compute
    and read as much. By measured times; where there are none, by estimates of kernels."""
    rows: dict[Hashable, dict[str, Any]] = {}
    for n, k, s in _steps(data):
        alike = s["name"], *((s["operations"], s["read_nbytes"]) if s["what"] == "call" else ())
        first = {"name": s["name"], "graph": n, "step": k, "where": _places(s)}
        first["operations"] = s["operations"]
        _count(rows.setdefault(alike, first | _NOTHING), s)
    return sorted(rows.values(), key=lambda row: -row["ns"])[:SLOWEST]


def _kinds(data: Data) -> list[dict[str, Any]]:
    """The time by kind of step, most first; nothing where none is measured."""
    rows: dict[str, dict[str, Any]] = {}
    for _, _, s in _steps(data):
        if s["time_ns"] is not None:
            _count(rows.setdefault(s["kind"], {"kind": KINDS[s["kind"]]} | _NOTHING), s)
    return sorted(rows.values(), key=lambda row: -row["ns"])


KINDS = {
    "product": "matrix products", "convolution": "convolutions", "attention": "attention",
    "operator": "other operators of PyTorch", "reduction": "kernels that reduce",
    "pointwise": "other kernels",
}  # fmt: skip
_NOTHING = {"n": 0, "ns": 0, "best_ns": 0.0, "timed": True}


def _steps(data: Data) -> Iterator[tuple[int, int, Data]]:
    """All steps, with the numbers of their graphs and their own."""
    for n, g in enumerate(data["graphs"]):
        yield from ((n, k, s) for k, s in enumerate(g["steps"]))


def _count(row: dict[str, Any], s: Data) -> None:
    """Adds a step. best_ns: what those would take, together, that have a share of the roofline."""
    row["n"] += 1
    row["ns"] += s["time_ns"] or s["estimate_ns"]
    row["best_ns"] += (s["roofline"] or 0) * (s["time_ns"] or 0)
    row["timed"] &= s["time_ns"] is not None


def _all_ns(data: Data) -> int:
    """The time of all steps, together, with estimates where kernels are not timed."""
    return sum(s["time_ns"] or s["estimate_ns"] for _, _, s in _steps(data))


def _places(step: Data) -> str:
    """The module and the user's lines of a step, the first ones."""
    found = list(dict.fromkeys(o["where"] for o in step["origin"] if o["where"]))
    lines = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return f"{step['module']}, {lines}" if step["module"] and lines else step["module"] or lines


def _buffer(graph: Data, name: str) -> Any:
    return next(b for b in graph["programs"][0]["buffers"] if b["name"] == name)


def _called(graph: Data, name: str) -> str:
    """A buffer's name, after the user's where there is one."""
    words = next((x["is"] for x in (*graph["inputs"], *graph["results"]) if x["name"] == name), "")
    return f"{words} ({name})" if words else name


def _json(data: object) -> str:
    """JSON that may stand in a script element: no text of it ends the element or begins a
    comment."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {"bytes": bytes_text, "time": time_text, "many": _many, "share": _share}
    return made


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _share(x: float | None) -> str:
    return "" if x is None else f"{x:.0%}" if x >= 0.005 or x == 0 else "<1%"
