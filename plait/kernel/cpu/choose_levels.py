"""Decides the loop level at which every value of a kernel is computed.

Comes in: a nest with its vectors and how threads share it. Goes out: a `Place` for each pass and
one for the stores after all passes, which `faults_of_levels` checks. A value is computed once, at
the outermost level that knows all that it depends on; that is all the hoisting there is.

Levels count from 0, the function itself. Level 1 is a point of the outer loops, level 2 vectors of
an outer axis, if there are any; then come the loops of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.ir.expr import Atom, Size, free_symbols
from plait.ir.loops import Node, index_exprs, walk
from plait.ir.reductions import REDUCTIONS
from plait.kernel.cpu.passes import Nest
from plait.kernel.cpu.share_work import Sharing, Unit
from plait.kernel.cpu.vectorize import Vectors
from plait.schedule.legalize.linear import position, stmt_nodes
from plait.schedule.plan import Reduce, Stmt

FAULTING = ("load", "bounded", "nonzero")
"""What a loop without points must not do: read memory, or check a value."""


@dataclass(frozen=True)
class Place:
    """Where statements stand.

    depth: the innermost level.
    known: the level at which a loop variable or an accumulator has its value.
    values: the level at which each value is computed.
    indirect: symbol of a data-dependent index -> the value that it is.
    tested: the level behind a test that the loops of a pass have points; 0: they have.
    chunk: the points of the innermost loop after which long sums are emptied; 0: it is whole."""

    depth: int
    known: Mapping[object, int]
    values: Mapping[Node, int]
    indirect: Mapping[Atom, Node]
    tested: int = 0
    chunk: int = 0

    def level(self, e: Size) -> int:
        """The outermost level that knows an expression."""
        where, known, values = self.indirect, self.known, self.values
        levels = (values[where[a]] if a in where else known.get(a, 0) for a in free_symbols(e))
        return max(levels, default=0)


def choose_levels(vectors: Vectors, sharing: Sharing) -> tuple[Place, ...]:
    """The places of a nest's passes, in order, and of the stores after them."""
    nest, unit = vectors.nest, _unit_level(sharing)
    around: dict[object, int] = dict.fromkeys(sharing.outer, 1)
    if unit == 2:
        around[nest.axis] = unit
    tested = unit + 1 if nest.maybe_empty() else 0
    places = []
    for stmts in nest.passes:
        reduces = [s for s in stmts if isinstance(s, Reduce)]
        chunk = vectors.chunk(reduces)
        known, depth = dict(around), max(unit, tested)
        for a in nest.order:
            if a == nest.order[-1]:
                depth += bool(chunk) + nest.inner  # loops along the vector axis share a block
            depth += 1
            known[a] = depth
        known |= {s.name: depth for s in reduces if s.running}
        values = _levels(nest, stmts, known, tested)
        places.append(Place(depth, known, values, nest.linear.indirect, tested, chunk))
        around |= {s.name: unit for s in reduces}
    if nest.tile is not None:
        around[nest.tile] = unit + 1
    values = _levels(nest, nest.last, around)
    depth = unit + (nest.tile is not None)
    return (*places, Place(depth, around, values, nest.linear.indirect))


def _unit_level(sharing: Sharing) -> int:
    return 1 if sharing.unit is Unit.POINT else 2


def roots_of(nest: Nest, stmts: Sequence[Stmt]) -> list[Node]:
    """The values that statements need, with that of a point's position."""
    roots = [n for s in stmts for n in stmt_nodes(s)]
    if any(isinstance(s, Reduce) and REDUCTIONS[s.kind].extreme for s in stmts):
        roots.append(position(nest.linear))
    return roots


def _levels(
    nest: Nest, stmts: Sequence[Stmt], known: Mapping[object, int], tested: int = 0
) -> Mapping[Node, int]:
    values: dict[Node, int] = {}
    faulting: set[Node] = set()
    for n in walk(roots_of(nest, stmts)):
        level = max((known[d] for d in nest.deps(n)), default=0)
        if tested and (n.op in FAULTING or not faulting.isdisjoint(n.args)):
            faulting.add(n)
            level = max(level, tested)
        values[n] = level
    return values


def faults_of_levels(vectors: Vectors, sharing: Sharing, places: Sequence[Place]) -> list[str]:
    """Values that are computed where what they need is not known, and reads and checks that rows
    without points do as well."""
    nest, unit, faults = vectors.nest, _unit_level(sharing), []
    least: dict[object, int] = {}  # the outermost level that may know a reduction
    for place, stmts in zip(places, (*nest.passes, nest.last), strict=True):
        nowhere = place.depth + 1
        reduces = [s for s in stmts if isinstance(s, Reduce)]
        least |= {s.name: place.depth if s.running else nowhere for s in reduces}
        for n in walk(roots_of(nest, stmts)):
            needs = [place.values[a] for a in n.args]
            needs += map(place.level, index_exprs(n))
            needs += [place.known.get(n.attr, nowhere)] if n.op == "acc" else []
            needs += [place.tested] if n.op in FAULTING else []
            if not max(needs, default=0) <= place.values[n] <= place.depth:
                faults.append(f"computes {n} at level {place.values[n]}, where it cannot be known")
        for s in nest.reduces():
            if place.known.get(s.name, nowhere) < least.get(s.name, nowhere):
                faults.append(f"knows the {s.kind} '{s.name}' before its last point")
        least |= {s.name: unit for s in reduces}
    return faults
