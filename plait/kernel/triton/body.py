"""Prints the body of one Triton kernel from its plan: which block a program is, its loops, and what
they hold.

What does not depend on the index of a loop is printed outside of it, once. A block that holds whole
rows has no loop over them, so nothing is read twice; it may walk from row to row, in one loop for
all passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.ir.expr import Size
from plait.kernel.triton.lines import Lines
from plait.kernel.triton.ops import TYPES
from plait.kernel.triton.plan_body import BodyPlan, RowPass
from plait.kernel.triton.reductions import Reductions
from plait.kernel.triton.split_rows import RowStart, Span
from plait.kernel.triton.tiles import Group
from plait.kernel.triton.values import Piece, Values
from plait.schedule.plan import Store


class BodyPrinter:
    """Prints the loops of one kernel."""

    def __init__(self, plan: BodyPlan) -> None:
        self.plan, self.layout, self.tile = plan, plan.layout, plan.layout.tile
        self.lines = Lines()
        self.values = Values(plan, self.lines)
        self.reductions = Reductions(self.values)
        self.sums: dict[str, str] = {}  # buffer -> the accumulator of its columns' sums

    def print(self) -> tuple[list[str], bool]:
        """All lines of the body, and whether they hold run-time checks."""
        heads = self._heads()
        # First the sizes that heads are written with.
        lines, self.lines.outer.lines = self.lines.outer.lines + heads, []
        if self.tile.column_programs:
            self._walk()
        else:
            for p in self.plan.passes:
                (self._looped if self.tile.looped else self._held)(p)
            self.values.piece = Piece()
            for s in self.plan.last:
                self.values.store(s)
        return lines + self.lines.outer.lines, self.values.checks

    def _heads(self) -> list[str]:
        """Which block this program is, and the indices of its points."""
        index_type, groups = self.plan.index_type, self.tile.groups
        lines: list[str] = []
        pids = {"x": "pid"}
        if len(self.tile.outer) == 2 or self.tile.programs:
            x = next(g for g in self.tile.outer if g.name == "x")
            lines.append(f"columns = tl.cdiv({self._points(x)}, {x.block})")
            pids = {"x": "pid % columns", "y": "pid // columns"}
            if self.tile.programs:
                lines.append("y = pid // columns")
        for d, g in enumerate(groups):
            at = ", ".join(":" if k == d else "None" for k in range(len(groups)))
            span = f"tl.arange(0, {g.block}).to({index_type})[{at}]"
            if g.name == self.layout.along and (self.tile.looped or self.tile.column_programs):
                lines.append(f"{g.name}base = {span}")
            elif g.name == "r":
                lines += [f"r = {span}", *self._mask_of(g)]
            else:
                at = f"({pids[g.name]}) * {g.block} + {span}"
                at = f"tl.max_contiguous({at}, 1)" if self.tile.spread else at
                lines += [f"{g.name} = {at}", *self._mask_of(g)]
        return lines

    def _mask_of(self, g: Group) -> list[str]:
        return [] if g.full else [f"{g.name}mask = {g.name} < {self._points(g)}"]

    def _points(self, g: Group) -> str:
        return self.values.indices.size(g.points)

    # --------------------------------------------------------------------------------------- passes
    def _held(self, p: RowPass) -> None:
        """A pass of a block that holds whole rows, which stay in registers."""
        self._block(p, Piece())
        self.lines.merge()

    def _looped(self, p: RowPass) -> None:
        """A pass of a block that walks along its rows."""
        for a in p.accumulators:
            self.reductions.start(a, p.span.start is None)
        if p.counts:
            self.reductions.start_count()
        if p.span.start is not None:
            self._from_lines(p, p.span.start)
        else:
            (self._loop_ahead if p.ahead else self._loops)(p)
        self.lines.enter()
        for a in p.accumulators:
            self.reductions.finish(a)

    def _loops(self, p: RowPass) -> None:
        """The blocks that lie inside their rows, and those at the ends."""
        r, whole = self.tile.groups[-1], p.span.whole
        head = ["r = rbase + offset"]
        if whole != 0:
            self._block(p, Piece(True, None, p.later))
            self._loop("0", str(whole), r.block, [*head, *self.lines.inner.lines])
        self._block(p, Piece(False, None, p.later))
        lines = [*head, *self._mask_of(r), *self.lines.inner.lines]
        if whole != 0:
            self.lines.outer.lines += [f"offset = {whole}", *lines]
        else:
            self._loop("0", self._points(r), r.block, lines)

    def _from_lines(self, p: RowPass, start: RowStart) -> None:
        """The same where blocks begin before their rows. The ends are the first block and what is
        behind the whole ones: one block, or as many as it takes."""
        r, whole = self.tile.groups[-1], p.span.whole
        points, end = self._points(r), self.values.indices.size(whole)
        lead, at = f"r = along - {self.values.lead(start)}", "offset"
        ends: tuple[str, str, Size] = "0", str(whole + 1), whole
        if not isinstance(whole, int):
            last = self.lines.define(f"tl.maximum({end}, {r.block})", False, "i")
            ends = f"{last} - {r.block}", f"{points} + {start.line - 1}", r.block
            at = f"offset * (offset >= {last})"
        self._block(p, Piece(True, start, p.later))
        lines = ["along = rbase + offset", lead, *self.lines.inner.lines]
        self._loop(str(r.block), end, r.block, lines)
        self._block(p, Piece(False, start, p.later))
        mask = f"rmask = (r >= 0) & (r < {points})"
        self._loop(*ends, [f"along = rbase + {at}", lead, mask, *self.lines.inner.lines])

    def _loop_ahead(self, p: RowPass) -> None:
        """All blocks, each while the next is loaded; the last while it is loaded again."""
        r = self.tile.groups[-1]
        mask, points = self._mask_of(r), self._points(r)
        self.values.piece = Piece(False, None, p.later)
        self.lines.enter()
        names = [self.values.value(n) for n in p.ahead]
        loads = self.lines.inner.lines
        self.lines.enter()
        for n, name in zip(p.ahead, names, strict=True):
            self.lines.keep(n, self.lines.define(name, True), True)
        copies, self.lines.inner.lines = self.lines.inner.lines, []
        self._points_of(p)
        following = f"(offset + {r.block} if offset + {r.block} < {points} else offset)"
        self.lines.outer.lines += ["r = rbase", *mask, *loads]
        load = [f"r = rbase + {following}", *mask, *loads]
        work = ["r = rbase + offset", *mask, *self.lines.inner.lines]
        self._loop("0", points, r.block, [*copies, *load, *work])

    def _block(self, p: RowPass, piece: Piece) -> None:
        """What one block of a pass does."""
        self.values.piece = piece
        self.lines.enter()
        self._points_of(p)

    def _points_of(self, p: RowPass) -> None:
        for a in p.accumulators:
            (self.reductions.step if self.tile.looped else self.reductions.whole)(a)
        for s in p.stores:
            if s.store.mode == "sum":
                self._add_to_sum(s.store)
            else:
                self.values.store(s)
        if p.counts:
            self.reductions.count()

    def _loop(self, first: str, end: str, step: Size, lines: Sequence[str]) -> None:
        """A loop over the blocks of a dimension. Loads are under way num_stages - 1 blocks
        ahead."""
        n = self.tile.num_stages
        span = (
            f"range({first}, {end}, {step})"
            if n == 1
            else f"tl.range({first}, {end}, {step}, num_stages={n})"
        )
        self.lines.outer.lines += [f"for offset in {span}:", *(f"    {line}" for line in lines)]

    # ------------------------------------------------------------------------------ from row to row
    def _walk(self) -> None:
        """All passes for a block of rows after the other, and the sums of their columns, stored at
        the end."""
        sums = [s for s in self.layout.linear.stmts if isinstance(s, Store) and s.mode == "sum"]
        shape = self.layout.shape(self.layout.everything)
        for s in sums:
            zeros = f"tl.zeros({shape}, {TYPES[self.layout.linear.buffers[s.buf].dtype.name]})"
            self.sums[s.buf] = self.lines.define(zeros, False, "a")
        self.lines.enter()
        for p in (*self.plan.passes, RowPass((), self.plan.last, Span())):
            self._points_of(p)
        x, n = self.tile.groups[0], self.tile.column_programs
        even = isinstance(x.points, int) and x.points % n == 0
        rows = f"{x.points // n}" if even else f"tl.cdiv({self._points(x)} - pid, {n})"
        head = [f"x = (xbase + offset) * {n} + pid", *self._mask_of(x)]
        self._loop("0", rows, x.block, [*head, *self.lines.inner.lines])
        for s in sums:
            value = self.lines.define(f"tl.sum({self.sums[s.buf]}, 0)[None, :]", False)
            at = self.values.offset(s.index[0], frozenset("r"))
            mask = "".join(f", {m}" for m in self.values.mask(frozenset("r")))
            self.lines.add(f"tl.store({self.values.pointer(s.buf)} + {at}, {value}{mask})", False)

    def _add_to_sum(self, s: Store) -> None:
        """Adds a block of rows to the sums of their columns."""
        shape = self.layout.shape(self.layout.everything)
        value = f"tl.broadcast_to({self.values.value(s.value)}, {shape})"
        for mask in self.values.mask(frozenset("x")):
            value = f"tl.where({mask}, {value}, 0)"
        self.lines.add(f"{self.sums[s.buf]} = {self.sums[s.buf]} + {value}", True)
