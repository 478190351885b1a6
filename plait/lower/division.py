"""Division and remainders: quotients rounded as eager rounds them, floors that agree with the
remainders."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.ir.checks import ZERO_DIVISION
from plait.ir.dtypes import DType, b1, f64
from plait.ir.loops import Node, apply, cast, const, node
from plait.ir.maths import copysign, eq, floor, fmod, isinf, ne, trunc, where
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import (
    FLOAT,
    Formula,
    Operand,
    elementwise,
    overloads,
    register,
    rounds_all,
    rounds_factors,
)

aten = torch.ops.aten


def divide(op: str, a: Node, b: Node) -> Node:
    """A division or remainder; of integers, the call fails where the divisor is 0."""
    if a.dtype.is_float:
        return apply(op, a, b)
    if a.dtype == b1:
        raise NoRule("a division of bools")
    if not (b.op == "const" and b.attr):
        b = node("nonzero", (b,), ZERO_DIVISION, b.dtype)
    return apply(op, a, b)


def _rounds_dividend(ctx: Lowering, xs: Sequence[Operand]) -> Sequence[bool]:
    """Of a quotient: the dividend, be it a number; the divisor is treated as a factor."""
    return [True, *rounds_factors(ctx, xs[1:])]


def _truediv(a: Node, b: Node) -> Node:
    return a / b


def _by_reciprocal(a: Node, b: Node) -> Node:
    return a * (1.0 / b)


def _by_exact_reciprocal(a: Node, b: Node) -> Node:
    """Of a Python number, and of one that sizes make, eager computes the reciprocal in double."""
    if b.op == "const" and isinstance(b.attr, (int, float)) and b.attr:
        return a * (1.0 / b.attr)
    if b.op == "cast":
        exact = const(1.0, f64) / cast(b.args[0], f64)
        return a * cast(exact, b.dtype)
    return _by_reciprocal(a, b)


def _divided(ctx: Lowering, b: Operand) -> Formula:
    """How eager's kernel divides floats by b: those of a GPU multiply by the reciprocal of a
    number, which may be a last bit off."""
    number = not any(rounds_factors(ctx, (b,)))
    return _by_reciprocal if number and not ctx.facts().eager_cpu else _truediv


def _floor_divide(a: Node, b: Node, divided: Formula, held: DType) -> Node:
    """floor(a/b) as eager does it for floats: by the remainder, so that it never disagrees with it.
    held: what eager holds the floor in."""
    if not a.dtype.is_float:
        return divide("floordiv", a, b)
    quotient = divided(a, b)
    rem = fmod(a, b)
    div = divided(a - rem, b)
    off = ne(rem, 0) & ne(b < 0, rem < 0)
    div = where(off, div - 1, div)
    low = cast(cast(floor(div), held), div.dtype)
    low = where(div - low > 0.5, low + 1, low)
    out = where(ne(div, 0), low, copysign(const(0.0, a.dtype), quotient))
    over = isinf(quotient) & ~isinf(a)  # fmod of vectors is NaN then
    return where(over | eq(b, 0), quotient, out)


def _trunc_divide(a: Node, b: Node, divided: Formula) -> Node:
    if a.dtype.is_float:
        return trunc(divided(a, b))
    return divide("truncdiv", a, b)


def _quotient(ctx: Lowering, a: Operand, b: Operand, mode: str | None) -> View:
    divided = _divided(ctx, b)
    if mode is None:
        exact = divided is _by_reciprocal and not isinstance(b, View)
        formula = _by_exact_reciprocal if exact else divided
        return elementwise(ctx, formula, (a, b), FLOAT, rounds=_rounds_dividend)
    if mode == "trunc":
        return elementwise(
            ctx, lambda x, y: _trunc_divide(x, y, divided), (a, b), rounds=_rounds_dividend
        )
    held = ctx.out_dtype() if divided is _by_reciprocal else compute_dtype(ctx.out_dtype())
    return elementwise(
        ctx, lambda x, y: _floor_divide(x, y, divided, held), (a, b), rounds=_rounds_dividend
    )


@lower(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def _div(ctx: Lowering, a: Operand, b: Operand) -> View:
    return _quotient(ctx, a, b, None)


@lower(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(ctx: Lowering, a: Operand, b: Operand, *, rounding_mode: str | None) -> View:
    return _quotient(ctx, a, b, rounding_mode)


@lower(aten.floor_divide.default, aten.floor_divide.Scalar)
def _floor_div(ctx: Lowering, a: Operand, b: Operand) -> View:
    return _quotient(ctx, a, b, "floor")


register(
    overloads("fmod", "Tensor", "Scalar"),
    lambda a, b: divide("fmod" if a.dtype.is_float else "rem", a, b),
    rounds=rounds_all,
)
register(
    overloads("remainder", "Tensor", "Scalar", "Scalar_Tensor"),
    lambda a, b: divide("pymod" if a.dtype.is_float else "mod", a, b),
    rounds=rounds_all,
)
