"""Prints the loops of one kernel as C++: the body of a function (tid, nthreads, bufs, syms).

Comes in: a `BodyPlan`. The nest is a chain of blocks: function, row (outer loop variables), vector,
inner loops; the plan says in which block each value is computed. Vector values run over `lanes`
consecutive values of the nest's axis; the last, partial vector uses lanes < n only (`tail`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext

from plait.ir.expr import Atom
from plait.kernel.cpu.compute import compute
from plait.kernel.cpu.loads import fill_tile
from plait.kernel.cpu.plan_body import BodyPlan
from plait.kernel.cpu.reduce import Accumulators
from plait.kernel.cpu.rows import print_arguments, print_share, print_units
from plait.kernel.cpu.share_work import SHORT
from plait.kernel.cpu.stores import store
from plait.kernel.cpu.values import Values
from plait.runtime.toolchain import Isa
from plait.schedule.legalize.linear import extent
from plait.schedule.plan import Reduce, Stmt


def print_body(plan: BodyPlan, isa: Isa, instead: str = "") -> str:
    """The statements of the kernel's function. instead: the function to call where row buffers are
    too small."""
    v = Values(plan, isa, compute)
    print_arguments(v, plan, instead)
    print_share(v, plan)
    print_units(v, plan, UnitPrinter(v, plan).print)
    v.line("return 0;")
    return "\n".join(v.here.lines)


class UnitPrinter:
    """Prints what is done for one unit of a thread's work. Values, memory accesses and accumulators
    have printers of their own."""

    def __init__(self, v: Values, plan: BodyPlan) -> None:
        self.v, self.plan, self.nest = v, plan, plan.vectors.nest
        self.accs = Accumulators(v)

    def print(self, end: str) -> None:
        """A unit. end: where it ends on the vector axis; "" if it is a point."""
        for _ in self._segments(end) if end else (None,):
            for p, stmts in enumerate(self.nest.passes):
                self.v.pass_number = p
                self._pass(stmts)
            self.v.pass_number = len(self.nest.passes)
            if self.nest.tile is None:
                self._last()
            else:
                self._tiles(self.nest.tile)

    def _segments(self, end: str) -> Iterator[None]:
        """The loops over the axis from its present value to `end`: several vectors, one vector, the
        lanes left over. For each, the block is open while the caller prints its contents."""
        v, axis = self.v, self.plan.vectors.axis
        x, before = v.names[axis], (v.reps, v.tail)
        pragma = f"#pragma GCC unroll {SHORT}\n" if self.plan.sharing.unrolled else ""
        for reps, tail in self.nest.pieces():
            v.reps, v.tail, step = reps, tail, v.lanes * reps
            opening = f"{pragma}for (; {x} + {step} <= {end}; {x} += {step}) {{"
            if tail:
                opening = f"if ({x} < {end}) {{"
            elif step == 1:
                opening = f"for (; {x} < {end}; ++{x}) {{"
            with v.loop(opening, (axis,)):
                if tail:
                    v.line(f"const i64 n = {end} - {x};")
                    v.line("const vi32 lm = lane_mask(n);")
                yield
            v.reps, v.tail = before

    def _last(self) -> None:
        """The stores after all passes, each for all vectors in flight."""
        for s in self.nest.last:
            for _ in self.v.copies():
                store(self.v, s)

    def _tiles(self, along: Atom) -> None:
        """Turns one tile of every tiled load around, then runs the stores over the tile."""
        v, lanes, n, x = self.v, self.nest.lanes, self.v.integer(extent(along)), self.v.names[along]
        v.line(
            f"const i64 first = xt * {lanes}, beyond = first + {lanes} < {n} ? first + {lanes} : "
            f"{n};"
        )
        for load in self.nest.tiled:
            fill_tile(v, load, along)
        with v.loop(f"for (i64 {x} = first; {x} < beyond; ++{x}) {{", (along,)):
            for s in self.nest.last:
                store(v, s)

    def _pass(self, stmts: Sequence[Stmt]) -> None:
        v, nest = self.v, self.nest
        reps = nest.unroll if nest.inner else v.reps
        reduces = [s for s in stmts if isinstance(s, Reduce)]
        self.accs.begin(reduces, reps)
        loops = [(a, v.names[a], v.integer(extent(a))) for a in nest.order]
        with ExitStack() as opened:
            if tests := " && ".join(f"{v.integer(n)} > 0" for n in nest.maybe_empty()):
                opened.enter_context(v.loop(f"if ({tests}) {{"))
            for a, x, n in loops[:-1]:
                opened.enter_context(v.loop(f"for (i64 {x} = 0; {x} < {n}; ++{x}) {{", (a,)))
            if loops:
                self._innermost(*loops[-1], stmts, reduces, reps)
            else:
                self._statements(stmts)
        self.accs.finish(reduces, reps)

    def _innermost(
        self, a: Atom, x: str, n: str, stmts: Sequence[Stmt], reduces: Sequence[Reduce], reps: int
    ) -> None:
        """The innermost loop, cut into chunks where sums need a second level of accumulators to
        stay accurate."""
        v, chunk = self.v, self.v.place.chunk
        start, end = ("c", "ce") if chunk else ("0", n)
        with v.loop(f"for (i64 c = 0; c < {n}; c += {chunk}) {{") if chunk else nullcontext():
            if chunk:
                v.line(f"const i64 ce = c + {chunk} < {n} ? c + {chunk} : {n};")
            self.accs.begin_chunk(reduces, reps)
            if self.nest.inner:
                with v.loop("{"):
                    v.line(f"i64 {x} = {start};")
                    for _ in self._segments(end):
                        self._statements(stmts)
            else:
                with v.loop(f"for (i64 {x} = {start}; {x} < {end}; ++{x}) {{", (a,)):
                    self._statements(stmts)
            self.accs.end_chunk(reduces, reps)

    def _statements(self, stmts: Sequence[Stmt]) -> None:
        """Statements, for each vector in flight."""
        v = self.v
        assert len(v.chain) - 1 == v.place.depth, "statements are at another level than planned"
        for _ in v.copies():
            for s in stmts:
                if isinstance(s, Reduce):
                    self.accs.update(s)
                else:
                    store(v, s)
