"""The suite's page: results/suite-DEVICE.json as Markdown and as a plot."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path

from benchmarks.suite import records as book
from benchmarks.suite.models import cases
from benchmarks.suite.plot import draw
from benchmarks.table import render

CAUSES = Path(__file__).parent / "causes.json"
DOCS = book.ROOT / "docs"
LEGEND = f"""\
Times are ms of the best call, CUDA graphs (mode "reduce-overhead") after the stroke, max-autotune,
of a command of its own, after a second one where a model is named for it. × best: the best time of
Inductor's modes over the best of plait's; × eager: eager's time over it. first s: the first call in
default mode, plait / Inductor, with caches that are empty and beside other processes that compile,
so that only their ratio says something. MiB: memory of a call at its peak, default mode and graphs
(with what a recording keeps): plait / Inductor. error: distance from the truth (float64; float32
where the model cannot run in it) as a multiple of eager's, the worst of the modes: plait /
Inductor; right is what stays below {book.RIGHT:g}. Of a training step in float32 eager's is the
worst of four runs whose weights differ by a unit in their last place, for an activation near zero
falls on one side of it by luck. kernels: what the device runs in a call, eager / plait / Inductor,
default mode. A pass is a row whose modes of plait all ran and were right."""
HEADS = (
    "", "of", "eager", "plait", "Inductor", "× best", "× eager", "first s", "MiB", "graphs MiB",
    "error", "kernels", "breaks",
)  # fmt: skip
KEYS = ("first_s", "peak_mib")


def write_page(table: Path) -> None:
    """The page beside the table; the plot in docs/ if the table is the project's own."""
    records = book.read(table)
    own = table.parent == book.RESULTS
    plot = (DOCS if own else table.parent) / f"{table.stem}.svg"
    device = next(iter(records.values()))["device"]
    causes = json.loads(CAUSES.read_text())
    plot.write_text(draw(speedups(records), f"{device}: times as fast as Inductor's best mode"))
    link = f"../../docs/{plot.name}" if own else plot.name
    table.with_suffix(".md").write_text(page(records, causes, link) + "\n")
    print(f"wrote {table.with_suffix('.md')} and {plot}")


def kind(case: str) -> tuple[str, str]:
    """(inference or training, type) of a case."""
    _, how, dtype = case.split("/")
    return {"infer": "inference", "train": "training"}[how], dtype


def speedups(records: book.Records) -> dict[str, list[tuple[str, float]]]:
    """For the plot: by panel, the models with their ratio, the fastest first."""
    panels: dict[str, list[tuple[str, float]]] = {}
    for case, record in sorted(records.items()):
        r = book.ratio(record)
        if r is not None:
            panels.setdefault(", ".join(kind(case)), []).append((case.split("/")[0], r))
    return {name: sorted(rows, key=lambda row: -row[1]) for name, rows in panels.items()}


def page(records: book.Records, causes: dict[str, str], plot: str) -> str:
    """The whole page."""
    device = next(iter(records.values()))["device"]
    known = cases("cpu" if device.startswith("CPU") else "cuda")
    dates = sorted(record["date"][:10] for record in records.values())
    plaits = sorted({record["commit"] or record["plait"] for record in records.values()})
    parts = [
        f"# The suite on {device}",
        f"- measured: {len(records)} of {len(known)} cases, {dates[0]} to {dates[-1]}\n"
        f"- torch: {', '.join(sorted({record['torch'] for record in records.values()}))}\n"
        f"- plait at: {', '.join(plaits)}\n"
        "- command: `python -m benchmarks.suite.run` (`make bench-suite`), in pieces",
        f"![speed-up per model]({plot})",
        summary(records),
        LEGEND,
        "## The ten worst rows\n\n" + worst_table(records, causes),
        "## What failed\n\n" + failure_list(records),
    ]
    groups: dict[tuple[str, str], list[book.Record]] = {}
    for case in sorted(records):
        groups.setdefault(kind(case), []).append(records[case])
    for (how, dtype), rows in sorted(groups.items()):
        rows.sort(key=lambda r: (r["field"], r["case"]))
        parts.append(f"## {how}, {dtype}\n\n" + render(HEADS, [row(r) for r in rows]))
    notes = {r["case"].split("/")[0]: r["note"] for r in records.values() if r.get("note")}
    said = [
        f"- {case}, {name}: {line}"
        for case, r in sorted(records.items())
        for name, figures in r["variants"].items()
        for line in figures.get("said", ())
    ]
    parts += ["## What plait warned of\n\n" + "\n".join(said)] if said else []
    cut = "Cut: " + "; ".join(f"{m}: {notes[m]}" for m in sorted(notes)) + "."
    parts.append(textwrap.fill(cut, 100))
    return "\n\n".join(parts)


def mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of those that are there."""
    logs = [math.log(v) for v in values if v]
    return math.exp(sum(logs) / len(logs)) if logs else None


def summary(records: book.Records) -> str:
    """Pass rates and geometric means, a row a kind of case."""
    heads = (
        "", "rows", "passed", "below 0.98", "× Inductor", "× eager", "first, × Inductor",
        "MiB / Inductor's",
    )  # fmt: skip
    rows = []
    for how in sorted({kind(case) for case in records}):
        some = [r for case, r in records.items() if kind(case) == how]
        ratios = [x for r in some if (x := book.ratio(r))]
        passed = sum(not book.failures(r) for r in some)
        both = [(figure(r, "plait", k), figure(r, "inductor", k)) for r in some for k in KEYS]
        first = mean(over(b, a) for a, b in both[::2])
        peak = mean(over(a, b) for a, b in both[1::2])
        eager = mean(over(figure(r, "eager", "ms"), book.best(r, "plait")) for r in some)
        cells = [number(c, 2) for c in (mean(ratios), eager, first, peak)]
        below = str(sum(x < 0.98 for x in ratios))
        rows.append([", ".join(how), str(len(some)), str(passed), below, *cells])
    return render(heads, rows)


def shares(record: book.Record) -> str:
    """What the vendors' kernels take of a call, in the best mode of either peer."""
    said = []
    for peer in ("plait", "inductor"):
        name = min(book.times(record, peer), key=book.times(record, peer).__getitem__, default="")
        figures = record["variants"].get(name, {})
        if "vendors_ms" not in figures:
            return "not known yet"
        said.append(f"{figures['vendors_ms']:.2f} of {figures['busy_ms']:.2f}")
    ours, theirs = said
    return f"kernels of libraries and of PyTorch take {ours} ms here, {theirs} ms in Inductor's"


def worst_table(records: book.Records, causes: dict[str, str]) -> str:
    rows = []
    for case in book.worst(records, 10):
        r = records[case]
        ours, theirs = number(book.best(r, "plait"), 3), number(book.best(r, "inductor"), 3)
        cause = causes.get(case) or causes.get(case.split("/")[0]) or shares(r)
        rows.append([case, number(book.ratio(r), 2), ours, theirs, cause])
    return render(("", "× best", "plait ms", "Inductor ms", "cause"), rows)


def failure_list(records: book.Records) -> str:
    lines = []
    for peer in ("plait", "inductor"):
        for case in sorted(records):
            for name, why in book.failures(records[case], peer).items():
                if peer == "plait" or name != "eager":
                    lines.append(f"- {case}, {name}: {why[:300]}")
    return "\n".join(lines) or "Nothing."


def row(record: book.Record) -> list[str]:
    """A row of the big tables."""
    name, eager = record["case"].split("/")[0], figure(record, "eager", "ms")

    def pair(key: str, digits: int, suffix: str = "") -> str:
        both = [figure(record, f"{peer}{suffix}", key) for peer in ("plait", "inductor")]
        return " / ".join(number(x, digits) or "–" for x in both)

    def times(peer: str) -> str:
        modes = [m for m in (peer, f"{peer}-graphs", f"{peer}-max") if m in record["variants"]]
        return " / ".join(number(figure(record, m, "ms"), 3) or "failed" for m in modes)

    kernels = [figure(record, v, "kernels") for v in ("eager", "plait", "inductor")]
    errors = [worst_error(record, peer) for peer in ("plait", "inductor")]
    breaks = figure(record, "plait", "breaks")
    return [
        name,
        record["field"],
        number(eager, 3) or "failed",
        times("plait"),
        times("inductor"),
        number(book.ratio(record), 2),
        number(over(eager, book.best(record, "plait")), 2),
        pair("first_s", 1),
        pair("peak_mib", 0),
        pair("peak_mib", 0, "-graphs"),
        " / ".join(number(x, 2) or "–" for x in errors),
        " / ".join(number(x, 0) or "–" for x in kernels),
        number(breaks, 0) if breaks else "",
    ]


def worst_error(record: book.Record, peer: str) -> float | None:
    names = [name for name in record["variants"] if name.split("-")[0] == peer]
    found = [x for name in names if (x := book.error(record, name)) is not None]
    return max(found, default=None)


def figure(record: book.Record, variant: str, key: str) -> float | None:
    value = record["variants"].get(variant, {}).get(key)
    return None if value is None else float(value)


def over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def number(value: float | None, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if value < 1e6 else "not finite"
