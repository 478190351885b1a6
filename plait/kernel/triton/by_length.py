"""Which tiles a kernel has where its rows have a length that only a call tells, and which of them a
call takes.

A block that holds rows as a whole reads them once, but holds rows up to its own length only. So
there is a block for rows of about the length that is expected, one for rows some times as long, and
one that walks along rows of any length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.ir.expr import Size, compare, total
from plait.kernel.triton.tiles import BUSY, Tile, held_tile, power
from plait.schedule.cost import hint
from plait.schedule.dedup import symbol_for
from plait.schedule.legalize.linear import LinearKernel, trip_count

LEAST = 128
"""Points of the shortest block: what is shorter costs no less."""
LONGER = 4
"""How many times as long the rows of the second block are."""


@dataclass(frozen=True)
class Tiles:
    """pick: the number of the tile that a call takes, over the kernel's sizes. tiles: the last of
    them takes any size; None is the one that is planned for any."""

    pick: Size
    tiles: tuple[Tile | None, ...]

    def named(self, symbol: str, taken: set[str]) -> list[tuple[str, Tile | None]]:
        """The tiles with the symbols of their kernels: of blocks that hold rows up to a length,
        with that. taken: symbols that others have."""
        lengths = [tile.groups[-1].block for tile in self.tiles[:-1] if tile is not None]
        symbols = [*(symbol_for(f"{symbol}_{n}", taken) for n in lengths), symbol]
        return list(zip(symbols, self.tiles, strict=True))


def tiles_by_length(linear: LinearKernel, hints: Mapping[str, int], busy: int = BUSY) -> Tiles:
    """The tiles of a kernel. busy: programs that fill the device."""
    length = trip_count(linear.rvars)
    if isinstance(length, int):
        return Tiles(0, (None,))
    first = max(power(hint(length, hints)), LEAST)
    found = ((n, held_tile(linear, n, busy)) for n in (first, LONGER * first))
    held = {n: tile for n, tile in found if tile is not None}
    pick = total(compare("lt", n, length) for n in held)
    return Tiles(pick, (*held.values(), None))
