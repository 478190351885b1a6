"""The part of results/numerics.md about models, made from results/numerics-DEVICE.json."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.numerics.programs import BATCHES, PARTS, SORTED, TOKENS
from benchmarks.suite import records as book
from benchmarks.suite.page import mean
from benchmarks.table import render

PAGE = book.RESULTS / "numerics.md"
MARK = "<!-- What follows is written by python -m benchmarks.numerics -->"
CAUSES = Path(__file__).parent / "causes.json"
"""Why a model has other bits than eager's with numerics="eager", and other things that are known:
{"model/type/part": cause}; of a failure {"model/type/part/variant": what is known since}."""
Figures = dict[str, Any]

SIZES = "{}, {} and {}".format(*BATCHES[1:])
LEGEND = f"""\
`python -m benchmarks.numerics` (`--device cuda`, `--small`, `--shard K/N`, `--merge FILES`) runs
the models of benchmarks/suite, with random weights; norms and biases, ones and zeros in a fresh
model, are drawn as well. Results are all that a model returns; of a training step the loss and the
gradients of each module as one vector. Bits are equal where every element is, signs of zeros
included; a percentage is the share of elements that differ. An error is the distance from float64
(relative, in the 2-norm, the root of the mean square over results; float32 where a model cannot run
in float64), as a multiple of eager's own; of a training step in float32 eager's is the worst of
four, whose weights differ in their last bit. The error of the median vector (the logits of a token,
say) is given too: where experts are chosen by a narrow margin a few tokens are far off, in eager or
in another by luck.

- *traced*: the graph that Dynamo makes, or AOTAutograd, run operator by operator as eager does. If
  it has other bits than eager, a library runs other code when it is traced, or PyTorch writes
  gradients otherwise, before any compiler of kernels sees the graph.
- *batch*: one row alone and as the first and the last one of batches of {SIZES}, each size
  compiled on its own; what is returned for the row has to have the same bits. Models of two layers
  here, and for lengths. Graph networks have no rows.
- *padded* (transformers with a mask): a text alone, with a mask of ones, and as the first row of
  two that are filled up to a longer length, masked; two longer lengths. All of the text's own
  positions count.
- *prefix* (causal language models): the same text followed by more text, without a mask; two longer
  lengths.
- *each time*: two calls of a process, and two processes with caches of their own.
- *cost*: the least time of a call in seven rounds, in turn, as a multiple of plait's by default.
- *graphs* (GPT-2, Llama, on a GPU): the same where what is compiled is replayed as a CUDA graph, so
  that what a CPU does for each call does not count; *train-cost*: the same of a training step.
- *token* (GPT-2, Llama): the same for one token of each row, without a cache, so that attention
  sees this token alone; what is compiled is replayed as a CUDA graph on a GPU."""


def write_page(tables: Sequence[Path], page: Path = PAGE) -> None:
    """Puts what the tables say in the place of what the page has below its mark."""
    kept = page.read_text().split(MARK)[0].rstrip()
    causes = json.loads(CAUSES.read_text())
    parts = [kept, MARK, "# Models", LEGEND]
    parts += [section(book.read(table), causes) for table in tables]
    page.write_text("\n\n".join(parts) + "\n")
    print(f"wrote {page}")


def section(records: book.Records, causes: dict[str, str]) -> str:
    """What one device's table says."""
    rows = [records[name] for name in sorted(records)]
    first = rows[0]
    figures = [f for r in rows for variants in r["parts"].values() for f in variants.values()]
    commits = sorted({f["commit"] or f["plait"] for f in figures})
    sizes = "two layers, short inputs and batches of two" if first["small"] else "the suite's sizes"
    torch_and_plait = f"torch {first['torch']}, plait {', '.join(commits)}"
    parts = [
        f"## {first['device']}",
        wrapped(f"{torch_and_plait}, {len(rows)} models and types, {sizes}."),
        "### Against eager\n\n" + against_eager(rows),
        exceptions(rows, causes),
        "### The same each time\n\n" + each_time(rows),
        "### The same in any batch\n\n" + any_batch(rows),
        "### Costs\n\n" + (costs(rows, "cost") or "Not measured."),
        *(f"{how}\n\n{table}" for part, how in COSTS.items() if (table := costs(rows, part))),
        "### Every model\n\n" + every_model(rows),
        failures(rows, causes),
    ]
    return "\n\n".join(part for part in parts if part)


def wrapped(text: str) -> str:
    return textwrap.fill(text, 100, subsequent_indent="  " if text[0] == "-" else "")


def get(record: book.Record, part: str, variant: str) -> Figures | None:
    """The figures of a variant, None if it failed or was not measured."""
    found = record["parts"].get(part, {}).get(variant)
    return None if found is None or "failed" in found else found


def ratio(record: book.Record, part: str, variant: str) -> float | None:
    """The error of a variant as a multiple of eager's."""
    f = get(record, part, variant)
    if f is None or f["error"] is None or f["own"] is None:
        return None
    return f["error"] / max(f["own"], 1e-12)


def typical(record: book.Record, part: str, variant: str) -> float | None:
    """The error of the median vector as a multiple of eager's."""
    f = get(record, part, variant)
    if f is None or f.get("typical") is None or not f["own_typical"]:
        return None
    return f["typical"] / f["own_typical"]


def share(f: Figures | None) -> float | None:
    """Which part of the elements differs; of several sizes the worst."""
    if f is None:
        return None
    differ = f["differ"]
    return (max(differ.values()) if isinstance(differ, dict) else differ) / max(1, f["of"])


def count(found: Iterable[bool | None]) -> str:
    """Such as 7 of 9; "-" of nothing."""
    known = [x for x in found if x is not None]
    return f"{sum(known)} of {len(known)}" if known else "-"


def equal(record: book.Record, part: str, variant: str) -> bool | None:
    found = share(get(record, part, variant))
    return None if found is None else found == 0


def traced(record: book.Record, part: str) -> bool | None:
    """Whether what is traced has eager's bits."""
    found = [equal(record, part, v) for v in ("traced", "autograd")]
    return None if None in found else all(found)


NAMES = {
    "plait": "plait",
    "plait-eager": 'numerics="eager"',
    "plait-precise": '"precise"',
    "plait-invariant": "batch_invariant",
    "inductor": "Inductor",
    "inductor-casts": "emulate_precision_casts",
}
HOW = {"infer": "inference", "train": "training"}


def against_eager(rows: list[book.Record]) -> str:
    """How many models have eager's bits, and errors as multiples of eager's."""
    table = []
    for part in HOW:
        for dtype in ("bfloat16", "float32"):
            some = [r for r in rows if r["case"].endswith(dtype) and part in r["parts"]]
            for name, label in NAMES.items():
                ratios = [x for r in some if (x := ratio(r, part, name)) is not None]
                medians = [typical(r, part, name) for r in some]
                if not ratios:
                    continue
                table.append([
                    f"{HOW[part]}, {dtype}", label,
                    count(equal(r, part, name) for r in some),
                    count(
                        equal(r, part, name) if traced(r, part) else None for r in some
                    ),
                    f"{mean(ratios):.3f}", f"{m:.3f}" if (m := mean(medians)) else "-",
                    f"{max(ratios):.2f}",
                    count(x < 1 for x in ratios),
                ])  # fmt: skip
    heads = (
        "", "", "eager's bits", "of those traced with eager's", "error / eager's, mean",
        "of the median vector", "worst", "below eager's",
    )  # fmt: skip
    return render(heads, table)


def exceptions(rows: list[book.Record], causes: dict[str, str]) -> str:
    """Models without eager's bits where they are promised, and those where "precise" has not the
    smaller error, with causes as far as they are known."""
    other, worse = [], []
    for r in rows:
        for part, how in HOW.items():
            name = f"{r['case']}, {how}"
            cause = causes.get(f"{r['case']}/{part}") or causes.get(r["case"].split("/")[0], "")
            f = get(r, part, "plait-eager")
            if f is not None and f["differ"]:
                twins = [v for v in ("traced", "autograd") if same(f, get(r, part, v))]
                said = f"the bits of what is traced ({twins[0]})" if twins else ""
                if not twins and traced(r, part) is False:
                    said = "what is traced has other bits than eager too"
                why = "; ".join(filter(None, (said, cause))) or "not known yet"
                other.append(wrapped(f"- {name}: {share(f):.1%} differ: {why}"))
            x = ratio(r, part, "plait-precise")
            other_bits = bool((get(r, part, "plait-precise") or {}).get("differ"))
            if r["case"].endswith("bfloat16") and other_bits and x is not None and x >= 1:
                y = typical(r, part, "plait-precise")
                vectors = f", {y:.3f} times for the median vector" if y else ""
                worse.append(wrapped(f"- {name}: {x:.3f} times eager's{vectors}"))
    parts = []
    if other:
        parts.append('Without eager\'s bits with `numerics="eager"`:\n\n' + "\n".join(other))
    if worse:
        parts.append('With "precise" no closer to float64 than eager:\n\n' + "\n".join(worse))
    return "\n\n".join(parts)


def same(a: Figures | None, b: Figures | None) -> bool:
    return a is not None and b is not None and a["digest"] == b["digest"]


def each_time(rows: list[book.Record]) -> str:
    """How many models give the same bits in another call and another process."""
    table = []
    for part, other in (("infer", "other"), ("train", "other-train")):
        names = {"eager": "eager", "plait": "plait", "inductor": "Inductor"}
        if part == "train":
            names |= {v: f"{v.split('-')[0]}, deterministic algorithms" for v in SORTED}
        for dtype in ("bfloat16", "float32"):
            some = [r for r in rows if r["case"].endswith(dtype)]
            for name, label in names.items():
                calls = [f["again"] for r in some if (f := get(r, part, name))]
                processes = [
                    same(a, b)
                    for r in some
                    if (a := get(r, part, name))
                    and (b := get(r, other, name))
                    and a["plait"] == b["plait"]
                ]
                if calls:
                    table.append([f"{HOW[part]}, {dtype}", label, count(calls), count(processes)])
    return render(("", "", "two calls", "two processes"), table)


def any_batch(rows: list[book.Record]) -> str:
    """How many models have the same bits in any batch and length."""
    names = {"eager": "eager", "plait": "plait", "plait-invariant": "batch_invariant"}
    names["inductor"] = "Inductor"
    groups = {
        "transformers' models": lambda r: r["library"] == "transformers",
        "all others": lambda r: r["library"] != "transformers",
    }
    table = []
    for part in ("batch", "padded", "prefix"):
        for group, inside in groups.items():
            for dtype in ("bfloat16", "float32"):
                some = [r for r in rows if r["case"].endswith(dtype) and inside(r)]
                cells = [count(equal(r, part, v) for r in some) for v in names]
                if any(c != "-" for c in cells):
                    table.append([part, group, dtype, *cells])
    return render(("", "", "", *names.values()), table)


COSTS = {"graphs": "Replayed as CUDA graphs", "train-cost": "A training step"}
COSTS |= {part: f"One token of each row, rows: {n}" for part, n in TOKENS.items()}
TIMED = ("eager", "plait-eager", "plait-precise", "plait-invariant", "inductor")


def costs(rows: list[book.Record], part: str) -> str:
    """Times as multiples of plait's by default; "" where none is known."""
    timed = [v for v in TIMED if v in PARTS[part]]
    found: dict[str, list[float | None]] = {}
    table = []
    for r in rows:
        ours = (get(r, part, "plait") or {}).get("ms")
        if not ours:
            continue
        ms = [(get(r, part, v) or {}).get("ms") for v in timed]
        ratios = [t / ours if t else None for t in ms]
        dtype = r["case"].split("/")[1]
        for v, x in zip(timed, ratios, strict=True):
            found.setdefault(f"{dtype} {v}", []).append(x)
        table.append([r["case"], f"{ours:.3g}", *map(times, ratios)])
    for dtype in ("bfloat16", "float32"):
        means = [mean(found.get(f"{dtype} {v}", ())) for v in timed]
        if any(means):
            table.append([f"geometric mean, {dtype}", "", *map(times, means)])
    heads = ("", "plait, ms", *(NAMES.get(v, v) for v in timed))
    return render(heads, table) if table else ""


def times(x: float | None) -> str:
    return f"{x:.2f} x" if x and math.isfinite(x) else "-"


def every_model(rows: list[book.Record]) -> str:
    """A row a model and type."""
    table = []
    for r in rows:
        cells = [r["case"]]
        for part in HOW:
            cells.append(cell(r, part, "plait-eager", error=False))
            cells += [cell(r, part, v) for v in ("plait", "plait-precise", "inductor")]
        for part in ("batch", "padded", "prefix"):
            marks = [equal(r, part, v) for v in ("eager", "plait", "plait-invariant", "inductor")]
            known = any(m is not None for m in marks)
            cells.append("".join({None: ".", True: "=", False: "x"}[m] for m in marks))
            cells[-1] = cells[-1] if known else ""
        table.append(cells)
    heads = (
        "", '"eager"', "plait", '"precise"', "Inductor", 'training: "eager"', "plait", '"precise"',
        "Inductor", "batch", "padded", "prefix",
    )  # fmt: skip
    note = (
        "Shares of elements with other bits than eager's (= none) and errors as multiples of "
        "eager's;\nbatch, padded and prefix: eager, plait, batch_invariant, Inductor: = equal, "
        "x not, . not measured."
    )
    return note + "\n\n" + render(heads, table)


def cell(r: book.Record, part: str, variant: str, error: bool = True) -> str:
    """Such as "12 %, 0.97 x"."""
    found = share(get(r, part, variant))
    if found is None:
        return "failed" if variant in r["parts"].get(part, {}) else ""
    bits = f"{found:.1%}" if found else "="
    x = ratio(r, part, variant)
    return f"{bits}, {x:.2f} x" if error and x is not None else bits


def failures(rows: list[book.Record], causes: dict[str, str]) -> str:
    """What failed, of which plait, why, and what is known since."""
    lines = [
        wrapped(
            f"- {r['case']}, {part}, {variant} ({f['commit'] or f['plait']}): {f['failed'][:200]}"
            + "".join(f"; {why}" for why in [causes.get(f"{r['case']}/{part}/{variant}")] if why)
        )
        for r in rows
        for part, variants in r["parts"].items()
        for variant, f in variants.items()
        if "failed" in f
    ]
    return "### What failed\n\n" + "\n".join(lines) if lines else ""
