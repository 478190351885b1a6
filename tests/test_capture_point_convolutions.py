"""Convolutions with filters that are points, as products."""

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
from plait.graph import point_convolutions
from plait.graph.dead import drop_dead

aten = torch.ops.aten
LAST = torch.channels_last
X = torch.randn(2, 128, 5, 7).to(memory_format=LAST)
W = torch.randn(64, 128, 1, 1) / 10
B = torch.randn(64)


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass takes a CPU for a GPU that multiplies float32 as it convolves it."""
    if "on_a_cpu" in request.node.name:
        return
    monkeypatch.setattr(point_convolutions, "facts_of", lambda device: facts_of("cuda"))
    monkeypatch.setattr(point_convolutions, "_has_tensor_cores", lambda dtype: True)


def replaced(fn: Callable[..., Any], *args: Tensor, mode: str = "fake") -> tuple[set[Any], int]:
    """The operators of fn's graph after the pass, whose results are checked, and how many
    convolutions it replaced."""
    table = compat.decompositions.decomposition_table()
    gm = make_fx(torch.func.functionalize(fn), table, mode)(*args)
    n = point_convolutions.multiply_points(gm)
    drop_dead(gm)
    gm.graph.lint()
    gm.recompile()
    got, want = gm(*args), fn(*args)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.is_contiguous(memory_format=LAST) if a.dim() == 4 else a.is_contiguous()
    return {node.target for node in gm.graph.nodes}, n


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_forward(mode: str) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return F.conv2d(x, w), F.conv2d(x, w, b).relu()

    if mode == "symbolic":  # sizes of the image are not known: a view would have to be told
        assert replaced(fn, X, W, B, mode=mode)[1] == 0
        return
    ops, n = replaced(fn, X, W, B)
    assert n == 2 and aten.convolution.default not in ops
    assert {aten.mm.default, aten.addmm.default} <= ops


def test_backward() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y, gradients = torch.func.vjp(F.conv2d, x, w, b)
        return gradients(y)

    def of_filter(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y, gradients = torch.func.vjp(lambda w: F.conv2d(x, w), w)
        return gradients(y)

    for traced, *args in ((fn, X, W, B), (of_filter, X, W)):
        ops, n = replaced(traced, *args)
        assert n == 2 and aten.convolution_backward.default not in ops


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: (F.conv2d(x, w, stride=2),),
        lambda x, w: (F.conv2d(x, w, padding=1),),
        lambda x, w: (F.conv2d(x, w[:, :32], groups=4),),
        lambda x, w: (F.conv2d(x, w[:4]),),
        lambda x, w: (F.conv2d(x, w.expand(64, 128, 2, 2)),),
        lambda x, w: (F.conv2d(x.contiguous(), w).to(memory_format=LAST),),
    ],
)
def test_others_stay(fn: Callable[..., Any]) -> None:
    assert replaced(fn, X, W)[1] == 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("last", [False, True])
def test_all_points_are_products_on_a_cpu(batch: int, last: bool) -> None:
    """Of few channels, with biases, in either layout; the results lie as a convolution's. Images of
    one channel lie both ways."""
    form = LAST if last else torch.contiguous_format

    def fn(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return F.conv2d(x, w), F.conv2d(x, w, b).relu()

    for channels, filters in ((6, 10), (1, 3), (3, 1)):
        x = torch.randn(batch, channels, 5, 7).to(memory_format=form)
        w, b = torch.randn(filters, channels, 1, 1), torch.randn(filters)
        assert on_a_cpu(fn, x, w, b) == 2


def test_what_stays_on_a_cpu() -> None:
    """Strides, groups, gaps between rows, other types; and where the user lets products round more
    than convolutions."""
    x, w = torch.randn(2, 6, 5, 7), torch.randn(10, 6, 1, 1)
    assert on_a_cpu(lambda x, w: (F.conv2d(x, w, stride=2),), x, w) == 0
    assert on_a_cpu(lambda x, w: (F.conv2d(x, w[:, :3], groups=2),), x, w) == 0
    assert on_a_cpu(lambda x, w: (F.conv2d(x[..., :4], w),), x, w) == 0
    assert on_a_cpu(lambda x, w: (F.conv2d(x, w),), x.double(), w.double()) == 0
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert on_a_cpu(lambda x, w: (F.conv2d(x, w),), x, w) == 0
    finally:
        torch.set_float32_matmul_precision(before)


def on_a_cpu(fn: Callable[..., Any], *args: Tensor) -> int:
    """How many convolutions the pass replaces, whose results are checked."""
    gm = make_fx(torch.func.functionalize(fn), compat.decompositions.decomposition_table(), "fake")(
        *args
    )
    n = point_convolutions.multiply_points(gm)
    gm.graph.lint()
    gm.recompile()
    for a, b in zip(gm(*args), fn(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.stride() == b.stride()
    return n
