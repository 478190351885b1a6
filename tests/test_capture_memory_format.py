"""Channels-last convolutions, on graphs of the CPU: values, layouts of results, and whole models
through the pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import plait.graph.memory_format as memory_format
from plait import compat
from plait.devices import facts_of
from tests.models import MODELS
from tests.test_models import build, close, double, trains_as_eager

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pass takes float32 on a CPU for what half precision on a GPU is."""
    wants = memory_format._wants

    def also_float32(node: Any) -> bool:
        if node.target not in memory_format._CONVOLUTIONS:
            return False
        source = node.args[memory_format._CONVOLUTIONS[node.target][-2]]
        x = source.meta["val"]
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return wants(node)
        with x.fake_mode:
            half = x.to(torch.bfloat16)
        source.meta["val"] = half
        try:
            return wants(node)
        finally:
            source.meta["val"] = x

    monkeypatch.setattr(memory_format, "facts_of", lambda device: facts_of("cuda"))
    monkeypatch.setattr(memory_format, "_wants", also_float32)
    yield


def turned(fn: Callable[..., Any], *args: Tensor) -> tuple[GraphModule, int]:
    """The graph of fn after the pass, whose results are checked, layouts included."""
    gm = make_fx(torch.func.functionalize(fn), compat.decompositions.decomposition_table(), "fake")(
        *args
    )
    n = memory_format.channels_last(gm)
    gm.graph.lint()
    gm.recompile()
    got, want = gm(*args), fn(*args)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.stride() == b.stride()
    assert memory_format.channels_last(gm) == 0  # nothing is left to turn
    return gm, n


def is_last(node: Any) -> bool:
    return bool(node.meta["val"].is_contiguous(memory_format=torch.channels_last))


def convolutions(gm: GraphModule) -> list[Any]:
    return [n for n in gm.graph.nodes if n.target in memory_format._CONVOLUTIONS]


X, W, V = torch.randn(2, 16, 9, 9), torch.randn(32, 16, 3, 3), torch.randn(8, 32, 3, 3)


def test_a_chain_is_turned_once_and_back_once() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y = F.max_pool2d(F.relu(F.conv2d(x, w, padding=1)), 2)
        return F.conv2d(y * 2 + y.mean((2, 3), keepdim=True), v), y.sum()

    gm, n = turned(fn, X, W, V)
    assert n == 3  # the image and the filters
    assert all(is_last(c.args[0]) and is_last(c.args[1]) for c in convolutions(gm))
    assert sum(c.target is aten.clone.default for c in gm.graph.nodes) == 4


def test_views_that_the_layout_lacks_get_eagers() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(x, w)
        return (
            y.flatten(1) @ torch.ones(32 * 49, 3),
            y.flatten(2).transpose(1, 2),
            y.as_strided((4, 3), (2, 5)),
        )

    assert turned(fn, X, W)[1] == 2


def test_results_that_are_picked_from_several() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(x, w)
        a, at = F.max_pool2d(y, 2, return_indices=True)
        b, c = y.split(16, 1)
        return a, at, b + 1, c

    assert turned(fn, X, W)[1] == 2


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: (F.conv_transpose2d(x, w.transpose(0, 1)),),
        lambda x, w: (F.conv2d(x, w[:, :4], groups=4),),
        lambda x, w: (F.conv2d(x[:, :3], w[:4, :3]),),
        lambda x, w: (F.conv1d(x[:, :, 0], w[:, :, 0]),),
        lambda x, w: (F.conv2d(x.double(), w.double()),),
    ],
)
def test_others_stay(fn: Callable[..., Any]) -> None:
    assert turned(fn, X, W)[1] == 0


def test_channels_last_models_need_no_copy() -> None:
    last = torch.channels_last
    gm, n = turned(
        lambda x, w: (F.conv2d(x, w).relu(),), X.to(memory_format=last), W.to(memory_format=last)
    )
    assert n == 0 and not any(c.target is aten.clone.default for c in gm.graph.nodes)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_few_channels_are_turned_for_what_is_made_of_them(channels: int) -> None:
    gm, n = turned(
        lambda x, w: (F.conv2d(x, w).relu(),), X[:, :channels].contiguous(), W[:, :channels]
    )
    (convolution,) = convolutions(gm)
    assert n == 2 and is_last(convolution) and is_last(convolution.next)


def test_filters_that_are_points_need_no_copy() -> None:
    assert turned(lambda x, w: (F.conv2d(x, w[:, :, :1, :1].contiguous()),), X, W)[1] == 1


WITH_CONVOLUTIONS = [
    n for n in MODELS if any(isinstance(m, nn.Conv2d) for m in build(n)[0].modules())
]


@pytest.mark.parametrize("name", WITH_CONVOLUTIONS)
def test_models(name: str) -> None:
    model, exact, x = build(name)
    model.eval(), exact.eval()
    compiled = torch.compile(model, backend="plait")
    with torch.no_grad():
        got, want = compiled(x), model(x)
    close(got, want, exact(double(x)), name)
    assert got.stride() == want.stride()
    trains_as_eager(name, *build(name), steps=2)


@pytest.mark.parametrize("name", WITH_CONVOLUTIONS)
def test_batches_of_any_size(name: str) -> None:
    model, exact, x = build(name)
    model.eval(), exact.eval()
    compiled = torch.compile(model, backend="plait")
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        for n in (x.shape[0], 3, 5):
            now = torch.randn(n, *x.shape[1:])
            torch._dynamo.mark_dynamic(now, 0)
            close(compiled(now), model(now), exact(double(now)), name)
