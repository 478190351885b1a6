"""Tiles worth measuring for a Triton kernel: the planned one, and others around it.

Comes in: a `LinearKernel`. Goes out: `Tile`s, a function of the same facts as the plan.
`runtime/tune.py` finds out which of them is fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plait.kernel.triton.tiles import BUSY, MAX_WARPS, Tile, longest_segment, plan_tile, power
from plait.schedule.legalize.linear import LinearKernel

# Bounds on what is measured, not results of measuring: benchmarks/tuning_gpu.py
# shows time and gain.
MAX_TILES = 14
MAX_EACH = 128
"""Points of a block that a thread may have: more do not fit its registers."""
MAX_ROW = 1 << 16
"""The longest row that is tried as one block."""


def candidates(linear: LinearKernel, busy: int = BUSY) -> tuple[Tile, ...]:
    """The planned tile first, then up to MAX_TILES - 1 others. busy: programs that fill the
    device."""
    first = plan_tile(linear, busy)
    others = _reductions(first) if linear.rvars else _pointwise(first)
    if linear.by_row and linear.rvars:  # what may not change the order of a sum
        others = (t for t in others if _walks_as(t, first))
    least = longest_segment(linear)
    fitting = (t for t in others if _fits(t) and t.groups[-1].block >= least)
    return tuple(dict.fromkeys((first, *fitting)))[:MAX_TILES]


def describe(tile: Tile) -> str:
    """A tile in a few words."""
    size = " x ".join(f"{g.name} {g.block}" for g in tile.groups)
    loop = " looped" if tile.looped else ""
    stages = f", {tile.num_stages} stages" if tile.num_stages > 1 else ""
    return f"{size}{loop} on {tile.num_warps} warps{stages}"


def _pointwise(first: Tile) -> Iterator[Tile]:
    """Blocks of half to eight times the size, narrower and wider where there are two dimensions;
    first the number of warps, which changes most."""
    yield from _with_warps(first)
    if len(first.groups) == 1:
        x = first.groups[0].block
        blocks: list[tuple[int, ...]] = [(2 * x,), (4 * x,), (x // 2,), (8 * x,)]
    else:
        y, x = (g.block for g in first.groups)
        blocks = [(y // 2, x), (y, x // 2), (y // 2, x // 2), (y // 4, x)]
        blocks += [(y // 2, 2 * x), (2 * y, x // 2)]
    for block in blocks:
        sized = _sized(first, block, first.looped)
        yield sized
        yield _on_warps(sized, sized.num_warps // 2)


def _reductions(first: Tile) -> Iterator[Tile]:
    """More and fewer rows a block; whole rows in place of pieces, and pieces in place of whole
    rows."""
    yield from _with_warps(first)
    rows, r = (g.block for g in first.groups)
    length = first.groups[1].points
    whole = power(length) if isinstance(length, int) else 0
    shapes = [(2 * rows, r), (rows // 2, r), (4 * rows, r)]
    if first.column_programs:
        yield replace(first, num_stages=2)
    elif first.looped:
        shapes = [(rows, 2 * r), (rows, r // 2), (2 * rows, r // 2)]
        shapes += [(rows // 2, r), (rows // 2, 2 * r)]
        yield replace(first, num_stages=3)
    yield from (_sized(first, shape, first.looped) for shape in shapes)
    if first.looped and 0 < whole <= MAX_ROW:
        row = _sized(first, (1, whole), False)
        yield from (row, *_with_warps(row))
    elif not first.looped and not first.column_programs and whole >= 512:
        for pieces in (2, 4):
            piece = _sized(first, (rows, whole // pieces), True)
            yield from (piece, _on_warps(piece, piece.num_warps // 2))


def _walks_as(tile: Tile, first: Tile) -> bool:
    """Whether a row is walked, or held, as by another tile."""
    return (tile.looped, tile.groups[-1].block) == (first.looped, first.groups[-1].block)


def _with_warps(tile: Tile) -> Iterator[Tile]:
    yield from (
        _on_warps(tile, n) for n in (tile.num_warps // 2, 2 * tile.num_warps, tile.num_warps // 4)
    )


def _on_warps(tile: Tile, n: int) -> Tile:
    return replace(tile, num_warps=min(max(n, 1), MAX_WARPS))


def _sized(tile: Tile, blocks: tuple[int, ...], looped: bool) -> Tile:
    """The tile with other blocks, its threads with as many points as before."""
    groups = tuple(replace(g, block=max(b, 1)) for g, b in zip(tile.groups, blocks, strict=True))
    made = replace(tile, groups=groups, looped=looped)
    return _on_warps(made, tile.num_warps * made.block // tile.block)


def _fits(tile: Tile) -> bool:
    """Whether threads have something to do, and room for it."""
    useful = all(g.block <= power(g.points) for g in tile.groups if isinstance(g.points, int))
    return useful and 32 * tile.num_warps <= tile.block <= MAX_EACH * 32 * tile.num_warps
