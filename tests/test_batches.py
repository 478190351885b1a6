"""Updates of many tensors: a few launches, of kernels that take any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import plait
from plait.config import WRAPPERS
from plait.schedule.plan import kernels_of
from plait.schedule.text import plan_text, read_plan
from plait.wrapper.instructions import Copy

Tensors = list[torch.Tensor]
MIXED = [(5 * k + 3, 16) if k % 3 else (7 * k + 2,) for k in range(30)]


def tensors(seed: int, sizes: Sequence[tuple[int, ...]] = MIXED) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(s, generator=g) + 0.5 for s in sizes]


def momentum(params: Tensors, grads: Tensors, sums: Tensors, rate: torch.Tensor) -> None:
    """Written for each tensor by itself."""
    for p, g, m in zip(params, grads, sums, strict=True):
        m.mul_(0.9).add_(g)
        p.sub_(m * rate)


def inputs(sizes: Sequence[tuple[int, ...]] = MIXED) -> tuple[Any, ...]:
    return (*(tensors(k, sizes) for k in range(3)), torch.tensor(0.1))


def agree(fn: Any, sizes: Sequence[tuple[int, ...]] = MIXED, **options: Any) -> None:
    want, got = inputs(sizes), inputs(sizes)
    run = torch.compile(fn, backend="plait", options=options)
    for _ in range(2):
        fn(*want)
        run(*got)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_mixed_sizes(wrapper: str) -> None:
    """Lengths that are multiples of 16 and others, with a factor that all read."""
    agree(momentum, wrapper=wrapper)


def test_launches() -> None:
    """A launch for each kind of length, and the plan with it reads back."""
    told = plait.explain(momentum, *inputs(), quiet=True)
    assert told.kernels <= 3, told
    plan = told.graphs[0].plan
    assert sum(len(k.parts) for k in kernels_of(plan) if k.alike) == len(MIXED), plan
    assert plan_text(read_plan(plan_text(plan), plan.program)) == plan_text(plan)


def test_written_in_place() -> None:
    """New values take the place of old ones, though another result is made of these too; a ring of
    values that need each other's old ones is copied."""

    def ring(params: Tensors, grads: Tensors, sums: Tensors, rate: torch.Tensor) -> None:
        for p, m in zip(params, sums, strict=True):
            old = p.clone()
            p.copy_(m * rate)
            m.copy_(old * rate)

    def copies(fn: Any) -> int:
        (graph,) = plait.explain(fn, *inputs(), quiet=True).graphs
        return sum(isinstance(i, Copy) for i in graph.wrapper.body)

    assert copies(momentum) == 0
    assert copies(ring) == len(MIXED)
    agree(ring)


def test_large_and_small() -> None:
    """Threads share all of it: one tensor is larger than the others together, one is empty, one a
    single element."""
    agree(momentum, [*((k, 16) for k in range(20)), (700, 1000), (1,), (), (0, 4)])


def test_a_value_that_another_one_reads() -> None:
    """An update that reads what an earlier one wrote stays behind it."""

    def chained(params: Tensors, grads: Tensors, sums: Tensors, rate: torch.Tensor) -> None:
        for k in range(1, len(params)):
            params[k].add_(params[k - 1].sum() * 0.01 + grads[k])
            sums[k].mul_(rate)

    agree(chained)


def test_transposed() -> None:
    """Tensors whose elements lie in another order than those of their gradients share nothing."""

    def fn(params: Tensors, grads: Tensors, sums: Tensors, rate: torch.Tensor) -> None:
        momentum(params, [g.t() for g in grads], sums, rate)

    agree(fn, [(k, k) for k in range(2, 20)])


def test_autotuned() -> None:
    agree(momentum, autotune=True)
