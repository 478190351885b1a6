"""Rules for running combinations (cumsum and its kin), as Scan loops.

Sums and products run in ATen's accumulation type (f64 for f32) and are rounded once an element.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.ir.dtypes import DType, b1, bf16, f16, f32, f64, i64, u8
from plait.ir.loops import Node, Scan, loop_vars
from plait.ir.record import Recorder
from plait.lower.convert import convert
from plait.lower.core import Lowering, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.memory import copy
from plait.lower.view import wrap_dim

aten = torch.ops.aten

_ACCUMULATE: dict[DType, DType] = {f32: f64, f16: f32, bf16: f32}


def _scan(
    ctx: Lowering, x: View, dim: int, kind: str, dtype: DType, outs: tuple[bool, ...]
) -> tuple[View | None, ...]:
    """The scan of x, cast to dtype, along dim. outs: which results are wanted."""
    ops, vars_ = Recorder(), loop_vars("i", x.shape)
    body = ops.cast(x.load(ops, vars_), dtype)
    dtypes = (dtype, i64)[: len(outs)]
    names = tuple(
        ctx.new_buffer(t, x.shape) if want else None for t, want in zip(dtypes, outs, strict=True)
    )
    ctx.ops.append(Scan(names, vars_, wrap_dim(dim, len(x.shape)), kind, body, origin=ctx.origin))
    return tuple(None if n is None else ctx.whole(n) for n in names)


def _cumulative(ctx: Lowering, x: View, dim: int, kind: str) -> View:
    out = ctx.out_dtype()
    if not x.shape:
        return ctx.pointwise((), out, lambda ops, i: ops.cast(x.load(ops, i), out))

    (made,) = _scan(ctx, _rounded(ctx, x, out), dim, kind, _ACCUMULATE.get(out, out), (True,))
    assert made is not None, f"a scan by {kind} that gives nothing"
    if made.dtype == out:
        return made

    def narrow(ops: Recorder, i: Any) -> Node:
        return ops.cast(made.load(ops, i), out)

    return ctx.pointwise(x.shape, out, narrow)


def _rounded(ctx: Lowering, x: View, dtype: DType) -> View:
    """x in the result's dtype, as eager converts before it adds."""
    if x.dtype == dtype:
        return x
    return ctx.pointwise(x.shape, dtype, lambda ops, i: ops.cast(x.load(ops, i), dtype))


@lower(aten.cumsum.default)
def cumsum(ctx: Lowering, x: View, dim: int, *, dtype: torch.dtype | None = None) -> View:
    return _cumulative(ctx, x, dim, "sum")


@lower(aten.cumprod.default)
def cumprod(ctx: Lowering, x: View, dim: int, *, dtype: torch.dtype | None = None) -> View:
    return _cumulative(ctx, x, dim, "prod")


def _extreme(ctx: Lowering, x: View, dim: int, kind: str) -> tuple[View | None, ...]:
    if not x.shape:
        return copy(ctx, x), ctx.pointwise((), i64, lambda ops, i: ops.const(0, i64))
    wide = u8 if x.dtype == b1 else compute_dtype(x.dtype)
    value, at = _scan(ctx, x, dim, kind, wide, (True, True))
    assert value is not None, f"a scan by {kind} that gives nothing"
    return convert(ctx, value, x.dtype), at


@lower(aten.cummax.default)
def cummax(ctx: Lowering, x: View, dim: int) -> tuple[View | None, ...]:
    return _extreme(ctx, x, dim, "max")


@lower(aten.cummin.default)
def cummin(ctx: Lowering, x: View, dim: int) -> tuple[View | None, ...]:
    return _extreme(ctx, x, dim, "min")
