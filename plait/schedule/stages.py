"""A reduction in two stages: partial results, and what combines them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from plait.ir import expr
from plait.ir.dtypes import DType, i64
from plait.ir.effects import loop_outs
from plait.ir.expr import Size
from plait.ir.layouts import follow
from plait.ir.loops import (
    Buffer,
    Load,
    Node,
    Op,
    Pointwise,
    Reduction,
    arg_symbol,
    cast,
    const,
    integer,
    loop_vars,
    node,
    walk,
)
from plait.ir.record import inline
from plait.ir.reductions import REDUCTIONS
from plait.schedule.cost import Hints, hint
from plait.schedule.deps import extent, load_of


@dataclass(frozen=True, slots=True)
class Cut:
    """How a reduction is cut: the first `whole` reduced axes as they are, then chunks * rest >= the
    extent of the next, or 1 where that one stays. lanes: every so many-th row is a part, of a
    reduction over one axis that is not cut otherwise."""

    whole: int
    chunks: Size = 1
    rest: Size = 1
    lanes: int = 1


class Stages:
    """One reduction in two stages. Partial results have the axes of chunks first, then lanes."""

    def __init__(self, op: Reduction, parts: Cut, buffers: dict[str, Buffer], hints: Hints) -> None:
        self.op, self.parts, self.buffers = op, parts, buffers
        self.row = REDUCTIONS[op.kind]
        sizes = tuple(extent(v) for v in op.rvars)
        self.chunks, inner = sizes[: parts.whole], sizes[parts.whole :]
        if parts.chunks != 1:
            self.chunks, inner = (*self.chunks, parts.chunks), (parts.rest, *inner[1:])
        if parts.lanes != 1:
            self.chunks, inner = (*self.chunks, parts.lanes), (inner[0] // parts.lanes, *inner[1:])
        outer = tuple(extent(v) for v in op.vars)
        self.shape = (*self.chunks, *outer)
        self.first_vars, self.first_rvars = loop_vars("i", self.shape), loop_vars("r", inner)
        self.vars = loop_vars("i", outer)
        self._down = None if op.down is None else bool(outer)  # chunks lie further apart
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
        if self.parts.lanes != 1:
            at = self.first_rvars[0] * self.parts.lanes + chunk[-1]
            index = (*outer, *chunk[:-1], at, *self.first_rvars[1:])
            return inline(node("load", (), Load("body", index), dtype), producer)
        if self.parts.chunks == 1:
            index = (*outer, *chunk, *self.first_rvars)
            return inline(node("load", (), Load("body", index), dtype), producer)
        at = chunk[-1] * self.parts.rest + self.first_rvars[0]
        index = (*outer, *chunk[:-1], at, *self.first_rvars[1:])
        size = extent(self.op.rvars[self.parts.whole])
        if self.parts.chunks * self.parts.rest == size:
            return inline(node("load", (), Load("body", index), dtype), producer)
        inside = node("lt", (integer(at), integer(size)))
        value = inline(node("load", (inside,), Load("body", index, True), dtype), producer)
        return node("where", (inside, value, const(self.row.identity(dtype), dtype)))

    def buffer(self, suffix: str, dtype: DType, shape: tuple[Size, ...], stem: str = "") -> str:
        stem = stem or loop_outs(self.op)[0]
        name = f"{stem}_{suffix}"
        strides = self.strides if shape == self.shape else expr.contiguous_strides(shape)
        self.buffers[name] = Buffer(name, dtype, shape, strides, self.buffers[stem].device)
        return name

    def first(self, kind: str, outs: tuple[str | None, ...]) -> Reduction:
        down = self.op.down
        return Reduction(
            outs, self.first_vars, self.first_rvars, kind, self.value, self.op.origin, down
        )

    def second(self, kind: str, outs: tuple[str | None, ...], partial: str) -> Reduction:
        """Combines partial results over the chunks."""
        rvars = loop_vars("r", self.chunks)
        dtype = self.buffers[partial].dtype
        value = node("load", (), Load(partial, (*rvars, *self.vars)), dtype)
        return Reduction(outs, self.vars, rvars, kind, value, self.op.origin, self._down)

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
        self.part = self.buffer("part", self.value.dtype, self.shape)
        return [
            self.first(self.op.kind, (self.part,)),
            self.second(self.op.kind, self.op.outs, self.part),
        ]

    def below(self, op: Reduction) -> list[Op]:
        """The sum of exponentials below this maximum: of each part below the part's own, which are
        brought together below the whole. It reads what the maxima of parts read, with them."""
        (peak,) = (name for name in self.op.outs if name is not None)
        part = self.part
        dtype = self.value.dtype
        at_part = node("load", (), Load(part, self.first_vars), dtype)
        value = node("exp", (node("sub", (self.value, at_part)),))
        total = self.buffer("below", dtype, self.shape, loop_outs(op)[0])
        rvars = loop_vars("r", self.chunks)
        most = node("load", (), Load(part, (*rvars, *self.vars)), dtype)
        sums = node("load", (), Load(total, (*rvars, *self.vars)), dtype)
        whole = node("load", (), Load(peak, self.vars), dtype)
        # A part of minus infinities adds nothing, if that is not the whole's maximum too.
        least = const(-math.inf, dtype)
        scaled = node("mul", (sums, node("exp", (node("sub", (most, whole)),))))
        some = node("where", (node("eq", (most, least)), const(0.0, dtype), scaled))
        term = node("where", (node("eq", (most, whole)), sums, some))
        return [
            Reduction(
                (total,), self.first_vars, self.first_rvars, "sum", value, op.origin, op.down
            ),
            Reduction(op.outs, self.vars, rvars, "sum", term, op.origin, self._down),
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
