"""Sets of bytes as ranges in order: what is taken of an arena, what launches have touched.

A range is added or looked up by bisection, so that thousands of buffers cost little more than one
each. `Timeline` knows what is taken at which step. Numbers only: ranges with symbolic ends are
compared one by one by whoever has them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from operator import itemgetter

Range = tuple[int, int]
_START, _END = itemgetter(0), itemgetter(1)


class Spans:
    """Bytes, as ranges from a first byte to one past the last, in order; those that touch are
    one."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []

    def add(self, start: int, end: int) -> None:
        """Adds a range."""
        a = bisect_left(self.ranges, start, key=_END)
        b = bisect_right(self.ranges, end, key=_START)
        if a < b:
            start, end = min(start, self.ranges[a][0]), max(end, self.ranges[b - 1][1])
        self.ranges[a:b] = [(start, end)]

    def meet(self, start: int, end: int) -> bool:
        """Whether a range has a byte in common with these."""
        k = bisect_right(self.ranges, start, key=_END)
        return k < len(self.ranges) and self.ranges[k][0] < end


class Timeline:
    """Which bytes are taken at which steps. A binary tree over the steps: node 1 is all of them,
    the halves of node k are nodes 2k and 2k + 1."""

    def __init__(self, last_step: int) -> None:
        self.leaves = 1 << last_step.bit_length()
        self.throughout: dict[int, Spans] = defaultdict(
            Spans
        )  # of a node: taken at all of its steps
        self.anywhere: dict[int, Spans] = defaultdict(Spans)  # taken at some of its steps

    def take(self, first: int, last: int, start: int, end: int) -> None:
        """Takes bytes from a first step to a last."""
        parts = set(self._parts(first, last))
        for k in parts:
            self.throughout[k].add(start, end)
        for k in parts | self._above(first, last):
            self.anywhere[k].add(start, end)

    def taken(self, first: int, last: int) -> list[Range]:
        """The bytes that are taken at any step from a first to a last, as ranges by their start,
        which may overlap."""
        found = {r for k in self._parts(first, last) for r in self.anywhere[k].ranges}
        return sorted(found.union(*(self.throughout[k].ranges for k in self._above(first, last))))

    def _parts(self, first: int, last: int) -> Iterator[int]:
        """The fewest nodes that together are these steps."""
        a, b = self.leaves + first, self.leaves + last + 1
        while a < b:
            if a & 1:
                yield a
                a += 1
            if b & 1:
                b -= 1
                yield b
            a, b = a >> 1, b >> 1

    def _above(self, first: int, last: int) -> set[int]:
        """The nodes of a first and a last step, and all above them."""
        leaves = (self.leaves + first, self.leaves + last)
        return {k >> up for k in leaves for up in range(k.bit_length())}


class Skyline:
    """Which thing lies highest at each step, where things are put one on the other. Things are
    numbers; -1: nothing."""

    def __init__(self) -> None:
        # Neighbouring ranges of steps, by their first ones.
        self.starts, self.tops = [0], [-1]

    def cover(self, first: int, last: int, thing: int) -> list[int]:
        """Puts a thing on the steps from a first to a last; returns what lay highest there."""
        a, b = bisect_right(self.starts, first) - 1, bisect_right(self.starts, last)
        old = self.tops[a:b]
        starts, tops = [first], [thing]
        if self.starts[a] < first:
            starts, tops = [self.starts[a], first], [old[0], thing]
        if b == len(self.starts) or self.starts[b] > last + 1:
            starts, tops = [*starts, last + 1], [*tops, old[-1]]
        self.starts[a:b], self.tops[a:b] = starts, tops
        return old
