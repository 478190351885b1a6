"""Tensors made from nothing: full, zeros, arange, linspace, eye."""

from __future__ import annotations

import math
from typing import Any

import torch

from plait.ir.dtypes import LOOP_DTYPES, b1, f64
from plait.ir.expr import Expr, Size, smax
from plait.ir.loops import Node
from plait.ir.maths import fma, where
from plait.ir.record import Recorder
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.dtypes import TO_TORCH, compute_dtype
from plait.lower.elementwise import compare, result, scalar

aten = torch.ops.aten


def fill(ctx: Lowering, value: Any) -> View:
    dtype = ctx.out_dtype()
    return result(ctx, lambda ops, i: scalar(ctx, ops, value, dtype))


@lower(aten.full.default, aten.full_like.default, aten.new_full.default)
def full(ctx: Lowering, *args: Any, **kwargs: Any) -> View:
    """full(size, value), full_like(x, value), new_full(x, size, value): the value comes last by
    position."""
    return fill(ctx, kwargs["fill_value"] if "fill_value" in kwargs else args[-1])


@lower(
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default,
    aten._efficientzerotensor.default,
)  # fmt: skip
def zeros(ctx: Lowering, *_: Any, **__: Any) -> View:
    return fill(ctx, 0)


@lower(
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.empty_permuted.default, aten.new_empty.default, aten.new_empty_strided.default,
)  # fmt: skip
def empty(ctx: Lowering, *_: Any, **__: Any) -> View:
    """Zeros, which cost nothing once a reader inlines them; under deterministic algorithms what
    eager fills new memory with, so that reading it shows."""
    dtype = ctx.out_dtype()
    fills: Any = torch.utils.deterministic
    if not (torch.are_deterministic_algorithms_enabled() and fills.fill_uninitialized_memory):
        return fill(ctx, 0)
    if dtype.is_float:
        return fill(ctx, math.nan)
    return fill(ctx, True if dtype == b1 else torch.iinfo(TO_TORCH[dtype]).max)


@lower(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(ctx: Lowering, *_: Any, **__: Any) -> View:
    return fill(ctx, 1)


@lower(aten.scalar_tensor.default)
def scalar_tensor(ctx: Lowering, value: Any, **_: Any) -> View:
    return fill(ctx, value)


@lower(aten.zero.default)
def zero(ctx: Lowering, x: View) -> View:
    return fill(ctx, 0)


@lower(aten.eye.default, aten.eye.m)
def eye(ctx: Lowering, *_: Any, **__: Any) -> View:
    dtype = ctx.out_dtype()
    return result(ctx, lambda ops, i: ops.cast(compare(ops, "eq", i[0], i[1]), dtype))


def _affine(ctx: Lowering, start: Any, step: Any) -> View:
    """start + step * i. Floats are computed in f64 and rounded once, as ATen does (its accumulation
    type)."""
    dtype = ctx.out_dtype()
    need = isinstance(start, float) or isinstance(step, float)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        if not need:
            return ops.cast(ops.index(start + i[0] * step), dtype)
        steps = scalar(ctx, ops, step, f64) * ops.cast(ops.index(i[0]), f64)
        return ops.cast(scalar(ctx, ops, start, f64) + steps, dtype)

    return result(ctx, body)


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, (bool, float)) and value == int(value) else value


@lower(aten.arange.default)
def arange(ctx: Lowering, end: Any, **_: Any) -> View:
    return _arange(ctx, 0, 1)


@lower(aten.arange.start)
def arange_start(ctx: Lowering, start: Any, end: Any, **_: Any) -> View:
    return _arange(ctx, start, 1)


@lower(aten.arange.start_step)
def arange_step(ctx: Lowering, start: Any, end: Any, step: Any = 1, **_: Any) -> View:
    return _arange(ctx, start, step)


def _arange(ctx: Lowering, start: Any, step: Any) -> View:
    if not ctx.out_dtype().is_float:
        start, step = (int(v) if isinstance(v, float) else v for v in (start, step))
    return _affine(ctx, _integral(start), _integral(step))


@lower(torch.ops.prims.iota.default)
def iota(ctx: Lowering, length: Size, *, start: Size, step: Size, **kw: Any) -> View:
    return _affine(ctx, start, step)


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
