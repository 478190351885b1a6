"""The passes of a Triton kernel over its rows: which statements run in which, and which reductions share one.

Rows too long for a block are read once a pass. Two kinds of sums that use an earlier reduction need no pass of their
own: each lane of the block keeps its own partial results, and they are brought together once, after the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.ir.loops import Node
from plait.kernel.space import Space, dependences, passes_of
from plait.schedule.plan import Reduce, Store


@dataclass(frozen=True)
class Passes:
    """loops: the statements of each pass. last: stores after all of them. rescaled: sum of exp(x - max x) -> that
    maximum, by which a lane rescales its sum as it grows. spread: sum of (x - c)^2, where c comes from the sum of x ->
    that sum, beside which a lane keeps the squares of deviations from its own mean.

    Milakov and Gimelshein, Online normalizer calculation for softmax, 2018. Chan, Golub and LeVeque, Algorithms for
    computing the sample variance, 1983.
    """

    loops: tuple[tuple[Reduce | Store, ...], ...]
    last: tuple[Store, ...]
    rescaled: Mapping[str, Reduce] = field(default_factory=dict)
    spread: Mapping[str, Reduce] = field(default_factory=dict)


def plan_passes(space: Space, looped: bool) -> Passes:
    """The passes of a kernel. looped: the block walks along the rows; otherwise it holds them."""
    deps = dependences(space)
    found, last = passes_of(space, deps)
    if not looped:
        return Passes(found, last)
    level = {s.name: (k, s) for k, p in enumerate(found) for s in p if isinstance(s, Reduce) and not s.running}
    loops = [list(p) for p in found]
    rescaled: dict[str, Reduce] = {}
    spread: dict[str, Reduce] = {}
    for k, p in enumerate(found):
        for s in p:
            if not isinstance(s, Reduce) or s.kind != "sum" or s.running:
                continue
            base, moved = peak_of(s), rescaled
            if not base:
                c = center_of(s)
                names = frozenset() if c is None else deps(c)
                base, moved = next(map(str, names), "") if len(names) == 1 else "", spread
            at, first = level.get(base, (k, s))
            if at < k and (_rescales(s, first) if moved is rescaled else _deviates(s, first)):
                moved[s.name] = first
                loops[k].remove(s)
                loops[at].append(s)
    return Passes(tuple(tuple(p) for p in loops if p), last, rescaled, spread)


def peak_of(s: Reduce) -> str:
    """The reduction m of a sum of exp(x - m), or ""."""
    n = s.value
    if n.op != "exp" or n.args[0].op != "sub" or n.args[0].args[1].op != "acc":
        return ""
    return str(n.args[0].args[1].attr)


def _rescales(s: Reduce, first: Reduce) -> bool:
    return first.kind == "max" and s.value.args[0].args[0] is first.value


def center_of(s: Reduce) -> Node | None:
    """c of a sum of (x - c)^2."""
    n = s.value
    square = n.op == "mul" and n.args[0] is n.args[1] and n.args[0].op == "sub" and n.dtype.is_float
    return n.args[0].args[1] if square else None


def scale_of(s: Reduce, first: Reduce) -> Node | None:
    """The constant that the summands of `first` have besides x, or None if it is 1."""
    x = s.value.args[0].args[0]
    return None if first.value is x else first.value.args[1]


def _deviates(s: Reduce, first: Reduce) -> bool:
    x, v = s.value.args[0].args[0], first.value
    if first.kind != "sum" or v.dtype != x.dtype:
        return False
    return v is x or (v.op == "mul" and v.args[0] is x and v.args[1].op == "const")
