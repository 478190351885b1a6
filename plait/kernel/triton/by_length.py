"""Which tiles a kernel has where its rows have a length that only a call tells, and which of them a
call takes.

A block that holds rows as a whole reads them once, but holds rows up to its own length only. So
there are blocks for rows of about the length that is expected, of twice and of four times that, and
one that walks along rows of any length. A call takes the first that can hold its rows; under
`max-autotune` the one that was fastest for rows of up to the next power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.ir.expr import Expr, Size, compare, smax, smin, total
from plait.kernel.triton.tiles import BUSY, Tile, held_tile, power
from plait.schedule.cost import buffer_nbytes, hint
from plait.schedule.dedup import symbol_for
from plait.schedule.legalize.linear import LinearKernel, trip_count
from plait.schedule.plan import Kernel

LEAST = 128
"""Points of the shortest block: what is shorter costs no less."""
MOST_NBYTES = 1 << 30
"""Bytes of the tensors with which a kernel is measured."""


@dataclass(frozen=True)
class Tiles:
    """pick: the number of the tile that a call takes, over the kernel's sizes. tiles: the last of
    them takes any size; None is the one that is planned for any. length: of rows."""

    pick: Size
    tiles: tuple[Tile | None, ...]
    length: Size = 0

    @property
    def buckets(self) -> list[int]:
        """Lengths of rows up to which one tile is chosen, where there are several to choose
        from."""
        longest = max((t.groups[-1].block for t in self.tiles[:-1] if t is not None), default=0)
        return [n for k in range(6, 17) if (n := 1 << k) <= longest]

    def named(self, symbol: str, taken: set[str]) -> list[tuple[str, Tile | None]]:
        """The tiles with the symbols of their kernels: of blocks that hold rows up to a length,
        with that. taken: symbols that others have."""
        lengths = [tile.groups[-1].block for tile in self.tiles[:-1] if tile is not None]
        symbols = [*(symbol_for(f"{symbol}_{n}", taken) for n in lengths), symbol]
        return list(zip(symbols, self.tiles, strict=True))

    def _that_hold(self, length: int) -> list[int]:
        """The numbers of the tiles that take rows of a length, the one that is taken first."""
        last = len(self.tiles) - 1
        held = [n for n, t in enumerate(self.tiles[:-1]) if t and t.groups[-1].block >= length]
        return [*held, last]

    def for_rows(self, length: int) -> list[Tile]:
        """The tiles that take rows of a length, the one that is taken first."""
        return [t for n in self._that_hold(length) if (t := self.tiles[n]) is not None]

    def measured(self, best: Mapping[int, int], walks: Tile) -> Tiles:
        """The tiles with another pick. best: length of rows -> which of `for_rows` is the best for
        rows up to that, above the next smaller one; longer ones stay with the pick that there is.
        walks: the best tile for any length."""
        tiles = (*self.tiles[:-1], walks)
        if not best:
            return replace(self, tiles=tiles)
        numbers = [self._that_hold(n)[k] for n, k in best.items()]
        pick: Size = numbers[0]
        for upto, before, after in zip(best, numbers, [*numbers[1:], self.pick], strict=True):
            pick = pick + (after - before) * compare("lt", upto, self.length)
        return replace(self, pick=smax(0, smin(pick, len(tiles) - 1)), tiles=tiles)


def tiles_by_length(linear: LinearKernel, hints: Mapping[str, int], busy: int = BUSY) -> Tiles:
    """The tiles of a kernel. busy: programs that fill the device."""
    length = trip_count(linear.rvars)
    if isinstance(length, int):
        return Tiles(0, (None,))
    first = max(power(hint(length, hints)), LEAST)
    rows = hint(trip_count(linear.vars), hints)
    found = ((n, held_tile(linear, n, rows, busy)) for n in (first, 2 * first, 4 * first))
    held = {n: tile for n, tile in found if tile is not None}
    pick = total(compare("lt", n, length) for n in held)
    return Tiles(pick, (*held.values(), None), length)


def hints_at(kernel: Kernel, length: Size, n: int) -> Kernel | None:
    """The kernel with other hints: its rows have n points. None where no one size tells, or its
    tensors would be too large to measure."""
    terms = length.terms if isinstance(length, Expr) and length.const == 0 else ()
    if len(terms) != 1 or len(terms[0][0]) != 1 or terms[0][0][0].kind != "sym":
        return None
    ((atom,), times) = terms[0]
    hints = {**kernel.hint_of, atom.name: max(n // times, 1)}
    nbytes = sum(buffer_nbytes(b, hints) for b in kernel.args)
    made = replace(kernel, hints=tuple(hints[str(s)] for s in kernel.sizes))
    return made if nbytes <= MOST_NBYTES else None
