"""Long reductions to few results are cut in two stages, so that several threads share them.

The outermost reduced axis (or a part of it) becomes an outer axis of a first reduction, whose partial results a second,
short one combines. Worth it from SPLIT_NBYTES on, where a second kernel costs less than idle threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.ir.dtypes import DType, b1, i64
from plait.ir.loops import (
    Buffer,
    Const,
    Load,
    LoopProgram,
    Node,
    Op,
    Pointwise,
    Reduction,
    arg_symbol,
    cast,
    const,
    loop_vars,
    node,
)
from plait.ir.record import inline
from plait.ir.sizes import Size, add, coefficient, contiguous_strides, mul, numel
from plait.schedule.cost import Hints, hint, hint_numel
from plait.schedule.deps import Bodies, extent, load_of, roots
from plait.schedule.layout import flat_index

SPLIT_NBYTES = 1 << 20  # read by the reduction
MIN_UNITS = 8  # units of work (results, or vectors of results) that are enough
UNITS = 16  # to aim at
MIN_INNER = 1024  # points a partial result is worth
VECTOR = 64  # neighbouring results that are made together


def split_reductions(program: LoopProgram, bodies: Bodies) -> LoopProgram:
    """The program with long reductions in two stages."""
    buffers = dict(program.buffers)
    ops: list[Op] = []
    for op in program.ops:
        parts = _chunks(op, program.buffers, bodies, program.hints) if isinstance(op, Reduction) else None
        if parts is None:
            ops.append(op)
        else:
            assert isinstance(op, Reduction)
            ops += _Split(op, parts, buffers).ops()
    return replace(program, ops=tuple(ops), buffers=buffers)


def _chunks(op: Reduction, buffers: Mapping[str, Buffer], bodies: Bodies, hints: Hints) -> tuple[Size, Size] | None:
    """(chunks, rest) with chunks * rest >= the extent of the outermost reduced axis, or None where it stays whole."""
    outer = hint_numel(map(extent, op.vars), hints)
    points = outer * hint_numel(map(extent, op.rvars), hints)
    found = bodies.of(roots(op)).loads
    if not op.rvars or not found:
        return None
    nbytes = max(buffers[load_of(n).buf].dtype.nbytes for n in found)
    units = outer if _along_memory(op, buffers, found) else outer // VECTOR
    if points * nbytes < SPLIT_NBYTES or units >= MIN_UNITS:
        return None
    want = max(min(UNITS // max(units, 1), points // max(outer, 1) // MIN_INNER), 1)
    size = extent(op.rvars[0])
    if want < 2:
        return None
    inner = hint_numel(map(extent, op.rvars[1:]), hints)
    if inner > 1 and want <= hint(size, hints) <= 4 * want:
        return size, 1
    if not isinstance(size, int):
        return None
    exact = [d for d in range(want, min(4 * want, size - 1) + 1) if size % d == 0]
    if exact:
        return exact[0], size // exact[0]
    if op.kind in ("sum", "prod", "max", "min", "any", "all", "xor") and size > want:
        return want, -(-size // want)
    return None


def _along_memory(op: Reduction, buffers: Mapping[str, Buffer], loads: tuple[Node, ...]) -> bool:
    """Whether neighbours in memory are reduced together (and not neighbouring results). What is read once a result (a
    mean, a scale) says nothing of it."""
    inner = [v.symbol for v in op.rvars]
    for n in loads:
        flat = flat_index(buffers[load_of(n).buf], load_of(n).index)
        if not n.args and all(r is not None and coefficient(flat, r) == 0 for r in inner):
            continue
        strides = [coefficient(flat, v.symbol) for v in op.vars if v.symbol is not None]
        if 1 in strides:
            return False
    return True


class _Split:
    """One reduction in two stages. c is the axis of chunks; partial results have it first."""

    def __init__(self, op: Reduction, parts: tuple[Size, Size], buffers: dict[str, Buffer]) -> None:
        self.op, self.buffers = op, buffers
        self.chunks, self.rest = parts
        outer = tuple(extent(v) for v in op.vars)
        self.shape = (self.chunks, *outer)
        self.first_vars = loop_vars("i", self.shape)
        inner = tuple(extent(v) for v in op.rvars[1:])
        self.first_rvars = loop_vars("r", inner if self.rest == 1 else (self.rest, *inner))
        self.vars = loop_vars("i", outer)
        self.value = self._first_value()

    def _first_value(self) -> Node:
        """The body over the first stage's variables."""
        c, outer = self.first_vars[0], self.first_vars[1:]
        size = extent(self.op.rvars[0])
        at: Size = c
        inner = self.first_rvars
        if self.rest != 1:
            at, inner = add(mul(c, self.rest), inner[0]), inner[1:]
        index = (*outer, at, *inner)
        producer = {"body": (self.op.vars + self.op.rvars, self.op.body)}
        dtype = self.op.body.dtype
        if mul(self.chunks, self.rest) == size:
            return inline(node("load", (), Load("body", index), dtype), producer)
        inside = node("lt", (node("index", (), at, i64), _number(size)))
        value = inline(node("load", (inside,), Load("body", index, True), dtype), producer)
        return node("where", (inside, value, const(_neutral(self.op.kind, dtype), dtype)))

    def buffer(self, suffix: str, dtype: DType, shape: tuple[Size, ...]) -> str:
        stem = next(o for o in self.op.outs if o is not None)
        name = f"{stem}_{suffix}"
        self.buffers[name] = Buffer(name, dtype, shape, contiguous_strides(shape), self.buffers[stem].device)
        return name

    def first(self, kind: str, outs: tuple[str | None, ...]) -> Reduction:
        return Reduction(outs, self.first_vars, self.first_rvars, kind, self.value, self.op.origin)

    def second(self, kind: str, outs: tuple[str | None, ...], partial: str) -> Reduction:
        """Combines partial results over the chunks."""
        (r,) = loop_vars("r", (self.chunks,))
        dtype = self.buffers[partial].dtype
        value = node("load", (), Load(partial, (r, *self.vars)), dtype)
        return Reduction(outs, self.vars, (r,), kind, value, self.op.origin)

    def pointwise(self, out: str, value: Node) -> Pointwise:
        return Pointwise(out, self.vars, value, origin=self.op.origin)

    def at(self, buf: str) -> Node:
        """A result of the second stage."""
        return node("load", (), Load(buf, self.vars), self.buffers[buf].dtype)

    def ops(self) -> list[Op]:
        if self.op.kind == "welford":
            return self._welford()
        if self.op.kind in ("argmax", "argmin"):
            return self._position()
        partial = self.buffer("part", self.value.dtype, self.shape)
        return [self.first(self.op.kind, (partial,)), self.second(self.op.kind, self.op.outs, partial)]

    def _position(self) -> list[Op]:
        """The chunk with the best value, then the position in it."""
        kind = self.op.kind
        best = self.buffer("part", self.value.dtype, self.shape)
        place = self.buffer("place", i64, self.shape)
        chunk = self.buffer("chunk", i64, self.shape[1:])
        at = Load(place, (arg_symbol(0, self.chunks), *self.vars))
        inside = node("load", (self.at(chunk),), at, i64)
        before = node("mul", (self.at(chunk), _number(numel(extent(v) for v in self.first_rvars))))
        (out,) = self.op.outs
        assert out is not None
        return [
            self.first(kind[3:], (best,)),
            self.first(kind, (place,)),
            self.second(kind, (chunk,), best),
            self.pointwise(out, node("add", (before, inside))),
        ]

    def _welford(self) -> list[Op]:
        """Means of equal chunks: the deviations inside of the chunks, and of their means from the whole."""
        dtype = self.value.dtype
        mean, m2, count = self.op.outs
        means = self.buffer("means", dtype, self.shape)
        inside = self.buffer("inside", dtype, self.shape)
        total = self.buffer("total", dtype, self.shape[1:])
        between = self.buffer("between", dtype, self.shape[1:])
        if mean is None:
            mean = self.buffer("mean", dtype, self.shape[1:])
        n = _number(numel(extent(v) for v in self.first_rvars))
        ops: list[Op] = [
            self.first("welford", (means, inside, None)),
            self.second("welford", (mean, between, None), means),
            self.second("sum", (total,), inside),
        ]
        if m2 is not None:
            spread = node("mul", (self.at(between), cast(n, dtype)))
            ops.append(self.pointwise(m2, node("add", (self.at(total), spread))))
        if count is not None:
            points = _number(numel(extent(v) for v in self.op.rvars))
            ops.append(self.pointwise(count, cast(points, dtype)))
        return ops


def _number(e: Size) -> Node:
    """An integer expression as i64."""
    return const(e, i64) if isinstance(e, int) else node("index", (), e, i64)


def _neutral(kind: str, dtype: DType) -> Const:
    """The value that changes nothing."""
    if kind in ("sum", "any", "xor"):
        return 0
    if kind in ("prod", "all"):
        return 1
    if dtype.is_float:
        return float("-inf") if kind == "max" else float("inf")
    if dtype == b1:
        return kind == "min"
    bits = dtype.nbytes * 8 - (dtype.kind == "i")
    if kind == "max":
        return -(1 << bits) if dtype.kind == "i" else 0
    return (1 << bits) - 1
