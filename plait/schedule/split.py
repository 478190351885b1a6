"""Long reductions to few results are cut in two stages, so that all of a device shares them.

The outermost reduced axes (or a part of one) become outer axes of a first reduction, whose partial
results a second, short one combines. What it takes to be worth a second kernel is the device's
(`devices.Rates`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import partial

from plait.devices import Rates, facts_of
from plait.ir import expr
from plait.ir.dtypes import DType, i64
from plait.ir.effects import loop_outs
from plait.ir.expr import Atom, Size
from plait.ir.layouts import flat_index, follow
from plait.ir.loops import (
    Buffer,
    Load,
    LoopProgram,
    Node,
    Op,
    Pointwise,
    Reduction,
    arg_symbol,
    cast,
    const,
    index_exprs,
    integer,
    loop_vars,
    node,
    substitute_vars,
    walk,
)
from plait.ir.record import inline
from plait.ir.reductions import REDUCTIONS
from plait.schedule.cost import Hints, buffer_nbytes, hint, hint_numel
from plait.schedule.deps import Bodies, extent, load_of, roots


@dataclass(frozen=True, slots=True)
class Cut:
    """How a reduction is cut: the first `whole` reduced axes as they are, then chunks * rest >= the
    extent of the next, or 1 where that one stays."""

    whole: int
    chunks: Size = 1
    rest: Size = 1


def split_reductions(
    program: LoopProgram, bodies: Bodies
) -> tuple[LoopProgram, dict[str, Reduction]]:
    """The program with long reductions in two stages, and the sums of columns that kernels which
    reduce rows could make on the way: as they were, by the buffer of partial sums."""
    buffers = dict(program.buffers)
    ops: list[Op] = []
    column_sums: dict[str, Reduction] = {}
    rows: set[tuple[str, int]] = set()
    results: dict[str, int] = {}
    if any(facts_of(b.device).rates.column_programs for b in buffers.values()):
        rows, results = _of_rows(program, bodies)
    for op in program.ops:
        if isinstance(op, Reduction) and _asks_rows(op, bodies, results):
            value, op = _valued(op, buffers)
            ops.append(value)
        found = (
            _chunks(op, buffers, bodies, program.hints, rows) if isinstance(op, Reduction) else None
        )
        if found is None:
            ops.append(op)
            continue
        cut, parts, columns = found
        first, *rest = _Split(cut, parts, buffers, program.hints).ops()
        ops += (first, *rest)
        if columns and isinstance(first, Reduction) and isinstance(op, Reduction):
            column_sums[loop_outs(first)[0]] = replace(op, outs=first.outs)
    return replace(program, ops=tuple(ops), buffers=buffers), column_sums


def _of_rows(program: LoopProgram, bodies: Bodies) -> tuple[set[tuple[str, int]], dict[str, int]]:
    """What reductions along memory read, and what is computed from their results at every point,
    each with the length of their rows; and the results."""
    rows: set[tuple[str, int]] = set()
    results: dict[str, int] = {}
    for op in program.ops:
        if not isinstance(op, (Reduction, Pointwise)):
            continue
        loads = bodies.of(roots(op)).loads
        read = {load_of(n).buf for n in loads}
        if isinstance(op, Pointwise):
            rows.update((op.out, results[b]) for b in read if b in results)
        elif _along_memory(op, program.buffers, loads):
            length = hint_numel(map(extent, op.rvars), program.hints)
            rows.update((b, length) for b in read)
            results.update(dict.fromkeys(loop_outs(op), length))
    return rows, results


def _asks_rows(op: Reduction, bodies: Bodies, results: Mapping[str, int]) -> bool:
    """Whether a reduction over rows looks something up in each, and asks for what the row was
    reduced to: work for the many programs that had the rows."""
    loads = [(n, load_of(n)) for n in bodies.of(roots(op)).loads]
    looked_up = any(len(n.args) > load.masked for n, load in loads)
    return (
        not op.vars
        and looked_up
        and any(x.buf in results and x.index == op.rvars for _, x in loads)
    )


def _valued(op: Reduction, buffers: dict[str, Buffer]) -> tuple[Pointwise, Reduction]:
    """What a reduction reduces as a loop of its own, and the rest."""
    stem = loop_outs(op)[0]
    shape = tuple(extent(v) for v in op.rvars)
    name, dtype = f"{stem}_value", op.body.dtype
    buffers[name] = Buffer(name, dtype, shape, expr.contiguous_strides(shape), buffers[stem].device)
    value = Pointwise(name, op.rvars, op.body, origin=op.origin)
    return value, replace(op, body=node("load", (), Load(name, op.rvars), dtype))


def _chunks(
    op: Reduction,
    buffers: Mapping[str, Buffer],
    bodies: Bodies,
    hints: Hints,
    rows: Set[tuple[str, int]],
) -> tuple[Reduction, Cut, bool] | None:
    """A reduction, perhaps over fewer axes, how it is cut, and whether as a sum of columns,
    or None where it stays whole."""
    outer = hint_numel(map(extent, op.vars), hints)
    points = outer * hint_numel(map(extent, op.rvars), hints)
    found = bodies.of(roots(op)).loads
    if not op.rvars or not found:
        return None
    kind = facts_of(buffers[loop_outs(op)[0]].device).rates
    loaded = [buffers[load_of(n).buf] for n in found]
    # Of a mean a column, and of a mask, there is little to read.
    nbytes = max(loaded, key=lambda b: buffer_nbytes(b, hints)).dtype.nbytes
    along = _along_memory(op, buffers, found)
    large = (b for b in loaded if hint_numel(b.shape, hints) == points)
    if not along and any((b.name, outer) in rows for b in large):
        flat, widest = _flattened(op, buffers, found), max(b.dtype.nbytes for b in loaded)
        if parts := _column_cut(flat, widest * points, outer, kind, hints):
            return flat, parts, True
    units = outer if along else outer // kind.neighbours
    if points * nbytes < max(kind.split_nbytes, kind.unit_nbytes * units):
        return None
    if units >= kind.min_units:
        return None
    least, aligned = (
        (kind.min_along, kind.align_along) if along else (kind.min_across, kind.align_across)
    )
    aim = kind.units if along or nbytes > 2 else kind.narrow_units
    want = min(aim // max(units, 1), points // max(outer, 1) // least)
    if want < 2:
        return None
    inner = extent(op.rvars[-1])
    if along and isinstance(inner, int) and inner % aligned:  # parts of rows would begin anywhere
        op = _flattened(op, buffers, found)
    near = (1, 4) if along else (kind.fewer_across, kind.more_across)
    parts = _cut(op, want, aligned, along, near, hints)
    return None if parts is None else (op, parts, False)


def _column_cut(op: Reduction, nbytes: int, row: int, kind: Rates, hints: Hints) -> Cut | None:
    """A part for each program that sums columns, or None where these are better summed apart. row:
    points of one. If the sum stays a kernel of its own, equal parts are better."""
    if op.kind != "sum" or op.body.dtype.nbytes < 4 or len(op.rvars) > 1:
        return None
    size = extent(op.rvars[0])
    want = min(
        kind.column_programs,
        kind.column_points // max(row, 1),
        hint(size, hints) // kind.column_min_rows,
    )
    if nbytes < kind.column_min_nbytes or row > kind.column_max_row or want < 2:
        return None
    if isinstance(size, int):
        equal = [d for d in range(-(-want // 2), 2 * want + 1) if size % d == 0]
        want = min(equal, key=lambda d: abs(d - want), default=want)
    return Cut(0, want, expr.ceildiv(size, want))


def _flattened(op: Reduction, buffers: Mapping[str, Buffer], loads: tuple[Node, ...]) -> Reduction:
    """A reduction over one axis, where everything that it loads walks the reduced axes as one."""
    flats = [flat_index(buffers[load_of(n).buf], load_of(n).index) for n in loads]
    steps: Size = 1
    used = [expr.atom_of(v) for v in op.rvars]
    for axis, v in zip(reversed(used), reversed(op.rvars), strict=True):
        for flat in flats:
            step, last = expr.coefficient(flat, axis), expr.coefficient(flat, used[-1])
            if step is None or last is None or step != last * steps:
                return op
        steps = steps * extent(v)
    exprs = [e for n in walk((op.body,)) if n.op == "index" for e in index_exprs(n)]
    if any(not expr.free_symbols(e).isdisjoint(used) for e in exprs):
        return op
    (whole,) = loop_vars("r", (steps,))
    env: dict[Atom, Size] = {}
    inner: Size = 1
    for k, v in reversed(list(enumerate(op.rvars))):
        at = whole // inner
        env[used[k]] = at % extent(v) if k else at
        inner = inner * extent(v)
    return replace(op, rvars=(whole,), body=substitute_vars(op.body, env))


def _cut(
    op: Reduction, want: int, aligned: int, along: bool, near: tuple[int, int], hints: Hints
) -> Cut | None:
    """Cut with about `want` partial results for a result, each beginning at a multiple of
    `aligned` points. Across memory, where what is summed may be stored on the way, equal parts
    matter more. near: how many times fewer or more such parts may be."""
    fewer, more = near
    sizes = [extent(v) for v in op.rvars]
    whole = 0
    row = REDUCTIONS[op.kind]
    position = bool(row.extreme)  # is counted in one axis of chunks
    while want >= 2 and whole < len(sizes) - 1 and not (position and whole):
        n = hint(sizes[whole], hints)
        if n > more * want or (position and n < want) or hint_numel(sizes[whole + 1 :], hints) <= 1:
            break
        whole, want = whole + 1, -(-want // max(n, 1))
    kept = Cut(whole) if hint_numel(sizes[:whole], hints) > 1 else None
    size = sizes[whole]
    if want < 2 or not isinstance(size, int) or (position and whole):
        return kept
    last = whole == len(sizes) - 1
    counts = (
        *range(want, min(more * want, size - 1) + 1),
        *range(want - 1, max(want // fewer, 2) - 1, -1),
    )
    exact = [d for d in counts if size % d == 0]
    even = [d for d in exact if not last or size // d % aligned == 0] or ([] if along else exact)
    if even:
        return Cut(whole, even[0], size // even[0])
    if not along and kept is not None and want <= 4:
        return kept
    if row.merges and size > want:
        rest = -(-size // want)
        rest = -(-rest // aligned) * aligned if last else rest
        return Cut(whole, -(-size // rest), rest) if rest < size else kept
    return Cut(whole, exact[0], size // exact[0]) if exact else kept


def _along_memory(op: Reduction, buffers: Mapping[str, Buffer], loads: tuple[Node, ...]) -> bool:
    """Whether neighbours in memory are reduced together (and not neighbouring results). What is
    read once a result (a mean, a scale) says nothing of it."""
    inner = [v.symbol for v in op.rvars]
    for n in loads:
        flat = flat_index(buffers[load_of(n).buf], load_of(n).index)
        if not n.args and all(r is not None and expr.coefficient(flat, r) == 0 for r in inner):
            continue
        if any(expr.is_contiguous(flat, expr.atom_of(v)) for v in op.vars):
            return False
    return True


class _Split:
    """One reduction in two stages. Partial results have the axes of chunks first."""

    def __init__(self, op: Reduction, parts: Cut, buffers: dict[str, Buffer], hints: Hints) -> None:
        self.op, self.parts, self.buffers = op, parts, buffers
        self.row = REDUCTIONS[op.kind]
        sizes = tuple(extent(v) for v in op.rvars)
        self.chunks, inner = sizes[: parts.whole], sizes[parts.whole :]
        if parts.chunks != 1:
            self.chunks, inner = (*self.chunks, parts.chunks), (parts.rest, *inner[1:])
        outer = tuple(extent(v) for v in op.vars)
        self.shape = (*self.chunks, *outer)
        self.first_vars, self.first_rvars = loop_vars("i", self.shape), loop_vars("r", inner)
        self.vars = loop_vars("i", outer)
        self.value = self._first_value()
        loads = [load_of(n) for n in walk((self.value,)) if n.op == "load"]
        free = Buffer("", self.value.dtype, self.shape, expr.contiguous_strides(self.shape))
        sources = [(buffers[x.buf], x.index) for x in loads]
        self.strides = follow(free, self.first_vars, sources, partial(hint, hints=hints)).strides

    def _first_value(self) -> Node:
        """The body over the first stage's variables."""
        chunk, outer = self.first_vars[: len(self.chunks)], self.first_vars[len(self.chunks) :]
        producer = {"body": (self.op.vars + self.op.rvars, self.op.body)}
        dtype = self.op.body.dtype
        if self.parts.chunks == 1:
            return inline(
                node("load", (), Load("body", (*outer, *chunk, *self.first_rvars)), dtype), producer
            )
        at = chunk[-1] * self.parts.rest + self.first_rvars[0]
        index = (*outer, *chunk[:-1], at, *self.first_rvars[1:])
        size = extent(self.op.rvars[self.parts.whole])
        if self.parts.chunks * self.parts.rest == size:
            return inline(node("load", (), Load("body", index), dtype), producer)
        inside = node("lt", (integer(at), integer(size)))
        value = inline(node("load", (inside,), Load("body", index, True), dtype), producer)
        return node("where", (inside, value, const(self.row.identity(dtype), dtype)))

    def buffer(self, suffix: str, dtype: DType, shape: tuple[Size, ...]) -> str:
        stem = loop_outs(self.op)[0]
        name = f"{stem}_{suffix}"
        strides = self.strides if shape == self.shape else expr.contiguous_strides(shape)
        self.buffers[name] = Buffer(name, dtype, shape, strides, self.buffers[stem].device)
        return name

    def first(self, kind: str, outs: tuple[str | None, ...]) -> Reduction:
        return Reduction(outs, self.first_vars, self.first_rvars, kind, self.value, self.op.origin)

    def second(self, kind: str, outs: tuple[str | None, ...], partial: str) -> Reduction:
        """Combines partial results over the chunks."""
        rvars = loop_vars("r", self.chunks)
        dtype = self.buffers[partial].dtype
        value = node("load", (), Load(partial, (*rvars, *self.vars)), dtype)
        return Reduction(outs, self.vars, rvars, kind, value, self.op.origin)

    def pointwise(self, out: str, value: Node) -> Pointwise:
        return Pointwise(out, self.vars, value, origin=self.op.origin)

    def at(self, buf: str) -> Node:
        """A result of the second stage."""
        return node("load", (), Load(buf, self.vars), self.buffers[buf].dtype)

    def ops(self) -> list[Op]:
        if self.op.kind == "welford":
            return self._welford()
        if self.row.extreme:
            return self._position()
        partial = self.buffer("part", self.value.dtype, self.shape)
        return [
            self.first(self.op.kind, (partial,)),
            self.second(self.op.kind, self.op.outs, partial),
        ]

    def _position(self) -> list[Op]:
        """The chunk with the best value, then the position in it."""
        kind = self.op.kind
        best = self.buffer("part", self.value.dtype, self.shape)
        place = self.buffer("place", i64, self.shape)
        chunk = self.buffer("chunk", i64, self.shape[len(self.chunks) :])
        at = Load(place, (arg_symbol(0, self.chunks[0]), *self.vars))
        inside = node("load", (self.at(chunk),), at, i64)
        before = node(
            "mul", (self.at(chunk), integer(expr.numel(extent(v) for v in self.first_rvars)))
        )
        (out,) = self.op.outs
        assert out is not None, "an unused extreme was not dropped"
        return [
            self.first(self.row.extreme, (best,)),
            self.first(kind, (place,)),
            self.second(kind, (chunk,), best),
            self.pointwise(out, node("add", (before, inside))),
        ]

    def _welford(self) -> list[Op]:
        """Means of equal chunks: the deviations inside of the chunks, and of their means from the
        whole."""
        dtype = self.value.dtype
        mean, m2, count = self.op.outs
        means = self.buffer("means", dtype, self.shape)
        inside = self.buffer("inside", dtype, self.shape)
        total = self.buffer("total", dtype, self.shape[len(self.chunks) :])
        between = self.buffer("between", dtype, self.shape[len(self.chunks) :])
        if mean is None:
            mean = self.buffer("mean", dtype, self.shape[len(self.chunks) :])
        n = integer(expr.numel(extent(v) for v in self.first_rvars))
        ops: list[Op] = [
            self.first("welford", (means, inside, None)),
            self.second("welford", (mean, between, None), means),
            self.second("sum", (total,), inside),
        ]
        if m2 is not None:
            spread = node("mul", (self.at(between), cast(n, dtype)))
            ops.append(self.pointwise(m2, node("add", (self.at(total), spread))))
        if count is not None:
            points = integer(expr.numel(extent(v) for v in self.op.rvars))
            ops.append(self.pointwise(count, cast(points, dtype)))
        return ops
