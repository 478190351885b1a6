"""Rules that write at computed positions: scatter in its kinds, index_put, index_add, index_copy,
index_fill, index_reduce.

Goes out: `Scatter` loops over the points of the source, in row-major order, so that results do not
depend on the number of threads. Indices are checked at run time as eager checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.devices import facts_of
from plait.ir.checks import OUT_OF_RANGE, Check, out_of_bounds
from plait.ir.dtypes import b1, i64, u8
from plait.ir.expr import Expr, Size, atom_of, known_le, may_be_zero, numel, smin, symbol
from plait.ir.loops import Node, Scatter, apply, loop_vars
from plait.ir.maths import maximum, ne, where
from plait.ir.ops import ATOMICS
from plait.ir.record import Recorder
from plait.ir.reductions import REDUCTIONS
from plait.lower.convert import convert
from plait.lower.core import Index, Lowering, NoRule, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import fit, result, scalar
from plait.lower.extern import call_extern
from plait.lower.index import (
    at_least_1d,
    from_zero,
    indexing,
    require_all_inside,
    require_elements,
    require_some,
)
from plait.lower.inplace import strides_like
from plait.lower.memory import copy
from plait.lower.view import wrap_dim

aten = torch.ops.aten

# body(ops, i) -> (where it goes, what goes there)
ScatterBody = Callable[[Recorder, tuple[Expr, ...]], tuple[Index, Node]]


def scatter_loop(
    ctx: Lowering,
    base: View,
    shape: tuple[Size, ...],
    mode: str,
    body: ScatterBody,
    once: bool = True,
) -> View:
    """A copy of base into which body's values go for every point of `shape`. mode as in Scatter.
    once: sums and products of half types are rounded at their end, not at every step."""
    if 0 in base.shape:
        mode = "store"  # there is nothing to add to, but there are indices to check
    compute = compute_dtype(base.dtype)
    if once and mode in ("add", "mul") and compute != base.dtype:
        kept = strides_like(ctx, base.buf) if ctx.is_whole(base) else None

        def widened(ops: Recorder, i: tuple[Expr, ...]) -> tuple[Index, Node]:
            at, value = body(ops, i)
            return at, ops.cast(value, compute)

        total = scatter_loop(ctx, convert(ctx, base, compute), shape, mode, widened)
        return ctx.pointwise(
            base.shape, base.dtype, lambda ops, i: ops.cast(total.load(ops, i), base.dtype), kept
        )
    start = base if ctx.is_whole(base) else copy(ctx, base)
    ops, vars_ = Recorder(), loop_vars("i", shape)
    point, value = body(ops, vars_)
    if value.dtype != base.dtype:
        raise TypeError(f"the body gives {value.dtype}, not {base.dtype}")
    index, args = ops.take_args(tuple(point))
    out = ctx.new_buffer(base.dtype, base.shape, strides_like(ctx, start.buf))
    if mode == "add" and base.dtype == b1:
        mode = "max"
    anyhow = not facts_of(ctx.buffers[out].device).is_host  # points run in any order
    matters = mode in ("store", "mul") or (mode == "add" and base.dtype.is_float)
    if anyhow and args and matters and torch.are_deterministic_algorithms_enabled():
        raise NoRule("points that may collide in any order, under deterministic algorithms")
    at_once = mode != "store" and anyhow
    if at_once and base.dtype.name not in ATOMICS.get(mode, ()):
        raise NoRule(f"{base.dtype} elements that collide and combine by '{mode}' on a GPU")
    ctx.ops.append(Scatter(out, start.buf, vars_, index, args, value, mode, origin=ctx.origin))
    return ctx.whole(out)


def unless_empty(ctx: Lowering, shape: tuple[Size, ...], size: Size) -> tuple[Size, ...]:
    """Points to go over, of this shape (rank 1 or more), none where `size` is 0: eager looks at no
    index then."""
    if not may_be_zero(size):
        return shape
    some = symbol(f"some_{len(ctx.symbols)}", hi=1)
    ctx.symbols[atom_of(some).name] = smin(from_zero(size), 1)
    return (shape[0] * some, *shape[1:])


# ------------------------------------------------------------------------------------------ scatter
def _along(x: View, d: int, index: View, i: tuple[Expr, ...], ops: Recorder) -> Index:
    """Point i with coordinate d taken from the index tensor; negative positions are errors."""
    bound = out_of_bounds(d, x.shape[d], "RuntimeError")
    at = ops.checked(index.load(ops, i), x.shape[d], wrap=False, check=bound)
    return (*i[:d], at, *i[d + 1 :])


def _scatter(ctx: Lowering, x: View, dim: int, index: View, src: Any, mode: str) -> View:
    """x with src (a View or a number) put at index along dim. Results of rank 0 come back as
    such."""
    flat, index = at_least_1d(x), at_least_1d(index)
    src = at_least_1d(src) if isinstance(src, View) else src
    d = wrap_dim(dim, len(flat.shape))
    given = [v for v in (index, src) if isinstance(v, View)]
    if any(len(v.shape) != len(flat.shape) for v in given):  # eager's where nothing is written
        return copy(ctx, x)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> tuple[Index, Node]:
        value = src.load(ops, i) if isinstance(src, View) else scalar(ctx, ops, src, x.dtype)
        return _along(flat, d, index, i, ops), ops.cast(value, x.dtype)

    out = scatter_loop(ctx, flat, index.shape, mode, body)
    return out if x.shape else out.remap((), lambda _: (0,))


_REDUCE = {
    "add": "sum", "multiply": "prod", "sum": "sum", "prod": "prod", "mean": "sum", "amax": "max",
    "amin": "min",
}  # fmt: skip
"""What PyTorch calls a reduction -> its name in REDUCTIONS, whose op is the mode of the scatter."""


@lower(aten.scatter.src, aten.scatter.value)
def scatter(ctx: Lowering, x: View, dim: int, index: View, src: Any) -> View:
    return _scatter(ctx, x, dim, index, src, "store")


@lower(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_with(ctx: Lowering, x: View, dim: int, index: View, src: Any, *, reduce: str) -> View:
    return _scatter(ctx, x, dim, index, src, REDUCTIONS[_REDUCE[reduce]].op)


@lower(aten.scatter_add.default)
def scatter_add(ctx: Lowering, x: View, dim: int, index: View, src: View) -> View:
    return _scatter(ctx, x, dim, index, src, "add")


@lower(aten.scatter_reduce.two)
def scatter_reduce(
    ctx: Lowering,
    x: View,
    dim: int,
    index: View,
    src: View,
    reduce: str,
    *,
    include_self: bool = True,
) -> View:
    return _reduced(
        ctx,
        x,
        reduce,
        include_self,
        lambda base, value, mode: _scatter(ctx, base, dim, index, value, mode),
        src,
    )


def _reduced(
    ctx: Lowering,
    x: View,
    reduce: str,
    include_self: bool,
    put: Callable[[View, Any, str], View],
    src: View,
) -> View:
    """The reductions of scatter_reduce and index_reduce. put(base, value, mode) scatters value into
    base."""
    row = REDUCTIONS[_REDUCE[reduce]]
    base = x if include_self else put(x, row.identity(x.dtype), "store")
    # The mean of nothing would drop the sum, and its check of indices.
    if reduce != "mean" or 0 in x.shape:
        return put(base, src, row.op)
    total = put(base, src, "add")
    ones = ctx.pointwise(
        x.shape, x.dtype, lambda ops, i: ops.const(1 if include_self else 0, x.dtype)
    )
    count = put(ones, 1, "add")
    compute = compute_dtype(x.dtype)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        a, b = (ops.cast(v.load(ops, i), compute) for v in (total, count))
        b = maximum(b, ops.const(1, compute))
        return ops.cast(apply("truediv" if compute.is_float else "floordiv", a, b), x.dtype)

    return ctx.pointwise(x.shape, x.dtype, body)


# -------------------------------------------------------------------------------------- x[i, j] = v
_MISMATCH = "shape mismatch: value tensor cannot be broadcast to indexing result"


@lower(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ctx: Lowering, x: View, indices: Sequence[View | None], values: View, accumulate: bool = False
) -> Any:
    masks = [t for t in indices if t is not None and t.dtype in (b1, u8)]
    if masks:
        where = _put_where(ctx, x, indices, values) if not accumulate else None
        args = (x, indices, values, accumulate)
        return where or call_extern(ctx, args, {})
    how = indexing(x, indices)
    check = ctx.node.target is aten.index_put.default
    if check:
        require_elements(ctx, x, how)
    given = fit(ctx, values, how.shape, _MISMATCH, ones=True)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> tuple[Index, Node]:
        return how.point(ops, x, i, check), ops.cast(given.load(ops, i), x.dtype)

    return scatter_loop(ctx, x, how.shape, "add" if accumulate else "store", body)


def _put_where(ctx: Lowering, x: View, indices: Sequence[View | None], values: View) -> View | None:
    """x[mask] = v as a choice between v and x, where v does not depend on how many elements were
    hit; else None."""
    first = next(d for d, t in enumerate(indices) if t is not None)
    mask = indices[first]
    assert mask is not None, "no index"
    if any(t is not None for t in indices[first + 1 :]):
        return None
    rank = len(mask.shape)
    if mask.shape != x.shape[first : first + rank]:
        return None  # tracing does not compare them; ATen does
    tail = x.shape[:first] + x.shape[first + rank :]  # dimensions of the result besides the hits
    hits = len(values.shape) - 1 - (len(tail) - first)  # which dimension of values counts the hits
    if hits >= 0 and values.shape[hits] != 1:
        return None
    if hits >= 0:
        values = values.remap(
            values.shape[:hits] + values.shape[hits + 1 :], lambda v: (*v[:hits], 0, *v[hits:])
        )
    if len(values.shape) > len(tail):
        return None
    given = fit(ctx, values, tail, _MISMATCH, ones=True)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        hit = ops.cast(mask.load(ops, i[first : first + rank]), b1)
        new = ops.cast(given.load(ops, i[:first] + i[first + rank :]), x.dtype)
        return where(hit, new, x.load(ops, i))

    return result(ctx, body)


# ------------------------------------------------------------------------------------------- along
# one dimension
def _index_along(
    ctx: Lowering,
    x: View,
    dim: int,
    index: View,
    src: Any,
    mode: str,
    alpha: Any = 1,
    wrap: bool = False,
    check: Check = OUT_OF_RANGE,
    drop: bool = False,
) -> View:
    """x into which src, times alpha, goes at index. wrap: negative indices count from the end.
    drop: no index is looked at where the size along dim is 0."""
    flat, index = at_least_1d(x), at_least_1d(index)
    d = wrap_dim(dim, len(flat.shape))
    shape = (*flat.shape[:d], index.shape[0], *flat.shape[d + 1 :])
    compute = compute_dtype(x.dtype)
    if isinstance(src, View) and src.shape:
        src = fit(
            ctx,
            src,
            shape,
            "source tensor shape must match self tensor shape, excluding one dimension",
        )

    def body(ops: Recorder, i: tuple[Expr, ...]) -> tuple[Index, Node]:
        at = ops.checked(index.load(ops, (i[d],)), flat.shape[d], wrap, check)
        if not isinstance(src, View):
            value = scalar(ctx, ops, src, x.dtype)
        else:
            value = src.load(ops, i if src.shape else ())
        if alpha != 1:
            times = "and" if compute == b1 else "mul"
            value = apply(times, ops.cast(value, compute), scalar(ctx, ops, alpha, compute))
        return (*i[:d], at, *i[d + 1 :]), ops.cast(value, x.dtype)

    points = unless_empty(ctx, shape, flat.shape[d]) if drop else shape
    # On a GPU, as eager's kernel, each row is added on its own where x may be far larger than what
    # is added to it: then all of it would be converted.
    once = facts_of(ctx.buffers[x.buf].device).eager_cpu or known_le(numel(x.shape), numel(shape))
    out = scatter_loop(ctx, flat, points, mode, body, once=once)
    return out if x.shape else out.remap((), lambda _: (0,))


@lower(aten.index_add.default)
def index_add(
    ctx: Lowering, x: View, dim: int, index: View, source: View, *, alpha: Any = 1
) -> View:
    if 0 in x.shape:  # eager looks at no index then
        return x
    rank = len(x.shape)
    if rank <= 1:
        return _index_along(ctx, x, dim, index, source, "add", alpha)
    adds_slices = alpha != 1 or x.dtype == b1 or wrap_dim(dim, rank) not in (0, rank - 1)
    check = OUT_OF_RANGE if adds_slices else _bound(x, dim, "RuntimeError")  # two kernels of eager
    return _index_along(ctx, x, dim, index, source, "add", alpha, check=check, drop=True)


def _bound(x: View, dim: int, error: str = "IndexError", where: str = "") -> Check:
    """The check of an index along one dimension of x."""
    d = wrap_dim(dim, len(x.shape))
    return out_of_bounds(d, x.shape[d] if x.shape else 1, error, where)


def _view_error(x: View, dim: int) -> str:
    """What eager raises for an index of x: where there is nothing, it fails before it looks at one,
    in a view as long as the indices."""
    return "RuntimeError" if x.shape and x.shape[wrap_dim(dim, len(x.shape))] == 0 else "IndexError"


@lower(aten.index_copy.default)
def index_copy(ctx: Lowering, x: View, dim: int, index: View, source: View) -> View:
    check = _bound(x, dim, _view_error(x, dim), where="index_copy_(): ")
    return _index_along(ctx, x, dim, index, source, "store", check=check)


@lower(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(ctx: Lowering, x: View, dim: int, index: View, value: Any) -> View:
    check = _bound(x, dim, _view_error(x, dim))
    return _index_along(ctx, x, dim, index, value, "store", wrap=True, check=check)


@lower(aten.index_reduce.default)
def index_reduce(
    ctx: Lowering,
    x: View,
    dim: int,
    index: View,
    source: View,
    reduce: str,
    *,
    include_self: bool = True,
) -> View:
    d = wrap_dim(dim, len(x.shape))
    if len(x.shape) > 1 and ctx.facts().eager_cpu:
        says, error = OUT_OF_RANGE.message, OUT_OF_RANGE.error
        require_some(ctx, x.shape[d], numel(index.shape), says, error)
        require_all_inside(ctx, x, d, index, error, says)

    def put(base: View, value: Any, mode: str) -> View:
        return _index_along(ctx, base, dim, index, value, mode)

    return _reduced(ctx, x, reduce, include_self, put, source)


# ----------------------------------------------------------------------------- embedding's gradient
@lower(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    ctx: Lowering,
    grad: View,
    indices: View,
    num_weights: Size,
    padding_idx: Size,
    scale_grad_by_freq: bool,
) -> View:
    if scale_grad_by_freq:
        raise NoRule("gradients scaled by frequency")
    zeros = ctx.pointwise(
        (num_weights, grad.shape[-1]), grad.dtype, lambda ops, i: ops.const(0, grad.dtype)
    )

    def body(ops: Recorder, i: tuple[Expr, ...]) -> tuple[Index, Node]:
        number = ops.cast(indices.load(ops, i[:-1]), i64)
        row = ops.checked(number, num_weights, wrap=False)
        keep = ne(number, ops.index(padding_idx))
        value = where(keep, grad.load(ops, i), ops.const(0, grad.dtype))
        return (row, i[-1]), value

    return scatter_loop(ctx, zeros, grad.shape, "add", body)
