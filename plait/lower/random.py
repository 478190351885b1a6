"""Rules for plait's own random operators; plait/runtime/philox.py says which bits belong to which
element.

`plait::seed` stays a call (`library.py`); the philox operators are pointwise functions of seed and
position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import plait.runtime.philox  # noqa: F401 - it defines the operators
from plait.ir.checks import Check
from plait.ir.dtypes import bf16, f16, f32, f64, i64
from plait.ir.expr import Size, compare, contiguous_strides, total
from plait.ir.loops import Node, apply
from plait.ir.maths import cos, eq, log, mod, philox, sqrt, where
from plait.ir.record import Recorder
from plait.lower.core import Lowering, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import result

_M32 = 0xFFFFFFFF
_UNIFORM_BITS = {f32: 24, f16: 11, bf16: 8}

Words = Callable[[int], Node]  # k -> word k of the element, an i64 in [0, 2**32)
Formula = Callable[[Recorder, Words], Node]


@lower(torch.ops.plait.within.default)
def within(ctx: Lowering, x: View, low: float, high: float, message: str) -> View:
    def body(ops: Recorder, i: tuple[Size, ...]) -> Node:
        value = x.load(ops, i)
        wide = ops.cast(value, compute_dtype(x.dtype))
        ends = (
            apply(op, wide, ops.const(end, wide.dtype)) for op, end in (("ge", low), ("le", high))
        )
        holds = ops.nonzero(ops.cast(apply("and", *ends), i64), Check("RuntimeError", message))
        return where(eq(holds, ops.const(1, i64)), value, ops.const(0, x.dtype))

    return result(ctx, body)


def _draw(ctx: Lowering, key: View, offset: int, formula: Formula) -> View:
    """The current node's result: formula over the words of each element, cast to its dtype."""
    shape, dtype = ctx.out_shape(), ctx.out_dtype()
    strides = contiguous_strides(shape)

    def body(ops: Recorder, i: tuple[Size, ...]) -> Node:
        linear = ops.index(total(v * s for v, s in zip(i, strides, strict=True)))
        drawn = key.load(ops, ())

        def word(k: int) -> Node:
            # The op's third argument holds the word number in its low two bits and the counter's
            # third word above them.
            return philox(drawn, linear, ops.const(k | (offset & _M32) << 2, i64))

        return ops.cast(formula(ops, word), dtype)

    return result(ctx, body)


def _shifted(ops: Recorder, word: Node, bits: int) -> Node:
    return word >> ops.const(bits, i64)


def _scaled(ops: Recorder, whole: Node, exponent: int, wide: bool) -> Node:
    """whole * 2**exponent as f64 or f32; exact for the integers met here."""
    dtype = f64 if wide else f32
    return ops.cast(whole, dtype) * ops.const(2.0**exponent, dtype)


def _double(ops: Recorder, high: Node, low: Node) -> Node:
    """53 bits of two words as an f64 in [0, 1)."""
    upper = _shifted(ops, high, 5) * ops.const(2**26, i64)
    return _scaled(ops, upper + _shifted(ops, low, 6), -53, True)


@lower(torch.ops.plait.philox_uniform.default)
def philox_uniform(ctx: Lowering, key: View, offset: int, size: Any, dtype: torch.dtype) -> View:
    out = ctx.out_dtype()

    def formula(ops: Recorder, word: Words) -> Node:
        if out == f64:
            return _double(ops, word(0), word(1))
        bits = _UNIFORM_BITS[out]
        return _scaled(ops, _shifted(ops, word(0), 32 - bits), -bits, False)

    return _draw(ctx, key, offset, formula)


@lower(torch.ops.plait.philox_normal.default)
def philox_normal(ctx: Lowering, key: View, offset: int, size: Any, dtype: torch.dtype) -> View:
    wide = ctx.out_dtype() == f64
    work = f64 if wide else f32

    def formula(ops: Recorder, word: Words) -> Node:
        if wide:
            a = _double(ops, word(0), word(1)) + ops.const(2.0**-53, f64)
            b = _double(ops, word(2), word(3))
        else:
            a = _scaled(ops, _shifted(ops, word(0), 8) + ops.const(1, i64), -24, False)
            b = _scaled(ops, _shifted(ops, word(1), 8), -24, False)
        radius = sqrt(ops.const(-2.0, work) * log(a))
        return radius * cos(ops.const(2 * math.pi, work) * b)

    return _draw(ctx, key, offset, formula)


@lower(torch.ops.plait.philox_randint.default)
def philox_randint(
    ctx: Lowering, key: View, offset: int, low: Size, high: Size, size: Any, dtype: torch.dtype
) -> View:
    span = high - low
    ctx.assert_true(
        compare("lt", low, high), f"random integers from the empty range [{low}, {high})"
    )

    def formula(ops: Recorder, word: Words) -> Node:
        upper = word(1) & ops.const(0x7FFFFFFF, i64)
        number = (upper << ops.const(32, i64)) | word(0)
        return ops.index(low) + mod(number, ops.index(span))

    return _draw(ctx, key, offset, formula)
