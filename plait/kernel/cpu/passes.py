"""Decisions about a kernel's loop nest, made on data: passes over the inner axes, values kept
between passes, the vector axis.

Comes in: a `LinearKernel`. Goes out: a `Nest`. Costs are those of the op table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from plait.ir.expr import Atom, Size, bounds, coefficient, may_be_zero, symbol, total
from plait.ir.loops import Node, walk
from plait.ir.ops import OPS
from plait.ir.reductions import REDUCTIONS
from plait.schedule.cost import hint
from plait.schedule.legalize.cut_passes import cut_passes
from plait.schedule.legalize.linear import (
    LinearKernel,
    blocks,
    dependences,
    extent,
    offset_of,
    stmt_nodes,
    trip_count,
)
from plait.schedule.plan import Reduce, Stmt, Store

# Far below a thread's stack, and within a second cache. The cost is in cycles of the op table.
# benchmarks/results/constants-cpu.md shows both, and that 1.5 and 524288 may be better.
ROW_BUFFER_BYTES = 131072
"""The most that one kernel keeps on the stack between passes."""
KEEP_COST = 3.0
"""A value that costs more cycles than this is kept for a later pass, a cheaper one is computed
again."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that a pass computes and keeps for later ones, in a row buffer of its own.

    by: number of the pass.
    index: its place in the buffer, before vectors in flight: the same at all points of an axis on
        which the value does not depend."""

    by: int
    index: Size


@dataclass(frozen=True)
class Nest:
    """A kernel with its loop structure decided.

    deps: what a node depends on: loop variables and accumulators.
    passes: the statements of each walk over the inner axes.
    last: stores at outer level, after all passes.
    sequential: points run in order.
    axis: the vectorised loop variable, or None (no loop at all).
    inner: it is a reduction axis.
    lanes: vector length, 1 for scalar code.
    order: the reduction axes, outermost first, as they are looped over.
    unroll: vectors in flight.
    kept: the values in row buffers.
    row_points: the points of a row, whole vectors of them.
    keep_limit: the points that a row buffer holds where sizes are not known now, else 0.
    tile: an outer variable along which the loads `tiled` are contiguous while the axis is not:
        these go through lanes x lanes tiles.
    tile_number: the number of a tile along it."""

    linear: LinearKernel
    deps: Callable[[Node], frozenset[object]]
    passes: tuple[tuple[Stmt, ...], ...]
    last: tuple[Store, ...]
    sequential: bool
    axis: Atom | None = None
    inner: bool = False
    lanes: int = 1
    order: tuple[Atom, ...] = ()
    unroll: int = 1
    kept: Mapping[Node, Kept] = field(default_factory=dict)
    row_points: Size = 1
    keep_limit: int = 0
    tile: Atom | None = None
    tile_number: Atom | None = None
    tiled: tuple[Node, ...] = ()

    @property
    def step(self) -> int:
        """The points of the axis in all vectors in flight."""
        return self.lanes * self.unroll

    @property
    def width(self) -> int:
        """The values that a row buffer has at a point of the reduction axes."""
        return 1 if self.inner else self.step

    def pieces(self) -> Iterator[tuple[int, bool]]:
        """The loops along the axis: vectors at once, and whether lanes of them are left out."""
        assert self.axis is not None, "scalar code without points has no axis"
        n, lanes = extent(self.axis), self.lanes
        for reps in dict.fromkeys((self.unroll, 1)):
            none = isinstance(n, int) and n < lanes * reps
            rest = isinstance(n, int) and reps < self.unroll and n % self.step < lanes
            if lanes == 1 or not (none or rest):
                yield reps, False
        if lanes > 1 and not (isinstance(n, int) and n % lanes == 0):
            yield 1, True

    def maybe_empty(self) -> list[Size]:
        """The extents of reduction axes that may have no points."""
        return [n for n in map(extent, self.order) if may_be_zero(n)]

    def reduces(self) -> list[Reduce]:
        """The reductions of all passes."""
        return [s for p in self.passes for s in p if isinstance(s, Reduce)]


def plan_nest(linear: LinearKernel, lanes: int, sequential: bool, keep: bool = True) -> Nest:
    """Chooses passes, axis and buffers. lanes: of a vector of 32-bit elements; 1 asks for scalar
    code. keep: may use row buffers."""
    deps = dependences(linear)
    nest = choose_axis(Nest(linear, deps, *cut_passes(linear, deps), sequential), lanes)
    nest = replace(nest, unroll=_unroll(nest))
    if keep:
        nest = keep_rows(nest)
    return turn_tiles(nest)


# -------------------------------------------------------------------------------------- values kept
def keep_rows(nest: Nest) -> Nest:
    """Keeps values that several passes need and that are too dear to compute twice."""
    linear, deps, width = nest.linear, nest.deps, nest.width
    points = trip_count(linear.rvars)
    if len(nest.passes) < 2 or points == 0:
        return nest
    known = hint(points, linear.hints)
    inner = frozenset(linear.rvars)
    seen: dict[Node, int] = {}
    kept: dict[Node, int] = {}
    room = ROW_BUFFER_BYTES
    for p, stmts in enumerate(nest.passes):
        stack = [n for s in stmts for n in stmt_nodes(s)]
        here: set[Node] = set()
        while stack:
            n = stack.pop()
            if n in here or not deps(n) & inner:
                continue
            here.add(n)
            if n in seen:
                nbytes = (known + 64) * width * n.dtype.nbytes
                if n in kept:
                    continue
                if n.dtype.nbytes >= 4 and _cost(n, inner, deps) > KEEP_COST and nbytes <= room:
                    kept[n] = seen[n]
                    room -= nbytes
                    continue
            stack.extend(n.args)
        for n in here:
            seen.setdefault(n, p)
    limit = 0
    if kept and not all(isinstance(extent(r), int) for r in linear.rvars):
        limit = ROW_BUFFER_BYTES // (width * sum(n.dtype.nbytes for n in kept))
    strides: dict[Atom, Size] = {}
    step: Size = 1
    for a in reversed(nest.order):
        strides[a] = step
        whole = blocks(extent(a), nest.lanes) * nest.lanes
        step = step * (whole if nest.inner and a == nest.axis else extent(a))
    found = {
        n: Kept(p, total(a.expr * (strides[a] * width) for a in nest.order if a in deps(n)))
        for n, p in kept.items()
    }
    return replace(nest, kept=found, row_points=step, keep_limit=limit)


def _cost(root: Node, inner: frozenset[Atom], deps: Callable[[Node], frozenset[object]]) -> float:
    """Cycles to compute a full-level node anew."""
    return sum(OPS[n.op].cost for n in walk((root,)) if n.op in OPS and deps(n) & inner)


# --------------------------------------------------------------------------------------------- axis
@dataclass(frozen=True)
class MemoryAccess:
    """One load or store: its offset, element size, what its data-dependent index depends on, and
    whether it is at full level."""

    offset: Size
    nbytes: int
    indirect: frozenset[object]
    full: bool
    store: bool = False


def accesses(
    linear: LinearKernel, deps: Callable[[Node], frozenset[object]]
) -> Iterator[MemoryAccess]:
    """Every distinct load and every store."""
    inner = frozenset(linear.rvars)
    for n in walk(linear.roots()):
        if n.op == "load":
            args = n.args[:-1] if getattr(n.attr, "masked", False) else n.args
            data = frozenset().union(*(deps(a) for a in args))
            yield MemoryAccess(offset_of(n), n.dtype.nbytes, data, bool(deps(n) & inner))
    for s in linear.stmts:
        if isinstance(s, Store):
            data = frozenset().union(*(deps(a) for a in s.index_args))
            yield MemoryAccess(s.index[0], linear.buffers[s.buf].dtype.nbytes, data, s.full, True)


def choose_axis(nest: Nest, lanes: int) -> Nest:
    """Vectors along the axis with unit stride for most bytes, or scalar code where that is cheaper
    or one lane is asked for."""
    linear, has_inner = nest.linear, bool(nest.linear.rvars)
    found = list(accesses(linear, nest.deps))
    scalar = sum(4.0 * _weight(a, has_inner) for a in found) + 1e-6
    costs: list[tuple[float, int, Atom | None, bool]] = [(scalar, 0, None, False)]
    candidates = list(_candidates(nest)) if lanes > 1 else []
    if linear.by_row and has_inner:
        down, last = any(s.down for s in nest.reduces()), linear.rvars[-1]
        candidates = [c for c in candidates if (not c[1] if down else c == (last, True))]
        costs = costs if down or not candidates else []  # one lane adds as `down` does
    for k, (a, inner) in enumerate(candidates):
        costs.append((_axis_cost(a, inner, found, lanes, has_inner), -k, a, inner))
    *_, axis, inner = min(costs, key=lambda c: c[:2])
    if axis is None:
        lanes, axis = 1, linear.vars[-1] if linear.vars else None
    order = (*(r for r in linear.rvars if r != axis), axis) if inner and axis else linear.rvars
    return replace(nest, axis=axis, inner=inner, lanes=lanes, order=order)


def _candidates(nest: Nest) -> Iterator[tuple[Atom, bool]]:
    """The axes that lanes may run along, and whether they are inner ones."""
    vars_, rvars = nest.linear.vars, nest.linear.rvars
    if nest.sequential:
        if vars_ and not rvars:
            yield vars_[-1], False
        return
    yield from ((a, False) for a in vars_)
    if any(s.running for s in nest.reduces()) and len(rvars) > 1:
        return
    positions = any(REDUCTIONS[s.kind].extreme for s in nest.reduces())
    yield from ((a, True) for a in (rvars[-1:] if positions else rvars))


def _weight(a: MemoryAccess, has_inner: bool) -> float:
    """How much oftener than an outer access this one runs."""
    return 16.0 if a.full or not has_inner else 1.0


def _axis_cost(
    axis: Atom, inner: bool, found: list[MemoryAccess], lanes: int, has_inner: bool
) -> float:
    """Relative time of a point when lanes run along axis."""
    n = bounds(extent(axis))[1]
    waste = 1.0
    if n < 1e9:
        full = max(1, -(-int(n) // lanes)) * lanes
        waste = full / max(1, int(n))
    cost = 0.0
    for a in found:
        weight = _weight(a, has_inner)
        stride = coefficient(a.offset, axis)
        if axis in a.indirect or stride is None:
            each = 12.0 if a.store else 2.5  # lanes are stored one by one, from memory
        elif stride == 0:
            each = 0.02
        elif stride == 1:
            each = a.nbytes / 4 * 0.25 + 0.05
        elif stride in (-1, 2) and not a.store:
            each = a.nbytes / 4 * 0.4 + 0.05
        elif a.store:
            each = 3.5
        else:  # a cache line an element, unless tiles are turned around
            each = 3.9 if has_inner else 3.0
        if inner and not a.full:
            each = 2.0
        cost += weight * each * (waste if each < 2 else 1.0)
    return cost + (0.5 if inner else 0.0)


def turn_tiles(nest: Nest) -> Nest:
    """Turns tiles around for the variable along which most loads that are strided along the axis
    are contiguous."""
    linear, axis = nest.linear, nest.axis
    if nest.passes or nest.lanes == 1 or axis is None or nest.sequential:
        return nest
    found: dict[Atom, list[Node]] = {}
    for n in walk(linear.roots()):
        if n.op != "load" or n.args or coefficient(offset_of(n), axis) in (None, 0, 1):
            continue
        for b in linear.vars:
            size = extent(b)
            if (
                b != axis
                and coefficient(offset_of(n), b) == 1
                and not (isinstance(size, int) and size < 4)
            ):
                found.setdefault(b, []).append(n)
                break
    if not found:
        return nest
    best = max(linear.vars, key=lambda b: len(found.get(b, ())))
    number = symbol(f"{best.name}'", extent=blocks(extent(best), nest.lanes)).symbol
    return replace(nest, tile=best, tile_number=number, tiled=tuple(found[best]))


def _unroll(nest: Nest) -> int:
    """Vectors in flight: several for cheap reductions, which would wait for one accumulator, else
    one."""
    reduces = nest.reduces()
    if nest.axis is None or nest.lanes == 1 or not reduces or any(s.running for s in reduces):
        return 1
    if nest.inner:  # a pass has its own loop; what lies outside of it is not copied
        loops = frozenset(nest.linear.rvars)
        cost = max(
            sum(_cost(root, loops, nest.deps) for s in p for root in stmt_nodes(s))
            for p in nest.passes
        )
    else:
        cost = sum(OPS[n.op].cost for n in walk(nest.linear.roots()) if n.op in OPS)
    most = max(sum(isinstance(s, Reduce) for s in p) for p in nest.passes)
    n = extent(nest.axis)
    room = n // nest.lanes if isinstance(n, int) else 4
    alone = nest.linear.by_row and nest.inner  # what else is computed does not matter
    for unroll in (4, 2):
        if room >= unroll and (alone or (cost <= 8 and most * unroll <= 8)):
            return unroll
    return 1
