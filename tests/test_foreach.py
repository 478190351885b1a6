"""Operators on lists of tensors (`_foreach_*`): each overload gives eager's numbers, in kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import plait
from plait.config import WRAPPERS
from tests.against_eager import same

aten = torch.ops.aten
Tensors = list[torch.Tensor]

UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor lgamma log log10 log1p log2 "
    "neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
).split()
OTHERS = [torch.float64, torch.float16]
SHAPES = [(4, 9), (), (0, 3), (33,)]


def tensors(dtype: torch.dtype, seed: int, least: float = 0.1) -> Tensors:
    """Of mixed sizes, with values from `least` to 0.9."""
    g = torch.Generator().manual_seed(seed)
    made = [torch.rand(s, generator=g) * (0.9 - least) + least for s in SHAPES]
    return [x.to(dtype) if dtype.is_floating_point else (x * 10).to(dtype) for x in made]


def unary(x: Tensors) -> Any:
    return [getattr(torch, f"_foreach_{n}")(x) for n in UNARY]


def binary(x: Tensors, y: Tensors, one: torch.Tensor) -> Any:
    numbers, out = [0.5, 2, 1.25, 3], []
    for name in ("add", "sub", "mul", "div", "clamp_min", "clamp_max", "maximum", "minimum"):
        op = getattr(torch, f"_foreach_{name}")
        out += [op(x, 0.5), op(x, numbers), op(x, y)]
    for name in ("add", "mul", "div"):
        out.append(getattr(torch, f"_foreach_{name}")(x, one))
    out += [torch._foreach_add(x, y, alpha=0.3), torch._foreach_sub(x, y, alpha=2)]
    return out


def powers(x: Tensors, y: Tensors) -> Any:
    op = torch._foreach_pow
    return [op(x, 2), op(x, 0.5), op(x, [1, 2, 0.25, -1]), op(x, y), op(0.9, x)]


def updates(x: Tensors, y: Tensors, z: Tensors) -> Any:
    numbers, out = [0.5, -2, 1.25, 3], []
    for op in (torch._foreach_addcmul, torch._foreach_addcdiv):
        out += [op(x, y, z), op(x, y, z, value=-0.3), op(x, y, z, numbers)]
    lerp = torch._foreach_lerp
    return [*out, lerp(x, y, 0.3), lerp(x, y, 0.8), lerp(x, y, numbers), lerp(x, y, z)]


def in_place(x: Tensors, y: Tensors) -> None:
    torch._foreach_mul_(x, 0.9)
    torch._foreach_addcmul_(y, x, x, value=0.5)
    torch._foreach_copy_(x[:1], y[:1])
    torch._foreach_zero_(x[2:])


def norms(x: Tensors) -> Any:
    return [torch._foreach_norm(x, p) for p in (1, 2)] + [torch._foreach_norm(x[3:], float("inf"))]


CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "unary": (unary, 1),
    "binary": (lambda x, y: binary(x, y, y[1]), 2),
    "powers": (powers, 2),
    "updates": (updates, 3),
    "in place": (in_place, 2),
    "norms": (norms, 1),
}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in OTHERS)],
    ids=str,
)
@pytest.mark.parametrize("case", CASES)
def test_foreach(case: str, dtype: torch.dtype) -> None:
    """Eager's numbers, up to a unit in the last place of a half type, and nothing is called."""
    fn, n = CASES[case]
    args, given = (tuple(tensors(dtype, k) for k in range(n)) for _ in range(2))
    told = plait.explain(fn, *(tensors(dtype, k) for k in range(n)), quiet=True)
    assert not told.fallbacks, told
    want, got = fn(*given), torch.compile(fn, backend="plait")(*args)
    eps = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close((got, args), (want, given), rtol=2 * eps, atol=eps, equal_nan=True)


def test_promotion() -> None:
    """As of the operator on tensors."""

    def fn(x: Tensors, y: Tensors) -> Any:
        return [
            torch._foreach_add(x, 1),
            torch._foreach_add(x, 0.5),
            torch._foreach_mul(x, y),
            torch._foreach_div(x, x),
            torch._foreach_sqrt(x),
        ]

    same(fn, lambda: (tensors(torch.int32, 0, 0.2), tensors(torch.bfloat16, 1)))
    same(fn, lambda: (tensors(torch.bfloat16, 0), tensors(torch.float64, 1)))


def test_dynamic() -> None:
    fn = CASES["updates"][0]
    same(fn, lambda: tuple(tensors(torch.float32, k) for k in range(3)), dynamic=True)


def test_different_lengths() -> None:
    """Eager's error."""
    x = tensors(torch.float32, 0)
    with pytest.raises(RuntimeError, match=r"same number of tensors|lists must have"):
        torch.compile(lambda x, y: torch._foreach_add(x, y), backend="plait")(x, x[1:])


@torch.library.custom_op("plait_tests::list_and_tensor", mutates_args=())
def list_and_tensor(xs: Tensors, y: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Results of which one is a list."""
    return [x + 1 for x in xs], y * 2


@list_and_tensor.register_fake
def _(xs: Tensors, y: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return [torch.empty_like(x) for x in xs], torch.empty_like(y)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_list_among_results(wrapper: str) -> None:
    """Of a user's operator, and of one of PyTorch's where there are no kernels."""

    def users(xs: Tensors, y: torch.Tensor) -> Any:
        many, one = list_and_tensor(xs, y)
        return many[0] * 2, many[3], one

    def unscaled(xs: Tensors, found: torch.Tensor) -> Any:
        torch._amp_foreach_non_finite_check_and_unscale_(xs, found, torch.tensor(0.5))
        return xs[0] + 1

    for fn in (users, unscaled):
        seen = []
        options: dict[str, Any] = {"wrapper": wrapper, "strict": True, "kernels": fn is users}
        for run in (fn, torch.compile(fn, backend="plait", options=options)):
            args = (tensors(torch.float32, 0), torch.zeros(1))
            seen.append((run(*args), args))
        torch.testing.assert_close(seen[1], seen[0])


def test_alike_elements() -> None:
    """A rule is asked once for elements that are alike: those that are not, by what they share, by
    their layout or by a number, have loops of their own."""

    def fn(x: Tensors, y: Tensors) -> Any:
        twice = [x[0], x[0], x[2], x[3]]
        sums = torch._foreach_add(twice, [y[0], x[0], x[2], y[3]], alpha=2)
        return torch._foreach_mul(sums, [2.0, 2.0, -0.0, 0.0]), torch._foreach_mul(y, y[1])

    def given() -> tuple[Tensors, Tensors]:
        x, y = tensors(torch.float32, 0), tensors(torch.float32, 1)
        torch.manual_seed(0)
        shapes = [torch.rand(4, 9), torch.rand(()), torch.rand(9, 4).t(), torch.rand(4, 9)]
        return [*shapes], [torch.rand(4, 9), y[1], torch.rand(4, 9), x[0].half().float()]

    same(fn, given)
