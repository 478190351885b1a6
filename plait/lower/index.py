"""Rules that read at computed positions: index, gather, index_select, embedding, take, and the
slice and diagonal scatters.

An index tensor becomes part of the load's index, checked at run time as eager checks it. Boolean
masks, whose number of hits nobody knows beforehand, stay extern calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait.ir import expr
from plait.ir.checks import OUT_OF_RANGE, Check, out_of_bounds
from plait.ir.dtypes import b1, i64, u8
from plait.ir.expr import Expr, Size
from plait.ir.loops import Node, Scatter, loop_vars
from plait.ir.maths import where
from plait.ir.record import Recorder
from plait.lower.core import Index, Lowering, NoRule, View, lower
from plait.lower.elementwise import all_of, broadcast, compare, fit, result, scalar
from plait.lower.extern import call_extern
from plait.lower.inplace import is_scattered, may_write, strides_like
from plait.lower.integers import item, require_index
from plait.lower.view import clamp_start, wrap_dim, wrap_index

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------ x[i, j]
@dataclass(frozen=True, slots=True)
class Indexing:
    """What x[indices] means: `tensors` by dimension of x, all seen with shape `common`, whose
    dimensions start at position `at` of the result; `shape` is the shape of the result."""

    tensors: dict[int, View]
    common: tuple[Size, ...]
    at: int
    shape: tuple[Size, ...]

    def point(self, ops: Recorder, x: View, i: tuple[Expr, ...], check: bool = True) -> Index:
        """The element of x that element i of the result stands for."""
        inner = i[self.at : self.at + len(self.common)]
        plain = iter(i[: self.at] + i[self.at + len(self.common) :])
        out: list[Size] = []
        for d, size in enumerate(x.shape):
            if d in self.tensors:
                value = self.tensors[d].load(ops, inner)
                bound = out_of_bounds(sorted(self.tensors).index(d), size)
                at = ops.checked(value, size, check=bound) if check else ops.indirect(value, size)
                out.append(at)
            else:
                out.append(next(plain))
        return tuple(out)


def indexing(x: View, indices: Sequence[View | None]) -> Indexing:
    """How eager reads x[indices]. Raises NoRule for masks."""
    tensors = {d: t for d, t in enumerate(indices) if t is not None}
    if any(t.dtype in (b1, u8) for t in tensors.values()):
        raise NoRule("a mask as index")
    common = _broadcast_shape([t.shape for t in tensors.values()])
    dims = sorted(tensors)
    adjacent = dims == list(range(dims[0], dims[0] + len(dims))) if dims else True
    at = dims[0] if dims and adjacent else 0
    plain = tuple(s for d, s in enumerate(x.shape) if d not in tensors)
    shape = plain[:at] + common + plain[at:]
    return Indexing({d: broadcast(t, common) for d, t in tensors.items()}, common, at, shape)


def _broadcast_shape(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    rank = max((len(s) for s in shapes), default=0)
    out: list[Size] = [1] * rank
    for shape in shapes:
        for d, s in enumerate(shape, rank - len(shape)):
            if out[d] == 1:
                out[d] = s
    return tuple(out)


def require_elements(ctx: Lowering, x: View, how: Indexing) -> None:
    """Asserts, as eager does before it looks at an index, that none picks from a size of 0. Kernels
    look only where there is something to read or to write."""
    picked = expr.product(s for d, s in enumerate(x.shape) if d in how.tensors)
    require_some(
        ctx,
        picked,
        expr.numel(how.common),
        "index is out of bounds for dimension with size 0",
        "IndexError",
    )


def require_all_inside(ctx: Lowering, x: View, d: int, index: View, error: str, says: str) -> None:
    """Asserts that all indices are positions along dimension d of x where its other dimensions have
    no elements: eager looks at them then too, and a kernel does not."""
    size, rest = x.shape[d], expr.numel(x.shape[:d] + x.shape[d + 1 :])
    if not expr.may_be_zero(rest):
        return

    def is_outside(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        at = ops.cast(index.load(ops, r), i64)
        inside = all_of(ops, [at >= ops.const(0, i64), at < ops.index(size)])
        return where(inside, ops.const(0, i64), ops.const(1, i64))

    index = at_least_1d(index)
    wrong = ctx.reduce((), index.shape, "sum", is_outside)
    found = item(ctx, wrong, expr.symbol(f"{wrong.buf}_found", lo=0))
    ctx.assert_true(expr.smax(from_zero(rest), expr.compare("le", found, 0)), says, error=error)


def require_some(ctx: Lowering, size: Size, count: Size, says: str, error: str) -> None:
    """Asserts that there is something to pick from, or nothing is picked."""
    if expr.may_be_zero(size):
        ctx.assert_true(
            expr.smax(from_zero(size), expr.compare("eq", from_zero(count), 0)), says, error=error
        )


def from_zero(size: Size) -> Size:
    """A size without what its range does not tell: one that varies from 1 on may be 0, see
    `capture/least_sizes.py`."""
    least = {a: expr.symbol(a.name, hi=a.hi) for a in expr.free_symbols(size) if a.lo == 1}
    return expr.substitute(size, least)


@lower(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(ctx: Lowering, x: View, indices: Sequence[View | None]) -> Any:
    if any(t is not None and t.dtype in (b1, u8) for t in indices):
        return call_extern(ctx, (x, indices), {})
    how = indexing(x, indices)
    check = ctx.node.target is aten.index.Tensor
    if check:
        require_elements(ctx, x, how)
    return result(ctx, lambda ops, i: x.load(ops, how.point(ops, x, i, check)))


@lower(aten.gather.default)
def gather(ctx: Lowering, x: View, dim: int, index: View, *, sparse_grad: bool = False) -> View:
    if not x.shape or not index.shape:
        x, index = at_least_1d(x), at_least_1d(index)
    d = wrap_dim(dim, len(x.shape))
    if len(index.shape) != len(x.shape):  # eager allows it where nothing is read
        return result(ctx, lambda ops, i: ops.const(0, x.dtype))

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        point = i if i else (0,)
        size = x.shape[d]
        bound = out_of_bounds(d, size, "RuntimeError")
        at = ops.checked(index.load(ops, point), size, wrap=False, check=bound)
        return x.load(ops, (*point[:d], at, *point[d + 1 :]))

    return result(ctx, body)


def at_least_1d(x: View) -> View:
    """A tensor of rank 0 as one of shape (1,); others unchanged."""
    return x if x.shape else x.remap((1,), lambda _: ())


@lower(aten.index_select.default)
def index_select(ctx: Lowering, x: View, dim: int, index: View) -> View:
    index = at_least_1d(index)
    d = wrap_dim(dim, len(x.shape))
    size = x.shape[d] if x.shape else 1
    _require_selected(ctx, x, d, index)
    # Eager has a kernel of its own for dimension 1.
    bound = out_of_bounds(d, size, "RuntimeError") if d == 1 else OUT_OF_RANGE

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        at = ops.checked(index.load(ops, i[d : d + 1] or (0,)), size, wrap=False, check=bound)
        return x.load(ops, (*i[:d], at, *i[d + 1 :]) if x.shape else ())

    return result(ctx, body)


def _require_selected(ctx: Lowering, x: View, d: int, index: View) -> None:
    """What eager's index_select asserts of an empty x."""
    if len(x.shape) < 2 or not ctx.facts().eager_cpu:
        return
    says = "index_select(): self indexing axis dim should be positive"
    require_some(ctx, x.shape[d], expr.numel(index.shape), says, "RuntimeError")
    require_all_inside(ctx, x, d, index, "RuntimeError", "INDICES element is out of DATA bounds")


@lower(aten.embedding.default)
def embedding(
    ctx: Lowering,
    weight: View,
    indices: View,
    padding_idx: Size = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> View:
    _require_selected(ctx, weight, 0, indices)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        row = ops.checked(indices.load(ops, i[:-1]), weight.shape[0], wrap=False)
        return weight.load(ops, (row, i[-1]))

    return result(ctx, body)


_TAKE = Check("IndexError", "out of range: tried to access an index of a tensor that it has not")


@lower(aten.take.default)
def take(ctx: Lowering, x: View, index: View) -> View:
    if expr.numel(x.shape) == 0:  # eager allows it where nothing is read
        return result(ctx, lambda ops, i: ops.const(0, x.dtype))

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        flat = ops.checked(index.load(ops, i), expr.numel(x.shape), check=_TAKE)
        return x.load(ops, unflatten(flat, x.shape))

    return result(ctx, body)


def unflatten(flat: Size, shape: tuple[Size, ...]) -> Index:
    """The index of element number `flat`, row-major."""
    out: list[Size] = []
    for step, s in zip(expr.contiguous_strides(shape), shape, strict=True):
        out.append(flat // step % s)
    return tuple(out)


# ----------------------------------------------------------------------------------- parts replaced
_UNEQUAL = "expected src to have a size equal to the slice of self"


@lower(aten.slice_scatter.default)
def slice_scatter(
    ctx: Lowering,
    x: View,
    src: View,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> View:
    d = wrap_dim(dim, len(x.shape))
    size = x.shape[d]
    first = _clamped(0 if start is None else start, size)
    last = size if end is None else end
    length = expr.ceildiv(expr.smax(clamp_start(last, size, -1, step) - first, 0), step)
    src = fit(ctx, src, (*x.shape[:d], length, *x.shape[d + 1 :]), _UNEQUAL)
    if src.shape[d] == size and first == 0:
        return result(ctx, lambda ops, i: ops.cast(src.load(ops, i), x.dtype))
    written = _written(ctx, x, src, lambda i: (*i[:d], first + i[d] * step, *i[d + 1 :]))
    if written is not None:
        return written

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        ahead = i[d] - first
        k = ahead // step
        inside = [compare(ops, "ge", ahead, 0), compare(ops, "lt", k, src.shape[d])]
        if step != 1:
            inside.append(compare(ops, "eq", ahead % step, 0))
        return _replaced(ops, x, i, inside, src, (*i[:d], k, *i[d + 1 :]))

    return result(ctx, body)


def _clamped(start: Size, size: Size) -> Size:
    """A slice's start as a position in [0, size]. Raises NoRule where its sign is unknown."""
    if expr.bounds(start)[1] < 0:
        start = expr.smax(start + size, 0)
    elif expr.bounds(start)[0] < 0:
        raise NoRule(f"a slice that starts at {start}, which may be negative")
    return expr.smin(start, size)


def _replaced(ops: Recorder, x: View, i: Index, inside: list[Node], src: View, at: Index) -> Node:
    """src[at] where all of inside hold, else x[i]."""
    hit = all_of(ops, inside)
    new = ops.masked(hit, lambda: ops.cast(src.load(ops, at), x.dtype), 0)
    return where(hit, new, x.load(ops, i))


def _written(
    ctx: Lowering, x: View, src: View, point: Callable[[tuple[Expr, ...]], Index]
) -> View | None:
    """x with element point(i) replaced by src[i], in place: for an input that the graph overwrites
    in the end (of a cache little changes) and what comes of it. None for others: readers inline a
    choice between x and src."""
    if src.buf == x.buf and src.index == x.remap(src.shape, point).index:
        return x  # what was changed in place
    mine = is_scattered(ctx, x.buf) or x.buf in ctx.input_buffers
    if not mine or src.buf == x.buf or not may_write(ctx, x, ctx.buffers[x.buf].strides):
        return None
    ops, vars_ = Recorder(), loop_vars("i", src.shape)
    out = ctx.new_buffer(x.dtype, x.shape, strides_like(ctx, x.buf))
    value = ops.cast(src.load(ops, vars_), x.dtype)
    ctx.ops.append(
        Scatter(out, x.buf, vars_, tuple(point(vars_)), (), value, "store", origin=ctx.origin)
    )
    return ctx.whole(out)


@lower(aten.select_scatter.default)
def select_scatter(ctx: Lowering, x: View, src: View, dim: int, index: Size) -> View:
    d = wrap_dim(dim, len(x.shape))
    require_index(ctx, index, d, x.shape[d])
    at = wrap_index(index, x.shape[d])
    src = fit(ctx, src, (*x.shape[:d], *x.shape[d + 1 :]), _UNEQUAL)
    written = _written(ctx, x, src, lambda i: (*i[:d], at, *i[d:]))
    if written is not None:
        return written

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        return _replaced(ops, x, i, [compare(ops, "eq", i[d], at)], src, (*i[:d], *i[d + 1 :]))

    return result(ctx, body)


@lower(aten.diagonal_scatter.default)
def diagonal_scatter(
    ctx: Lowering, x: View, src: View, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> View:
    rank = len(x.shape)
    d1, d2 = wrap_dim(dim1, rank), wrap_dim(dim2, rank)
    others = tuple(n for d, n in enumerate(x.shape) if d not in (d1, d2))
    ends = expr.smin(x.shape[d1] + min(offset, 0), x.shape[d2] - max(offset, 0))
    src = fit(ctx, src, (*others, expr.smax(ends, 0)), _UNEQUAL)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        along = i[d1] if offset >= 0 else i[d2]
        rest = tuple(v for d, v in enumerate(i) if d not in (d1, d2))
        hit = compare(ops, "eq", i[d2] - i[d1], offset)
        return _replaced(ops, x, i, [hit], src, (*rest, along))

    return result(ctx, body)


@lower(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: Lowering, x: View, mask: View, value: Any) -> View:
    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        new = (
            ops.cast(value.load(ops, ()), x.dtype)
            if isinstance(value, View)
            else scalar(ctx, ops, value, x.dtype)
        )
        hit = ops.cast(seen(mask).load(ops, i), b1)
        return where(hit, new, seen(x).load(ops, i))

    def seen(v: View) -> View:
        return broadcast(v, ctx.out_shape())

    return result(ctx, body)
