"""Decides how threads share the points of a kernel.

Comes in: a `Nest`. Goes out: `Sharing`, which `faults_of_sharing` checks: each point has one
thread, and points that run in order stay on one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from plait.ir.expr import Atom, Size, product
from plait.ir.loops import walk
from plait.kernel.cpu.passes import Nest
from plait.schedule.legalize.linear import blocks, extent
from plait.schedule.plan import Kernel

# Chosen with the short rows (pad, pixel_shuffle) of benchmarks/kernels_cpu.py: twice and three
# times as fast as without.
SHORT = 8
"""The most vectors in a row that threads do not share."""
MANY = 64
"""Rows that are enough for all threads."""
UNROLLED = 100
"""The most nodes, times vectors, in a loop over a short row that is unrolled: then its masks are
constants."""


class Unit(Enum):
    """What a thread does at once, at one point of the outer loops."""

    POINT = "the point"
    ROW = "all of the vector axis"
    VECTORS = "the vectors in flight, or as many as there are"


class Share(Enum):
    """Which units a thread has."""

    ALL = "all, in one thread"
    RUN = "as many in a row as other threads"
    FIRST = "those of some values of the first outer loop"
    COLUMNS = "some points of the vector axis in all of them"


@dataclass(frozen=True)
class Sharing:
    """How threads share a kernel.

    outer: the loops around a unit, outermost first.
    unrolled: the loop over a short row is."""

    share: Share
    unit: Unit
    outer: tuple[Atom, ...]
    unrolled: bool = False


def share_work(kernel: Kernel, nest: Nest) -> Sharing:
    """Threads share runs of units. Sequential kernels are shared along loops that are apart."""
    a, sequential = nest.axis, nest.sequential
    outer = tuple(v for v in nest.linear.vars if nest.inner or v != a)
    apart = _apart(kernel)
    if sequential and not (outer and outer[0] in apart) and not nest.inner and a in apart:
        return Sharing(Share.COLUMNS, Unit.ROW, outer)
    outer = tuple(nest.tile_number if v == nest.tile and nest.tile_number else v for v in outer)
    unit, unrolled = Unit.POINT, False
    if a is not None and not nest.inner:
        n_vectors = _short_row(nest, a)
        unit = Unit.VECTORS if n_vectors is None else Unit.ROW
        if n_vectors and not nest.passes:
            unrolled = n_vectors * len(list(walk(nest.linear.roots()))) <= UNROLLED
    if units(nest, unit, outer) == 1:
        return Sharing(Share.ALL, unit, outer, unrolled)
    share = Share.RUN
    if sequential:
        share = Share.FIRST if outer and outer[0] in apart else Share.ALL
    return Sharing(share, unit, outer, unrolled)


def units(nest: Nest, unit: Unit, outer: tuple[Atom, ...]) -> Size:
    """The number of units."""
    n = product(extent(a) for a in outer)
    return n * groups(nest) if unit is Unit.VECTORS else n


def groups(nest: Nest) -> Size:
    """The units in a row of vectors."""
    assert nest.axis is not None, "scalar code has no vector axis"
    return blocks(extent(nest.axis), nest.step)


def _apart(kernel: Kernel) -> set[Atom | None]:
    return {v.symbol for v in kernel.apart}


def _short_row(nest: Nest, a: Atom) -> int | None:
    """The vectors in a row so short that threads share whole rows; None for others."""
    if nest.lanes == 1 or nest.tile is not None:
        return None
    n, rows = extent(a), product(extent(b) for b in nest.linear.vars if b != a)
    if nest.passes and not (isinstance(rows, int) and rows >= MANY):
        return None  # loops in a row: vectors are work to share
    return n // nest.lanes if isinstance(n, int) and n <= SHORT * nest.step else None


def faults_of_sharing(kernel: Kernel, nest: Nest, sharing: Sharing) -> list[str]:
    """Points that no thread or several threads have, and threads that share what runs in order."""
    around = [nest.tile if a == nest.tile_number else a for a in sharing.outer]
    inside = [] if sharing.unit is Unit.POINT else [nest.axis]
    faults = []
    if Counter((*around, *inside)) != Counter(nest.linear.vars):
        faults.append(f"has the loops {around} around a unit")
    shared = {Share.FIRST: around[:1], Share.COLUMNS: inside}.get(sharing.share, [])
    alone = sharing.share is Share.ALL or not nest.sequential
    if not alone and not (shared and _apart(kernel).issuperset(shared)):
        faults.append(f"runs in order, and a thread has {sharing.share.value}")
    return faults
