"""The negative log likelihood: a gather along the classes and weighted sums, which fuse with the
log_softmax before; and the gradients of smooth_l1_loss and soft_margin_loss.

Targets are checked at run time as eager checks them, but for those that are ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.ir.checks import Check
from plait.ir.dtypes import i64
from plait.ir.expr import Expr, Size, numel
from plait.ir.loops import Node
from plait.ir.maths import eq, exp, maximum, minimum, ne, sign, where
from plait.ir.record import Recorder
from plait.lower.core import Lowering, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import elementwise, result
from plait.lower.index import at_least_1d

aten = torch.ops.aten

_TARGET = Check("IndexError", "a target is out of bounds")
_NONE, _MEAN = 0, 1  # at::Reduction
Point = tuple[Size, ...]


@lower(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    ctx: Lowering, x: View, target: View, weight: View | None, reduction: int, ignore_index: Size
) -> tuple[View, View]:
    """The loss (of each target, or summed) and the sum of the weights of all targets that count."""
    if len(x.shape) == 1:  # one row
        x = x.remap((1, *x.shape), lambda v: (v[1],))
        target = at_least_1d(target)
    compute = compute_dtype(x.dtype)

    def at_target(ops: Recorder, i: Point, value: Callable[[Expr], Node]) -> Node:
        """value(class of target i), 0 where it is ignored."""
        t = ops.cast(target.load(ops, i), i64)
        counts = ne(t, ops.index(ignore_index))
        return ops.masked(
            counts, lambda: value(ops.checked(t, x.shape[1], wrap=False, check=_TARGET)), 0
        )

    def weight_of(ops: Recorder, at: Expr) -> Node:
        return ops.const(1, i64) if weight is None else ops.cast(weight.load(ops, (at,)), compute)

    def loss(ops: Recorder, i: Point) -> Node:
        def value(at: Expr) -> Node:
            e = -ops.cast(x.load(ops, (i[0], at, *i[1:])), compute)
            return e if weight is None else e * weight_of(ops, at)

        return at_target(ops, i, value)

    if reduction == _NONE and ctx.out_meta(0).dim() > 0:
        each = result(ctx, lambda ops, i: ops.cast(loss(ops, i), x.dtype), 0)
        return each, result(ctx, lambda ops, i: ops.const(0, x.dtype), 1)
    total = ctx.reduce((), target.shape, "sum", lambda ops, i, r: loss(ops, r))
    weights = ctx.reduce(
        (), target.shape, "sum", lambda ops, i, r: at_target(ops, r, lambda at: weight_of(ops, at))
    )

    def total_weight(ops: Recorder) -> Node:
        return ops.cast(weights.load(ops, ()), compute)

    def combined(ops: Recorder, i: Point) -> Node:
        value = total.load(ops, ())
        if reduction == _MEAN:
            value = value / total_weight(ops)
        return ops.cast(value, x.dtype)

    return result(ctx, combined, 0), result(
        ctx, lambda ops, i: ops.cast(total_weight(ops), x.dtype), 1
    )


@lower(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    ctx: Lowering, grad: View, x: View, target: View, weight: View | None, reduction: int,
    ignore_index: Size, total_weight: View,
) -> View:  # fmt: skip
    """The gradient of x: a choice for every class, which fuses with the gradient of log_softmax.
    What a scatter into zeros would write and read again is never in memory."""
    compute = compute_dtype(x.dtype)
    rows = len(x.shape) > 1
    target = target if rows else at_least_1d(target)

    def body(ops: Recorder, i: Point) -> Node:
        row, c = ((i[0], *i[2:]), i[1]) if rows else ((0,), i[0])
        t = ops.cast(target.load(ops, row), i64)
        hit = eq(t, ops.index(c)) & ne(t, ops.index(ignore_index))
        g = ops.cast(
            grad.load(ops, row if grad.shape and rows else (0,) * len(grad.shape)), compute
        )
        if reduction == _MEAN:
            g = g / ops.cast(total_weight.load(ops, ()), compute)
        g = -g
        if weight is not None:
            g = g * ops.cast(weight.load(ops, (c,)), compute)
        return ops.cast(where(hit, g, ops.const(0, compute)), x.dtype)

    return result(ctx, body)


@lower(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(
    ctx: Lowering, grad: View, x: View, target: View, reduction: int, beta: float
) -> View:
    """The gradient of x."""

    def formula(g: Node, a: Node, b: Node, n: Node) -> Node:
        off = a - b
        if reduction == _MEAN:
            g = g / n
        if beta == 0:
            slope = sign(off)
        else:
            slope = maximum(minimum(off / beta, 1.0), -1.0)
        return g * slope

    return elementwise(ctx, formula, (grad, x, target, numel(ctx.out_shape())))


@lower(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(
    ctx: Lowering, grad: View, x: View, target: View, reduction: int
) -> View:  # fmt: skip
    """The gradient of x, of small ones too. Where exp overflows, eager's is NaN."""

    def formula(g: Node, a: Node, t: Node, n: Node) -> Node:
        if reduction == _MEAN:
            g = g / n
        return -(t * g) / (exp(t * a) + 1.0)

    return elementwise(ctx, formula, (grad, x, target, numel(ctx.out_shape())))
