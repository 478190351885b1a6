"""Readers of concatenations that are computed in pieces: as eager, and only where that is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.schedule.plan import kernels_of
from plait.wrapper.program import CompileRecord
from tests.against_eager import same
from tests.product_programs import observing

SIZES = (3, 5, 1, 4, 2, 6)  # more than a chain of masked loads


def make(dim: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(4, n, 3) if dim == 1 else (n, 4, 3) for n in SIZES]
    return [torch.randn(s, generator=generator) for s in sizes] + [torch.ones(sum(SIZES), 1)]


def scaled(*xs: Tensor) -> Tensor:
    *parts, w = xs
    return torch.relu(torch.cat(parts, 1) * (w + torch.arange(len(w))[:, None]))


def kept(*xs: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.cat(xs[:-1], 1)
    return y, y.sin()


def twice(*xs: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.cat(xs[:-1], 1)
    return y.sin(), y.transpose(0, 1).cos() + 1


def moved(*xs: Tensor) -> Tensor:
    """Read elsewhere than where it is stored."""
    y = torch.cat(xs[:-1], 1)
    return y + y.flip(1)


def changed(*xs: Tensor) -> Tensor:
    """A piece is updated between the concatenation and its reader."""
    y = torch.cat(xs[:-1], 1)
    xs[0].add_(1)
    return y.exp() + xs[0].sum()


def computed(*xs: Tensor) -> Tensor:
    return torch.cat([x.sin() * k for k, x in enumerate(xs[:-1])], 1).sigmoid() - 1


@pytest.mark.parametrize("fn", [scaled, kept, twice, moved, changed, computed])
@pytest.mark.parametrize("dynamic", [False, True])
def test_as_eager(fn: Callable[..., Any], dynamic: bool) -> None:
    torch.compiler.reset()
    same(fn, make, dynamic=dynamic)


@pytest.mark.parametrize(
    ("fn", "buffers"), [(scaled, 1), (computed, 1), (kept, 2), (twice, 3), (moved, 2)]
)
def test_what_is_made(fn: Callable[..., Any], buffers: int) -> None:
    """The concatenation itself is a buffer only where it has to be."""
    torch.compiler.reset()
    records: list[CompileRecord] = []
    with observing(records):
        torch.compile(fn, backend="plait")(*make())
    (record,) = records
    made = {o for k in kernels_of(record.plan) for o in k.outs}
    assert len(made) == buffers


def test_gradients() -> None:
    torch.compiler.reset()
    same(scaled, make, grad=True)
