"""Norms of rows of equal or nearly equal elements, and gradients, against eager and float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.kernel_tools import isas

LENGTHS = (1, 2, 7, 16, 33, 48, 64, 70, 768, 1031, 4096)
SPREADS = (0, 1e-7, 1e-6, 1e-5)
MIDDLES = (3.3, 1000.1, 12345.7, -0.7)
slow = pytest.mark.slow
Norm = Callable[[torch.Tensor], torch.Tensor]
all_isas = pytest.mark.parametrize("isa", isas())


def norms(n: int, eps: float) -> dict[str, Norm]:
    return {
        "layer_norm": lambda x: F.layer_norm(x, (n,), eps=eps),
        "group_norm": lambda x: F.group_norm(x.view(len(x), 1, n), 1, eps=eps).view(x.shape),
    }


def gradients(fn: Norm, dy: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    given = tuple(x.clone().requires_grad_() for x in given)
    return torch.autograd.grad(fn(*given), given, dy)


def worst(x: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest error."""
    return float((x.double() - truth).abs().max())


@all_isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["layer_norm", "group_norm"])
def test_forward(name: str, dtype: torch.dtype, isa: str) -> None:
    for n in LENGTHS:
        torch._dynamo.reset()
        fn = norms(n, 1e-12)[name]
        run = torch.compile(fn, backend="plait", options={"isa": isa}, dynamic=False)
        for spread in SPREADS:
            noise = 1 + spread * torch.randn(len(MIDDLES), n, dtype=torch.float64)
            x = (torch.tensor(MIDDLES, dtype=torch.float64)[:, None] * noise).to(dtype)
            truth, want, got = fn(x.double()), fn(x), run(x)
            rounding = 2 * torch.finfo(dtype).eps * float(truth.abs().max()) + 1e-5
            assert worst(got, truth) <= worst(want, truth) + rounding, (n, spread)


@all_isas
def test_gradients_of_constant_rows(isa: str) -> None:
    """The reciprocal deviation, too, is that of equal numbers."""
    # The reciprocal deviation is 1e6.
    for n in (2, 7, 48, 64, 70, 768, 1031):
        torch._dynamo.reset()
        fn = norms(n, 1e-12)["layer_norm"]
        run = torch.compile(fn, backend="plait", options={"isa": isa}, dynamic=False)
        x = torch.tensor(MIDDLES)[:, None].repeat(1, n)
        dy = torch.randn(x.shape)

        (truth,), (got,) = gradients(fn, dy.double(), x.double()), gradients(run, dy, x)
        torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=2.0)


GROUPS = ((3, 4, 16, 1), (2, 6, 49, 3), (4, 8, 256, 2), (5, 32, 7, 8), (3, 16, 1, 2))
"""Of group norms: samples, channels, elements of a channel, groups."""


@all_isas
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_of_group_norm(affine: bool, isa: str) -> None:
    """The mean takes no digits of the sums, as it does in eager's."""
    for n, c, size, groups in GROUPS:
        torch._dynamo.reset()

        def fn(x: torch.Tensor, *weights: torch.Tensor, groups: int = groups) -> torch.Tensor:
            return F.group_norm(x, groups, *weights)

        run = torch.compile(fn, backend="plait", options={"isa": isa}, dynamic=False)
        for middle, spread in itertools.product(MIDDLES, (*SPREADS, 1e-2, 1.0)):
            noise = 1 + spread * torch.randn(n, c, size, dtype=torch.float64)
            given = [(middle * noise).float(), *(torch.randn(c) for _ in range(2 * affine))]
            dy = torch.randn(n, c, size)
            truths = gradients(fn, dy.double(), *(x.double() for x in given))
            wants, gots = gradients(fn, dy, *given), gradients(run, dy, *given)
            for truth, want, got in zip(truths, wants, gots, strict=True):
                limit = 2 * worst(want, truth) + 5e-7 * float(truth.abs().max())
                assert worst(got, truth) <= limit, (n, c, size, groups, middle, spread)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["layer_norm", "group_norm"])
def test_gradients_round_once(name: str, dtype: torch.dtype) -> None:
    """Statistics that are saved have half precision, in eager too; all else is in float32."""
    for n in (7, 48, 294, 1031):
        torch._dynamo.reset()
        fn = norms(n, 1e-5)[name]
        run = torch.compile(fn, backend="plait", dynamic=False)
        x = torch.tensor(MIDDLES[:4])[:, None].repeat(1, n).to(dtype)
        dy = torch.randn(x.shape).to(dtype)
        (truth,), (want,) = gradients(fn, dy.double(), x.double()), gradients(fn, dy, x)
        (got,) = gradients(run, dy, x)
        assert worst(got, truth) <= 1.02 * worst(want, truth), n


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_deviations_of_equal_numbers_are_zero(dtype: torch.dtype) -> None:
    """Exactly, since gradients divide by them where they are not."""

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.std(1), torch.std_mean(x, 1, correction=0)[0], x.std(), x.t().contiguous().std(0)]

    middles = torch.tensor([*MIDDLES, 7e-5, 6e4], dtype=torch.float64).to(dtype)
    for n in (3, 7, 48, 1031, 20_000):
        torch._dynamo.reset()
        run = torch.compile(lambda x: fn(x)[:2] + fn(x)[3:], backend="plait", dynamic=False)
        assert not any(map(torch.any, run(middles[:, None].repeat(1, n)))), n
        if n not in (7, 1031):  # a gradient of short rows and one of long ones
            continue
        x = torch.full((3, n), 0.3, dtype=dtype).requires_grad_()
        found = torch.compile(fn, backend="plait", dynamic=False)(x)
        (gradient,) = torch.autograd.grad(found, x, [torch.ones_like(y) for y in found])
        assert not any(map(torch.any, (*found, gradient))), n


def test_squares_that_overflow_are_no_nans() -> None:
    x = torch.tensor([[1e30, -3e30, 2e30] * 100, [3e38] * 299 + [2e38]])
    run = torch.compile(torch.native_layer_norm, backend="plait")
    _, mean, rstd = run(x, (300,), None, None, 1e-5)
    torch.testing.assert_close(mean, x.double().mean(1, keepdim=True).float(), rtol=1e-5, atol=1e25)
    assert rstd.flatten().tolist() == [0.0, 0.0]


def test_sizes_found_at_run_time() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[1:], eps=1e-12)

    run = torch.compile(fn, backend="plait", dynamic=True)
    for n in (7, 48, 768, 1031):
        assert not run(torch.full((3, n), 1000.1)).any()
    assert run(torch.empty(3, 0)).shape == (3, 0)
