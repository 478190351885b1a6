"""Readers of concatenations that are computed in pieces: as eager, and only where that is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.ir.calls import TensorArg
from plait.ir.dtypes import f32
from plait.ir.loops import Buffer, Load, LoopProgram, Pointwise, apply, loop_vars, node
from plait.ir.verify import verify
from plait.schedule.deps import Bodies
from plait.schedule.plan import kernels_of
from plait.schedule.split_readers import split_readers
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


def first_half(*xs: Tensor) -> Tensor:
    """A reader of the first elements only: pieces behind it are nobody's."""
    return torch.cat(xs[:-1], 1).chunk(2, 1)[0].relu()


@pytest.mark.parametrize("fn", [scaled, kept, twice, moved, changed, computed, first_half])
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


def test_a_reader_of_two_concatenations() -> None:
    """Each is one piece on a GPU: a reader that was split for one is not what the other knew."""
    i = loop_vars("i", (4, 6))
    given = [Buffer(n, f32, (4, 6), (6, 1), fixed=True) for n in ("a", "b")]
    made = [Buffer(n, f32, (4, 6), (6, 1)) for n in ("x", "y", "z")]
    loads = {b.name: node("load", (), Load(b.name, i), f32) for b in (*given, *made)}
    ops = (
        Pointwise("x", i, apply("exp", loads["a"]), i),
        Pointwise("y", i, apply("sin", loads["b"]), i),
        Pointwise("z", i, loads["x"] * loads["y"]),
    )
    out = TensorArg("z", (4, 6), (6, 1), 0)
    buffers = {b.name: b for b in (*given, *made)}
    p = LoopProgram(("a", "b"), buffers, {}, ops, (out,), {}, (), {}, ())
    verify(split_readers(p, Bodies()), "test")
