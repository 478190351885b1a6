"""The passes of a Triton kernel over its rows: which statements run in which, and which reductions
share one.

Rows too long for a block are read once a pass. Two kinds of sums that use an earlier reduction need
no pass of their own: each lane of the block keeps its own partial results, and they are brought
together once, after the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.ir.loops import Node
from plait.schedule.legalize.cut_passes import cut_passes
from plait.schedule.legalize.linear import LinearKernel, dependences
from plait.schedule.plan import Reduce, Store


@dataclass(frozen=True)
class Passes:
    """loops: the statements of each pass. last: stores after all of them. rescaled: sum of
    exp(x - max x) -> that maximum, by which a lane rescales its sum as it grows. spread: sum of
    x - c or of (x - c)^2, where c comes from the sum of x -> that sum, in whose place a lane keeps
    its mean, and beside it the squares of deviations from that.

    Milakov and Gimelshein, Online normalizer calculation for softmax, 2018. Chan, Golub and
    LeVeque, Algorithms for computing the sample variance, 1983.
    """

    loops: tuple[tuple[Reduce | Store, ...], ...]
    last: tuple[Store, ...]
    rescaled: Mapping[str, Reduce] = field(default_factory=dict)
    spread: Mapping[str, Reduce] = field(default_factory=dict)

    def beside(self, first: Reduce, of: Mapping[str, Reduce]) -> tuple[Reduce, ...]:
        """The sums that belong to `first`. of: `rescaled` or `spread`."""
        sums = (s for p in self.loops for s in p if isinstance(s, Reduce))
        return tuple(s for s in sums if of.get(s.name) is first)


def plan_passes(linear: LinearKernel, looped: bool) -> Passes:
    """The passes of a kernel. looped: the block walks along the rows; otherwise it holds them."""
    deps = dependences(linear)
    found, last = cut_passes(linear, deps)
    # What lanes keep depends on which reductions share a kernel.
    if not looped or linear.by_row:
        return Passes(found, last)
    level = {
        s.name: (k, s)
        for k, p in enumerate(found)
        for s in p
        if isinstance(s, Reduce) and not s.inner
    }
    loops = [list(p) for p in found]
    rescaled: dict[str, Reduce] = {}
    spread: dict[str, Reduce] = {}
    means: dict[str, Node] = {}  # sum of x -> x
    for k, p in enumerate(found):
        for s in p:
            if not isinstance(s, Reduce) or s.kind != "sum" or s.inner:
                continue
            base, moved = peak_of(s), rescaled
            if not base and _is_offset(s):
                names = deps(offset_from(s)[1])
                base, moved = next(map(str, names), "") if len(names) == 1 else "", spread
            if base in spread or base in rescaled:  # which lanes do not know
                continue
            at, first = level.get(base, (k, s))
            if at < k and (rescales(s, first) if moved is rescaled else _deviates(s, first, means)):
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


def rescales(s: Reduce, first: Reduce) -> bool:
    """Whether a sum of exp(x - m) is one where m is the greatest x."""
    return first.kind == "max" and s.value.args[0].args[0] is first.value


def _is_offset(s: Reduce) -> bool:
    """Whether it is a sum of x - c or of (x - c)^2."""
    n = s.value
    if n.op == "mul" and n.args[0] is n.args[1]:
        (n, _) = n.args
    return n.op == "sub" and n.dtype.is_float


def offset_from(s: Reduce) -> tuple[Node, Node]:
    """x and c of such a sum."""
    x, c = (s.value.args[0] if s.value.op == "mul" else s.value).args
    return x, c


def scale_of(s: Reduce, first: Reduce) -> Node | None:
    """The constant that the summands of `first` have besides x, or None if it is 1."""
    return None if first.value is offset_from(s)[0] else first.value.args[1]


def _deviates(s: Reduce, first: Reduce, means: dict[str, Node]) -> bool:
    """Whether lanes that keep means in place of `first` know s as well. means: of what they are."""
    (x, _), v = offset_from(s), first.value
    if first.kind != "sum" or v.dtype != x.dtype:
        return False
    is_scaled = v.op == "mul" and v.args[0] is x and v.args[1].op == "const"
    return (v is x or is_scaled) and means.setdefault(first.name, x) is x
