"""Fake quantisation: what quantising and reading back makes of a tensor, and where it was not cut
off."""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.ir.dtypes import f32, i64
from plait.ir.expr import Expr
from plait.ir.loops import Node, const
from plait.ir.maths import maximum, minimum, ne, rounded, where
from plait.ir.record import Recorder
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.elementwise import result, scalar
from plait.lower.view import wrap_dim

aten = torch.ops.aten

Point = tuple[Expr, ...]
Grid = Callable[[Recorder, Point], tuple[Node, Node]]  # (scale f32, zero point i64) at a point


def _fake_quantize(
    ctx: Lowering, x: View, low: int, high: int, grid: Grid, enabled: View | None = None
) -> tuple[View, View]:
    """(x rounded to the grid and cut off at low and high, whether it was not cut off)."""
    if x.dtype != f32:
        raise NoRule(f"{x.dtype} elements")

    def on(ops: Recorder) -> Node | None:
        return None if enabled is None else ne(enabled.load(ops, (0,)), 0)

    def number(ops: Recorder, i: Point) -> tuple[Node, Node, Node]:
        scale, zero = grid(ops, i)
        steps = x.load(ops, i) * (const(1, f32) / scale)
        q = ops.cast(ops.cast(zero, f32) + rounded(steps), i64)
        return q, scale, zero

    def value(ops: Recorder, i: Point) -> Node:
        q, scale, zero = number(ops, i)
        cut = minimum(maximum(q, low), high) - zero
        out = ops.cast(cut, f32) * scale
        switch = on(ops)
        return out if switch is None else where(switch, out, x.load(ops, i))

    def inside(ops: Recorder, i: Point) -> Node:
        q, _, _ = number(ops, i)
        fits = (q >= low) & (q <= high)
        switch = on(ops)
        return fits if switch is None else fits | ~switch

    return result(ctx, value, 0), result(ctx, inside, 1)


@lower(aten.fake_quantize_per_tensor_affine_cachemask.default)
def per_tensor(
    ctx: Lowering, x: View, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> tuple[View, View]:
    def grid(ops: Recorder, i: Point) -> tuple[Node, Node]:
        return scalar(ctx, ops, scale, f32), scalar(ctx, ops, zero_point, i64)

    return _fake_quantize(ctx, x, quant_min, quant_max, grid)


@lower(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def per_tensor_by_tensors(
    ctx: Lowering,
    x: View,
    scale: View,
    zero_point: View,
    fake_quant_enabled: View,
    quant_min: int,
    quant_max: int,
) -> tuple[View, View]:
    if any(len(v.shape) != 1 for v in (scale, zero_point, fake_quant_enabled)):
        raise NoRule("parameters of another rank")

    def grid(ops: Recorder, i: Point) -> tuple[Node, Node]:
        return ops.cast(scale.load(ops, (0,)), f32), ops.cast(zero_point.load(ops, (0,)), i64)

    return _fake_quantize(ctx, x, quant_min, quant_max, grid, fake_quant_enabled)


@lower(aten.fake_quantize_per_channel_affine_cachemask.default)
def per_channel(
    ctx: Lowering, x: View, scale: View, zero_point: View, axis: int, quant_min: int, quant_max: int
) -> tuple[View, View]:
    if zero_point.dtype.is_float:
        raise NoRule("zero points between the steps")
    d = wrap_dim(axis, len(x.shape))

    def grid(ops: Recorder, i: Point) -> tuple[Node, Node]:
        return ops.cast(scale.load(ops, (i[d],)), f32), ops.cast(zero_point.load(ops, (i[d],)), i64)

    return _fake_quantize(ctx, x, quant_min, quant_max, grid)
