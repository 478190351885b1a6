"""Decisions about a kernel's loop nest, made on data: passes over the inner axes, values kept
between passes, the vector axis.

Comes in: a `LinearKernel`. Goes out: a `Nest`, which `nest.py` writes down as loops. Costs
are those of the op table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from plait.ir.expr import Atom, Size, bounds, coefficient
from plait.ir.loops import Node, walk
from plait.ir.ops import OPS
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

ROW_BUFFER_BYTES = 131072
"""The most that one kernel keeps on the stack between passes."""
KEEP_COST = 3.0
"""A value that costs more cycles than this is kept for a later pass, a cheaper one is computed
again."""


@dataclass(frozen=True)
class Nest:
    """A kernel with its loop structure decided.

    axis: the vectorised loop variable, or None (no loop at all). inner: it is a reduction axis.
    lanes: vector length, 1 for scalar code.
    unroll: vectors in flight. passes: full-level statements a pass. last: outer-level stores. kept:
    full-level node -> pass that computes it and keeps it in a row buffer; keep_limit: with sizes
    that are not known now, the points that such a buffer holds (0: sizes are known). order: the
    reduction axes, outermost first, as they are looped over.
    tile: an outer variable along which the loads `tiled` are contiguous while the axis is not:
    these go through lanes x lanes tiles."""

    linear: LinearKernel
    axis: Atom | None
    inner: bool
    lanes: int
    unroll: int
    passes: tuple[tuple[Stmt, ...], ...]
    last: tuple[Store, ...]
    kept: dict[Node, int]
    keep_limit: int
    order: tuple[Atom, ...]
    sequential: bool
    tile: Atom | None = None
    tiled: tuple[Node, ...] = ()


def plan_nest(linear: LinearKernel, lanes: int, sequential: bool, keep: bool = True) -> Nest:
    """Chooses passes, axis and buffers. lanes: of a vector of 32-bit elements; 1 asks for scalar
    code. keep: may use row buffers."""
    deps = dependences(linear)
    passes, last = cut_passes(linear, deps)
    axis, inner = (
        (None, False) if lanes == 1 else _axis(linear, deps, passes, last, lanes, sequential)
    )
    if axis is None:
        lanes, axis = 1, linear.vars[-1] if linear.vars else None
        inner = False
    order = linear.rvars
    if inner:
        assert axis is not None
        order = (*(r for r in linear.rvars if r != axis), axis)
    unroll = _unroll(linear, deps, passes, last, axis, inner, lanes)
    width = 1 if inner else lanes * unroll
    kept = _kept(linear, deps, passes, width) if keep else {}
    limit = 0
    if kept and not all(isinstance(extent(r), int) for r in linear.rvars):
        limit = ROW_BUFFER_BYTES // (width * sum(n.dtype.nbytes for n in kept))
    tile, tiled = (
        (None, ()) if passes or lanes == 1 or axis is None or sequential else _tiles(linear, axis)
    )
    return Nest(
        linear,
        axis,
        inner,
        lanes,
        unroll,
        passes,
        last,
        kept,
        limit,
        order,
        sequential,
        tile,
        tiled,
    )


# -------------------------------------------------------------------------------------- values kept
def _kept(
    linear: LinearKernel,
    deps: Callable[[Node], frozenset[object]],
    passes: tuple[tuple[Stmt, ...], ...],
    width: int,
) -> dict[Node, int]:
    """Full-level values needed by several passes and too dear to compute twice, with the pass that
    computes them."""
    points = trip_count(linear.rvars)
    if len(passes) < 2 or points == 0:
        return {}
    known = hint(points, linear.hints)
    inner = frozenset(linear.rvars)
    seen: dict[Node, int] = {}
    kept: dict[Node, int] = {}
    room = ROW_BUFFER_BYTES
    for p, stmts in enumerate(passes):
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
    return kept


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


def _axis(
    linear: LinearKernel,
    deps: Callable[[Node], frozenset[object]],
    passes: tuple[tuple[Stmt, ...], ...],
    last: tuple[Store, ...],
    lanes: int,
    sequential: bool,
) -> tuple[Atom | None, bool]:
    """The axis with unit stride for most bytes, and whether it is an inner one."""
    reduces = [s for p in passes for s in p if isinstance(s, Reduce)]
    ordered = any(s.running for s in reduces)
    positions = any(s.kind in ("argmax", "argmin") for s in reduces)
    candidates: list[tuple[Atom, bool]] = []
    if sequential:
        if linear.vars and not linear.rvars:
            candidates.append((linear.vars[-1], False))
    else:
        candidates += [(a, False) for a in linear.vars]
    if not sequential and not (ordered and len(linear.rvars) > 1):
        inner = linear.rvars[-1:] if positions else linear.rvars
        candidates += [(a, True) for a in inner]
    found = list(accesses(linear, deps))
    best: tuple[float, int, Atom | None, bool] = (
        _scalar_cost(found, bool(linear.rvars)),
        0,
        None,
        False,
    )
    for k, (a, is_inner) in enumerate(candidates):
        cost = _axis_cost(a, is_inner, found, lanes, bool(linear.rvars))
        if (cost, -k) < best[:2]:
            best = (cost, -k, a, is_inner)
    return best[2], best[3]


def _weight(a: MemoryAccess, has_inner: bool) -> float:
    """How much oftener than an outer access this one runs."""
    return 16.0 if a.full or not has_inner else 1.0


def _scalar_cost(found: list[MemoryAccess], has_inner: bool) -> float:
    return sum(4.0 * _weight(a, has_inner) for a in found) + 1e-6


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


def _tiles(linear: LinearKernel, axis: Atom) -> tuple[Atom | None, tuple[Node, ...]]:
    """The variable along which most loads that are strided along the axis are contiguous, and these
    loads."""
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
        return None, ()
    best = max(linear.vars, key=lambda b: len(found.get(b, ())))
    return best, tuple(found[best])


def _unroll(
    linear: LinearKernel,
    deps: Callable[[Node], frozenset[object]],
    passes: tuple[tuple[Stmt, ...], ...],
    last: tuple[Store, ...],
    axis: Atom | None,
    inner: bool,
    lanes: int,
) -> int:
    """Vectors in flight: several for cheap reductions, which would wait for one accumulator, else
    one."""
    reduces = [s for p in passes for s in p if isinstance(s, Reduce) and not s.running]
    if (
        axis is None
        or lanes == 1
        or not reduces
        or any(isinstance(s, Reduce) and s.running for p in passes for s in p)
    ):
        return 1
    if inner:  # a pass has its own loop; what lies outside of it is not copied
        loops = frozenset(linear.rvars)
        cost = max(
            sum(_cost(root, loops, deps) for s in p for root in stmt_nodes(s)) for p in passes
        )
    else:
        cost = sum(OPS[n.op].cost for n in walk(linear.roots()) if n.op in OPS)
    most = max(sum(isinstance(s, Reduce) for s in p) for p in passes)
    n = extent(axis)
    room = n // lanes if isinstance(n, int) else 4
    for unroll in (4, 2):
        if cost <= 8 and room >= unroll and most * unroll <= 8:
            return unroll
    return 1


def buffer_points(nest: Nest) -> Size:
    """Points of a row buffer: of all reduction axes, the vector axis padded to whole vectors."""
    if not nest.order:
        return 1
    a, step = row_points(nest.order, nest.lanes, nest.axis if nest.inner else None)[0]
    n = extent(a)
    return step * (blocks(n, nest.lanes) * nest.lanes if nest.inner and a == nest.axis else n)


def row_points(order: tuple[Atom, ...], lanes: int, padded: Atom | None) -> list[tuple[Atom, Size]]:
    """Strides of a row buffer over the reduction axes, the innermost padded to whole vectors where
    it is the vector axis."""
    out: list[tuple[Atom, Size]] = []
    step: Size = 1
    for a in reversed(order):
        out.append((a, step))
        n = extent(a)
        step = step * (blocks(n, lanes) * lanes if a == padded else n)
    return out[::-1]
