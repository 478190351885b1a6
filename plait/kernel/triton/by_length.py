"""Which tiles a kernel has where its rows have a length that only a call tells, and which of them a
call takes.

A block that holds rows as a whole reads them once, but holds rows up to its own length only. So
there are blocks for rows of about the length that is expected, of a quarter, twice and four times
that, and one that walks along rows of any length. A call takes the first that can hold its rows;
under `max-autotune` the one that was fastest for rows of up to the next power of two.

Rows of any length begin in the middle of vectors: blocks that hold them read element by element,
those that walk along them do at their ends (`split_rows.py`). Where the length is that of whole
vectors, a call takes tiles that know it, and so read 16 bytes at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.ir.expr import Expr, Size, compare, smax, smin, total
from plait.kernel.triton.tiles import (
    BUSY,
    Tile,
    column_vector,
    held_tiles,
    plan_tile,
    power,
    vector_unit,
)
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
    """pick: the number of the tile that a call takes, over the kernel's sizes. tiles: first those
    for rows of whole vectors, if there are any, then those for all rows; of both the last one takes
    any length. None is the tile that is planned for any. length: of rows. picks: which of the first
    ones, and which of the others."""

    pick: Size
    tiles: tuple[Tile | None, ...]
    length: Size = 0
    picks: tuple[Size, Size] = (0, 0)

    @property
    def buckets(self) -> list[int]:
        """Lengths of rows up to which one tile is chosen, where there are several to choose
        from."""
        longest = max((t.groups[-1].block for t in self.tiles if t and not t.looped), default=0)
        return [n for k in range(6, 17) if (n := 1 << k) <= longest]

    def named(self, symbol: str, taken: set[str]) -> list[tuple[str, Tile | None]]:
        """The tiles with the symbols of their kernels: of blocks that hold rows up to a length,
        with that. taken: symbols that others have."""
        names = []
        for tile in self.tiles:
            held = f"_{tile.groups[-1].block}" if tile and not tile.looped else ""
            names.append(f"{symbol}{held}{'_vectors' if tile and tile.unit > 1 else ''}")
        symbols = [*(symbol_for(name, taken) for name in names[:-1]), symbol]
        return list(zip(symbols, self.tiles, strict=True))

    @property
    def n_vectors(self) -> int:
        """How many tiles are for rows of whole vectors."""
        return sum(t is not None and t.unit > 1 for t in self.tiles)

    def _that_hold(self, length: int) -> list[int]:
        """The numbers of the tiles that take rows of a length, a power of two: the one that is
        taken first."""
        among = range(self.n_vectors or len(self.tiles))
        tiles = [(n, self.tiles[n]) for n in among[:-1]]
        return [*(n for n, t in tiles if t and t.groups[-1].block >= length), among[-1]]

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
        of_vectors, of_all = self.picks
        before = of_vectors if self.n_vectors else of_all
        numbers = [self._that_hold(n)[k] for n, k in best.items()]
        pick: Size = numbers[0]
        for upto, one, other in zip(best, numbers, [*numbers[1:], before], strict=True):
            pick = pick + (other - one) * compare("lt", upto, self.length)
        picks = (pick, of_all) if self.n_vectors else (of_vectors, pick)
        return _picked(replace(self, tiles=tiles, picks=picks))


def _picked(t: Tiles) -> Tiles:
    """The tiles with the pick that chooses between the two of `picks`."""
    n, (of_vectors, of_all) = t.n_vectors, t.picks
    size, pick = size_of(t.length), n + of_all
    if n and size is not None:
        unit = next(tile.unit for tile in t.tiles if tile)
        pick = pick + (of_vectors - pick) * compare("eq", size % unit, 0)
    return replace(t, pick=smax(0, smin(pick, len(t.tiles) - 1)))


def size_of(length: Size) -> Expr | None:
    """The one size that tells a length, or None."""
    return _terms(length)[0]


def _terms(length: Size) -> tuple[Expr | None, int]:
    """The size that a length is a multiple of, and the multiple; (None, 0) if no one size tells."""
    terms = length.terms if isinstance(length, Expr) and length.const == 0 else ()
    if len(terms) != 1 or len(terms[0][0]) != 1 or terms[0][0][0].kind != "sym":
        return None, 0
    ((atom,), times) = terms[0]
    return atom.expr, times


def tiles_by_length(linear: LinearKernel, hints: Mapping[str, int], busy: int = BUSY) -> Tiles:
    """The tiles of a kernel. busy: programs that fill the device."""
    length = trip_count(linear.rvars)
    if isinstance(length, int):
        return Tiles(0, (None,))
    first = max(power(hint(length, hints)), LEAST)
    rows = hint(trip_count(linear.vars), hints)
    lengths = [n for n in (first // 4, first, 2 * first, 4 * first, 16 * first) if n >= LEAST]
    held = held_tiles(linear, lengths, rows, busy)
    every = {n: tile for n, tile in held.items() if n <= 4 * first}
    pick = total(compare("lt", n, length) for n in every)
    size, times = _terms(length)
    unit = vector_unit(linear)
    if size is None or unit == 1 or times % unit == 0 or column_vector(linear):
        return Tiles(pick, (*every.values(), None), length, (0, pick))
    # Fewer blocks, for more lengths: a vector that is masked costs little.
    few = {n: tile for n, tile in held.items() if n != 2 * first}
    vectors = [replace(tile, unit=unit) for tile in (*few.values(), plan_tile(linear, busy))]
    of_vectors = total(compare("lt", n, length) for n in few)
    tiles = (*vectors, *every.values(), None)
    return _picked(Tiles(0, tiles, length, (of_vectors, pick)))


def hints_at(kernel: Kernel, length: Size, n: int) -> Kernel | None:
    """The kernel with other hints: its rows have n points. None where no one size tells, or its
    tensors would be too large to measure."""
    size, times = _terms(length)
    if size is None:
        return None
    hints = {**kernel.hint_of, str(size): max(n // times, 1)}
    nbytes = sum(buffer_nbytes(b, hints) for b in kernel.args)
    made = replace(kernel, hints=tuple(hints[str(s)] for s in kernel.sizes))
    return made if nbytes <= MOST_NBYTES else None
