"""Special functions that scalar arithmetic can express: digamma, trigamma, erfinv, the Bessel
functions i0 and i1.

Each is a fixed number of steps for every element (both sides of a `where` are computed). Series are
cut where their terms no longer reach the compute dtype. The Chebyshev coefficients below are cosine
sums of the functions at 64 points, worked out with 40 digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from plait.ir.dtypes import f32, f64
from plait.ir.loops import Node, cast, const
from plait.ir.maths import (
    copysign,
    eq,
    erf,
    erfc,
    exp,
    log,
    maximum,
    minimum,
    reciprocal,
    sin,
    sqrt,
    tan,
    trunc,
    where,
)
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import FLOAT, Formula, common_dtype, elementwise, overloads, register

aten = torch.ops.aten

_EPS = {f32: 2.0**-23, f64: 2.0**-52}


# ------------------------------------------------------------------------------------------ digamma
_STEPS = 10  # the recurrence lifts arguments to 10 and more, where the asymptotic series holds
# B(2k) / 2k, k = 1, 2, ...: the series of digamma in 1 / x^2.
_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
# B(2k): the series of trigamma.
_TRIGAMMA = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)


def _horner(z: Node, coefficients: Sequence[float]) -> Node:
    """c0 + z*(c1 + z*(c2 + ...))."""
    out = const(coefficients[-1], z.dtype)
    for c in reversed(coefficients[:-1]):
        out = out * z + c
    return out


def digamma(x: Node) -> Node:
    """The logarithmic derivative of the gamma function: NaN at negative integers, -copysign(inf, x)
    at zeros."""
    negative = x < 0
    y, total = where(negative, 1.0 - x, x), const(0.0, x.dtype)
    for _ in range(_STEPS):
        small = y < _STEPS
        total = total - where(small, reciprocal(y), const(0.0, x.dtype))
        y = where(small, y + 1.0, y)
    z = reciprocal(y * y)
    tail = 0.5 / y + z * _horner(z, _DIGAMMA)
    value = total + (log(y) - tail)
    fraction = x - trunc(x)
    # Near a pole a rounding of the angle counts for much, so this is in double, as in eager.
    slope = math.pi / tan(cast(fraction, f64) * math.pi)
    reflected = value - cast(slope, x.dtype)
    reflected = where(eq(fraction, 0), const(math.nan, x.dtype), reflected)
    out = where(negative, reflected, value)
    at_zero = copysign(const(math.inf, x.dtype), -x)
    return where(eq(x, 0), at_zero, out)


def trigamma(x: Node) -> Node:
    """The derivative of digamma; infinite at 0 and the negative integers."""
    low = x < 0.5
    y, total = where(low, 1.0 - x, x), const(0.0, x.dtype)
    for _ in range(_STEPS):
        small = y < _STEPS
        term = reciprocal(y * y)
        total = total + where(small, term, const(0.0, x.dtype))
        y = where(small, y + 1.0, y)
    inverse = reciprocal(y)
    z = inverse * inverse
    series = inverse * z * _horner(z, _TRIGAMMA)
    value = total + (inverse + 0.5 * z + series)
    slope = math.pi / sin(x * math.pi)
    return where(low, slope * slope - value, value)


register(overloads("digamma"), digamma, FLOAT)


@lower(aten.polygamma.default)
def _polygamma(ctx: Lowering, n: int, x: View) -> View:
    if n not in (0, 1):
        raise NoRule("polygamma of a higher order")
    return elementwise(ctx, trigamma if n else digamma, (x,), FLOAT)


# ------------------------------------------------------------------------------------------- erfinv
# Polynomials in w = -log(1 - x^2) of erfinv(x) / x: for w < 5 in w - 2.5, else in sqrt(w) - 3. Good
# to 1e-6; one step of Newton's method does the rest.
_ERFINV_CENTRE = (
    1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06,
    -3.5233877e-06, 3.43273939e-07, 2.81022636e-08,
)  # fmt: skip
_ERFINV_TAIL = (
    2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844,
    0.00134934322, 0.000100950558, -0.000200214257,
)  # fmt: skip


def erfinv(x: Node) -> Node:
    """The inverse of erf in f32; infinite at -1 and 1, NaN outside."""
    a = abs(x)
    w = -log((1.0 - a) * (1.0 + a))
    centre = _horner(w - 2.5, _ERFINV_CENTRE)
    tail = _horner(sqrt(maximum(w, 5.0)) - 3.0, _ERFINV_TAIL)
    y = where(w < 5.0, centre, tail) * a
    # Near 1 the distance to 1 is exact and erf(y) is not: compare the complements.
    off = where(a > 0.5, 1.0 - a - erfc(y), erf(y) - a)
    y = y - off * (0.5 * math.sqrt(math.pi)) * exp(y * y)
    y = where(eq(a, 1.0), const(math.inf, x.dtype), y)
    return copysign(where(a > 1.0, const(math.nan, x.dtype), y), x)


@lower(aten.erfinv.default)
def _erfinv(ctx: Lowering, x: View) -> View:
    if compute_dtype(common_dtype((x,), FLOAT)) != f32:
        raise NoRule("erfinv in float64")
    return elementwise(ctx, erfinv, (x,), FLOAT)


# --------------------------------------------------------------------------------- Bessel functions
# Chebyshev series of exp(-x) I(x) (divided by x for I1) on [0, 8] in x/4 - 1, and of exp(-x)
# sqrt(x) I(x) beyond in 16/x - 1.
_I0_NEAR = (
    0.33839763720473803, -0.3046826723431984, 0.17162090152220877, -0.09490109704804764,
    0.04930528423967071, -0.02373741480589947, 0.010546460394594998, -0.004324309995050576,
    0.0016394756169413357, -0.0005763755745385824, 0.00018850288509584165,
    -5.754195010082104e-05, 1.6448448070728896e-05, -4.4167383584587505e-06,
    1.1173875391201037e-06, -2.670793853940612e-07, 6.046995022541919e-08,
    -1.300025009986248e-08, 2.6598237246823866e-09, -5.189795601635263e-10,
    9.675809035373237e-11, -1.726826291441556e-11, 2.95505266312964e-12,
    -4.856446783111929e-13, 7.676185498604936e-14, -1.1685332877993451e-14,
    1.715391285555133e-15, -2.431279846547955e-16, 3.3307945188222384e-17,
    -4.4153416464793395e-18,
)  # fmt: skip
_I0_FAR = (
    0.4022452055070544, 0.0033691164782556943, 6.889758346916825e-05,
    2.8913705208347567e-06, 2.0489185894690638e-07, 2.266668990498178e-08,
    3.3962320257083865e-09, 4.94060238822497e-10, 1.1889147107846439e-11,
    -3.1499165279632416e-11, -1.3215811840447713e-11, -1.7941785315068062e-12,
    7.180124451383666e-13, 3.8527783827421426e-13, 1.54008621752141e-14,
    -4.150569347287222e-14, -9.554846698828307e-15, 3.8116806693526224e-15,
    1.7725601330565263e-15, -3.425485619677219e-16, -2.8276239805165836e-16,
    3.461222867697461e-17, 4.46562142029676e-17, -4.830504485944182e-18,
    -7.233180487874754e-18,
)  # fmt: skip
_I1_NEAR = (
    0.12629359322181682, -0.17641651835783406, 0.1026436586898471, -0.05294598120809499,
    0.024726449030626516, -0.010564084894626197, 0.004156422944312888,
    -0.0015135724506312532, 0.0005122859561685758, -0.00016176081582589674,
    4.781565107550054e-05, -1.3273163656039436e-05, 3.4702513081376785e-06,
    -8.568720264695455e-07, 2.0032947535521353e-07, -4.445059128796328e-08,
    9.381537386495773e-09, -1.8872497517228294e-09, 3.625590281552117e-10,
    -6.663489723502027e-11, 1.1736186298890901e-11, -1.9839743977649436e-12,
    3.223793365945575e-13, -5.042185504727912e-14, 7.600684294735408e-15,
    -1.1055969477353862e-15, 1.5536319577362005e-16, -2.111421214358166e-17,
    2.7779141127610464e-18,
)  # fmt: skip
_I1_FAR = (
    0.38928811750914005, -0.009761097491361469, -0.00011058893876262371,
    -3.882564808877691e-06, -2.512236237870209e-07, -2.6314688468895196e-08,
    -3.835380385964237e-09, -5.589743462196584e-10, -1.8974958123505413e-11,
    3.2526035830154884e-11, 1.4125807436613782e-11, 2.0356285441470896e-12,
    -7.198551776245908e-13, -4.0835511110921974e-13, -2.1015418427726643e-14,
    4.272440016711951e-14, 1.0420276984128802e-14, -3.8144030724370075e-15,
    -1.8803547755107825e-15, 3.3082023109209285e-16, 2.96262899764595e-16,
    -3.209525921993424e-17, -4.6503053684893586e-17, 4.414348323071708e-18,
    7.517296310842105e-18,
)  # fmt: skip


def _chebyshev(t: Node, coefficients: Sequence[float]) -> Node:
    """The series c0 + c1 T1(t) + c2 T2(t) + ... by Clenshaw's recurrence."""
    least = _EPS[t.dtype] * abs(coefficients[0]) / 64
    kept = coefficients[: 1 + max(k for k, c in enumerate(coefficients) if abs(c) > least)]
    two_t = t * 2.0
    b1, b2 = const(kept[-1], t.dtype), const(0.0, t.dtype)
    for c in reversed(kept[1:-1]):
        b1, b2 = two_t * b1 - b2 + c, b1
    return t * b1 - b2 + kept[0]


def _bessel(a: Node, near: Sequence[float], far: Sequence[float]) -> tuple[Node, Node]:
    """exp(-a) I(a) near 0 (see the tables) and far from it, for a >= 0."""
    low = _chebyshev(minimum(a, 8.0) * 0.25 - 1.0, near)
    big = maximum(a, 8.0)
    high = _chebyshev(16.0 / big - 1.0, far)
    return low, high / sqrt(big)


def i0e(x: Node) -> Node:
    """exp(-|x|) I0(x)."""
    a = abs(x)
    low, high = _bessel(a, _I0_NEAR, _I0_FAR)
    return where(a <= 8.0, low, high)


def i1e(x: Node) -> Node:
    """exp(-|x|) I1(x)."""
    a = abs(x)
    low, high = _bessel(a, _I1_NEAR, _I1_FAR)
    value = where(a <= 8.0, low * a, high)
    return where(x < 0, -value, value)


def _grown(formula: Formula) -> Formula:
    """Without the factor exp(-|x|)."""
    return lambda x: formula(x) * exp(abs(x))


register(overloads("i0"), _grown(i0e), FLOAT)
register(overloads("special_modified_bessel_i0"), _grown(i0e), FLOAT)
register(overloads("special_modified_bessel_i1"), _grown(i1e), FLOAT)
register(overloads("special_i0e"), i0e, FLOAT)
register(overloads("special_i1"), _grown(i1e), FLOAT)
register(overloads("special_i1e"), i1e, FLOAT)
