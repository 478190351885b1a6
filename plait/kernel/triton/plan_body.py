"""All that is decided about the body of a kernel, before a line of it is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.ir.loops import Node, walk
from plait.kernel.triton.choose_accesses import (
    Access,
    BlockStore,
    load_accesses,
    needs_points,
    store_access,
)
from plait.kernel.triton.choose_accumulators import (
    IN_ORDER,
    Accumulation,
    Accumulator,
    choose_accumulators,
)
from plait.kernel.triton.choose_forms import Form, choose_forms
from plait.kernel.triton.layout import Layout
from plait.kernel.triton.load_ahead import loads_ahead
from plait.kernel.triton.passes import Passes, plan_passes
from plait.kernel.triton.split_rows import Span, split_rows
from plait.kernel.triton.tiles import Tile
from plait.schedule.legalize.linear import LinearKernel, stmt_nodes
from plait.schedule.plan import Store


@dataclass(frozen=True)
class RowPass:
    """One pass over rows.

    accumulators: its reductions, in order.
    stores: what is stored at every point, after all loads: an output may have the memory of an
        input.
    span: how blocks walk along a row.
    later: the loads that later passes repeat; None if there is one pass.
    ahead: the loads that are under way while the loop works on the block before.
    """

    accumulators: tuple[Accumulator, ...]
    stores: tuple[BlockStore, ...]
    span: Span
    later: frozenset[Node] | None = None
    ahead: tuple[Node, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it counts the blocks of its row that it has seen, for the means of lanes."""
        return any(a.how is Accumulation.MEAN for a in self.accumulators)


@dataclass(frozen=True)
class BodyPlan:
    """The body of a kernel.

    index_type: Triton's type of indices.
    sizes: the argument that holds each size symbol.
    passes: what is done at the points of rows.
    last: what is stored after all passes.
    loads, forms: of the nodes that are loads, or have another form than their op's.
    guarded: nodes that need rows which have points.
    """

    layout: Layout
    index_type: str
    sizes: Mapping[str, str]
    passes: tuple[RowPass, ...]
    last: tuple[BlockStore, ...]
    loads: Mapping[Node, Access]
    forms: Mapping[Node, Form]
    guarded: frozenset[Node]


def plan_body(
    linear: LinearKernel,
    tile: Tile,
    index_type: str,
    sizes: Mapping[str, str],
    float8: bool = False,
) -> BodyPlan:
    """Decides how a kernel is computed by blocks of a tile. float8: see `choose_forms`."""
    layout = Layout(linear, tile)
    passes = plan_passes(linear, tile.looped)
    guarded = needs_points(linear)
    loads = load_accesses(layout, guarded)
    return BodyPlan(
        layout,
        index_type,
        sizes,
        _row_passes(layout, passes, loads),
        tuple(store_access(layout, s, in_pass=False) for s in passes.last),
        loads,
        choose_forms(layout, float8),
        guarded,
    )


def _row_passes(
    layout: Layout, passes: Passes, loads: Mapping[Node, Access]
) -> tuple[RowPass, ...]:
    linear, tile = layout.linear, layout.tile
    repeated: list[frozenset[Node] | None] = [None] * len(passes.loops)
    if tile.looped and len(passes.loops) > 1:
        later: frozenset[Node] = frozenset()
        for k in reversed(range(len(passes.loops))):
            repeated[k] = later
            nodes = walk([n for s in passes.loops[k] for n in stmt_nodes(s)])
            later |= {n for n in nodes if n.op == "load"}
    found = []
    for stmts, again in zip(passes.loops, repeated, strict=True):
        accumulators = choose_accumulators(linear, tile, passes, stmts)
        stores = (store_access(layout, s, in_pass=True) for s in stmts if isinstance(s, Store))
        span = Span()
        if tile.looped:
            ordered = any(a.how in IN_ORDER for a in accumulators)
            span = split_rows(linear, tile, stmts, ordered)
        ahead = loads_ahead(layout, stmts, span, loads)
        found.append(RowPass(accumulators, tuple(stores), span, again, ahead))
    return tuple(found)
