"""The first layers of a convolutional network in training: what is saved, who computes gradients,
and the numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import plait.graph.pool_indices as pool_indices
from plait.devices import facts_of
from plait.ir.dtypes import f32
from plait.schedule.cost import buffer_nbytes
from plait.schedule.plan import Kernel
from plait.wrapper.program import CompileRecord
from tests.test_cuda_programs import compile_only, record

__all__ = ["compile_only"]
aten = torch.ops.aten
POOL: Any = ([3, 3], [2, 2], [1, 1], [1, 1], False)
LARGE = 1 << 22  # bytes


def channels_last(*shapes: tuple[int, ...]) -> tuple[FakeTensorMode, list[Tensor]]:
    """Fake bfloat16 images on a GPU."""
    mode = FakeTensorMode()
    with mode:
        made = (torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
        return mode, [x.to(memory_format=torch.channels_last) for x in made]


def busy_kernels(made: CompileRecord) -> list[Kernel]:
    """The kernels that read or write something large, all of which keep a device busy, with nothing
    large in f32."""
    found = []
    for step in made.plan.steps:
        if isinstance(step, Kernel) and any(buffer_nbytes(b, {}) >= LARGE for b in step.args):
            found.append(step)
            assert isinstance(step.grid, int) and step.grid >= 256, step.name
            assert all(b.dtype != f32 for b in step.args if buffer_nbytes(b, {}) >= LARGE), (
                step.name
            )
    return found


def norm_backward(grad: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Through relu and the sums of a batch norm."""
    g, deviation = torch.where(y <= 0, 0.0, grad).float(), x.float() - 0.5
    once, twice = g.sum((0, 2, 3), keepdim=True), (g * deviation).sum((0, 2, 3), keepdim=True)
    return (g - deviation * twice - once).bfloat16(), once, twice


def test_a_sum_of_gradients_that_is_read_thrice_is_made_once(compile_only: None) -> None:
    mode, args = channels_last(*[(32, 256, 56, 56)] * 4)
    made = record(lambda a, b, y, x: norm_backward(a + b, y, x), *args, mode=mode)
    first, last = busy_kernels(made)
    assert (
        len({b.name for b in first.args if buffer_nbytes(b, {}) >= LARGE}) == 5
    )  # a, b, y, x, and what is read again
    assert len({b.name for b in last.args if buffer_nbytes(b, {}) >= LARGE}) == 3


def test_the_gradient_of_a_pool_is_gathered_once(compile_only: None) -> None:
    mode, (grad, y, x) = channels_last((32, 64, 56, 56), *[(32, 64, 112, 112)] * 2)
    with mode:
        at = torch.empty_like(grad, dtype=torch.int16)

    def fn(grad: Tensor, at: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return norm_backward(aten.max_pool2d_with_indices_backward(grad, y, *POOL, at.long()), y, x)

    made = record(fn, grad, at, y, x, mode=mode)
    kernels = busy_kernels(made)
    assert len(kernels) == 2 and sum(at.dtype.name == "i16" for k in kernels for at in k.args) == 1
    (combine,) = (s for s in made.plan.steps if isinstance(s, Kernel) and s not in kernels)
    assert combine.grid == 8  # 64 sums of 3584 parts each: sectors of 32 bytes


def test_a_filter_is_turned_once_for_all_who_want_it(compile_only: None) -> None:
    mode, (x,) = channels_last((8, 64, 56, 56))
    with mode:
        w = torch.empty(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16)

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        turned = w.clone(memory_format=torch.channels_last)
        return F.conv2d(x, turned), F.conv2d(x, turned, padding=1), turned

    made = record(fn, x, w, mode=mode)
    (turn,) = (step for step in made.plan.steps if isinstance(step, Kernel))
    assert len(turn.outs) == 1


# --------------------------------------------------------------------------------------- indices
def pooled(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    y, at = aten.max_pool2d_with_indices(x, *POOL)
    return y, aten.max_pool2d_with_indices_backward(g, x, *POOL, at)


def adaptive(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    y, at = aten.adaptive_max_pool2d(x, g.shape[-2:])
    return y, aten.adaptive_max_pool2d_backward(g, x, at)


def read_elsewhere(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    y, at = aten.max_pool2d_with_indices(x, *POOL)
    return y, at, aten.max_pool2d_with_indices_backward(g, x, *POOL, at)


@pytest.mark.parametrize(
    ("fn", "size", "saved"),
    [
        (pooled, (128, 256), torch.int16),
        (pooled, (128, 258), torch.int32),
        (adaptive, (40, 40), torch.int16),
        (read_elsewhere, (8, 8), None),
    ],
)
def test_positions_are_saved_as_small_integers(
    fn: Callable[..., Any],
    size: tuple[int, int],
    saved: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, g = torch.randn(1, 2, *size), torch.randn(1, 2, size[0] // 2, size[1] // 2)
    gm = make_fx(fn, tracing_mode="fake")(x, g)
    assert pool_indices.narrow_pool_indices(gm) == 0  # on a CPU
    monkeypatch.setattr(pool_indices, "facts_of", lambda device: facts_of("cuda"))
    assert pool_indices.narrow_pool_indices(gm) == (saved is not None)
    gm.graph.lint()
    gm.recompile()
    casts = [n.meta["val"].dtype for n in gm.graph.nodes if n.target is aten._to_copy.default]
    assert casts == ([] if saved is None else [saved, torch.int64])
    torch.testing.assert_close(gm(x, g), fn(x, g), rtol=0, atol=0)
    assert pool_indices.narrow_pool_indices(gm) == 0


# ------------------------------------------------------------------------------------------ numbers
def step(model: nn.Module, x: Tensor, run: Callable[..., Tensor]) -> list[Tensor]:
    """The result and all gradients."""
    x = x.detach().requires_grad_()
    out = run(x)
    parameters = list(model.parameters())
    return [out, *torch.autograd.grad(out.float().square().mean(), [x, *parameters])]


@pytest.mark.parametrize("image", [(2, 3, 13, 18), (3, 3, 9, 8)])
def test_first_layers_train_as_in_eager(
    image: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_indices, "facts_of", lambda device: facts_of("cuda"))
    torch.manual_seed(0)
    stem = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )
    half = stem.to(torch.bfloat16, memory_format=torch.channels_last)
    x = torch.randn(image).to(torch.bfloat16, memory_format=torch.channels_last)
    exact = copy.deepcopy(half).double()
    got = step(half, x, torch.compile(half, backend="plait"))
    eager, truth = step(half, x, half), step(exact, x.double(), exact)
    for a, b, c in zip(got, eager, truth, strict=True):
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm() + 0.02 * c.norm()
