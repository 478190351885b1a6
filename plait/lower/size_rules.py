"""SymPy's expressions of integers as sizes: a rule for each kind.

Comes in: an expression, and what makes sizes of its arguments. Goes out: a `Size`. Raises
Unsupported for what no size can be. Floats on the way to an integer are exact fractions of sizes
where they can be (`int(n / 4)`), or else words of doubles, which `runtime/functions.py` computes.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial, reduce
from typing import Any

import sympy
from torch.utils._sympy import functions as sf

from plait.errors import Unsupported
from plait.ir import expr
from plait.ir.expr import Size
from plait.runtime.functions import FUNCTIONS, bits

Sub = Callable[[Any], Size]


class Word(sympy.Function):  # type: ignore[misc]  # SymPy has no types
    """The word of a float, as an integer: see `runtime/functions.py`."""

    is_integer = True


def _mul(e: Any, sub: Sub) -> Size:
    out: Size = 1
    den = 1
    for a in e.args:
        if isinstance(a, sympy.Rational) and not isinstance(a, sympy.Integer):
            out, den = out * int(a.p), den * int(a.q)
        else:
            out = out * sub(a)
    return out if den == 1 else out // den  # a size is integral, so this division is exact


def _power(base: Size, exponent: Size) -> Size:
    if not isinstance(exponent, int) or exponent > 16:
        return expr.call("power", base, exponent)
    if exponent < 0:
        raise Unsupported(f"a size that is ({base}) ** {exponent}")
    return expr.product([base] * exponent)


def _floordiv(a: Size, b: Size) -> Size:
    return -a // -b if expr.bounds(b)[1] < 0 else a // b


def _mod(a: Size, b: Size) -> Size:
    # The sign of Python's remainder is the divisor's.
    return -(-a % -b) if expr.bounds(b)[1] < 0 else a % b


def _shift(name: str, a: Size, n: Size) -> Size:
    if not isinstance(n, int) or not 0 <= n < 63:
        return expr.call(name, a, n)
    return a * (1 << n) if name == "shift_left" else a // (1 << n)


def _largest(*sizes: Size) -> Size:
    return reduce(expr.smax, sizes)


def _least(*sizes: Size) -> Size:
    return reduce(expr.smin, sizes)


def _piecewise(e: Any, sub: Sub) -> Size:
    out: Size = 0
    for value, cond in reversed(e.args):
        v, c = sub(value), sub(cond)
        out = v if c == 1 else out + c * (v - out)
    return out


def _compare(op: str, swap: bool) -> Callable[[Any, Sub], Size]:
    def rule(e: Any, sub: Sub) -> Size:
        given = reversed(e.args) if swap else e.args
        if any(map(_is_float, e.args)):
            return expr.call(f"real_{op}", *(_real(a, sub) for a in given))
        return expr.compare(op, *map(sub, given))

    return rule


def _from_float(mode: str) -> Callable[[Any, Sub], Size]:
    """Integers out of a float expression: by integers alone where it is exactly p/q of integer
    sizes."""

    def rule(e: Any, sub: Sub) -> Size:
        try:
            p, q = _fraction(e.args[0], sub)
        except Unsupported:
            return expr.call(mode, _real(e.args[0], sub))
        if mode == "round" or (mode == "trunc" and expr.bounds(p)[0] < 0):
            return expr.call(mode, _real(e.args[0], sub))
        return expr.ceildiv(p, q) if mode == "ceil" else p // q

    return rule


def _real(e: Any, sub: Sub) -> Size:
    """The word of a float expression, see `runtime/functions.py`."""
    if isinstance(e, sympy.Number):
        return bits(float(e))
    if isinstance(e, sf.IntTrueDiv):
        return expr.call("true_div", sub(e.args[0]), sub(e.args[1]))
    if isinstance(e, sf.RoundDecimal):
        return expr.call("real_round", _real(e.args[0], sub), sub(e.args[1]))
    if isinstance(e, sf.ToFloat):
        return expr.call("real", sub(e.args[0]))
    if type(e) in _REAL_UNARY:
        return expr.call(_REAL_UNARY[type(e)], _real(e.args[0], sub))
    if type(e) in _REAL_BINARY and _is_float(e):
        name = _REAL_BINARY[type(e)]
        return reduce(lambda a, b: expr.call(name, a, b), (_real(a, sub) for a in e.args))
    if is_whole(e):
        return expr.call("real", sub(e))
    raise Unsupported(
        f"the float {e} ({type(e).__name__})", hint="compute it outside of the compiled function"
    )


def is_whole(e: Any) -> bool:
    """Whether an expression is an integer: torch does not say so of functions of bits."""
    return bool(e.is_integer) or isinstance(e, _OF_BITS)


def _is_float(e: Any) -> bool:
    """Whether Python computes an expression as a float."""
    if isinstance(e, _INTEGRAL):
        return False
    number = isinstance(e, sympy.Symbol) and not e.is_integer
    return number or isinstance(e, _FLOATS) or any(map(_is_float, e.args))


def _fraction(e: Any, sub: Sub) -> tuple[Size, Size]:
    """e == p / q in exact arithmetic, q > 0."""
    if isinstance(e, sf.IntTrueDiv | sf.FloatTrueDiv):
        (p1, q1), (p2, q2) = (_fraction(a, sub) for a in e.args)
        return p1 * q2, q1 * p2
    if isinstance(e, sf.ToFloat):
        return sub(e.args[0]), 1
    if isinstance(e, sympy.Float | sympy.Rational):
        ratio = _ratio(float(e))
        return ratio.numerator, ratio.denominator
    if isinstance(e, sympy.Mul):
        ps, qs = zip(*(_fraction(a, sub) for a in e.args), strict=True)
        return expr.product(ps), expr.product(qs)
    if isinstance(e, sympy.Add):
        parts = [_fraction(a, sub) for a in e.args]
        den = expr.product(q for _, q in parts)
        return expr.total(p * (den // q) for p, q in parts), den
    if is_whole(e):
        return sub(e), 1
    raise Unsupported(f"a size made from the float {e}")


def _ratio(c: float) -> Fraction:
    """The simple fraction that the float c stands for (17/10 for 1.7), if integers times c round to
    integers where integers times the fraction are some. Raises Unsupported otherwise."""
    ratio = Fraction(c).limit_denominator(1024)
    p, q = ratio.numerator, ratio.denominator
    if p / q != c or any(float(k * q) * c != k * p for k in range(1, 2049)):
        raise Unsupported(f"a size that is made with the float {c}")
    return ratio


OPAQUE = {kind: name for name in FUNCTIONS if (kind := getattr(sf, f"OpaqueUnaryFn_{name}", None))}
"""Functions of `math` that SymPy takes for opaque -> their names."""

_REAL_UNARY = {**OPAQUE, sympy.Abs: "real_abs", sf.TruncToFloat: "real_trunc"}
_REAL_BINARY = {
    sympy.Add: "real_add", sympy.Mul: "real_mul", sf.FloatTrueDiv: "real_div",
    sf.FloatPow: "real_power", sympy.Pow: "real_power", sf.Max: "real_max", sf.Min: "real_min",
    sympy.Max: "real_max", sympy.Min: "real_min",
}  # fmt: skip
_FLOATS = (
    sympy.Float, sf.ToFloat, sf.IntTrueDiv, sf.RoundDecimal, sf.FloatTrueDiv, sf.FloatPow,
    *(kind for kind in _REAL_UNARY if kind is not sympy.Abs),
)  # fmt: skip
_OF_BITS = (sf.BitwiseFn_bitwise_and, sf.BitwiseFn_bitwise_or, sf.BitwiseFn_bitwise_xor)
_INTEGRAL = (sf.RoundToInt, sf.CeilToInt, sf.FloorToInt, sf.TruncToInt, sympy.floor, sympy.ceiling)

_FORMULAS: dict[type, Callable[..., Size]] = {
    sympy.Add: lambda *sizes: expr.total(sizes),
    sympy.Pow: _power,
    sf.PowByNatural: _power,
    sf.FloorDiv: _floordiv,
    sf.CleanDiv: _floordiv,
    sf.CeilDiv: expr.ceildiv,
    sf.Mod: _mod,
    sf.PythonMod: _mod,
    sympy.Mod: _mod,
    sf.ModularIndexing: lambda a, b, m: a // b % m,
    sf.Max: _largest,
    sf.Min: _least,
    sympy.Max: _largest,
    sympy.Min: _least,
    sympy.Abs: lambda a: expr.smax(a, -a),
    sf.Where: lambda c, a, b: b + c * (a - b),
    sf.Identity: lambda a: a,
    sf.LShift: partial(_shift, "shift_left"),
    sf.RShift: partial(_shift, "shift_right"),
    sf.BitwiseFn_bitwise_and: partial(expr.call, "bit_and"),
    sf.BitwiseFn_bitwise_or: partial(expr.call, "bit_or"),
    sf.BitwiseFn_bitwise_xor: partial(expr.call, "bit_xor"),
    sympy.And: lambda *holds: expr.product(holds),
    sympy.Or: _largest,
    sympy.Not: lambda holds: 1 - holds,
}
"""What an expression is of the sizes of its arguments."""


def _by(formula: Callable[..., Size]) -> Callable[[Any, Sub], Size]:
    return lambda e, sub: formula(*map(sub, e.args))


RULES: dict[type, Callable[[Any, Sub], Size]] = {
    **{kind: _by(formula) for kind, formula in _FORMULAS.items()},
    sympy.Mul: _mul,
    sympy.Piecewise: _piecewise,
    sf.RoundToInt: _from_float("round"),
    sf.CeilToInt: _from_float("ceil"),
    sf.FloorToInt: _from_float("floor"),
    sf.TruncToInt: _from_float("trunc"),
    sympy.floor: _from_float("floor"),
    sympy.ceiling: _from_float("ceil"),
    sympy.Eq: _compare("eq", False),
    sympy.Ne: _compare("ne", False),
    sympy.Lt: _compare("lt", False),
    sympy.Le: _compare("le", False),
    sympy.Gt: _compare("lt", True),
    sympy.Ge: _compare("le", True),
    Word: lambda e, sub: _real(e.args[0], sub),
}
"""The size of an expression, given the expression and what makes sizes of its arguments."""
