"""Decides the shape and the mask of every load and store of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.ir.expr import Size, bounds
from plait.ir.loops import Load, Node, walk
from plait.kernel.stores import How, how_to_store
from plait.kernel.triton.layout import Layout
from plait.schedule.legalize.linear import LinearKernel, extent, offset_of, stmt_nodes
from plait.schedule.plan import Reduce, Store


@dataclass(frozen=True)
class Access:
    """A load or a store of a block.

    buf: the buffer.
    offset: the element.
    dims: the dimensions of the block that it spans, whose masks it has.
    guarded: it may happen only where rows have points.
    """

    buf: str
    offset: Size
    dims: frozenset[str]
    guarded: bool = False


@dataclass(frozen=True)
class BlockStore:
    """A store as a block does it.

    inner: inside the loop.
    """

    store: Store
    access: Access
    inner: bool


def load_accesses(layout: Layout, guarded: frozenset[Node]) -> Mapping[Node, Access]:
    """The accesses of all loads. guarded: see `needs_points`."""
    return {
        n: _of_load(layout, n, n.attr, n in guarded)
        for n in walk(layout.linear.roots())
        if isinstance(n.attr, Load)
    }


def _of_load(layout: Layout, n: Node, attr: Load, guarded: bool) -> Access:
    dims = layout.dims_of_index(offset_of(n))
    if attr.masked:
        dims |= layout.dims(n.args[-1])
    return Access(attr.buf, offset_of(n), dims, guarded and "r" not in dims)


def store_access(layout: Layout, s: Store, in_pass: bool) -> BlockStore:
    """How a block stores. in_pass: as part of a pass over rows, at each of their points."""
    linear, tile = layout.linear, layout.tile
    dims = layout.everything if in_pass else layout.rows
    if not linear.rvars and _writes_once(layout, s):  # every program has a point
        dims = frozenset()
    return BlockStore(s, Access(s.buf, s.index[0], dims), in_pass or tile.column_programs > 0)


def _writes_once(layout: Layout, s: Store) -> bool:
    moves = any(map(layout.dims, stmt_nodes(s)))
    return how_to_store(s.mode, moves, bool(layout.dims_of_index(s.index[0]))) is How.ONCE


def needs_points(linear: LinearKernel) -> frozenset[Node]:
    """What only points of rows need, where rows may have none: elsewhere it may not be read or
    checked."""
    if all(bounds(extent(r))[0] > 0 for r in linear.rvars):
        return frozenset()
    inner: list[Node] = []
    outer: list[Node] = []
    for s in linear.stmts:
        (inner if isinstance(s, Reduce) or s.full else outer).extend(stmt_nodes(s))
    return frozenset(walk(inner)) - frozenset(walk(outer))
