"""Which dimensions of a block the values and indices of a kernel vary along.

A value is one Triton variable of the block's rank, of extent 1 along the dimensions that it does
not vary along. What does not vary along the dimension of a loop is computed outside of it.
"""

from __future__ import annotations

import math

from plait.ir.expr import Atom, Size, coefficient, free_symbols, product, substitute, symbol
from plait.ir.loops import Node
from plait.kernel.triton.tiles import Tile
from plait.schedule.legalize.linear import LinearKernel, dependences, extent
from plait.schedule.plan import Reduce


class Layout:
    """A kernel cut into blocks. Its methods are functions of kernel and tile alone.

    everything: names of all dimensions of a block.
    rows: names of those that are spread over programs.
    along: the dimension that the loop of a block walks along.
    groups: axes that one index walks: the block's dimensions, and what a program has one point of.
    numbers: points of a segment -> the number of a segment in its row.
    """

    def __init__(self, linear: LinearKernel, tile: Tile) -> None:
        self.linear, self.tile = linear, tile
        self.everything = frozenset(g.name for g in tile.groups)
        self.rows = frozenset(g.name for g in tile.outer)
        self.along = "x" if tile.column_programs else "r"
        self.groups = (*tile.groups, *((tile.programs,) if tile.programs else ()))
        self.group_of = {a: g for g in self.groups for a in g.axes}
        self.deps = dependences(linear)
        rows = tile.groups[-1].points if tile.groups else 1
        self.numbers = {
            n: symbol(f"segment{n}", extent=rows // n)
            for n in dict.fromkeys(s.segment for s in linear.stmts)
            if n
        }
        self._inner = {s.name for s in linear.stmts if isinstance(s, Reduce) and s.inner}

    def dims(self, n: Node) -> frozenset[str]:
        """The dimensions that a value varies along."""
        return self._dims(self.deps(n))

    def dims_of_index(self, e: Size) -> frozenset[str]:
        """The dimensions that an index varies along."""
        numbers = free_symbols(e) & {v.symbol for v in self.numbers.values()}
        return frozenset("r" if numbers else ()) | self._dims(
            frozenset().union(
                *(
                    {a} if a in self.group_of else self.deps(self.linear.indirect[a])
                    for a in free_symbols(e)
                    if a in self.group_of or a in self.linear.indirect
                )
            )
        )

    def _dims(self, what: frozenset[object]) -> frozenset[str]:
        found = {g.name for g in self.tile.groups if not what.isdisjoint(g.axes)}
        names = {d for d in what if isinstance(d, str)}
        return frozenset(found).union(
            self.rows if names else (), () if names.isdisjoint(self._inner) else "r"
        )

    def along_rows(self, n: Node) -> bool:
        """Whether a value varies from point to point of a row, or of a segment of it."""
        deps = self.deps(n)
        segments = {s.name for s in self.linear.stmts if isinstance(s, Reduce) and s.segment}
        return "r" in self._dims(deps - segments)

    def is_inner(self, n: Node) -> bool:
        """Whether a value is computed inside the loop."""
        return self.along in self.dims(n)

    def shape(self, names: frozenset[str]) -> str:
        """The block's shape over these dimensions, 1 along the others."""
        return f"[{', '.join(str(g.block) if g.name in names else '1' for g in self.tile.groups)}]"

    def size(self, names: frozenset[str]) -> int:
        """How many elements the block has over these dimensions."""
        return math.prod(g.block for g in self.tile.groups if g.name in names)

    def segments(self, points: int) -> str:
        """The block's shape with its rows cut into segments of so many points."""
        *outer, r = (g.block for g in self.tile.groups)
        return f"[{', '.join(map(str, (*outer, r // points, points)))}]"

    def each_segment(self, points: int) -> tuple[str, str]:
        """The shape of all segments of a block, one below the other, and that of the block with a
        point for each."""
        *outer, r = (g.block for g in self.tile.groups)
        many = (math.prod(outer) * (r // points), points)
        one = (*outer, r // points, 1)
        return f"[{', '.join(map(str, many))}]", f"[{', '.join(map(str, one))}]"

    def by_number(self, e: Size, points: int) -> Size:
        """An index that does not walk along segments of so many points, over their number."""
        places: dict[Atom, Size] = {}
        inner: Size = 1
        for a in reversed(self.tile.groups[-1].axes):
            places[a] = 0
            if points % inner != 0 or inner == points:
                places[a] = self.numbers[points] // (inner // points) % extent(a)
            inner = inner * extent(a)
        return substitute(e, places)

    def walk_groups(self, e: Size) -> Size:
        """e with axes that it walks in the order of their group as one: the group's index itself,
        undivided."""
        for g in self.groups:
            if isinstance(e, int) or len(g.axes) < 2:
                continue
            step = coefficient(e, g.axes[-1])
            steps = [
                None if step is None else step * product(map(extent, g.axes[k + 1 :]))
                for k in range(len(g.axes))
            ]
            if step not in (None, 0) and all(
                c is not None and coefficient(e, a) == c for a, c in zip(g.axes, steps, strict=True)
            ):
                rest = substitute(e, dict.fromkeys(g.axes, 0))
                e = rest + step * symbol(f"#{g.name}", extent=g.points)
        return e


def undivided(a: Atom) -> str:
    """The name of the group whose index a symbol of `walk_groups` is, or "" for other symbols."""
    return a.name[1:] if a.name.startswith("#") else ""
