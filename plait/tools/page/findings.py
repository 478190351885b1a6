"""What of a report deserves a look: causes of lost time, each with the user's line.

In: the data of a report. Out: findings, those that cost most first within a kind. Each says what
there is, where, why it costs, what would avoid it, and the step it is about (graph and number).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from plait.tools.page.kernels import ACROSS, APART

Data = dict[str, Any]
LARGE = 1 << 16  # bytes of a tensor whose layout matters: what is less stays in the first cache
GOOD = 0.5  # share of the memory roofline above which a layout costs little
FAR = 16  # elements apart: no two in one cache line
MUCH = 0.1  # share of the time of all steps
LITTLE = 0.01  # the same: less is not worth a change of the user's
MOST = 20  # findings of one kind


def findings(report: Data) -> list[Data]:
    """A list of {kind, what, where, why, advice, graph, step}."""
    found: list[Data] = []
    for b in report["breaks"]:
        hints = [h.removeprefix("Hint: ") for h in b["hints"] if h.startswith("Hint: ")]
        why = "A graph ends here: nothing is fused across it, and Python runs in between"
        found.append(_finding("graph break", b["cause"], b["where"], why, " ".join(hints[:1])))
    for r in report["recompiles"]:
        places = [g["where"] for g in r["guards"] if g["where"]]
        what = ", ".join(dict.fromkeys(g["text"] for g in r["guards"]))
        advice = "; ".join(dict.fromkeys(g["advice"] for g in r["guards"] if g["advice"]))
        why = f"{r['function']} was compiled for the {_nth(r['number'])} time: a call failed this"
        found.append(_finding("recompile", what, ", ".join(dict.fromkeys(places)), why, advice))
    for what in report["left_to_eager"]:
        why = "Dynamo compiles it no more: Python runs it, and compiles only what it calls"
        advice = "see its graph breaks and recompiles; a loop that breaks may call a function"
        found.append(_finding("left to eager", what, "", why, advice))
    found += _layouts(report)[:MOST]
    for n, g in enumerate(report["graphs"]):
        for step in g["ladder"][:MOST]:
            kind = {"eager": "run by eager", "specialise": "size taken for a number"}
            where, reason = step["where"], step["reason"]
            title = kind.get(step["rung"], "no kernel")
            found.append(_finding(title, step["what"], where, reason, "", n))
    return found


def _layouts(report: Data) -> list[Data]:
    """Kernels that visit elements of large tensors far apart, while they visit as much side by
    side; not where the time is known to be good, or little of all. How an intermediate lies is
    plait's choice: such a kernel is named only where its launches take much of the time. What
    several graphs have is named once, for the first."""
    taken: Counter[tuple[str, str]] = Counter()
    for g in report["graphs"]:
        for s in g["steps"]:
            taken[g["name"], s["name"]] += s["time_ns"] or 0
    found: dict[tuple[str, str], Data] = {}
    cost: Counter[tuple[str, str]] = Counter()
    for n, g in enumerate(report["graphs"]):
        inputs = {i["name"] for i in g["inputs"] if g["kind"] != "backward"}  # else saved by plait
        words = {i["name"]: i["is"] for i in g["inputs"] if i["is"]}
        for k, s in enumerate(g["steps"]):
            large = [a for a in s["accesses"] if a["nbytes"] >= LARGE and abs(a["stride"]) >= FAR]
            apart = [a for a in large if a["order"] in (ACROSS, APART)]
            if not apart or (s["roofline"] or 0) > GOOD:
                continue
            given = [a for a in apart if a["buffer"] in inputs]
            share = taken[g["name"], s["name"]] / (taken.total() or 1)
            if share <= (LITTLE if given else MUCH) and (taken.total() or not given):
                continue
            one = _layout(s, given or apart, bool(given), words, share, n, k)
            key = one["where"], one["what"].partition(" ")[2]
            found.setdefault(key, one)
            cost[key] += s["time_ns"] or sum(a["nbytes"] for a in given or apart)
    return [found[key] for key, _ in cost.most_common()]


def _layout(
    s: Data, apart: Sequence[Data], given: bool, names: Mapping[str, str], share: float,
    graph: int, step: int,
) -> Data:  # fmt: skip
    """given: the tensors are the program's inputs. names: the user's, of inputs. share: of the time
    of all steps."""
    words = [
        f"{'writes' if a['writes'] else 'reads'} {names.get(a['buffer'], a['buffer'])} "
        f"{a['stride']} elements apart"
        for a in apart
    ]
    where = ", ".join(dict.fromkeys(o["where"] for o in s["origin"] if o["where"]))
    why = (
        "The kernel's other tensors lie along another dimension. Whichever loop is the innermost, "
        "one of them is gathered element by element: a cache line each, and no vector is loaded"
    )
    if s["roofline"] is not None:
        why += f". The kernel runs at {s['roofline']:.0%} of the memory roofline, "
        why += f"and its launches take {share:.0%} of the time of all kernels and calls"
    if given:
        advice = (
            "keep the tensor in memory as it is used: where it is made, or once before the calls, "
            ".contiguous() of the transposed tensor, or another memory_format"
        )
    else:
        advice = "look for a transposed view in these lines; plait lays out what is between them"
    kind = "layout" if given else "layout within"
    return _finding(kind, f"{s['name']} {', '.join(words)}", where, why, advice, graph, step)


def _finding(
    kind: str, what: str, where: str, why: str, advice: str,
    graph: int | None = None, step: int | None = None,
) -> Data:  # fmt: skip
    return {
        "kind": kind, "what": what, "where": where, "why": why, "advice": advice,
        "graph": graph, "step": step,
    }  # fmt: skip


def _nth(n: int) -> str:
    return f"{n}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(n, 'th') }"
