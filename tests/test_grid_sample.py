"""`grid_sample` and its gradients as on a GPU: the rules' loops against float64, by the reference
evaluator. On a CPU ATen is called."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from plait.devices import facts_of
from plait.lower.core import Lowering
from tests.lower_tools import Evaluation, lowered

aten = torch.ops.aten
BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)
HOW = [
    (rank, mode, padding, align)
    for rank, mode, padding, align in itertools.product((2, 3), range(3), range(3), (False, True))
    if (rank, mode) != (3, BICUBIC)
]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lowering, "facts", lambda _: facts_of("cuda"))


def _operators(rank: int):
    if rank == 2:
        return aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default
    return aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default


def _close(got: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(got.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("rank", "mode", "padding", "align"), HOW)
def test_loops(as_on_a_gpu: None, rank: int, mode: int, padding: int, align: bool) -> None:
    """Positions inside and outside; a dimension of one element."""
    forward, backward = _operators(rank)
    x = torch.randn(2, 2, *(1, 5, 4)[:rank])
    grid = torch.rand(2, *(3, 2, 2)[:rank], rank) * 3.2 - 1.6

    def both(x: Tensor, grid: Tensor, grad: Tensor):
        out = forward(x, grid, mode, padding, align)
        return out, *backward(grad, x, grid, mode, padding, align, [True, True])

    args = x, grid, torch.randn(2, 2, *grid.shape[1:-1])
    low = lowered(both, args)
    assert not low.fallbacks and not any("grid_sampler" in str(op) for op in _calls(low))
    exact = both(*(a.double() for a in args))
    for got, want in zip(Evaluation(low, args).run(), exact, strict=True):
        _close(got, want)


def _calls(low) -> list[object]:
    return [op.op for op in low.program.ops if type(op).__name__ == "Extern"]


@pytest.mark.parametrize("padding", [ZEROS, BORDER, REFLECTION])
def test_positions_that_are_no_numbers(as_on_a_gpu: None, padding: int) -> None:
    """ATen's kernels for GPUs read nothing there, or the first element."""
    x = torch.arange(1.0, 7.0).view(1, 1, 2, 3)
    grid = torch.tensor([[float("nan"), -1.0], [float("inf"), -1.0], [-float("inf"), -1.0]])
    low = lowered(
        lambda x, g: aten.grid_sampler_2d(x, g, BILINEAR, padding, True), (x, grid.view(1, 1, 3, 2))
    )
    (got,) = Evaluation(low, (x, grid.view(1, 1, 3, 2))).run()
    want = {ZEROS: [0.0, 0.0, 0.0], BORDER: [1.0, 3.0, 1.0], REFLECTION: [1.0, 1.0, 1.0]}
    assert got.flatten().tolist() == want[padding]


def test_one_gradient_alone(as_on_a_gpu: None) -> None:
    args = torch.randn(1, 2, 2, 3), torch.randn(1, 2, 4, 3), torch.rand(1, 2, 3, 2) * 2 - 1
    for wanted in ([True, False], [False, True]):
        low = lowered(
            lambda g, x, p, wanted=wanted: next(
                r
                for r in aten.grid_sampler_2d_backward(g, x, p, 0, 0, False, wanted)
                if r is not None
            ),
            args,
        )
        (got,) = Evaluation(low, args).run()
        exact = aten.grid_sampler_2d_backward(*(a.double() for a in args), 0, 0, False, wanted)
        _close(got, exact[wanted.index(True)])


def test_a_cpu_calls_aten() -> None:
    x, grid = torch.randn(1, 2, 3, 3), torch.rand(1, 2, 2, 2)
    low = lowered(lambda x, g: aten.grid_sampler_2d(x, g, 0, 0, False), (x, grid))
    assert _calls(low) == ["aten::grid_sampler_2d"] and not low.fallbacks
