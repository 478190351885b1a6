"""Floats of 8 bits, taken apart and put together with integer operations, which every target has.

In: nodes that hold codes (u8) or numbers (f32). Out: nodes that hold the others. A target with
instructions for it finds the nodes again (`code_of`, `number_of`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plait.ir.dtypes import DType, b1, f8e4m3fn, f8e4m3fnuz, f8e5m2, f8e5m2fnuz, f32, u8, u32
from plait.ir.loops import Node
from plait.ir.maths import eq, where
from plait.ir.record import Recorder
from plait.ir.rules import Simplifier

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

    @property
    def saturating(self) -> Format:
        """The same where numbers beyond the largest become that one, and not NaN."""
        # The limit lies between the largest number and what would follow it.
        return replace(self, limit=464.0, over=0x7E)


FORMATS: dict[DType, Format] = {
    f8e4m3fn: Format(3, 7, 480.0, 0x7F, 0x7F, True),
    f8e5m2: Format(2, 15, 65536.0, 0x7C, 0x7F, True, infinity=0x7C),
    f8e4m3fnuz: Format(3, 8, 256.0, 0x80, 0x80, False),
    f8e5m2fnuz: Format(2, 16, 65536.0, 0x80, 0x80, False),
}


def decoded(ops: Recorder, code: Node, form: Format | None) -> Node:
    """The f32 value of a code, a u8."""

    def number(k: int) -> Node:
        return ops.const(k, u32)

    if form is None:  # an exponent, and nothing else
        power = ops.cast(code, u32)
        bits = where(eq(power, number(0)), number(1 << 22), power << number(23))
        return ops.bitcast(where(eq(power, number(0xFF)), number(_NAN), bits), f32)
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


def encoded(ops: Recorder, value: Node, form: Format | None) -> Node:
    """The code, as u8, of the nearest number to an f32 value; of two, the one with an even code. Of
    two powers of two it is the larger, unless the smaller is no normal number."""

    def number(k: int) -> Node:
        return ops.const(k, u32)

    bits = ops.bitcast(value, u32)
    if form is None:
        power = (bits >> number(23)) & number(0xFF)
        half = where(eq(power, number(0)), number((1 << 22) - 1), number(1 << 22))
        up = ((bits & number((1 << 23) - 1)) + half) >> number(23)
        return ops.cast(where(eq(power, number(0xFF)), power, power + up), u8)
    shift, bias = 23 - form.mantissa, 127 - form.bias
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


def encodes(n: Node, form: Format) -> Node | None:
    """The number whose code a node is, simplified but for the number; None if it is another
    value."""
    if n.op != "cast" or n.dtype != u8 or n.args[0].dtype != u32:
        return None
    return next(
        (x for x in _below(n, f32) if Simplifier((x,))(encoded(Recorder(), x, form)) is n), None
    )


def decodes(n: Node, form: Format | None) -> Node | None:
    """The code whose number a node is, simplified but for the code; None if it is another value."""
    if n.op != "bitcast" or n.dtype != f32 or n.args[0].dtype != u32:
        return None
    return next(
        (x for x in _below(n, u8) if Simplifier((x,))(decoded(Recorder(), x, form)) is n), None
    )


def _below(n: Node, dtype: DType) -> Iterator[Node]:
    """Values of this dtype that the words which a node is made of are made of."""
    seen, todo = {n}, [n]
    while todo:
        for a in todo.pop().args:
            if a in seen:
                continue
            seen.add(a)
            if a.dtype == dtype and a.op != "const":
                yield a
            elif a.dtype in (u32, b1):
                todo.append(a)
