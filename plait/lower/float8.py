"""Casts between floats of 8 bits and others, bit for bit as eager's, in fused loops.

A float8 tensor is memory of bytes: a rule sees its buffer as u8, and takes the codes apart or puts
them together with integer operations, which every kernel target has. Whatever else is done with
float8 tensors is a view or a call of ATen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from plait import compat
from plait.ir.dtypes import DType, f8e4m3fn, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, f32, u8, u32
from plait.ir.loops import Alias, Node
from plait.ir.maths import eq, where
from plait.ir.record import Recorder
from plait.lower.core import Lowering, NoRule, View
from plait.lower.memory import alias

_SIGN, _NAN, _INFINITY = 0x80000000, 0x7FC00000, 0x7F800000


@dataclass(frozen=True, slots=True)
class Format:
    """A float of 8 bits: 1 of sign, then exponent, then `mantissa` bits; `bias` of the exponent.

    limit: what is not below it has no code and becomes `over`. nan: the code of NaN. signed_zero:
    there is a -0, and NaN has codes of either sign; else NaN is the code that -0 would have.
    infinity: its code, None if there is none.
    """

    mantissa: int
    bias: int
    limit: float
    over: int
    nan: int
    signed_zero: bool
    infinity: int | None = None


FORMATS: dict[DType, Format] = {
    f8e4m3fn: Format(3, 7, 480.0, 0x7F, 0x7F, True),
    f8e5m2: Format(2, 15, 65536.0, 0x7C, 0x7F, True, infinity=0x7C),
    f8e4m3fnuz: Format(3, 8, 256.0, 0x80, 0x80, False),
    f8e5m2fnuz: Format(2, 16, 65536.0, 0x80, 0x80, False),
}


@cache
def _saturating() -> bool:
    """Whether the installed torch gives numbers beyond the largest of float8_e4m3fn that one, and
    not NaN."""
    with compat.tracing.untraced_operators():
        return bool(torch.full((), 1000.0).to(torch.float8_e4m3fn).float() == 448.0)


def _format(dtype: DType) -> Format | None:
    form = FORMATS.get(dtype)
    if dtype == f8e4m3fn and form is not None and _saturating():
        # 464 lies between the largest number and what would follow it.
        return replace(form, limit=464.0, over=0x7E)
    return form


def convert_float8(ctx: Lowering, x: View, want: DType) -> View:
    """x as dtype `want`, one of which is a float of 8 bits. Raises NoRule for formats without a
    rule."""
    if any(d.kind == "8" and d not in FORMATS for d in (x.dtype, want)) or "c" in (
        x.dtype.kind,
        want.kind,
    ):
        raise NoRule(f"{x.dtype} to {want}")
    given, codes = _format(x.dtype), _format(want)
    source = x if given is None else _bytes(ctx, x)

    def value(ops: Recorder, i: tuple[object, ...]) -> Node:
        number = source.load(ops, i)  # type: ignore[arg-type]
        number = ops.cast(number, f32) if given is None else decoded(ops, number, given)
        return ops.cast(number, want) if codes is None else encoded(ops, number, codes)

    made = ctx.pointwise(x.shape, want if codes is None else u8, value, ctx.out_strides())
    return made if codes is None else _seen(ctx, made, want)


def decoded(ops: Recorder, code: Node, form: Format) -> Node:
    """The f32 value of a code."""

    def number(k: int) -> Node:
        return ops.const(k, u32)

    shift = 23 - form.mantissa
    wide = ops.cast(code, u32)
    size = wide & number(0x7F)
    sign = (wide & number(0x80)) << number(24)
    normal = (size << number(shift)) + number((127 - form.bias) << 23)
    step = ops.const(2.0 ** (1 - form.bias - form.mantissa), f32)
    small = ops.bitcast(ops.cast(size, f32) * step, u32)
    bits = where(size < number(1 << form.mantissa), small, normal)
    if not form.signed_zero:
        bits = where(eq(wide, number(0x80)), number(_NAN), bits)
    elif form.infinity is None:
        bits = where(eq(size, number(0x7F)), number(_NAN), bits)
    else:
        top = number(form.infinity)
        beyond = where(eq(size, top), number(_INFINITY), number(_NAN))
        bits = where(size >= top, beyond, bits)
    return ops.bitcast(bits | sign, f32)


def encoded(ops: Recorder, value: Node, form: Format) -> Node:
    """The code, as u8, of the nearest number to an f32 value; of two, the one with an even code."""

    def number(k: int) -> Node:
        return ops.const(k, u32)

    shift, bias = 23 - form.mantissa, 127 - form.bias
    bits = ops.bitcast(value, u32)
    sign = bits & number(_SIGN)
    size = bits ^ sign
    # Below the least normal number codes are a fixed point: adding a power of two lets the addition
    # round.
    magic = (bias + shift + 1) << 23
    added = ops.bitcast(size, f32) + ops.const(2.0 ** ((magic >> 23) - 127), f32)
    small = ops.bitcast(added, u32) - number(magic)
    odd = (size >> number(shift)) & number(1)
    half = size - number(bias << 23) + number((1 << (shift - 1)) - 1)
    normal = (half + odd) >> number(shift)
    code = where(size < number((bias + 1) << 23), small, normal)
    over = where(size > number(_INFINITY), number(form.nan), number(form.over))
    limit = ops.bitcast(ops.const(form.limit, f32), u32)
    code = where(size >= limit, over, code)
    signed = code | (sign >> number(24))
    if not form.signed_zero:
        signed = where(eq(code, number(0)), number(0), signed)
    return ops.cast(signed, u8)


def _bytes(ctx: Lowering, x: View) -> View:
    """x with its buffer seen as bytes: those it was made of, if a loop made them."""
    b = ctx.buffers[x.buf]
    for op in ctx.ops:
        if isinstance(op, Alias) and x.buf in (op.out, op.base) and op.offset == 0 and op.relative:
            other = ctx.buffers[op.base if op.out == x.buf else op.out]
            if (other.dtype, other.shape, other.strides) == (u8, b.shape, b.strides):
                return View(other.name, u8, x.shape, x.vars, x.index)
    seen = alias(ctx, ctx.whole(x.buf), u8, b.shape, b.strides, 0)
    return View(seen.buf, u8, x.shape, x.vars, x.index)


def _seen(ctx: Lowering, codes: View, want: DType) -> View:
    """A buffer of bytes as one of float8 elements."""
    b = ctx.buffers[codes.buf]
    return alias(ctx, codes, want, b.shape, b.strides, 0)
