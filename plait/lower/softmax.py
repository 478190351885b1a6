"""softmax, its gradient and log_softmax as reductions and pointwise loops over one range, which the
scheduler fuses into a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from plait.ir.expr import Expr, Size
from plait.ir.loops import Node, apply
from plait.ir.maths import exp, log
from plait.ir.record import Recorder
from plait.lower.core import Lowering, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.reduce import Axes
from plait.lower.view import add_dim, drop_dims

aten = torch.ops.aten

Finish = Callable[[Node, Node, Node], Node]  # (x, greatest, sum of exp(x - greatest)) -> result


def _softmax_like(ctx: Lowering, x: View, dim: int, finish: Finish) -> View:
    if not x.shape:
        return drop_dims(_over(ctx, add_dim(x, 0), 0, finish), {0})
    return _over(ctx, x, dim, finish)


def _over(ctx: Lowering, x: View, dim: int, finish: Finish) -> View:
    out = ctx.out_dtype()
    compute = compute_dtype(x.dtype)
    axes = Axes(x, dim)
    greatest = axes.reduce(ctx, "max", lambda ops, e: ops.cast(e, compute))

    def body(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        e = ops.cast(x.load(ops, axes.at(i, r)), compute)
        return exp(e - greatest.load(ops, i))

    total = ctx.reduce(axes.shape, axes.rshape, "sum", body)

    def result(ops: Recorder, v: tuple[Expr, ...]) -> Node:
        point = axes.kept_of(v)
        e = ops.cast(x.load(ops, v), compute)
        return ops.cast(finish(e, greatest.load(ops, point), total.load(ops, point)), out)

    return ctx.pointwise(
        x.shape, out, result, ctx.out_strides() if ctx.out_meta().dim() == len(x.shape) else None
    )


@lower(aten._softmax.default)
def _softmax(ctx: Lowering, x: View, dim: int, half_to_float: bool) -> View:
    return _softmax_like(ctx, x, dim, lambda e, top, total: exp(e - top) / total)


@lower(aten._log_softmax.default)
def _log_softmax(ctx: Lowering, x: View, dim: int, half_to_float: bool) -> View:
    return _softmax_like(ctx, x, dim, lambda e, top, total: e - top - log(total))


@lower(aten._softmax_backward_data.default)
def _softmax_backward(ctx: Lowering, grad: View, y: View, dim: int, dtype: torch.dtype) -> View:
    """y * (grad - sum(grad * y)), where torch's own takes the difference of two products."""
    if not y.shape:
        grad, y = add_dim(grad, 0), add_dim(y, 0)
    axes, compute = Axes(y, dim), compute_dtype(y.dtype)

    def pair(ops: Recorder, at: Sequence[Size]) -> tuple[Node, Node]:
        return ops.cast(y.load(ops, at), compute), ops.cast(grad.load(ops, at), compute)

    def product(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        return apply("mul", *pair(ops, axes.at(i, r)))

    total = ctx.reduce(axes.shape, axes.rshape, "sum", product)

    def body(ops: Recorder, v: tuple[Expr, ...]) -> Node:
        e, g = pair(ops, v)
        value = e * (g - total.load(ops, axes.kept_of(v)))
        return ops.cast(value, ctx.out_dtype())

    rank = ctx.out_meta().dim()
    out = ctx.pointwise(y.shape, ctx.out_dtype(), body, ctx.out_strides() if rank else None)
    return out if rank else drop_dims(out, {0})
