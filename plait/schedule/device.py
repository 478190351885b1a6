"""What scheduling needs to know of a kind of device: its rates, and how much work keeps it busy.

A row a kind of device. Fusion, inlining and splitting take their numbers from the row of the device
that a buffer is on; none of them knows a language that kernels are written in.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.ir.loops import Buffer


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Rates: cycles_a_ns counts those of the op table; bytes a nanosecond from the cache (for up to
    cache_nbytes) and from farther away. launch_ns: what a kernel costs by being there.

    A unit of work is what runs without the others: a result, or `neighbours` results that lie side
    by side. A reduction of split_nbytes or more, and of unit_nbytes or more a unit, to fewer than
    min_units of them is cut in two stages, with `units` to aim at, or narrow_units across memory
    with elements of at most two bytes. A partial result is worth min_along points that lie side by
    side in memory, or min_across that do not, and begins at a multiple of align_along or
    align_across points where it can. Parts of equal length may be up to more_across times as many
    as aimed at, or fewer_across times as few.

    walkers: how many programs (0: none) walk rows where sums of columns are to be had on the way, a
    part of the rows each, of walk_rows or more. Together they have up to walk_points under way, a
    row up to walk_row, and the tensor has walk_nbytes or more.

    min_outer: outer points from which on a large loop joins a reduction. tiny_nbytes: groups near
    each other that move no more are joined if only their shapes agree.
    """

    cycles_a_ns: float
    cache_bytes_a_ns: float
    far_bytes_a_ns: float
    cache_nbytes: int
    launch_ns: float
    split_nbytes: int
    unit_nbytes: int
    min_units: int
    units: int
    narrow_units: int
    neighbours: int
    min_along: int
    min_across: int
    align_along: int
    align_across: int
    fewer_across: int
    more_across: int
    walkers: int
    walk_rows: int
    walk_row: int
    walk_points: int
    walk_nbytes: int
    min_outer: int
    tiny_nbytes: int

    def moved_ns(self, nbytes: float) -> float:
        """Nanoseconds that it takes to read or write so many bytes."""
        return nbytes / (
            self.cache_bytes_a_ns if nbytes <= self.cache_nbytes else self.far_bytes_a_ns
        )


KINDS: dict[str, DeviceKind] = {
    # One core with AVX-512, fitted to the measured times of 412 kernels of models and of
    # benchmarks/kernel_cases.py: cycles are those of narrow vectors; far is between the last cache
    # (50) and memory (10).
    "cpu": DeviceKind(
        cycles_a_ns=45.0,
        cache_bytes_a_ns=90.0,
        far_bytes_a_ns=36.0,
        cache_nbytes=1 << 20,
        launch_ns=110.0,
        split_nbytes=1 << 20,
        unit_nbytes=0,
        min_units=8,
        units=16,
        narrow_units=16,
        neighbours=64,
        min_along=1024,
        min_across=1024,
        align_along=1,
        align_across=1,
        fewer_across=1,
        more_across=4,
        walkers=0,
        walk_rows=0,
        walk_row=0,
        walk_points=0,
        walk_nbytes=0,
        min_outer=4,
        tiny_nbytes=4096,
    ),
    # A whole Hopper device; units are programs, eight (or four) for each of its 132
    # multiprocessors.
    "cuda": DeviceKind(
        cycles_a_ns=20000.0,
        cache_bytes_a_ns=5000.0,
        far_bytes_a_ns=3000.0,
        cache_nbytes=32 << 20,
        launch_ns=2500.0,
        split_nbytes=1 << 19,
        unit_nbytes=1 << 18,
        min_units=256,
        units=1024,
        narrow_units=512,
        neighbours=64,
        min_along=4096,
        min_across=128,
        align_along=64,
        align_across=32,
        fewer_across=2,
        more_across=2,
        walkers=512,
        walk_rows=8,
        walk_row=8192,
        walk_points=1 << 20,
        walk_nbytes=2 << 20,
        min_outer=128,
        tiny_nbytes=1 << 20,
    ),
}


def kind_of(buffer: Buffer) -> DeviceKind:
    """The kind of device that a buffer is on."""
    return KINDS.get(buffer.device.partition(":")[0], KINDS["cpu"])
