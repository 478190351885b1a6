"""Makes a failing program small: fewer statements, calls and operands, plain layouts and roads,
small sizes.

Whatever still fails in the same way is kept. Candidates run in a worker, so that crashes and hangs
shrink too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from plait.tools.faults.shrink import smallest
from plait.tools.faults.trial import plain_words
from tests.fuzz.pool import Worker
from tests.fuzz.program import Operand, Program, Road

SECONDS = 90.0  # for one program


def signature(found: dict[str, Any]) -> str:
    """What makes two failures the same: how, and the words of the error without names and
    numbers."""
    what = re.sub(r"call \d+|output \d+|argument \d+|gradient \d+", "", found["what"])
    label, _, rest = what.partition(":")
    if found["kind"] in ("crash", "hang"):
        return str(found["kind"])
    words = plain_words(rest) if "rais" in label or "err" in label else ""
    return f"{found['kind']} {label} {words}"


def shrink(p: Program, found: dict[str, Any], worker: Worker, seconds: float = SECONDS) -> Program:
    """The smallest program found in that time that ends as p did."""
    want = signature(found)
    return smallest(
        p, candidates, lambda c: signature(worker.ask({"program": c.dumps()})) == want, seconds
    )


def candidates(p: Program) -> Iterator[Program]:
    """Smaller programs, the most promising first."""
    yield from _halves(p)
    yield from _lines(p)
    if len(p.outputs) > 1:
        yield from (_of(replace(p, outputs=(o,))) for o in p.outputs)
    if len(p.calls) > 1:
        yield from (
            _of(replace(p, calls=p.calls[:k] + p.calls[k + 1 :])) for k in range(len(p.calls))
        )
    yield from (replace(p, road=r) for r in _roads(p.road))
    for k, o in enumerate(p.operands):
        for simple in _operands(o):
            yield _of(replace(p, operands=(*p.operands[:k], simple, *p.operands[k + 1 :])))
    yield from _sizes(p)


def _of(p: Program) -> Program:
    """Without what nothing needs."""
    used = set(p.outputs)
    kept = []
    for line in reversed(p.lines):
        if not line.out or line.out in used:
            used |= line.reads
            kept.append(line)
    return replace(p, lines=tuple(reversed(kept))).pruned()


def _without(p: Program, drop: set[int]) -> Program:
    """Without these statements and those that need them."""
    gone: set[str] = set()
    lines = []
    for k, line in enumerate(p.lines):
        if k in drop or line.reads & gone:
            gone |= {line.out} if line.out else set()
        else:
            lines.append(line)
    outputs = tuple(o for o in p.outputs if o not in gone) or tuple(
        x.out for x in lines[-1:] if x.out
    )
    return _of(replace(p, lines=tuple(lines), outputs=outputs))


def _halves(p: Program) -> Iterator[Program]:
    n = len(p.lines)
    if n > 3:
        yield _without(p, set(range(n // 2)))
        yield _without(p, set(range(n // 2, n)))


def _lines(p: Program) -> Iterator[Program]:
    for k in reversed(range(len(p.lines))):
        small = _without(p, {k})
        if len(small.lines) < len(p.lines):
            yield small


def _roads(r: Road) -> Iterator[Road]:
    plain = Road(way=r.way)
    for name in ("wrapper", "isa", "threads", "freeze", "params", "grad", "capture", "dynamic"):
        value = getattr(plain, name)
        if getattr(r, name) != value:
            yield replace(r, **{name: value})
    if r.way == "package":
        yield replace(r, way="direct")
    if r.way == "direct":
        yield replace(r, way="compile")


def _operands(o: Operand) -> Iterator[Operand]:
    if o.alias or o.dtype == "int":
        return
    if o.layout != "plain":
        yield replace(o, layout="plain")
    if o.values in ("special", "huge", "zeros", "normal"):
        yield replace(o, values="whole")
    if o.dtype not in ("float32", "int64", "bool"):
        yield replace(o, dtype="float32")
    if o.grad:
        yield replace(o, grad=False)


def _sizes(p: Program) -> Iterator[Program]:
    for name in sorted({s for c in p.calls for s in c.sizes}):
        for n in (1, 2, 4):
            if any(c.sizes[name] > n for c in p.calls):
                calls = tuple(
                    replace(c, sizes={**c.sizes, name: min(c.sizes[name], n)}) for c in p.calls
                )
                yield replace(p, calls=calls)
