"""Whole models against eager: inference, a training step, and one compile for several batch
sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import MODELS, SOME


def distance(a: Tensor, truth: Tensor) -> float:
    return float((a.double() - truth.double()).abs().max())


def close(got: Tensor, eager: Tensor, truth: Tensor, what: str) -> None:
    """got is at most twice as far from the float64 truth as eager is, plus a rounding of the
    largest value."""
    assert (
        got.shape == eager.shape and got.dtype == eager.dtype and got.stride() == eager.stride()
    ), what
    got, eager, truth = got.detach(), eager.detach(), truth.detach()
    slack = 1e-6 * float(truth.abs().max()) + 1e-7
    assert distance(got, truth) <= 2 * distance(eager, truth) + slack, (
        f"{what}: {distance(got, truth):.3e} from float64, eager {distance(eager, truth):.3e}"
    )


def build(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """The model without dropout, its float64 twin and an input of batch 2."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    make, data = MODELS[name]
    model = make()
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    return model, copy.deepcopy(model).double(), data(2)


def double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("name", list(MODELS))
def test_inference(name: str) -> None:
    model, exact, x = build(name)
    model.eval(), exact.eval()
    compiled = torch.compile(model, backend="plait")
    with torch.no_grad():
        for _ in range(2):
            close(compiled(x), model(x), exact(double(x)), name)


def trains_as_eager(
    name: str,
    model: nn.Module,
    exact: nn.Module,
    x: Tensor,
    mode: str | None = None,
    steps: int = 1,
    dynamic: bool | None = None,
) -> None:
    """Training steps from the same state: results, gradients and buffers."""
    model.train(), exact.train()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="plait", mode=mode, dynamic=dynamic)
    for _ in range(steps):
        _step_as_eager(name, model, twin, compiled, exact, x)


def _step_as_eager(
    name: str, model: nn.Module, twin: nn.Module, compiled: Any, exact: nn.Module, x: Tensor
) -> None:
    for m in (model, twin, exact):
        m.zero_grad(set_to_none=True)
    outs = []
    for m, fn, data in ((model, model, x), (twin, compiled, x), (exact, exact, double(x))):
        out = fn(data)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
        (out * weights.view_as(out)).mean().backward()
        outs.append((out, m))
    (eager, _), (got, _), (truth, _) = outs
    close(got, eager, truth, name)
    for (n, p), q, t in zip(
        model.named_parameters(), twin.parameters(), exact.parameters(), strict=True
    ):
        if p.grad is None:
            assert q.grad is None, n
        else:
            assert q.grad is not None and t.grad is not None
            close(q.grad, p.grad, t.grad, n)
    for (n, a), b, t in zip(model.named_buffers(), twin.buffers(), exact.buffers(), strict=True):
        close(b, a, t, n)


@pytest.mark.parametrize("name", list(MODELS))
def test_training_step(name: str) -> None:
    trains_as_eager(name, *build(name))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SOME else pytest.mark.slow) for n in MODELS]
)
def test_dynamic_batch(name: str) -> None:
    model, exact, _ = build(name)
    model.eval(), exact.eval()
    data = MODELS[name][1]
    compiled = torch.compile(model, backend="plait", dynamic=True)
    with torch.no_grad():
        for batch in (2, 3, 5):
            x = data(batch)
            torch._dynamo.mark_dynamic(x, 0)
            close(compiled(x), model(x), exact(double(x)), f"{name} batch {batch}")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
