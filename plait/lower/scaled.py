"""The rule of products of floats of 8 bits with scales (`_scaled_mm`).

GPUs have instructions for them, which the vendor's library calls. A CPU has none: there the numbers
are converted, by loops, and multiplied in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.ir.dtypes import f32
from plait.ir.expr import Expr, product
from plait.ir.loops import Node
from plait.ir.record import Recorder
from plait.lower.core import Lowering, View, lower
from plait.lower.elementwise import broadcast
from plait.lower.extern import call_op
from plait.lower.float8 import converted
from plait.lower.library import by_library

aten = torch.ops.aten


@lower(aten._scaled_mm.default, any_dtype=True)
def scaled_mm(
    ctx: Lowering,
    a: View,
    b: View,
    scale_a: View,
    scale_b: View,
    bias: View | None = None,
    scale_result: View | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:
    out, shape = ctx.out_dtype(), ctx.out_shape()
    by_row = scale_a.shape in ((), (1,), (1, 1), (shape[0], 1))
    by_column = scale_b.shape in ((), (1,), (1, 1), (1, shape[1]))
    scales = by_row and by_column and scale_a.dtype == scale_b.dtype == f32
    if not (scales and ctx.facts().is_host and ctx.cfg.kernels and out.is_float) or (
        scale_result is not None or a.dtype.kind != "8" or b.dtype.kind != "8"
    ):
        more = (bias, scale_result, out_dtype, use_fast_accum)
        return by_library(ctx, a, b, scale_a, scale_b, *more)
    wide = [converted(ctx, x, f32) for x in (a, b)]
    val = ctx.out_meta().new_empty(ctx.out_meta().shape, dtype=torch.float32)
    flops = product((2, *shape, a.shape[1]))
    made = call_op(ctx, aten.mm.default, wide, {}, val, flops=flops)
    rows, columns = broadcast(scale_a, shape), broadcast(scale_b, shape)
    added = None if bias is None else broadcast(bias, shape)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        value = made.load(ops, i) * rows.load(ops, i) * columns.load(ops, i)
        if added is not None:
            value = value + ops.cast(added.load(ops, i), f32)
        return ops.cast(value, out)

    return ctx.pointwise(shape, out, body, ctx.out_strides())
