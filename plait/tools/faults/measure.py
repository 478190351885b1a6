"""The rule for a wrong number: plait is wrong where it is further from the float64 result than
eager is, beyond tolerance (DESIGN, "How truth is established").

The tests, the fuzzer and `plait.bisect` measure with it. Where rounding alone decides, float64's
result of inputs that are half a unit in the last place off shows it: what lies within four times of
how far the result moves is not wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

NUDGES = range(1, 9)
"""Seeds of `jitter`: so many that of two numbers that cancel each is the greater in some."""
HALF = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""Half a unit in the last place, relative; of float32 2^-24."""
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""In the last place: where a result of few digits lies between two of them, eager may be nearer by
chance."""
TOLERANCE = 2e-5


def real(x: Tensor) -> Tensor:
    """The numbers of x, of a complex one as pairs."""
    x = x.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(x) if x.is_complex() else x


def equal(g: Tensor, e: Tensor) -> Tensor:
    """Where both hold the same number, or NaN."""
    return (g == e) | (g.isnan() & e.isnan())


def further(
    g: Tensor, e: Tensor, t: Tensor, moved: Tensor | None = None, least: float = TOLERANCE
) -> Tensor:
    """Where g, which plait computed, is further from t, float64's result, than e, eager's.

    All are real and of one shape. moved: float64's result of numbers that are a little off. least:
    the error that is always allowed."""
    dg, de = (g.double() - t.double()).abs(), (e.double() - t.double()).abs()
    # Where bfloat16 rounding or a comparison amplified a last bit, eager itself is as far off
    # elsewhere.
    eagers = float(de[de.isfinite()].max() if de.isfinite().any() else 0)
    slack = least + (TOLERANCE + UNIT.get(e.dtype, 0.0)) * t.double().abs() + 4 * eagers
    if moved is not None:
        by = (moved.double() - t.double()).abs()
        if e.is_floating_point():
            by[moved.abs() > torch.finfo(e.dtype).max] = math.inf
        slack = slack + 4 * by.nan_to_num(0.0, math.inf)
    right = equal(g, e) | (g == t.to(g.dtype)) | (g.isnan() & t.isnan())
    return ~right & ~(dg <= 2 * de + slack) & (e.isfinite() | ~t.isfinite())


def jitter(x: Tensor, half: float, seed: int) -> Tensor:
    """x in float64 with all numbers a little larger or smaller: at most by this part of them. What
    is one number in memory stays one: equal keys of `x.expand(n)` are equal however large they
    are."""
    once = x[tuple(slice(1) if step == 0 else slice(None) for step in x.stride())]
    generator = torch.Generator().manual_seed(seed)
    by = torch.rand(once.shape, generator=generator, dtype=torch.float64).to(x.device)
    return (once.double() * (1 + (2 * by - 1) * half)).expand(x.shape)


class Worst(NamedTuple):
    """The element that is furthest from float64's, and how many are wrong."""

    at: tuple[int, ...]
    plait: object
    eager: object
    float64: object
    n_wrong: int
    numel: int


K = TypeVar("K")
Numbers = Callable[[bool, int], Mapping[K, Any]]
"""Values by node or name, in float64 or not, a little off by seed."""


def worst_of(key: K, g: Tensor, values: Numbers[K]) -> Worst | None:
    """The worst element of g that is wrong as one of the values. Raises KeyError where that is not
    known."""
    e, t = values(False, 0)[key], values(True, 0)[key]
    if (g.shape, g.dtype) != (e.shape, e.dtype):
        have, want = (f"{x.dtype} {list(x.shape)}" for x in (g, e))
        return Worst((), have, want, want, g.numel(), e.numel())
    if t.shape != e.shape or not g.numel():
        return None
    g, e, t = real(g), real(e), real(t)
    size = t.double()[t.isfinite()].abs()
    least = TOLERANCE * min(1.0, float(size.amax()) if size.numel() else 1.0)
    bad = further(g, e, t, least=least)
    for seed in NUDGES:
        if not bool(bad.any()):
            return None
        other = real(values(True, seed)[key])
        if other.shape == t.shape:
            bad &= further(g, e, t, other, least)
    if not bool(bad.any()):
        return None
    off = (g.double() - t.double()).abs().nan_to_num(float("inf"), float("inf"))
    flat = int(torch.where(bad, off, -1.0).argmax())
    at = tuple(int(k) for k in torch.unravel_index(torch.tensor(flat), bad.shape))
    here, eager, float64 = (x[at].item() for x in (g, e, t))
    return Worst(at, here, eager, float64, int(bad.sum()), bad.numel())
