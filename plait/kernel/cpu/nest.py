"""Writes one kernel's loop nest as C++: the body of a function (tid, nthreads, bufs, syms).

Comes in: a `Nest`. The nest is a chain of blocks: function, row (outer loop variables), vector,
inner loops. A value is written once, in the outermost block where all that it depends on is known;
that is all the hoisting there is. Addresses are split the same way. Vector values run over `lanes`
consecutive values of the nest's axis; the last, partial vector uses lanes < n only (`tail`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from plait.ir.expr import Atom, Size, atom_of, may_be_zero, product, symbol
from plait.ir.loops import walk
from plait.kernel.cpu.compute import compute
from plait.kernel.cpu.expr import memory
from plait.kernel.cpu.loads import fill_tile
from plait.kernel.cpu.passes import Nest, buffer_points, row_points
from plait.kernel.cpu.reduce import Accumulators
from plait.kernel.cpu.stores import store
from plait.kernel.cpu.values import Values
from plait.kernel.cpu.vectorize import Vectors
from plait.runtime.toolchain import Isa
from plait.schedule.legalize.linear import blocks, extent
from plait.schedule.plan import Kernel, Reduce, Stmt

# Chosen with the short rows (pad, pixel_shuffle) of benchmarks/kernels_cpu.py: twice and three
# times as fast as without.
SHORT = 8
"""The most vectors in a row that threads do not share."""
MANY = 64
"""Rows that are enough for all threads."""
UNROLLED = 100
"""The most nodes, times vectors, in a loop over a short row that is unrolled: then its masks are
constants."""


def kernel_body(kernel: Kernel, facts: Vectors, isa: Isa, instead: str = "") -> str:
    """The statements of the kernel's function. instead: the function to call where row buffers are
    too small."""
    return NestWriter(kernel, facts, isa).text(instead)


class NestWriter:
    """Loops and passes of one kernel. Values, memory accesses and accumulators have writers of
    their own."""

    def __init__(self, kernel: Kernel, facts: Vectors, isa: Isa) -> None:
        self.kernel, self.nest = kernel, facts.nest
        nest = self.nest
        self.v = Values(facts, isa, kernel.checks, compute)
        self.accs = Accumulators(self.v)
        self.outer = tuple(a for a in nest.linear.vars if nest.inner or a != nest.axis)
        apart = {v.symbol for v in kernel.apart} if nest.sequential else set()
        self.by_row = (
            bool(self.outer) and self.outer[0] in apart
        )  # threads share a sequential nest so, or by column
        self.by_column = not self.by_row and not nest.inner and nest.axis in apart
        n_vectors = _short_row(nest)
        self.whole_rows = n_vectors is not None or self.by_column
        unrolled = (
            n_vectors
            and not nest.passes
            and not self.by_column
            and n_vectors * len(list(walk(nest.linear.roots()))) <= UNROLLED
        )
        self.unroll = f"#pragma GCC unroll {SHORT}\n" if unrolled else ""
        self.tile_block: Atom | None = None  # number of the tile along nest.tile
        if nest.tile is not None:
            block = symbol(f"{nest.tile.name}'", extent=blocks(extent(nest.tile), nest.lanes))
            self.tile_block = block.symbol
            self.outer = tuple(
                self.tile_block if a == nest.tile and self.tile_block else a for a in self.outer
            )

    def text(self, instead: str) -> str:
        """The function's body."""
        v = self.v
        with v.block():
            self._arguments()
            if self.nest.keep_limit:
                points = v.integer(buffer_points(self.nest))
                call = f"return {instead}(tid, nthreads, bufs, syms);"
                v.line(f"if ({points} > {self.nest.keep_limit}) {call}")
            self._share()
            at = v.here
            self._rows()
            v.line("return 0;")
            return "\n".join(at.lines)

    def _arguments(self) -> None:
        v = self.v
        for k, s in enumerate(self.kernel.sizes):
            v.names[atom_of(s)] = f"z{k}"
            v.depth_of[atom_of(s)] = 0
            v.line(f"const i64 z{k} = syms[{k}];")
        for k, b in enumerate(self.kernel.args):
            v.bases[b.name] = f"b{k}"
            v.line(f"{memory(b.dtype)}* const b{k} = ({memory(b.dtype)}*)bufs[{k}];")
        for k, a in enumerate((*self.nest.linear.vars, *self.nest.linear.rvars)):
            v.names[a] = f"x{k}"
        if self.tile_block is not None:
            v.names[self.tile_block] = "xt"

    # --------------------------------------------------------------------------- split over threads
    def _share(self) -> None:
        """lo, hi: this thread's share of the units (a unit: an outer point, or a group of vectors
        of one)."""
        v, nest = self.v, self.nest
        # Nothing below runs for a kernel without points, so that what reads may stand outside of
        # loops.
        if maybe := [v.integer(n) for n in map(extent, nest.linear.vars) if may_be_zero(n)]:
            v.line(f"if ({' || '.join(f'{n} <= 0' for n in maybe)}) return 0;")
        units: Size = product(extent(a) for a in self.outer)
        if nest.axis is not None and not nest.inner and not self.whole_rows:
            units = units * blocks(extent(nest.axis), nest.lanes * nest.unroll)
        if self.by_column:
            assert nest.axis is not None
            step, n = nest.lanes * nest.unroll, extent(nest.axis)
            share = f"({v.integer(blocks(n, step))}) * {{}} / nthreads * {step}"
            v.line(
                f"const i64 first = {share.format('tid')}, beyond = {share.format('(tid + 1)')};"
            )
            v.line(
                f"const i64 end = beyond < {v.integer(n)} ? beyond : {v.integer(n)}, lo = 0, hi = "
                f"{v.integer(units)};"
            )
            v.line("if (first >= end) return 0;")
            return
        alone = nest.sequential and not self.by_row
        if alone or units == 1:
            v.line("if (tid != 0) return 0;")
        if units == 1:
            v.line("const i64 lo = 0, hi = 1;")
            return
        v.line(f"const i64 units = {v.integer(units)};")
        if alone:
            v.line("const i64 lo = 0, hi = units;")
        elif self.by_row:
            rows = v.integer(extent(self.outer[0]))
            share = f"({rows}) * {{}} / nthreads * (units / ({rows}))"
            v.line(f"const i64 lo = {share.format('tid')}, hi = {share.format('(tid + 1)')};")
        else:
            v.line("const i64 lo = units * tid / nthreads, hi = units * (tid + 1) / nthreads;")
        v.line("if (lo >= hi) return 0;")

    def _rows(self) -> None:
        v, nest = self.v, self.nest
        vector = nest.axis is not None and not nest.inner and not self.whole_rows
        if self.outer or vector:
            v.line("i64 u = lo;")
        per_row = (
            v.integer(blocks(extent(nest.axis), nest.lanes * nest.unroll))
            if vector and nest.axis
            else "1"
        )
        if self.outer:
            self._first_point(per_row, vector)
        elif vector:
            v.line("i64 blk = lo;")
        opening = "while (u < hi) {" if self.outer else "{"
        for size in self._kept_buffers():
            v.line(size)
        with v.loop(opening, self.outer):
            if vector:
                assert nest.axis is not None
                step = nest.lanes * nest.unroll
                n = v.integer(extent(nest.axis))
                v.line(f"const i64 last = blk + (hi - u) < {per_row} ? blk + (hi - u) : {per_row};")
                end = f"last * {step} < {n} ? last * {step} : {n}" if step > 1 else "last"
                v.line(f"const i64 end = {end};")
                v.line(f"i64 {v.names[nest.axis]} = blk * {step};")
                for _ in self.segments("end"):
                    self._points()
            elif self.whole_rows:
                assert nest.axis is not None
                v.line(f"i64 {v.names[nest.axis]} = {'first' if self.by_column else '0'};")
                for _ in self.segments("end" if self.by_column else v.integer(extent(nest.axis))):
                    self._points()
            else:
                self._points()
            if self.outer:
                self._next_point(vector)

    def _first_point(self, per_row: str, vector: bool) -> None:
        v = self.v
        rest = "u"
        if vector:
            v.line(f"i64 blk = u % ({per_row}), rest = u / ({per_row});")
            rest = "rest"
        elif len(self.outer) > 1:
            v.line("i64 rest = u;")
            rest = "rest"
        for a in self.outer[:0:-1]:
            n = v.integer(extent(a))
            v.line(f"i64 {v.names[a]} = rest % ({n}); rest /= ({n});")
        v.line(f"i64 {v.names[self.outer[0]]} = {rest};")

    def _next_point(self, vector: bool) -> None:
        v = self.v
        v.line("u += last - blk; blk = 0;" if vector else "++u;")
        text = ""
        for a in self.outer[:0:-1]:
            x = v.names[a]
            text += f"if (++{x} == {v.integer(extent(a))}) {{ {x} = 0; "
        v.line(f"{text}++{v.names[self.outer[0]]};{' }' * (len(self.outer) - 1)}")

    # ----------------------------------------------------------------------------- loops and passes
    def segments(self, end: str, first: str = "") -> Iterator[None]:
        """The loops over the axis from its present value to `end`: several vectors, one vector, the
        lanes left over. For each, the block is open while the caller writes its contents."""
        v, nest = self.v, self.nest
        assert nest.axis is not None
        x, lanes, n = v.names[nest.axis], nest.lanes, extent(nest.axis)
        if lanes == 1:
            with self._segment(f"for (; {x} < {end}; ++{x}) {{", 1, False):
                yield
            return
        for reps in dict.fromkeys((nest.unroll, 1)):
            step = lanes * reps
            if isinstance(n, int) and (
                n < step or (reps < nest.unroll and n % (lanes * nest.unroll) < lanes)
            ):
                continue
            with self._segment(
                f"{self.unroll}for (; {x} + {step} <= {end}; {x} += {step}) {{", reps, False
            ):
                yield
        if not isinstance(n, int) or n % lanes:
            with self._segment(f"if ({x} < {end}) {{", 1, True):
                v.line(f"const i64 n = {end} - {x};")
                v.line("const vi32 lm = lane_mask(n);")
                yield

    @contextmanager
    def _segment(self, opening: str, reps: int, tail: bool) -> Iterator[None]:
        v = self.v
        assert self.nest.axis is not None
        before = v.reps, v.tail
        v.reps, v.tail = reps, tail
        with v.loop(opening, (self.nest.axis,)):
            yield
        v.reps, v.tail = before

    def _points(self) -> None:
        """All passes of one row (or one group of vectors), then the stores at outer level."""
        v = self.v
        for p, stmts in enumerate(self.nest.passes):
            v.pass_number = p
            self._pass(stmts)
        v.pass_number = len(self.nest.passes)
        if self.nest.tile is not None and self.tile_block is not None:
            self._tiles(self.nest.tile, self.tile_block)
            return
        for s in self.nest.last:
            for rep in range(v.reps):
                v.rep = rep
                store(self.v, s)
        v.rep = 0

    def _tiles(self, along: Atom, block: Atom) -> None:
        """Turns one tile of every tiled load around, then runs the stores over the tile."""
        v, lanes, n, x = self.v, self.nest.lanes, self.v.integer(extent(along)), self.v.names[along]
        v.line(
            f"const i64 first = xt * {lanes}, beyond = first + {lanes} < {n} ? first + {lanes} : "
            f"{n};"
        )
        for load in self.nest.tiled:
            fill_tile(self.v, load, along, block)
        with v.loop(f"for (i64 {x} = first; {x} < beyond; ++{x}) {{", (along,)):
            for s in self.nest.last:
                store(self.v, s)

    def _pass(self, stmts: tuple[Stmt, ...]) -> None:
        v, nest = self.v, self.nest
        reps = nest.unroll if nest.inner else v.reps
        reduces = [s for s in stmts if isinstance(s, Reduce)]
        self.accs.begin(reduces, reps)
        loops = [a for a in nest.order if not (nest.inner and a == nest.axis)]
        innermost = nest.axis if nest.inner else loops.pop() if loops else None
        named = [(a, v.names[a], v.integer(extent(a))) for a in loops]
        opened = [(a, f"for (i64 {x} = 0; {x} < {n}; ++{x}) {{") for a, x, n in named]
        with v.unless_empty(nest.order), v.nested(opened):
            if innermost is None:
                self._statements(stmts)
            else:
                self._innermost(innermost, stmts, reduces, reps)
        self.accs.finish(reduces, reps)

    def _innermost(
        self, a: Atom, stmts: tuple[Stmt, ...], reduces: list[Reduce], reps: int
    ) -> None:
        """The innermost loop, cut into chunks where sums need a second level of accumulators to
        stay accurate."""
        v, nest = self.v, self.nest
        x, n = v.names[a], v.integer(extent(a))
        chunk = v.facts.chunk(reduces, a)
        start, end = "0", n
        with v.maybe(f"for (i64 c = 0; c < {n}; c += {chunk}) {{" if chunk else None):
            if chunk:
                v.line(f"const i64 ce = c + {chunk} < {n} ? c + {chunk} : {n};")
                start, end = "c", "ce"
            self.accs.begin_chunk(reduces, reps)
            if nest.inner:
                with v.maybe("{"):
                    v.line(f"i64 {x} = {start};")
                    for _ in self.segments(end):
                        self._statements(stmts)
            else:
                with v.loop(f"for (i64 {x} = {start}; {x} < {end}; ++{x}) {{", (a,)):
                    self._statements(stmts)
            self.accs.end_chunk(reduces, reps)

    def _statements(self, stmts: tuple[Stmt, ...]) -> None:
        v = self.v
        for rep in range(v.reps):
            v.rep = rep
            for s in stmts:
                if isinstance(s, Reduce):
                    self.accs.update(s)
                else:
                    store(self.v, s)
        v.rep = 0

    def _kept_buffers(self) -> Iterator[str]:
        """Row buffers for values that several passes need."""
        v, nest = self.v, self.nest
        if not nest.kept:
            return
        points = nest.keep_limit or buffer_points(nest)
        assert isinstance(points, int)
        width = 1 if nest.inner else nest.lanes * nest.unroll
        v.keep_strides = row_points(nest.order, nest.lanes, nest.axis if nest.inner else None)
        for k, n in enumerate(nest.kept):
            v.keep_names[n] = f"kept{k}"
            yield f"alignas(64) {memory(n.dtype)} kept{k}[{points * width}];"


def _short_row(nest: Nest) -> int | None:
    """The vectors in a row so short that threads share whole rows; None for others."""
    a = nest.axis
    if a is None or nest.inner or nest.lanes == 1 or nest.tile is not None:
        return None
    n, rows = extent(a), product(extent(b) for b in nest.linear.vars if b != a)
    if nest.passes and not (
        isinstance(rows, int) and rows >= MANY
    ):  # loops in a row: vectors are work to share
        return None
    return n // nest.lanes if isinstance(n, int) and n <= SHORT * nest.lanes * nest.unroll else None
