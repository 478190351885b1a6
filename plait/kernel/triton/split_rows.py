"""Decides where the blocks of a row begin and end, so that loads and stores are vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.ir.expr import Size, coefficient, free_symbols, substitute
from plait.ir.loops import walk
from plait.kernel.triton.tiles import Tile
from plait.schedule.legalize.linear import LinearKernel, offset_of, stmt_nodes
from plait.schedule.plan import Stmt, Store

LINE = 8
"""Vectors of 16 bytes in a line of memory."""


@dataclass(frozen=True)
class RowStart:
    """Where a row begins, if that may be anywhere. Its blocks begin where lines do, before the row:
    but for the two ends of the row there are vectors, and lines are written whole.

    offset: of the row's first element.
    line: elements of a line of memory.
    """

    offset: Size
    line: int


@dataclass(frozen=True)
class Span:
    """How a block walks along its row.

    whole: points of the blocks that lie inside the row as a whole, which need no mask and have a
        loop of their own; 0 if all blocks share one loop.
    start: where the first block begins, if that is before the row. If only a call tells the length,
        there may be any number of blocks, and behind the whole ones none, one or two.
    """

    whole: Size = 0
    start: RowStart | None = None


def split_rows(linear: LinearKernel, tile: Tile, stmts: Sequence[Stmt], ordered: bool) -> Span:
    """The span of a pass. ordered: its reductions need to know which points come first."""
    block, length = tile.groups[-1].block, tile.groups[-1].points
    whole = length // block * block
    start = None if ordered else _start(linear, tile, stmts, length, whole)
    if not isinstance(length, int) or not isinstance(whole, int):
        return Span() if start is None else Span(whole, start)
    cut = 0 < whole < length and _keeps_from_vectors(linear, stmts, length)
    if start is None and not cut:
        return Span()
    return Span(whole, start)


def _contiguous(linear: LinearKernel, stmts: Sequence[Stmt]) -> list[tuple[Size, int]]:
    """Where statements load and store along memory, and how many elements a vector has there."""
    loads = [
        (offset_of(n), n.dtype)
        for n in walk([m for s in stmts for m in stmt_nodes(s)])
        if n.op == "load"
    ]
    stores = [(s.index[0], linear.buffers[s.buf].dtype) for s in stmts if isinstance(s, Store)]
    along = [(e, 16 // d.nbytes) for e, d in (*loads, *stores)]
    return [(e, n) for e, n in along if any(coefficient(e, a) == 1 for a in linear.rvars)]


def _start(
    linear: LinearKernel, tile: Tile, stmts: Sequence[Stmt], length: Size, whole: Size
) -> RowStart | None:
    block = tile.groups[-1].block
    if len(linear.rvars) > 1 or any(g.block > 1 for g in tile.outer) or tile.unit > 1:
        return None
    if linear.by_row:  # which lane has a point would depend on the row
        return None
    if isinstance(whole, int) and whole < 3 * block:
        return None
    (r,) = linear.rvars
    rows = [(substitute(e, {r: 0}), n) for e, n in _contiguous(linear, stmts)]
    rows = [(e, n) for e, n in rows if not free_symbols(e).isdisjoint(linear.vars)]
    begins, each = {e for e, _ in rows}, max((n for _, n in rows), default=1)
    line = each * LINE
    rest = length - whole + line
    if len(begins) != 1 or line > block or (isinstance(rest, int) and rest > block):
        return None
    (begin,) = begins
    if isinstance(length, int):
        known = free_symbols(begin) <= set(linear.vars)
    else:
        known = free_symbols(begin).isdisjoint(linear.indirect)
    return RowStart(begin, line) if known and begin % each != 0 else None


def _keeps_from_vectors(linear: LinearKernel, stmts: Sequence[Stmt], length: int) -> bool:
    """Whether rows that begin where vectors may are so long that a mask, which ends in the middle
    of a vector, would forbid them all along."""
    for offset, each in _contiguous(linear, stmts):
        steps = [coefficient(offset, a) for a in linear.vars]
        if length % each and all(isinstance(c, int) and c % each == 0 for c in steps):
            return True
    return False
