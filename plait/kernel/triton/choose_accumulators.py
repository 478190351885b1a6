"""Decides how each reduction of a pass accumulates its blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from plait.ir.reductions import REDUCTIONS
from plait.kernel.triton.passes import Passes
from plait.kernel.triton.tiles import Tile, column_vector, held_dtypes
from plait.schedule.legalize.linear import LinearKernel
from plait.schedule.plan import Reduce, Store


class Accumulation(Enum):
    """POINT: it is over one point.
    BLOCK: each lane combines its points.
    SCAN: what all earlier blocks give is carried along.
    SEGMENT: a block holds segments as a whole.
    PEAK: a maximum, as BLOCK, and sums of exponentials below it are rescaled as it grows.
    MEAN: each lane keeps the mean of its points in place of a sum.
    WITH: accumulated beside a PEAK or a MEAN."""

    POINT = "point"
    BLOCK = "block"
    SCAN = "scan"
    SEGMENT = "segment"
    PEAK = "peak"
    MEAN = "mean"
    WITH = "with"


IN_ORDER = (Accumulation.SCAN, Accumulation.MEAN, Accumulation.SEGMENT)
"""Those whose blocks begin at the first point of a row."""


@dataclass(frozen=True)
class Accumulator:
    """How one reduction accumulates.

    beside: the reductions that are accumulated with it.
    first: the reduction that this one goes beside.
    folds: [rows, n, lanes, vector] of a block whose rows are folded n times, and whose vectors are
        folded too, so that what lies on one another belongs to one thread, which then keeps one
        maximum for it; () if blocks are not folded.
    """

    reduce: Reduce
    how: Accumulation
    beside: tuple[Reduce, ...] = ()
    first: Reduce | None = None
    folds: tuple[int, ...] = ()

    @property
    def is_arg(self) -> bool:
        """Whether it gives a position."""
        return REDUCTIONS[self.reduce.kind].extreme != ""


def choose_accumulators(
    linear: LinearKernel, tile: Tile, passes: Passes, stmts: Sequence[Reduce | Store]
) -> tuple[Accumulator, ...]:
    """The accumulators of one pass."""
    reductions = [s for s in stmts if isinstance(s, Reduce)]
    return tuple(_accumulator(linear, tile, passes, s) for s in reductions)


def _accumulator(linear: LinearKernel, tile: Tile, passes: Passes, s: Reduce) -> Accumulator:
    if not linear.rvars:
        return Accumulator(s, Accumulation.POINT)
    if s.segment:
        return Accumulator(s, Accumulation.SEGMENT)
    if first := passes.rescaled.get(s.name):
        return Accumulator(s, Accumulation.WITH, (), first, _folds(linear, tile))
    if first := passes.spread.get(s.name):
        return Accumulator(s, Accumulation.WITH, (), first)
    if spread := passes.beside(s, passes.spread):
        return Accumulator(s, Accumulation.MEAN, spread)
    if rescaled := passes.beside(s, passes.rescaled):
        return Accumulator(s, Accumulation.PEAK, rescaled, None, _folds(linear, tile))
    return Accumulator(s, Accumulation.SCAN if s.running else Accumulation.BLOCK)


def _folds(linear: LinearKernel, tile: Tile) -> tuple[int, ...]:
    r = tile.groups[-1]
    rows = math.prod(g.block for g in tile.outer)
    if rows > 1:  # the threads that are left beside neighbouring results walk along rows
        lanes = 32 * tile.num_warps * column_vector(linear) // rows
        n = max(r.block // lanes, 1) if lanes else 1
        return (rows, n, r.block // n, 1)
    vector = 16 // min((d.nbytes for d in held_dtypes(linear, linear.vars)), default=4)
    n = max(r.block // (32 * tile.num_warps * vector), 1)
    return (rows, n, r.block // (n * vector), vector)
