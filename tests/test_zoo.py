"""A zoo of architectures against eager: inference, a training step, plait.compile and a dynamic
batch.

The rule is distance from float64. Inputs, weights and random numbers are equal in all runs; what a
model may not do (train, export) its entry in zoo.py says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from tests.zoo import HF, OWN, TORCHVISION, Case

CASES = {**HF, **OWN}
pytestmark = pytest.mark.slow
Model = Callable[..., tuple[Tensor, ...]]


def distance(a: Tensor, truth: Tensor) -> float:
    """The largest difference; infinite where one is finite and the other is not."""
    a, truth = a.double(), truth.double()
    if not torch.equal(torch.isfinite(a), torch.isfinite(truth)):
        return float("inf")
    return float((a - truth).abs().nan_to_num(0).max()) if a.numel() else 0.0


def close(
    got: Sequence[Tensor], eager: Sequence[Tensor], truth: Sequence[Tensor], what: str
) -> None:
    """Each result is at most twice as far from float64 as eager's, plus a rounding of the largest
    value."""
    for k, (g, e, t) in enumerate(zip(got, eager, truth, strict=True)):
        assert (g.shape, g.dtype) == (e.shape, e.dtype), f"{what} {k}"
        sizes = t.detach().double()
        sizes = sizes[sizes.isfinite() & (sizes.abs() < 1e30)].abs()
        slack = 1e-6 * float(sizes.max()) + 1e-7 if sizes.numel() else 1e-7
        mine, its = distance(g.detach(), t.detach()), distance(e.detach(), t.detach())
        assert mine <= 2 * its + slack, f"{what} {k}: {mine:.3e} from float64, eager {its:.3e}"


class Trio:
    """A model, its float64 twin (itself where it has none) and inputs."""

    def __init__(self, case: Case) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        self.case, self.model = case, case.make()
        for m in self.model.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.0
        self.exact = copy.deepcopy(self.model).double()
        self.inputs = case.data(2)

    def truth(self, run: Callable[..., Any], like: Any, inputs: Sequence[Tensor]) -> Any:
        """What run gives on the float64 twin; `like` where the model insists on float32
        somewhere."""
        try:
            return run(self.exact, [t.double() if t.is_floating_point() else t for t in inputs])
        except (RuntimeError, AssertionError):
            return like


def infer(model: Model, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    with torch.no_grad():
        return model(*inputs)


def train(model: Model, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a step; gradients are left in the parameters."""
    torch.manual_seed(1)
    outs = [o for o in model(*inputs) if o.requires_grad and o.numel()]
    weights = (torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape) for o in outs)
    torch.stack([(o * w).mean() for o, w in zip(outs, weights, strict=True)]).sum().backward()
    return tuple(outs)


def nudged(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose parameters are off by a rounding, or not at all."""
    twin, chance = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1 + torch.finfo(p.dtype).eps * torch.randint(-1, 2, p.shape, generator=chance))
    return twin


def farthest(runs: Sequence[Tensor], truth: Tensor) -> Tensor:
    """The run that is farthest from the truth."""
    return max(runs, key=lambda t: distance(t.detach(), truth.detach()))


def runs_well(case: Case) -> None:
    trio = Trio(case)
    trio.model.eval(), trio.exact.eval()
    eager = infer(trio.model, trio.inputs)
    truth = trio.truth(infer, eager, trio.inputs)
    compiled = torch.compile(trio.model, backend="plait")
    for _ in range(2):
        close(infer(compiled, trio.inputs), eager, truth, "result")
    if not case.breaks:
        assert not torch._dynamo.utils.counters["graph_break"]
    if case.exports:
        with torch.no_grad():
            program = plait.compile(trio.model, trio.inputs)
        close(infer(program, trio.inputs), eager, truth, "exported")


def takes_any_batch(case: Case) -> None:
    trio = Trio(case)
    trio.model.eval(), trio.exact.eval()
    compiled = torch.compile(trio.model, backend="plait", dynamic=True)
    batches = (2, 3, 5)
    for batch in batches:
        inputs = case.data(batch)
        eager = infer(trio.model, inputs)
        close(infer(compiled, inputs), eager, trio.truth(infer, eager, inputs), f"batch {batch}")
    if not case.breaks:
        most = len(batches) if case.numbered else 1
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= most


def trains_well(case: Case) -> None:
    trio = Trio(case)
    twin = copy.deepcopy(trio.model)
    others = [nudged(trio.model, seed) for seed in range(3 if case.sensitive else 0)]
    eager, *_ = [train(m, trio.inputs) for m in (trio.model, *others)]
    got = train(torch.compile(twin, backend="plait"), trio.inputs)
    truth = trio.truth(train, None, trio.inputs)
    exact = trio.model if truth is None else trio.exact
    close(got, eager, eager if truth is None else truth, "result")
    named = trio.model.named_parameters()
    for (name, p), q, t, *more in zip(
        named, twin.parameters(), exact.parameters(), *(m.parameters() for m in others), strict=True
    ):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None and t.grad is not None:
            close([q.grad], [farthest([p.grad, *(o.grad for o in more)], t.grad)], [t.grad], name)
    for (name, a), b, t in zip(
        trio.model.named_buffers(), twin.buffers(), exact.buffers(), strict=True
    ):
        close([b], [a], [t], name)


@pytest.mark.parametrize("name", CASES)
def test_inference(name: str) -> None:
    runs_well(CASES[name])


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.dynamic])
def test_batches(name: str) -> None:
    takes_any_batch(CASES[name])


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.trains])
def test_training(name: str) -> None:
    trains_well(CASES[name])


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name: str) -> None:
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    runs_well(TORCHVISION[name])
    trains_well(TORCHVISION[name])
