"""Layer and group norm of rows of equal or nearly equal elements, against eager and float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

LENGTHS = (1, 2, 7, 16, 33, 48, 64, 70, 768, 1031, 4096)
SPREADS = (0, 1e-7, 1e-6, 1e-5)
MIDDLES = (3.3, 1000.1, 12345.7, -0.7)
slow = pytest.mark.slow
Norm = Callable[[torch.Tensor], torch.Tensor]
all_isas = pytest.mark.parametrize(
    "isa", ["avx512", pytest.param("avx2", marks=slow), pytest.param("portable", marks=slow)]
)


def norms(n: int, eps: float) -> dict[str, Norm]:
    return {
        "layer_norm": lambda x: F.layer_norm(x, (n,), eps=eps),
        "group_norm": lambda x: F.group_norm(x.view(len(x), 1, n), 1, eps=eps).view(x.shape),
    }


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

        def gradient(f: Norm, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            return torch.autograd.grad(f(x), x, dy)[0]

        truth = gradient(fn, x.double(), dy.double())
        torch.testing.assert_close(gradient(run, x, dy).double(), truth, rtol=1e-5, atol=2.0)


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
