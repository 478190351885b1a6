"""Channels-last convolutions on a CPU: where they gain, in inference, with the layouts of eager's
results."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Set
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import plait
import plait.graph.memory_format as memory_format
from plait import compat
from plait.graph.min_cut import Network
from plait.wrapper.instructions import AssertSizeStride
from plait.wrapper.program import CompileRecord
from tests.product_programs import observing

aten = torch.ops.aten


class Bottleneck(nn.Module):
    """A block of MobileNetV2: a point, a filter a channel, a point, and a residual."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        wide = 4 * channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU6(), nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.adds = stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def lasts(fn: Callable[..., Any], *args: Tensor) -> list[bool]:
    """Whether each convolution reads channels-last images after the pass."""
    gm = make_fx(torch.func.functionalize(fn), compat.decompositions.decomposition_table(), "fake")(
        *args
    )
    memory_format.channels_last(gm)
    gm.recompile()
    for a, b in zip(gm(*args), fn(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.stride() == b.stride()
    found = [n for n in gm.graph.nodes if n.target is aten.convolution.default]
    return [memory_format.is_last(n.args[0].meta["val"]) for n in found]


X, W = torch.randn(2, 16, 40, 40), torch.randn(16, 16, 3, 3)


def two(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (F.conv2d(F.conv2d(x, w).relu(), w).mean((2, 3)),)


def test_several_in_a_row_gain() -> None:
    assert (
        lasts(lambda x, w: (F.conv2d(F.conv2d(x, w).relu(), w).mean((2, 3)),), X, W) == [True] * 2
    )


def test_one_alone_does_not() -> None:
    """Two copies cost more than it gains."""
    assert lasts(lambda x, w: (F.conv2d(x, w),), X, W) == [False]


def test_patches_stay() -> None:
    """oneDNN takes twice as long for those of channels-last images."""
    w = torch.randn(32, 16, 8, 8)
    assert lasts(lambda x, w: (F.conv2d(x.relu(), w, stride=8).flatten(2),), X, w) == [False]


def test_some_stay() -> None:
    """Large filters of small images, which oneDNN turns twice for channels-last ones, stay in rows
    next to small ones of large images: between them lies the smallest value."""
    small, wide, large = W, torch.randn(512, 16, 3, 3), torch.randn(512, 512, 3, 3) / 64

    def fn(x: Tensor, small: Tensor, wide: Tensor, large: Tensor) -> tuple[Tensor, ...]:
        for _ in range(4):
            x = F.conv2d(x, small, padding=1).relu()
        y = F.conv2d(F.max_pool2d(x, 20), wide, padding=1).relu()
        y = y + F.conv2d(F.conv2d(y, large, padding=1).relu(), large, padding=1)
        return (y.relu().mean((2, 3)),)

    assert lasts(fn, X, small / 12, wide / 12, large) == [True] * 4 + [False] * 3


def test_a_cut_costs_least() -> None:
    net = Network()
    for a, b, cost in (("s", "a", 9), ("a", "b", 2), ("a", "c", 3), ("c", "b", 9), ("b", "t", 6)):
        net.add(a, b, cost)
    assert net.sources_side("s", "t") == {"s", "a"}
    net.add("c", "a")  # who has a has c
    net.add("a", "c")
    assert net.sources_side("s", "t") == {"s", "a", "c", "b"}


@pytest.mark.parametrize("seed", range(20))
def test_cuts_of_random_networks(seed: int) -> None:
    """What is left of each edge belongs to the cut that costs least of all."""
    rng = random.Random(seed)
    nodes = range(7)
    edges = {p: rng.choice((0, 1, 2.5, 7)) for p in itertools.permutations(nodes, 2)}
    net = Network()
    for (a, b), cost in edges.items():
        net.add(a, b, cost)

    def costs(side: Set[Any]) -> float:
        return sum(cost for (a, b), cost in edges.items() if a in side and b not in side)

    sides = [{0, *some} for n in nodes for some in itertools.combinations(range(1, 6), n)]
    assert costs(net.sources_side(0, 6)) == min(map(costs, sides))


def test_training_stays() -> None:
    def step(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(F.conv2d(x, w).relu(), w)
        size = [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
        return y, aten.convolution_backward.default(grad, x, w, None, *size)[1]

    assert lasts(step, X, W, torch.randn(2, 16, 38, 38)) == [False] * 2


def test_not_without_onednn() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        assert lasts(two, X, W) == [False] * 2


@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, False),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.slow),
    ],
)
def test_a_model(dtype: torch.dtype, dynamic: bool) -> None:
    """As near to float64 as eager is, for other sizes too; nothing is turned between layers. In
    float32 points are products, where one size at most is unknown."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, 2, 1), Bottleneck(16), Bottleneck(16, 2), Bottleneck(16))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()
    records: list[CompileRecord] = []
    torch.compiler.reset()
    with observing(records), torch.no_grad():
        compiled = torch.compile(model.to(dtype), backend="plait", dynamic=dynamic)
        for batch, size in ((2, 64), (3, 48)) if dynamic else ((2, 64), (2, 64)):
            x = torch.randn(batch, 3, size, size)
            found, eager = compiled(x.to(dtype)), model(x.to(dtype))
            exact = model.double()(x.to(dtype).double())
            model.to(dtype)
            off, limit = ((y.double() - exact).abs().max() for y in (found, eager))
            unit = torch.finfo(dtype).eps * exact.abs().max()
            assert found.stride() == eager.stride() and off <= 1.5 * limit + 2 * unit
    made = [
        i.strides[1]
        for i in records[0].wrapper.body
        if isinstance(i, AssertSizeStride) and "aten.convolution" in i.origin
    ]
    assert made == [1] * (10 if dynamic or dtype == torch.bfloat16 else 4)


def test_windows_of_any_size() -> None:
    """What it costs to turn a filter is no reason to compile anew for one of another size."""
    torch.compiler.reset()
    records: list[CompileRecord] = []
    with observing(records), torch.no_grad():
        compiled = torch.compile(lambda x, w: F.conv2d(x, w, stride=2).relu(), backend="plait")
        for side in (3, 2):
            w = torch.randn(16, 16, side, side)
            for d in (2, 3):
                torch._dynamo.mark_dynamic(w, d)
            torch.testing.assert_close(
                compiled(X, w), F.conv2d(X, w, stride=2).relu(), rtol=1e-4, atol=1e-4
            )
    assert len(records) == 1


def test_any_number_of_images() -> None:
    """Of 16 and more torch may take another kernel: no reason for a program of up to 15."""
    model, batch = nn.Conv2d(16, 8, 3).eval(), torch.export.Dim("batch", max=400)
    compiled = plait.compile(model, (torch.randn(2, 16, 9, 9),), dynamic_shapes=({0: batch},))
    with torch.no_grad():
        for n in (1, 15, 40):
            x = torch.randn(n, 16, 9, 9)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
