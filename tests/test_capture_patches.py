"""Convolutions of patches of an image, as convolutions of points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from plait import compat
from plait.devices import facts_of
from plait.graph import memory_format, patches
from plait.graph.conv_cost import convolution_of

aten = torch.ops.aten
CASES = {  # sizes of images and of windows
    "image": ((2, 3, 12, 8), (4, 2)),
    "not whole": ((2, 3, 14, 9), (4, 2)),
    "video": ((2, 3, 4, 6, 9), (2, 3, 3)),
    "single": ((1, 1, 4, 4), (4, 4)),
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass takes a CPU for a GPU."""
    monkeypatch.setattr(memory_format, "facts_of", lambda device: facts_of("cuda"))


def unfolded(fn: Callable[..., Any], *args: Tensor, mode: str = "fake") -> int:
    """How many convolutions the pass replaced; results and their strides are checked."""
    table = compat.decompositions.decomposition_table()
    gm = make_fx(torch.func.functionalize(fn), table, mode)(*args)
    n = patches.unfold_patches(gm)
    gm.graph.lint()
    gm.recompile()
    for a, b in zip(gm(*args), fn(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.stride() == b.stride()
    found = [c for c in gm.graph.nodes if c.target in memory_format._CONVOLUTIONS]
    assert n == 0 or all(convolution_of(c).is_point for c in found)
    assert patches.unfold_patches(gm) == 0
    return n


def convolved(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    op: Any = (F.conv2d, F.conv3d)[x.dim() - 4]
    result: Tensor = op(x, w, b, stride=w.shape[2:])
    return result


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_forward_and_backward(name: str, last: bool) -> None:
    shape, window = CASES[name]
    x, w, b = torch.randn(shape), torch.randn(5, shape[1], *window), torch.randn(5)
    if last:
        x = x.to(memory_format=memory_format._FORMATS[x.dim()])

    def fn(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y, gradients = torch.func.vjp(convolved, x, w, b)
        return (y, *gradients(y))

    assert unfolded(fn, x, w, b) == 2
    assert unfolded(lambda *a: (convolved(*a),), x, w, b) == 1


@pytest.mark.parametrize("shape", [(2, 3, 15, 14), (1, 1, 9, 9)])
@pytest.mark.parametrize(("stride", "padding"), [(2, 3), ((1, 2), (0, 1))])
def test_patches_that_overlap(
    shape: tuple[int, ...], stride: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, b = torch.randn(shape), torch.randn(5, shape[1], 5, 3), torch.randn(5)

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b, stride, padding)

    def trained(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y, gradients = torch.func.vjp(lambda w, b: fn(x, w, b), w, b)
        return (y, *gradients(y))

    monkeypatch.setattr(patches, "MARGIN", 1e9)
    assert unfolded(lambda *a: (fn(*a),), x, w, b) == 0  # not worth the copy
    monkeypatch.setattr(patches, "MARGIN", 0)
    assert unfolded(lambda *a: (fn(*a),), x, w, b) == 1
    assert unfolded(trained, x, w, b) == 2


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        lambda x, w: F.conv2d(x, w, stride=(2, 1)),
        lambda x, w: F.conv2d(x, w, stride=2, dilation=2),
        lambda x, w: F.conv2d(x, w[:, :, :1, :1]),
        lambda x, w: F.conv2d(x.repeat(1, 8, 1, 1), w.repeat(1, 8, 1, 1), stride=2),
        lambda x, w: F.conv_transpose2d(x, w[:3], stride=2),
        lambda x, w: F.conv2d(x.double(), w.double(), stride=2),
    ],
)
def test_others_stay(fn: Callable[..., Any]) -> None:
    x, w = torch.randn(2, 3, 6, 6), torch.randn(5, 3, 2, 2)
    assert unfolded(lambda x, w: (fn(x, w),), x, w) == 0
