"""Elementwise ATen ops: the rules of arithmetic, powers, comparison and logic.

Divisions are in division.py, activations and special functions in pointwise_nn.py and
pointwise_special.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from plait import compat
from plait.ir.dtypes import b1, f16, f64
from plait.ir.expr import Expr
from plait.ir.loops import Node, apply, cast, const
from plait.ir.maths import (
    copysign,
    exp2,
    fma,
    isnan,
    log,
    maximum,
    minimum,
    ne,
    reciprocal,
    rounded,
    rsqrt,
    sign,
    signbit,
    sqrt,
    trunc,
    where,
)
from plait.ir.record import Recorder
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import (
    FLOAT,
    Formula,
    Operand,
    Scalar,
    broadcast_index,
    common_dtype,
    elementwise,
    overloads,
    register,
    rounded_number,
    rounds_all,
    rounds_factors,
    row,
)

aten = torch.ops.aten

# ------------------------------------------------------------------------------------- one argument
for _name in (
    "acos asin atan atanh cos cosh erf erfc exp exp2 expm1 lgamma log log10 log1p log2 reciprocal "
    "rsqrt sin sinh sqrt tan tanh"
).split():
    register(overloads(_name), row(_name), FLOAT)


def _area(op: str) -> Formula:
    """asinh or acosh. The vector functions square their argument: of a large x it is log(2x)."""

    def formula(x: Node) -> Node:
        a = abs(x)
        far = log(a) + math.log(2)
        far = copysign(far, x) if op == "asinh" else where(x < 0, math.nan, far)
        return where(a > (2.0**40), far, apply(op, x))

    return formula


for _name in ("acosh", "asinh"):
    register(overloads(_name), _area(_name), FLOAT)


def unless_integer(op: str) -> Formula:
    """An op that leaves integers and bools as they are."""
    return lambda x: apply(op, x) if x.dtype.is_float else x


for _name in ("ceil", "floor", "trunc", "round"):
    register(overloads(_name), unless_integer(_name))


def _abs(x: Node) -> Node:
    return abs(x) if x.dtype.kind in "fi" else x


def _neg(x: Node) -> Node:
    return -x if x.dtype.kind in "fi" else 0 - x


def _sign(x: Node) -> Node:
    if x.dtype.kind in "fi":
        return sign(x)
    return x if x.dtype == b1 else cast(ne(x, 0), x.dtype)


register(overloads("abs"), _abs)
register(overloads("neg"), _neg)
register(overloads("sign"), _sign)
register(overloads("sgn"), _sign)
register(overloads("bitwise_not"), row("not"))
register(overloads("positive") + overloads("conj_physical"), lambda x: x)


def relu(x: Node) -> Node:
    """max(x, 0)."""
    return x if x.dtype.kind in "ub" else maximum(x, 0)


register(overloads("relu"), relu)


def _signbit(x: Node) -> Node:
    if x.dtype.is_float:
        return signbit(x)
    return const(False, b1) if x.dtype.kind in "ub" else x < 0


def _test(op: str) -> Formula:
    return lambda x: apply(op, x) if x.dtype.is_float else const(False, b1)


register(overloads("isnan"), _test("isnan"))
register(overloads("isinf"), _test("isinf"))
register(overloads("signbit"), _signbit)


@lower(aten.round.decimals)
def _round_decimals(ctx: Lowering, x: View, *, decimals: int) -> View:
    scale = 10.0 ** abs(decimals)
    there, back = ("mul", "truediv") if decimals >= 0 else ("truediv", "mul")

    def formula(a: Node) -> Node:
        return apply(back, rounded(apply(there, a, scale)), scale) if a.dtype.is_float else a

    return elementwise(ctx, formula, (x,))


@lower(aten.angle.default)
def _angle(ctx: Lowering, x: View) -> View:
    def formula(a: Node) -> Node:
        out = where(a < 0, const(3.141592653589793, a.dtype), 0.0)
        return where(isnan(a), a, out)

    return elementwise(ctx, formula, (x,), FLOAT)


# --------------------------------------------------------------------------------------- arithmetic
def _rounds_terms(ctx: Lowering, xs: Sequence[Operand]) -> Sequence[bool]:
    """Of a sum: all on a CPU; on a GPU as of a product."""
    return rounds_all(ctx, xs) if ctx.facts().eager_cpu else rounds_factors(ctx, xs)


def _add(a: Node, b: Node) -> Node:
    return a | b if a.dtype == b1 else a + b


def _mul(a: Node, b: Node) -> Node:
    return a & b if a.dtype == b1 else a * b


@lower(aten.add.Tensor, aten.add.Scalar)
def _add_rule(ctx: Lowering, a: Operand, b: Operand, alpha: Scalar = 1) -> View:
    return _scaled(ctx, _add, a, b, alpha)


@lower(aten.sub.Tensor, aten.sub.Scalar)
def _sub_rule(ctx: Lowering, a: Operand, b: Operand, alpha: Scalar = 1) -> View:
    return _scaled(ctx, row("sub"), a, b, alpha)


def _scaled(ctx: Lowering, formula: Formula, a: Operand, b: Operand, alpha: Scalar) -> View:
    if isinstance(alpha, (bool, int, float)) and alpha == 1:
        return elementwise(ctx, formula, (a, b), rounds=_rounds_terms)
    common = common_dtype((a, b))
    return elementwise(
        ctx,
        lambda x, y, s: formula(x, _mul(y, s)),
        (a, b, alpha),
        common=common,
        rounds=_rounds_terms,
    )


register(overloads("mul", "Tensor", "Scalar"), _mul, rounds=rounds_factors)


def _multiply_add(a: Node, b: Node, c: Node) -> Node:
    return fma(a, b, c) if a.dtype.is_float else _add(_mul(a, b), c)


register(compat.decompositions.fused_multiply_add(), _multiply_add)


@lower(aten.addcmul.default)
def _addcmul(ctx: Lowering, x: View, y: View, z: View, *, value: Scalar = 1) -> View:
    """Rounded like eager's kernel: after value * y and at the end."""
    common = common_dtype((x, y, z))
    return elementwise(
        ctx, lambda a, b, c, v: _multiply_add(_mul(b, v), c, a), (x, y, z, value), common=common
    )


@lower(aten.addcdiv.default)
def _addcdiv(ctx: Lowering, x: View, y: View, z: View, *, value: Scalar = 1) -> View:
    common = common_dtype((x, y, z))
    return elementwise(ctx, lambda a, b, c, v: a + b * v / c, (x, y, z, value), common=common)


@lower(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(ctx: Lowering, x: View, y: View, weight: Operand) -> View:
    """From the nearer end."""

    def formula(a: Node, b: Node, w: Node) -> Node:
        near = abs(w) < 0.5
        return fma(where(near, w, w - 1), b - a, where(near, a, b))

    return elementwise(ctx, formula, (x, y, weight), common=common_dtype((x, y)))


def integer_power(x: Node, n: int) -> Node:
    """x ** n by squaring, n >= 0."""
    if n == 0:
        return const(1, x.dtype)
    out: Node | None = None
    while n:
        if n & 1:
            out = x if out is None else _mul(out, x)
        n >>= 1
        if n:
            x = _mul(x, x)
    assert out is not None, n
    return out


@lower(aten.pow.Tensor_Scalar)
def _pow_scalar(ctx: Lowering, x: View, exponent: Scalar) -> View:
    if not isinstance(exponent, (bool, int, float)):
        return _pow(ctx, x, exponent)

    common = common_dtype((x, exponent))
    power = float(exponent) if common == compute_dtype(common) else rounded_number(exponent, common)
    roots = common != f16 or not ctx.facts().eager_cpu  # of -0 and -infinity, they are no powers

    def formula(a: Node) -> Node:
        if not a.dtype.is_float:
            if exponent < 0:
                raise NoRule("integers to a negative power")
            return integer_power(a, int(exponent))
        match float(exponent):
            case 0.0 | 1.0 | 2.0 | 3.0:
                return integer_power(a, int(exponent))
            case 0.5 if roots:
                return sqrt(a)
            case -0.5 if roots:
                return rsqrt(a)
            case -1.0:
                return reciprocal(a)
            case -2.0:
                return reciprocal(a * a)
        return a**power

    return elementwise(ctx, formula, (x,), common=common)


@lower(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _pow_any(ctx: Lowering, x: Operand, exponent: Operand) -> View:
    return _pow(ctx, x, exponent)


def _pow(ctx: Lowering, x: Operand, exponent: Operand) -> View:
    if not common_dtype((x, exponent)).is_float:
        raise NoRule("an integer power with an exponent that is not constant")
    # `pow` is nearer there.
    doubles = common_dtype((x, exponent)) == f64 and not ctx.facts().eager_cpu
    if not isinstance(x, View) and isinstance(x, (int, float)) and x == 2 and not doubles:
        return elementwise(ctx, row("exp2"), (exponent,), common=common_dtype((x, exponent)))
    return elementwise(ctx, row("pow"), (x, exponent), rounds=rounds_all)


def _if_float(op: str, otherwise: str) -> Formula:
    return lambda a, b: apply(op if a.dtype.is_float else otherwise, a, b)


register(overloads("maximum"), row("max"))
register(overloads("minimum"), row("min"))
register(overloads("fmax"), _if_float("fmax", "max"))
register(overloads("fmin"), _if_float("fmin", "min"))
register(overloads("atan2"), row("atan2"), FLOAT)
register(overloads("hypot"), row("hypot"))
register(overloads("copysign", "Tensor", "Scalar"), row("copysign"), FLOAT)


@lower(aten.nextafter.default)
def _nextafter(ctx: Lowering, a: View, b: View) -> View:
    if common_dtype((a, b)) != compute_dtype(common_dtype((a, b))):
        raise NoRule("the next half-precision float")
    return elementwise(ctx, row("nextafter"), (a, b))


@lower(aten.ldexp.Tensor)
def _ldexp(ctx: Lowering, a: Operand, b: Operand) -> View:
    """a * 2 ** b. Where b is an integer, 2 ** b may overflow and the product not: it is made in
    three steps. All products of larger exponents are 0 or infinite."""
    most = 2200.0 if common_dtype((a, b), FLOAT) == f64 else 378.0

    def in_steps(a: Node, b: Node) -> Node:
        within = maximum(minimum(b, most), -most)
        third = trunc(within * (1 / 3))
        step, rest = exp2(third), exp2(within - third * 2.0)
        return a * step * step * rest

    whole = not common_dtype((b,)).is_float
    return elementwise(ctx, in_steps if whole else lambda a, b: a * exp2(b), (a, b), FLOAT)


@lower(aten.clamp.default, aten.clamp.Tensor)
def _clamp(ctx: Lowering, x: View, min: Operand | None = None, max: Operand | None = None) -> View:
    limits = [(op, lim) for op, lim in (("max", min), ("min", max)) if lim is not None]

    def formula(a: Node, *ends: Node) -> Node:
        for (op, _), end in zip(limits, ends, strict=True):
            a = apply(op, a, end)
        return a

    return elementwise(ctx, formula, (x, *(lim for _, lim in limits)))


# ----------------------------------------------------------------------------- comparison and logic
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    register(overloads(_name, "Tensor", "Scalar"), row(_name), rounds=rounds_all)

for _name in ("and", "or", "xor"):
    register(overloads(f"bitwise_{_name}", "Tensor", "Scalar", "Scalar_Tensor"), row(_name))


def _shift(op: str) -> Formula:
    def formula(a: Node, b: Node) -> Node:
        if a.dtype.is_float:
            raise NoRule("a shift of floats")
        return apply(op, a, b)

    return formula


for _name, _short, _op in (("left", "__lshift__", "shl"), ("right", "__rshift__", "shr")):
    register(
        overloads(f"bitwise_{_name}_shift", "Tensor", "Tensor_Scalar", "Scalar_Tensor")
        + overloads(_short, "Tensor", "Scalar"),
        _shift(_op),
    )


def _logical(op: str) -> Callable[..., View]:
    return lambda ctx, *xs: elementwise(ctx, row(op), xs, common=b1)


for _name in ("and", "or", "xor", "not"):
    lower(getattr(aten, f"logical_{_name}").default)(_logical(_name))


@lower(aten.where.self)
def _where(ctx: Lowering, cond: View, a: View, b: View) -> View:
    dtype, shape = ctx.out_dtype(), ctx.out_shape()

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        test, yes, no = (x.load(ops, broadcast_index(x, i, shape)) for x in (cond, a, b))
        return where(ops.cast(test, b1), ops.cast(yes, dtype), ops.cast(no, dtype))

    return ctx.pointwise(shape, dtype, body, ctx.out_strides())
