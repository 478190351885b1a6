"""Rules of products of factors of 8 bits: of integers (`_int_mm`), of floats with scales
(`_scaled_mm`).

GPUs have instructions for them, which the vendor's library calls. Where memory takes all the time,
for few rows, a kernel of ours multiplies them, floats as bfloat16, which holds them, and finishes
the result. A CPU has no instructions for floats: there they are converted, by loops, and multiplied
in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.ir.calls import Operator
from plait.ir.dtypes import bf16, f32, i8
from plait.ir.expr import Expr, Size, product
from plait.ir.loops import Node
from plait.ir.record import Recorder
from plait.lower.core import Lowering, View, lower
from plait.lower.elementwise import broadcast
from plait.lower.extern import call_op
from plait.lower.float8 import converted
from plait.lower.library import by_library
from plait.lower.product import cut, launch, launch_grouped, row_cut

aten = torch.ops.aten


_MORE_ROWS = 16  # than so many has an operand of eager's product of integers on a GPU
_MOST_ROWS = 64  # up to which memory takes all the time


@lower(aten._int_mm.default)
def int_mm(ctx: Lowering, a: View, b: View) -> Any:
    m = a.shape[0]
    more = isinstance(m, int) and m > _MORE_ROWS
    how = cut(ctx, a, b, (i8,)) if more else None
    return by_library(ctx, a, b) if how is None else launch(ctx, a, b, how, Operator("_int_mm"))


@lower(aten._grouped_mm.default, any_dtype=True)
def grouped_mm(
    ctx: Lowering, a: View, b: View, ends: View | None = None, bias: View | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    made = None if ends is None or bias is not None else launch_grouped(ctx, a, b, ends)
    if made is None:
        return by_library(ctx, a, b, ends, bias, out_dtype)
    out = ctx.out_dtype()
    body = lambda ops, i: ops.cast(made.load(ops, i), out)
    return ctx.pointwise(ctx.out_shape(), out, body, ctx.out_strides())


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
    made = None
    if scales and ctx.cfg.kernels and out.is_float and scale_result is None:
        made = _product(ctx, a, b)
    if made is None:
        more = (bias, scale_result, out_dtype, use_fast_accum)
        return by_library(ctx, a, b, scale_a, scale_b, *more)
    rows, columns = broadcast(scale_a, shape), broadcast(scale_b, shape)
    added = None if bias is None else broadcast(bias, shape)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        value = made.load(ops, i) * rows.load(ops, i) * columns.load(ops, i)
        if added is not None:
            value = value + ops.cast(added.load(ops, i), f32)
        return ops.cast(value, out)

    return ctx.pointwise(shape, out, body, ctx.out_strides())


def _product(ctx: Lowering, a: View, b: View) -> View | None:
    """The product in float32, of converted numbers; None where the operator itself is better."""
    if a.dtype.kind != "8" or b.dtype.kind != "8":
        return None
    if not ctx.facts().is_host:
        m, by_row = a.shape[0], ctx.cfg.batch_invariant
        if not by_row and (not isinstance(m, int) or m > _MOST_ROWS):
            return None
        mark = ctx.mark()
        short = converted(ctx, a, bf16), converted(ctx, b, bf16, _turned(b))
        how = (row_cut if by_row else cut)(ctx, *short)
        if how is None:
            ctx.undo(mark)
            return None
        return launch(ctx, *short, how)
    wide = [converted(ctx, a, f32), converted(ctx, b, f32)]
    meta = ctx.out_meta()
    val = meta.new_empty(meta.shape, dtype=torch.float32)
    flops = product((2, *a.shape, b.shape[1]))
    made: View = call_op(ctx, aten.mm.default, wide, {}, val, flops=flops)
    return made


def _turned(b: View) -> tuple[Size, ...]:
    """Strides with columns side by side, as the operator has its right operand."""
    return (1, b.shape[0])
