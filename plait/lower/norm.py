"""Layer, group and batch norm: one Welford reduction and one pointwise loop each.

Statistics are computed in f32 for half inputs; means and reciprocal deviations come out in the
dtype that the fake results have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait.ir.dtypes import DType
from plait.ir.expr import Expr, Size, product
from plait.ir.loops import Node
from plait.ir.maths import rsqrt
from plait.ir.record import Recorder
from plait.lower.convert import convert
from plait.lower.core import Lowering, NoRule, ReduceBody, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.extern import call_extern
from plait.lower.reduce import Axes, moments, moments_dtype
from plait.lower.view import reshape

aten = torch.ops.aten

CACHE_LINE = 128
"""Bytes that a GPU reads at once."""
LARGE_NBYTES = 1 << 24
"""Of an image: less is in the GPU's cache. An H100 took 145 us for the groups of 64 MiB, which it
reads in 25."""


def _rstd(ctx: Lowering, m2: View, count: Size, eps: float) -> View:
    """1 / sqrt(m2 / count + eps)."""

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        var = m2.load(ops, i) / ops.cast(ops.index(count), m2.dtype)
        return rsqrt(var + eps)

    return ctx.pointwise(m2.shape, m2.dtype, body)


def _scale_shift(
    ops: Recorder,
    x: Node,
    mean: Node,
    rstd: Node,
    weight: View | None,
    bias: View | None,
    at: Sequence[Size],
) -> Node:
    """(x - mean) * rstd * weight[at] + bias[at], in x's dtype."""
    out = (x - mean) * rstd
    if weight is not None:
        out = out * ops.cast(weight.load(ops, at), x.dtype)
    if bias is not None:
        out = out + ops.cast(bias.load(ops, at), x.dtype)
    return out


def _stat(ctx: Lowering, x: View, k: int) -> View:
    """A statistic as the current node's k-th result: its dtype, and its shape with dimensions of
    size 1."""
    return reshape(convert(ctx, x, ctx.out_dtype(k)), ctx.out_shape(k))


@lower(aten.native_layer_norm.default)
def _layer_norm(
    ctx: Lowering,
    x: View,
    normalized_shape: Sequence[Size],
    weight: View | None,
    bias: View | None,
    eps: float,
) -> tuple[View, View, View]:
    first = len(x.shape) - len(normalized_shape)
    compute = compute_dtype(x.dtype)
    axes = Axes(x, tuple(range(first, len(x.shape))))
    mean, m2 = moments(ctx, axes, compute)
    rstd = _rstd(ctx, m2, axes.numel, eps)

    def body(ops: Recorder, v: tuple[Expr, ...]) -> Node:
        e = ops.cast(x.load(ops, v), compute)
        value = _scale_shift(
            ops, e, mean.load(ops, v[:first]), rstd.load(ops, v[:first]), weight, bias, v[first:]
        )
        return ops.cast(value, ctx.out_dtype(0))

    out = ctx.pointwise(x.shape, ctx.out_dtype(0), body, ctx.out_strides(0))
    return out, _stat(ctx, mean, 1), _stat(ctx, rstd, 2)


def _are_groups_apart(ctx: Lowering, x: View, channels: Size) -> bool:
    """Whether a GPU would read much in short pieces: the channels of a group are innermost, and
    few."""
    shape = x.shape[1:] if ctx.cfg.batch_invariant else x.shape
    strides, nbytes = ctx.out_strides(0), product((*shape, x.dtype.nbytes))
    if strides is None or strides[1] != 1 or not ctx.facts().streams:
        return False
    if not (isinstance(channels, int) and isinstance(nbytes, int)) or nbytes < LARGE_NBYTES:
        return False
    return 1 < channels and channels * x.dtype.nbytes < CACHE_LINE


def _moments_of_channels(ctx: Lowering, grouped: View, compute: DType) -> tuple[View, View]:
    """Mean and sum of squared deviations of each group of (batch, group, channel, place), by those
    of its channels, which lie side by side."""
    batch, groups, channels, places = grouped.shape
    means, inside = moments(ctx, Axes(grouped, (3,)), compute)

    def mean_of(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        return means.load(ops, (*i, *r)) / ops.cast(ops.index(channels), compute)

    mean = ctx.reduce((batch, groups), (channels,), "sum", mean_of)

    def deviation(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        apart = means.load(ops, (*i, *r)) - mean.load(ops, i)
        return inside.load(ops, (*i, *r)) + apart * apart * ops.cast(ops.index(places), compute)

    return mean, ctx.reduce((batch, groups), (channels,), "sum", deviation)


@lower(aten.native_group_norm.default)
def _group_norm(
    ctx: Lowering,
    x: View,
    weight: View | None,
    bias: View | None,
    N: Size,
    C: Size,
    HxW: Size,
    group: int,
    eps: float,
) -> tuple[View, View, View]:
    compute = compute_dtype(x.dtype)
    per_group = C // group
    grouped = reshape(x, (N, group, per_group, HxW))
    axes = Axes(grouped, (2, 3))
    if _are_groups_apart(ctx, x, per_group):
        mean, m2 = _moments_of_channels(ctx, grouped, compute)
    else:
        mean, m2 = moments(ctx, axes, compute)
    rstd = _rstd(ctx, m2, axes.numel, eps)

    def body(ops: Recorder, v: tuple[Expr, ...]) -> Node:
        e = ops.cast(x.load(ops, v), compute)
        point = _group_of(v, per_group)
        value = _scale_shift(
            ops, e, mean.load(ops, point), rstd.load(ops, point), weight, bias, v[1:2]
        )
        return ops.cast(value, ctx.out_dtype(0))

    out = ctx.pointwise(x.shape, ctx.out_dtype(0), body, ctx.out_strides(0))
    return out, _stat(ctx, mean, 1), _stat(ctx, rstd, 2)


def _group_of(at: Sequence[Size], channels: Size) -> tuple[Size, Size]:
    """The group of an element at (batch, channel, ...). channels: of a group; there may be none."""
    return at[0], at[1] // channels if channels != 0 else 0


@dataclass(frozen=True, slots=True)
class _Groups:
    """What the gradients of a group norm are made of, in the dtype `compute`.

    mean, rstd: of each group.
    weight: of each channel; None: 1.
    size: channels of a group.
    """

    mean: View
    rstd: View
    weight: View | None
    size: Size
    compute: DType

    def deviation(self, ops: Recorder, x: View, at: Sequence[Size]) -> Node:
        return ops.cast(x.load(ops, at), self.compute) - self.mean.load(
            ops, _group_of(at, self.size)
        )

    def weighted(self, ops: Recorder, value: Node, channel: Size) -> Node:
        if self.weight is None:
            return value
        return value * ops.cast(self.weight.load(ops, (channel,)), self.compute)

    def average(self, ctx: Lowering, sums: View, numel: Size) -> View:
        """Of each group: weight * sums, summed over its channels and divided by its elements."""

        def term(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
            channel = i[1] * self.size + r[0]
            return self.weighted(ops, sums.load(ops, (i[0], channel)), channel)

        total = ctx.reduce(self.mean.shape, (self.size,), "sum", term)

        def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
            return total.load(ops, i) / ops.cast(ops.index(numel), self.compute)

        return ctx.pointwise(total.shape, self.compute, body)


@lower(aten.native_group_norm_backward.default)
def _group_norm_backward(
    ctx: Lowering, grad: View, x: View, mean: View, rstd: View, weight: View | None,
    N: Size, C: Size, HxW: Size, group: int, output_mask: Sequence[bool],
) -> tuple[View | None, ...]:  # fmt: skip
    """By sums over deviations from the mean. Sums over the elements would lose the digits that a
    mean far from 0 takes up, and sums in half precision most of the others."""
    compute, size = compute_dtype(x.dtype), C // group
    mean, rstd = (convert(ctx, t, compute) for t in (mean, rstd))
    groups = _Groups(mean, rstd, weight, size, compute)
    g_rows, x_rows = (reshape(t, (N, C, HxW)) for t in (grad, x))

    def gradient(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        return ops.cast(g_rows.load(ops, (*i, *r)), compute)

    def product(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        return gradient(ops, i, r) * groups.deviation(ops, x_rows, (*i, *r))

    sums, products = (ctx.reduce((N, C), (HxW,), "sum", term) for term in (gradient, product))
    level, slope = (groups.average(ctx, t, size * HxW) for t in (sums, products))

    def of_input(ops: Recorder, at: tuple[Expr, ...]) -> Node:
        own = _group_of(at, groups.size)
        g, scale = ops.cast(grad.load(ops, at), compute), rstd.load(ops, own)
        along = groups.deviation(ops, x, at) * (scale * scale * slope.load(ops, own))
        across = groups.weighted(ops, g, at[1]) - level.load(ops, own) - along
        return ops.cast(scale * across, ctx.out_dtype(0))

    def of_weight(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        at = (*r, *i)
        return products.load(ops, at) * rstd.load(ops, _group_of(at, groups.size))

    def of_bias(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        return sums.load(ops, (*r, *i))

    def over_batch(k: int, term: ReduceBody) -> View | None:
        if not output_mask[k]:
            return None
        return convert(ctx, ctx.reduce((C,), (N,), "sum", term), ctx.out_dtype(k))

    made = None
    if output_mask[0]:
        made = ctx.pointwise(x.shape, ctx.out_dtype(0), of_input, ctx.out_strides(0))
    return made, over_batch(1, of_weight), over_batch(2, of_bias)


# --------------------------------------------------------------------------------------- batch norm
def _apply(
    ctx: Lowering, x: View, mean: View, rstd: View, weight: View | None, bias: View | None
) -> View:
    compute = compute_dtype(x.dtype)

    def body(ops: Recorder, v: tuple[Expr, ...]) -> Node:
        channel = v[1:2]
        e = ops.cast(x.load(ops, v), compute)
        middle, scale = (ops.cast(s.load(ops, channel), compute) for s in (mean, rstd))
        return ops.cast(
            _scale_shift(ops, e, middle, scale, weight, bias, channel), ctx.out_dtype(0)
        )

    return ctx.pointwise(x.shape, ctx.out_dtype(0), body, ctx.out_strides(0))


def _nothing(ctx: Lowering, k: int) -> View:
    """The k-th result where it is empty."""
    dtype = ctx.out_dtype(k)
    return ctx.pointwise(ctx.out_shape(k), dtype, lambda ops, i: ops.const(0, dtype))


def _given_stats(ctx: Lowering, x: View, mean: View, var: View, eps: float) -> tuple[View, View]:
    """Running mean and its rstd in x's compute dtype."""
    compute = compute_dtype(x.dtype)

    def rstd(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        return rsqrt(ops.cast(var.load(ops, i), compute) + eps)

    return convert(ctx, mean, compute), ctx.pointwise(var.shape, compute, rstd)


def _blend(
    ctx: Lowering, old: View, new: View, momentum: float, scale: tuple[Size, Size], k: int
) -> View:
    """old * (1 - momentum) + new * scale * momentum as the k-th result. scale: a fraction of
    sizes."""
    compute: DType = new.dtype

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        value = new.load(ops, i)
        if scale != (1, 1):
            num, den = (ops.cast(ops.index(s), compute) for s in scale)
            value = value * (num / den)
        kept = ops.cast(old.load(ops, i), compute) * (1.0 - momentum)
        return ops.cast(kept + value * momentum, ctx.out_dtype(k))

    return ctx.pointwise(old.shape, ctx.out_dtype(k), body)


def _batch_stats(ctx: Lowering, x: View, eps: float) -> tuple[View, View, View, Axes]:
    """Mean, rstd, sum of squared deviations over all but the channel dimension."""
    axes = Axes(x, [d for d in range(len(x.shape)) if d != 1])
    mean, m2 = moments(ctx, axes, moments_dtype(ctx, x))
    mean, rstd, m2 = (
        convert(ctx, v, compute_dtype(x.dtype)) for v in (mean, _rstd(ctx, m2, axes.numel, eps), m2)
    )
    return mean, rstd, m2, axes


@lower(aten._native_batch_norm_legit_functional.default)
def _batch_norm(
    ctx: Lowering, x: View, weight: View | None, bias: View | None, running_mean: View,
    running_var: View, training: bool, momentum: float, eps: float,
) -> tuple[View, ...]:  # fmt: skip
    if not training:
        out = _apply(ctx, x, *_given_stats(ctx, x, running_mean, running_var, eps), weight, bias)
        kept = (
            convert(ctx, running_mean, ctx.out_dtype(3)),
            convert(ctx, running_var, ctx.out_dtype(4)),
        )
        return out, _nothing(ctx, 1), _nothing(ctx, 2), *kept
    mean, rstd, m2, axes = _batch_stats(ctx, x, eps)
    out = _apply(ctx, x, mean, rstd, weight, bias)
    new_mean = _blend(ctx, running_mean, mean, momentum, (1, 1), 3)
    new_var = _blend(ctx, running_var, m2, momentum, (1, axes.numel - 1), 4)
    return out, _stat(ctx, mean, 1), _stat(ctx, rstd, 2), new_mean, new_var


@lower(aten._native_batch_norm_legit.no_stats)
def _batch_norm_no_stats(
    ctx: Lowering,
    x: View,
    weight: View | None,
    bias: View | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[View, ...]:
    mean, rstd, _, _ = _batch_stats(ctx, x, eps)
    return _apply(ctx, x, mean, rstd, weight, bias), _stat(ctx, mean, 1), _stat(ctx, rstd, 2)


@lower(aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default)
def _batch_norm_inference(
    ctx: Lowering, x: View, weight: View | None, bias: View | None, running_mean: View,
    running_var: View, momentum: float, eps: float,
) -> tuple[View, ...]:  # fmt: skip
    out = _apply(ctx, x, *_given_stats(ctx, x, running_mean, running_var, eps), weight, bias)
    return (out, *(_nothing(ctx, k) for k in range(1, len(ctx.node.meta["val"]))))


@lower(aten._batch_norm_with_update_functional.default)
def _batch_norm_with_update(ctx: Lowering, *args: Any, **kwargs: Any) -> Any:
    """A call of ATen. The new running statistics have the dtypes of the old ones; tracing says
    another."""
    *others, mean, var = ctx.node.meta["val"]
    old = [ctx.node.args[k].meta["val"].dtype for k in (3, 4)]  # type: ignore[union-attr]
    ctx.node.meta["val"] = (*others, mean.to(old[0]), var.to(old[1]))
    return call_extern(ctx, args, kwargs)


# -------------------------------------------------------------------------------------- weight norm
@lower(aten._weight_norm_interface_backward.default)
def _weight_norm_backward(
    ctx: Lowering, grad: View, v: View, g: View, norms: View, dim: int
) -> tuple[View, View]:
    """The gradients of v and g, where w = v * g / norms has the gradient `grad`. norms: over all
    dimensions but dim."""
    if len(v.shape) < 2:
        raise NoRule("the norm of each element")
    axes = Axes(v, [d for d in range(len(v.shape)) if d != dim])
    scale, norm = (reshape(convert(ctx, t, norms.dtype), axes.shape) for t in (g, norms))

    def product(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        a, b = (ops.cast(t.load(ops, axes.at(i, r)), norms.dtype) for t in (grad, v))
        return a * b

    total = ctx.reduce(axes.shape, axes.rshape, "sum", product)
    along = ctx.pointwise(
        axes.shape, norms.dtype, lambda ops, i: total.load(ops, i) / norm.load(ops, i)
    )

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        row = axes.kept_of(i)
        a, b = (ops.cast(t.load(ops, i), norms.dtype) for t in (grad, v))
        length = norm.load(ops, row)
        across = a - b * along.load(ops, row) / length
        return ops.cast(scale.load(ops, row) / length * across, v.dtype)

    return ctx.pointwise(v.shape, v.dtype, body, ctx.out_strides(0)), _stat(ctx, along, 1)
