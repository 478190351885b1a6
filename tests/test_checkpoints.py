"""Checkpointed regions with random numbers: the backward pass computes from those of the forward
pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from plait.wrapper.instructions import CallExtern
from plait.wrapper.program import CompileRecord, observers

ones = partial(torch.ones, 8)

# Results that are their own gradients with respect to an x of zeros.
RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "poisson": lambda x: torch.poisson(3 * ones()) * x.exp(),
    "multinomial": lambda x: torch.multinomial(ones(), 8, replacement=True) * x.exp(),
    "randperm": lambda x: torch.randperm(8) * x.exp(),
    "binomial": lambda x: torch.binomial(5 * ones(), ones() / 2) * x.exp(),
    "bernoulli_": lambda x: ones().bernoulli_(0.5) * x.exp(),
    "rand": lambda x: torch.rand(8) * x.exp(),
    "dropout": lambda x: F.dropout(x.exp(), 0.5),
    "rrelu": lambda x: F.rrelu(-x.exp(), training=True),
}


@pytest.mark.parametrize("eager_random", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_those_of_the_forward_pass(
    name: str, reentrant: bool, eager_random: bool
) -> None:
    options = {"strict": True, "eager_random": eager_random}
    run = torch.compile(
        lambda x: checkpoint(RANDOM[name], x, use_reentrant=reentrant),
        backend="plait",
        options=options,
    )
    x = torch.zeros(8, requires_grad=True)
    y = run(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def _noisy(x: Tensor) -> Tensor:
    return torch.dropout(x.sin(), 0.5, True).exp()


def _saves_sines(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if op == torch.ops.aten.sin.default
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


_SELECTIVE = partial(create_selective_checkpoint_contexts, _saves_sines)
REGIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: checkpoint(_noisy, x, use_reentrant=False),
    "reentrant": lambda x: checkpoint(_noisy, x, use_reentrant=True),
    "nested": lambda x: checkpoint(
        lambda x: checkpoint(_noisy, x, use_reentrant=False) * torch.dropout(x, 0.5, True),
        x,
        use_reentrant=False,
    ),
    "selective": lambda x: checkpoint(_noisy, x, use_reentrant=False, context_fn=_SELECTIVE),
    "state is not kept": lambda x: checkpoint(
        torch.sin, x, use_reentrant=False, preserve_rng_state=False
    ),
}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.filterwarnings("ignore:plait. eager runs a graph")
def test_graphs_that_eager_runs(name: str) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return REGIONS[name](x), torch.zeros(3, 1).expand(3, 4).fill_(5)  # which no graph can hold

    found = []
    for run in (fn, torch.compile(fn, backend="plait", options={"strict": False})):
        torch.manual_seed(0)
        x = torch.ones(200, requires_grad=True)
        y = run(x)[0]
        y.sum().backward()
        found.append((y.detach(), x.grad))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("saved, products", [(["mm"], 4), ([], 6)])
def test_what_is_computed_again_is_what_the_policy_says(saved: list[str], products: int) -> None:
    """Products of the backward pass: two for the gradients of each, and those of the region."""
    kept = [getattr(torch.ops.aten, name).default for name in saved]
    policy = partial(create_selective_checkpoint_contexts, kept)
    weights = [torch.eye(96, requires_grad=True) for _ in range(2)]

    def block(x: Tensor) -> Tensor:
        for w in weights:
            x = torch.tanh(x @ w) * 1.5
        return x

    made: list[CompileRecord] = []
    token = observers.set((made.append,))
    run = torch.compile(
        lambda x: checkpoint(block, x, use_reentrant=False, context_fn=policy), backend="plait"
    )
    found = []
    for fn in (block, run):
        x = torch.linspace(-1, 1, 96 * 96).view(96, 96).requires_grad_()
        found.append(torch.autograd.grad(fn(x).square().sum(), (x, *weights)))
    observers.reset(token)
    torch.testing.assert_close(*found)
    calls = [i.op for i in made[1].wrapper.body if isinstance(i, CallExtern)]
    assert sum(op.startswith("aten::mm") for op in calls) == products, calls


@pytest.mark.filterwarnings("ignore:plait. eager runs a graph")
def test_tangents_of_a_region() -> None:
    run = torch.compile(REGIONS["plain"], backend="plait", options={"strict": False})
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(
            run(forward_ad.make_dual(torch.ones(200), torch.ones(200)))
        )
    assert torch.equal(y == 1, tangent == 0) and 0 < int((y == 1).sum()) < 200
