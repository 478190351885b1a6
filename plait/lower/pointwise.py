"""Elementwise ATen ops: type promotion, broadcasting, and the rules of arithmetic, comparison and
logic.

Each op is a row: what it computes on nodes of one compute dtype, and how its inputs are promoted.
Half types are computed in f32 and rounded where eager rounds: at the result of every op.
Activations and special functions are in pointwise_nn.py and pointwise_special.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from plait import compat
from plait.errors import Unsupported
from plait.graph.refuse import CLONE, SHARED, repeats
from plait.ir.checks import ZERO_DIVISION
from plait.ir.dtypes import LOOP_DTYPES, DType, b1, f16, f64, i64
from plait.ir.expr import Expr, Size
from plait.ir.loops import Const, Node, apply, cast, const, node
from plait.ir.maths import (
    copysign,
    eq,
    exp2,
    floor,
    fma,
    fmod,
    isinf,
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
from plait.lower.dtypes import TO_TORCH, compute_dtype, from_torch
from plait.lower.extern import call_extern
from plait.lower.float8 import convert_float8
from plait.lower.float_nodes import to_scalar_node

aten = torch.ops.aten

Scalar = bool | int | float | Expr | torch.SymFloat
Operand = View | Scalar


def divide(op: str, a: Node, b: Node) -> Node:
    """A division or remainder; of integers, the call fails where the divisor is 0."""
    if a.dtype.is_float:
        return apply(op, a, b)
    if a.dtype == b1:
        raise NoRule("a division of bools")
    if not (b.op == "const" and b.attr):
        b = node("nonzero", (b,), ZERO_DIVISION, b.dtype)
    return apply(op, a, b)


Formula = Callable[..., Node]  # of nodes

# ---------------------------------------------------------------------------------------- promotion
KEEP = "keep"  # the common dtype of the inputs
FLOAT = "float"  # integers and bools become the default float dtype


def default_float() -> DType:
    """torch's default dtype."""
    return from_torch(torch.get_default_dtype())


@lru_cache(maxsize=4096)
def _promote(parts: tuple[tuple[DType, int], ...]) -> DType:
    """PyTorch's result type of (dtype, rank) parts. rank: 2 a tensor with dimensions, 1 without, 0
    a Python number.

    A part of lower rank counts only if its kind (bool < int < float) is above those of higher
    rank."""
    result: torch.dtype | None = None
    for rank in (2, 1, 0):
        mine: torch.dtype | None = None
        for dtype, r in parts:
            if r == rank:
                mine = (
                    TO_TORCH[dtype] if mine is None else torch.promote_types(mine, TO_TORCH[dtype])
                )
        if result is None:
            result = mine
        elif (
            mine is not None
            and not result.is_floating_point
            and (result == torch.bool or mine.is_floating_point)
        ):
            result = torch.promote_types(result, mine)
    assert result is not None
    return from_torch(result)


def common_dtype(xs: Sequence[Operand], kind: str = KEEP) -> DType:
    """The dtype that eager brings all of xs to."""
    found = _promote(tuple(_part(x) for x in xs))
    return default_float() if kind == FLOAT and not found.is_float else found


def _part(x: Operand) -> tuple[DType, int]:
    if isinstance(x, View):
        return x.dtype, 2 if x.shape else 1
    if isinstance(x, bool):
        return b1, 0
    if isinstance(x, (int, Expr)):
        return i64, 0
    if isinstance(x, (float, torch.SymFloat)):
        return default_float(), 0
    raise NoRule(f"an operand of type {type(x).__name__}")


# ----------------------------------------------------------------------------------------- operands
def spread(x: View, point: Sequence[Expr], shape: tuple[Size, ...]) -> list[Size]:
    """The index into x for a point of `shape`, which x broadcasts to."""
    skip = len(shape) - len(x.shape)
    return [
        0 if s == 1 and n != 1 else p
        for p, s, n in zip(point[skip:], x.shape, shape[skip:], strict=True)
    ]


def wrap(value: Const, dtype: DType) -> Const:
    """A Python integer as C converts it to an integer dtype."""
    if dtype.kind not in "iu" or isinstance(value, float):
        return value
    bits = 8 * dtype.nbytes
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value


Rounds = Callable[[Lowering, Sequence[Operand]], Sequence[bool]]
"""Which operands eager's kernel rounds to the common dtype before it computes."""


def rounds_tensors(ctx: Lowering, xs: Sequence[Operand]) -> Sequence[bool]:
    return [isinstance(x, View) for x in xs]


def rounds_all(ctx: Lowering, xs: Sequence[Operand]) -> Sequence[bool]:
    """Numbers too: `half_tensor == 0.1` is never true where they stay as they are."""
    return [True] * len(xs)


def _rounds_factors(ctx: Lowering, xs: Sequence[Operand]) -> Sequence[bool]:
    """Of a product: neither numbers nor tensors in the CPU's memory that hold one."""
    return [isinstance(x, View) and (bool(x.shape) or not ctx.is_hosts(x)) for x in xs]


def _rounds_terms(ctx: Lowering, xs: Sequence[Operand]) -> Sequence[bool]:
    """Of a sum: all on a CPU; on a GPU as of a product."""
    return rounds_all(ctx, xs) if ctx.facts().eager_cpu else _rounds_factors(ctx, xs)


def _rounds_dividend(ctx: Lowering, xs: Sequence[Operand]) -> Sequence[bool]:
    """Of a quotient: the dividend, be it a number; the divisor is treated as a factor."""
    return [True, *_rounds_factors(ctx, xs[1:])]


def _rounded(value: bool | int | float, dtype: DType) -> float:
    """A Python number as eager has it in a half type."""
    return float(torch.tensor(value).double().to(TO_TORCH[dtype]))


def operand(
    ctx: Lowering,
    ops: Recorder,
    x: Operand,
    i: Sequence[Expr],
    shape: tuple[Size, ...],
    common: DType,
    rounded: bool | None = None,
) -> Node:
    """Element i of x, brought to the compute dtype of the dtype `common`. rounded: to `common`
    before that; None: if x is a tensor."""
    compute = compute_dtype(common)
    if rounded is None:
        rounded = isinstance(x, View)
    if isinstance(x, (bool, int, float)):
        if rounded and compute != common:
            return ops.const(_rounded(x, common), compute)
        return ops.const(wrap(x, compute), compute)
    if isinstance(x, View):
        value = x.load(ops, spread(x, i, shape))
    elif isinstance(x, Expr):
        value = ops.index(x)
    else:
        value = to_scalar_node(ops, x, ctx.float_readers())
    return ops.cast(ops.cast(value, common) if rounded else value, compute)


def elementwise(
    ctx: Lowering,
    formula: Formula,
    xs: Sequence[Operand],
    kind: str = KEEP,
    common: DType | None = None,
    rounds: Rounds = rounds_tensors,
) -> View:
    """formula over xs, promoted and broadcast; its result is rounded to the common dtype, then cast
    to that of the fake result."""
    dtype = common or common_dtype(xs, kind)
    out, shape = ctx.out_dtype(), ctx.out_shape()
    compute, rounded = compute_dtype(dtype), rounds(ctx, xs)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        nodes = [operand(ctx, ops, x, i, shape, dtype, r) for x, r in zip(xs, rounded, strict=True)]
        value = formula(*nodes)
        if value.dtype == compute:
            value = ops.cast(value, dtype)
        return ops.cast(value, out)

    return ctx.pointwise(shape, out, body, ctx.out_strides())


def register(
    ops: Sequence[object], formula: Formula, kind: str = KEEP, rounds: Rounds = rounds_tensors
) -> None:
    """A rule for ops whose arguments are all tensors or numbers and take part in promotion."""

    def rule(ctx: Lowering, *xs: Operand) -> View:
        return elementwise(ctx, formula, xs, kind, rounds=rounds)

    lower(*ops)(rule)


def overloads(name: str, *which: str) -> list[object]:
    """Overloads of an aten op: those named, or the functional ones whose tensors and numbers are
    all that they take."""
    packet = getattr(aten, name)
    return [getattr(packet, w) for w in which or ("default",)]


def row(op: str) -> Formula:
    """The formula that is one row of the op table."""
    return lambda *nodes: apply(op, *nodes)


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
register(overloads("relu"), lambda x: x if x.dtype.kind in "ub" else maximum(x, 0))


def _test(op: str) -> Formula:
    return lambda x: apply(op, x) if x.dtype.is_float else const(False, b1)


register(overloads("isnan"), _test("isnan"))
register(overloads("isinf"), _test("isinf"))
register(
    overloads("signbit"),
    (
        lambda x: (
            signbit(x) if x.dtype.is_float else const(False, b1) if x.dtype.kind in "ub" else x < 0
        )
    ),
)


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


register(overloads("mul", "Tensor", "Scalar"), _mul, rounds=_rounds_factors)


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
    number = not any(_rounds_factors(ctx, (b,)))
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
    assert out is not None
    return out


@lower(aten.pow.Tensor_Scalar)
def _pow_scalar(ctx: Lowering, x: View, exponent: Scalar) -> View:
    if not isinstance(exponent, (bool, int, float)):
        return _pow(ctx, x, exponent)

    common = common_dtype((x, exponent))
    power = float(exponent) if common == compute_dtype(common) else _rounded(exponent, common)
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

for _name, _op in (("and", "and"), ("or", "or"), ("xor", "xor")):
    register(overloads(f"bitwise_{_name}", "Tensor", "Scalar", "Scalar_Tensor"), row(_op))


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
    def rule(ctx: Lowering, *xs: View) -> View:
        shape = ctx.out_shape()

        def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
            args = [ops.cast(x.load(ops, spread(x, i, shape)), b1) for x in xs]
            return ops.cast(apply(op, *args), ctx.out_dtype())

        return ctx.pointwise(shape, ctx.out_dtype(), body, ctx.out_strides())

    return rule


for _name in ("and", "or", "xor", "not"):
    lower(getattr(aten, f"logical_{_name}").default)(_logical(_name))


@lower(aten.where.self)
def _where(ctx: Lowering, cond: View, a: View, b: View) -> View:
    dtype, shape = ctx.out_dtype(), ctx.out_shape()

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        picked = [ops.cast(x.load(ops, spread(x, i, shape)), dtype) for x in (a, b)]
        return apply("where", ops.cast(cond.load(ops, spread(cond, i, shape)), b1), *picked)

    return ctx.pointwise(shape, dtype, body, ctx.out_strides())


# ---------------------------------------------------------------------------- copies and conversion
def convert(ctx: Lowering, x: View, dtype: DType, shape: tuple[Size, ...] | None = None) -> View:
    """x (broadcast to `shape`) as another dtype; x itself where nothing changes."""
    to = x.shape if shape is None else shape
    if x.dtype == dtype and to == x.shape:
        return x
    return ctx.pointwise(to, dtype, lambda ops, i: ops.cast(x.load(ops, spread(x, i, to)), dtype))


@lower(aten._to_copy.default, torch.ops.prims.convert_element_type.default, any_dtype=True)
def _to_copy(
    ctx: Lowering, x: View, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Any:
    want = ctx.out_dtype()
    if ctx.device() != ctx.buffers[x.buf].device:
        return call_extern(ctx, (x,), ctx.node.kwargs, any_strides=True)
    if x.dtype == want:
        return x
    if "8" in (x.dtype.kind, want.kind):
        return convert_float8(ctx, x, want)
    if x.dtype.kind in "co" or want.kind in "co":
        raise NoRule(f"{x.dtype} to {want}")
    return convert(ctx, x, want)


@lower(
    aten.clone.default, aten.lift_fresh_copy.default, aten.lift_fresh.default,
    aten.contiguous.default, aten.alias_copy.default, any_dtype=True,
)  # fmt: skip
def _clone(ctx: Lowering, x: View, **_: Any) -> View:
    if x.dtype not in LOOP_DTYPES:
        raise NoRule(f"{x.dtype} elements")  # readers may need the layout
    return x  # values do not change, so sharing them shows only in outputs, which are copied there


@lower(aten.copy.default)
def _copy(ctx: Lowering, x: View, src: View, non_blocking: bool = False) -> View:
    return convert(ctx, src, x.dtype, ctx.out_shape())


@lower(aten.copy_.default, any_dtype=True)
def _copy_(ctx: Lowering, x: View, src: View, non_blocking: bool = False) -> View:
    if not (ctx.is_whole(x) and x.buf in ctx.input_buffers):
        raise NoRule("a copy into something that is no input")
    if (x.dtype, x.shape) != (src.dtype, src.shape) and not {x.dtype, src.dtype} <= LOOP_DTYPES:
        raise NoRule(f"{src.dtype} to {x.dtype}")
    if repeats(ctx.node.args[0].meta["val"]):  # type: ignore[union-attr]  # which elements were written is lost
        raise Unsupported(SHARED, where=ctx.where(), hint=CLONE)
    value = convert(ctx, src, x.dtype, x.shape)
    ctx.mutations.append((x.buf, value))  # views of it see what it held before
    return x if any(user.op == "output" for user in ctx.node.users) else value
