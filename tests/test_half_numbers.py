"""Which Python numbers, and tensors that hold one, eager's kernels round to half types before they
compute.

Rounded, 1e-30 is 0, so that fmod is NaN; 0.1 equals a half tensor's 0.1; 65520 is infinite. Not
rounded, a product with 1e-30 of an infinity is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.wrapper.program import Program

NUMBERS = (1e-30, 0.1, 1 / 3, 65520.0, 1e10, -0.0, 1e-7, 2049, 1.001, 7.0003)
Fn = Callable[[Tensor, Any], Tensor]

ROUNDED: dict[str, Fn] = {
    "add": lambda x, s: x + s,
    "sub": lambda x, s: x - s,
    "rsub": lambda x, s: s - x,
    "remainder": lambda x, s: torch.remainder(x, s),
    "remainder of a number": lambda x, s: torch.remainder(s, x),
    "fmod": lambda x, s: torch.fmod(x, s),
    "pow": lambda x, s: torch.pow(x.abs(), s),
    "pow of a number": lambda x, s: torch.pow(abs(s), x),
    "eq": lambda x, s: x == s,
    "ne": lambda x, s: x != s,
    "lt": lambda x, s: x < s,
    "le": lambda x, s: x <= s,
    "gt": lambda x, s: x > s,
    "ge": lambda x, s: x >= s,
}
KEPT: dict[str, Fn] = {
    "mul": lambda x, s: x * s,
    "div": lambda x, s: x / s,
    "div of a number": lambda x, s: s / x,
    "floor": lambda x, s: torch.div(x, s, rounding_mode="floor"),
    "trunc": lambda x, s: torch.div(x, s, rounding_mode="trunc"),
    "floor_divide": lambda x, s: torch.floor_divide(x, s),
}
OF_NUMBERS: dict[str, Fn] = {
    "hardshrink": lambda x, s: F.hardshrink(x, abs(s)),
    "lerp": lambda x, s: torch.lerp(x, x.flip(0), s),
    "threshold": lambda x, s: F.threshold(x, s, 0.0),
    "threshold to a number": lambda x, s: F.threshold(x, 0.0, s),
    "masked_fill": lambda x, s: x.masked_fill(x > 0, s),
    "where": lambda x, s: torch.where(x > 0, x, s),
    "leaky_relu": lambda x, s: F.leaky_relu(x, s),
    "addcmul": lambda x, s: torch.addcmul(x, x, x.flip(0), value=s),
    "clamp": lambda x, s: x.clamp(-abs(s), abs(s)),
    "copysign": lambda x, s: torch.copysign(x, s),
}
OF_TENSORS: dict[str, Fn] = {
    "maximum": lambda x, s: torch.maximum(x, s),
    "minimum": lambda x, s: torch.minimum(x, s),
    "hypot": lambda x, s: torch.hypot(x, s),
    "atan2": lambda x, s: torch.atan2(x, s),
}


def awkward(dtype: torch.dtype) -> Tensor:
    ends = [
        0.0,
        -0.0,
        1.0,
        0.1,
        1 / 3,
        2048,
        2049,
        2050,
        1e4,
        6e4,
        math.inf,
        -math.inf,
        math.nan,
        1e-7,
        7,
        -7,
    ]
    spread = torch.randn(184, generator=torch.Generator().manual_seed(0)) * 3
    return torch.cat([torch.tensor(ends), spread]).to(dtype)


def check(fns: dict[str, Fn], dtype: torch.dtype, numbers: tuple[float | Tensor, ...]) -> None:
    """One program of all functions with all numbers that eager takes."""
    x = awkward(dtype)
    calls: list[tuple[str, Fn, float | Tensor]] = []
    for (name, fn), s in ((item, s) for item in fns.items() for s in numbers):
        try:
            fn(x, s)
        except RuntimeError:  # a number that overflows
            continue
        calls.append((name, fn, s))
    given = [s for _, _, s in calls if isinstance(s, Tensor)]

    def program(x: Tensor, given: list[Tensor]) -> list[Tensor]:
        rest = iter(given)
        return [fn(x, next(rest) if isinstance(s, Tensor) else s) for _, fn, s in calls]

    got = torch.compile(program, backend="plait")(x, given)
    wrong = []
    for (name, fn, s), g in zip(calls, got, strict=True):
        want = fn(x, s)
        assert g.dtype == want.dtype
        bad = ~((g == want) | (g.isnan() & want.isnan()))
        if bad.any():
            wrong.append(f"{name} of {x[bad][0]} and {s} is {g[bad][0]}, eager's {want[bad][0]}")
    assert calls and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_python_numbers(dtype: torch.dtype) -> None:
    check(ROUNDED | KEPT | OF_NUMBERS, dtype, NUMBERS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of", [torch.float32, torch.float64])
def test_tensors_that_hold_a_number(dtype: torch.dtype, of: torch.dtype) -> None:
    check(ROUNDED | KEPT | OF_TENSORS, dtype, tuple(torch.tensor(s, dtype=of) for s in NUMBERS))


VARYING = {
    name: (ROUNDED | KEPT)[name]
    for name in (
        "add",
        "sub",
        "rsub",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "mul",
        "div",
        "div of a number",
    )
}  # Dynamo compiles the others anew for each number


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_that_vary(dtype: torch.dtype, programs: list[Program]) -> None:
    """Numbers of the call, compiled once for all. Dynamo takes -0.0 for the 0.0 that it compiled
    for."""
    x = awkward(dtype)

    def program(x: Tensor, s: float) -> list[Tensor]:
        return [fn(x, s) for fn in VARYING.values()]

    compiled = torch.compile(program, backend="plait", dynamic=True)
    for s in (float(n) for n in NUMBERS if n):
        for name, g, want in zip(VARYING, compiled(x, s), program(x, s), strict=True):
            assert bool(((g == want) | (g.isnan() & want.isnan())).all()), (name, s)
    assert len(programs) == 1
