"""Elementwise functions at the ends of dtypes: what to call, with what, and when a result is
right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

Fn = Callable[..., torch.Tensor]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NAN, INF = float("nan"), float("inf")

ONE: Mapping[str, Fn] = {
    **{name: getattr(torch, name) for name in (
        "abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp "
        "exp2 expm1 floor frac i0 isfinite isinf isnan isneginf isposinf lgamma log log10 log1p "
        "log2 logit neg rad2deg reciprocal round rsqrt sgn sigmoid sign signbit sin sinc sinh "
        "sqrt square tan tanh trunc nan_to_num angle positive relu"
    ).split()},
    **{f"special.{name}": getattr(torch.special, name) for name in (
        "entr log_ndtr ndtr ndtri i0e i1 i1e erfcx bessel_j0 modified_bessel_i0 "
        "modified_bessel_i1 log_softmax"
    ).split() if name != "log_softmax"},
    **{name: getattr(F, name) for name in (
        "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 "
        "selu silu softplus softshrink softsign tanhshrink"
    ).split()},
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.5, 2.0),
    "threshold_int": lambda x: F.threshold(x, 1, 2),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp(min=0),
    "clamp_max": lambda x: x.clamp(max=0),
    "clamp_extremes": lambda x: x.clamp(*ends(x.dtype)),
    "square_root_of_square": lambda x: (x * x).sqrt(),
    **{f"pow{p}": partial(lambda p, x: x**p, p) for p in (0, 0.5, 1, 2, 3, -0.5, -1, -2, 1.5)},
    **{f"pow_of{b}": partial(lambda b, x: b**x, b) for b in (0.0, 1.0, 2.0, -2.0, 0.5)},
    "int_pow2": lambda x: x**2,
    "softmax": lambda x: x.unsqueeze(-1).expand(*x.shape, 3).softmax(-1).sum(-1),
}  # fmt: skip

TWO: Mapping[str, Fn] = {
    **{name: getattr(torch, name) for name in (
        "add sub mul div fmod remainder floor_divide pow atan2 hypot maximum minimum fmax fmin "
        "copysign nextafter logaddexp logaddexp2 xlogy heaviside eq ne lt le gt ge float_power "
        "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd"
    ).split()},
    "div_trunc": partial(torch.div, rounding_mode="trunc"),
    "div_floor": partial(torch.div, rounding_mode="floor"),
    "xlog1py": torch.special.xlog1py,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "where": lambda a, b: torch.where(a > b, a, b),
    "clamp_to": lambda a, b: a.clamp(b, b),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=2),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b, value=2),
    "prelu": lambda a, b: torch.where(a > 0, a, a * b),
}  # fmt: skip


def ends(dtype: torch.dtype) -> tuple[float | int, float | int]:
    """The least and the greatest number."""
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max


def special(dtype: torch.dtype) -> torch.Tensor:
    """Zeros, infinities, NaN, subnormals, ends, halves, and what lies around thresholds of
    overflow."""
    if not dtype.is_floating_point:
        low, high = ends(dtype)
        bits = torch.iinfo(dtype).bits
        found = {low, low + 1, high, high - 1, high // 2, 0, 1, 2, 3, 7, bits - 1, bits, bits + 1}
        found |= {v for v in (-1, -2, -3, -7, -bits) if v >= low}
        return torch.tensor(sorted(found), dtype=dtype)
    info = torch.finfo(dtype)
    double = dtype == torch.float64
    values = [
        0.0,
        1.0,
        0.5,
        1.5,
        2.5,
        0.25,
        3.0,
        6.0,
        7.3,
        20.0,
        1e-3,
        1e-5,
        1e-8,
        0.3,
        0.999,
        1.001,
    ]
    values += [
        info.max,
        info.max / 2,
        info.tiny,
        info.smallest_normal / 2,
        info.smallest_normal * info.eps,
    ]
    values += [
        info.eps,
        1 - info.eps,
        1 + info.eps,
        10.0,
        11.0,
        16.0,
        30.0,
        40.0,
        1e4,
        2.0**23,
        1e30,
        1e-30,
    ]
    values += [87.0, 88.5, 88.8, 89.4, 89.5, 103.0, 104.5, 127.5, 128.0, 150.0]
    if double:
        values += [709.5, 709.9, 710.3, 710.5, 745.0, 746.0, 1e300, 1e-300, 2.0**52, 1023.5, 1075.0]
    return torch.tensor([*values, *(-v for v in values), INF, -INF, NAN], dtype=torch.float64).to(
        dtype
    )


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every special value with every other."""
    x = special(dtype)
    return tuple(t.reshape(-1).clone() for t in torch.meshgrid(x, x, indexing="ij"))  # type: ignore[return-value]


TOLERANCE = {torch.float32: 2e-6, torch.float64: 2e-14, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def near(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two results are the same: NaNs with NaNs, zeros of one sign, numbers within a few last
    bits."""
    if not a.dtype.is_floating_point:
        return a == b
    wide_a, wide_b = a.double(), b.double()
    least = torch.finfo(a.dtype).tiny
    close = (wide_a - wide_b).abs() <= TOLERANCE[a.dtype] * wide_b.abs() + least
    close = close & ((a != 0) | (b != 0) | (a.signbit() == b.signbit()))
    return (a == b) & (a != 0) | close | (a.isnan() & b.isnan())


def right(found: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None) -> torch.Tensor:
    """Where a result is eager's, or no further from the exact one than eager's. exact: in
    float64."""
    ok = near(found, eager)
    if exact is None or not found.dtype.is_floating_point:
        return ok
    if exact.shape != found.shape:
        return ok
    ok |= near(found, exact.to(found.dtype))
    nearer = (found.double() - exact).abs() <= (eager.double() - exact).abs()
    # Zeros of other signs are as near: that of what rounds to 0 is right.
    rounded = (exact != 0) & (found.signbit() == exact.signbit())
    return ok | (nearer & ((found != 0) | (eager != 0) | rounded))


def accepts(fn: Fn, args: tuple[torch.Tensor, ...]) -> bool:
    """Whether eager computes it."""
    try:
        fn(*args)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def gradients(fn: Fn, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    """Those of a sum."""
    given = [a.clone().requires_grad_() for a in args]
    return torch.autograd.grad(fn(*given).sum(), given, allow_unused=True)
