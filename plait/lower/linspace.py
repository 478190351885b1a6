"""linspace, with the arithmetic of ATen: from both ends to the middle, each element with one
rounding.

For integers this decides which one a quotient is truncated to, so the steps are taken in f64 with
fused multiply-adds, as ATen's compiled loop takes them.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.ir.dtypes import LOOP_DTYPES, f64
from plait.ir.expr import Expr, Size, smax
from plait.ir.loops import Node
from plait.ir.maths import fma, where
from plait.ir.record import Recorder
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.shape import compare, result, scalar

aten = torch.ops.aten


@lower(
    aten.linspace.default,
    aten.linspace.Tensor_Tensor,
    aten.linspace.Tensor_Scalar,
    aten.linspace.Scalar_Tensor,
)
def linspace(ctx: Lowering, start: Any, end: Any, steps: Size, **_: Any) -> View:
    dtype = ctx.out_dtype()
    if dtype not in LOOP_DTYPES:
        raise NoRule(f"{dtype} elements")
    compute = compute_dtype(dtype) if dtype.is_float else f64
    last = steps - 1
    half = smax(steps // 2, 1)  # one element is the start

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        def number(value: Any) -> Node:
            return ops.cast(scalar(ctx, ops, value, dtype), compute)

        def count(value: Size) -> Node:
            return ops.cast(ops.index(value), compute)

        first, final = number(start), number(end)
        step = (final - first) / count(smax(last, 1))
        up = fma(step, count(i[0]), first)
        left = last - i[0]
        down = fma(-step, count(left), final)
        value = where(compare(ops, "lt", i[0], half), up, down)
        return ops.cast(value, dtype)

    return result(ctx, body)
