"""Channels-last convolutions, on graphs of the CPU: values, layouts of results, and whole models
through the pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import plait.graph.conv_cost as conv_cost
import plait.graph.memory_format as memory_format
from plait import compat
from plait.devices import facts_of
from plait.graph.fold import fold_weights
from tests.models import MODELS
from tests.test_models import build, close, double, trains_as_eager

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pass takes a CPU for a GPU on which every convolution gains."""
    for module in (memory_format, conv_cost):
        monkeypatch.setattr(module, "facts_of", lambda device: facts_of("cuda"))
    monkeypatch.setattr(memory_format, "gain_ns", lambda node: 1.0)
    monkeypatch.setattr(memory_format, "copy_ns", lambda source, x: 0.0)
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
    return memory_format.is_last(node.meta["val"])


def convolutions(gm: GraphModule) -> list[Any]:
    return [n for n in gm.graph.nodes if n.target in memory_format._CONVOLUTIONS]


def moves(gm: GraphModule) -> list[Any]:
    """Copies whose elements lie elsewhere than before."""
    copies = [c for c in gm.graph.nodes if c.target is aten.clone.default]
    return [c for c in copies if c.meta["val"].stride() != c.args[0].meta["val"].stride()]


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


OTHERS: dict[str, Callable[..., Any]] = {
    "transposed": lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=2, output_padding=1),
    "grouped": lambda x, w: F.conv2d(x, w[:, :4], groups=4),
    "depthwise": lambda x, w: F.conv2d(x, w[:16, :1], groups=16),
    "sequence": lambda x, w: F.conv1d(x[:, :, 0], w[:, :, 0], padding=1, stride=2),
    "transposed sequence": lambda x, w: F.conv_transpose1d(x[:, :, 0], w[:16, :8, 0], stride=2),
    "volume": lambda x, w: F.conv3d(x.unsqueeze(2), w.unsqueeze(2), padding=(0, 1, 1)),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_all_kinds_forward_and_backward(name: str) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y, gradients = torch.func.vjp(lambda x, w: OTHERS[name](x * 2, w).relu(), x, w)
        return (y, *gradients(y))

    gm, n = turned(fn, X, W)
    forward, backward = convolutions(gm)
    assert n in (2, 3)  # a filter of one channel a group lies so anyway
    assert forward.args[0].meta["val"].dim() == (5 if name == "volume" else 4)
    assert is_last(forward) and all(is_last(a) for a in backward.args[:2])


def test_chains_of_sequences_stay_turned() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y = F.gelu(F.conv1d(x, w, padding=1))
        return F.conv1d(y, v), y.mean((1, 2))

    gm, n = turned(fn, X[:, :, 0], W[:, :, 0].contiguous(), V[:, :, 0].contiguous())
    assert n == 3 and sum(c.target is aten.clone.default for c in gm.graph.nodes) == 4


@pytest.mark.parametrize("name", ["double", "not worth it"])
def test_others_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_format, "copy_ns", lambda source, x: 1.0)
    args = (X, W) if name != "double" else (X.double(), W.double())
    assert turned(lambda x, w: (F.conv2d(x, w),), *args)[1] == 0


def test_regions_are_decided_on_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One convolution gains what three copies cost, with another one behind it what five cost."""
    monkeypatch.setattr(memory_format, "gain_ns", lambda node: 3.0)
    monkeypatch.setattr(memory_format, "copy_ns", lambda source, x: 1.5)

    def fn(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return F.conv2d(x + 1, u), F.conv2d(F.conv2d(x, w).relu(), v)

    gm, n = turned(fn, X, W, V, W + 1)
    assert n == 3 and [is_last(c) for c in convolutions(gm)] == [False, True, True]


def test_odd_groups_stay() -> None:
    """cuDNN would turn them back: what they read has eager's layout."""
    for width, last in ((3, False), (4, True)):
        x, w = torch.randn(2, 2, 9, 9), torch.randn(6 * width, 2, 3, 3)
        gm, _ = turned(
            lambda x, w, v, u: (
                F.conv2d(F.conv2d(F.conv2d(x, w).relu(), v, groups=6).relu(), u),
            ),
            x, w, torch.randn(6 * width, width, 3, 3), torch.randn(4, 6 * width, 3, 3),
        )  # fmt: skip
        assert [is_last(c) for c in convolutions(gm)] == [True, last, True], width


def test_sizes_have_no_layout() -> None:
    """What is computed of the sizes of a turned result reads no tensor."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv2d(x, w)
        return y * torch.full((y.shape[3],), 2.0)

    gm = make_fx(fn, tracing_mode="symbolic")(X, W)
    assert memory_format.channels_last(gm) == 2
    torch.testing.assert_close(gm(X, W), fn(X, W), rtol=1e-4, atol=1e-4)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool": lambda y: F.max_pool2d(y, 3, 2, 1),
    "avg_pool": lambda y: F.avg_pool2d(y, 2),
    "adaptive_avg_pool": lambda y: F.adaptive_avg_pool2d(y, 4),
    "adaptive_max_pool": lambda y: F.adaptive_max_pool2d(y, (5, 3)),
    "nearest": lambda y: F.interpolate(y, scale_factor=2),
    "bilinear": lambda y: F.interpolate(y, size=(12, 13), mode="bilinear"),
    "bicubic": lambda y: F.interpolate(y, size=(12, 13), mode="bicubic"),
    "batch_norm": lambda y: F.batch_norm(y, y[0, :, 0, 0].abs(), y[0, :, 1, 1].abs()),
    "group_norm": lambda y: F.group_norm(y, 4),
    "cat": lambda y: torch.cat([y, y.relu()], 1)[:, ::2],
    "reflection_pad": lambda y: F.pad(y, (1, 2, 1, 2), mode="reflect"),
    "gate": lambda y: y * F.hardsigmoid(y.mean((2, 3), keepdim=True)),
}


@pytest.mark.parametrize("name", list(BETWEEN))
def test_what_stands_between_convolutions_copies_nothing(name: str) -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (F.conv2d(BETWEEN[name](F.conv2d(x, w, padding=1)), v),)

    gm, n = turned(fn, X, W, V)
    assert n == 3 and len(moves(gm)) == n + 1  # the image and two filters; the result goes back


@pytest.mark.parametrize(
    "second", [lambda y: y.relu(), lambda y: y.permute(0, 1, 3, 2).contiguous()]
)
def test_a_concatenation_of_any_size_lies_as_torchs_does(second: Callable[..., Tensor]) -> None:
    """What its strides are is not asked of torch, which takes long to compare symbols."""

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = F.conv2d(x, w, padding=1)
        return F.conv2d(torch.cat([y, second(y)], 1)[:, ::2], v)

    table = compat.decompositions.decomposition_table()
    gm = make_fx(torch.func.functionalize(fn), table, "symbolic")(X, W, V)
    assert memory_format.channels_last(gm)
    (cat,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    laid_out = [
        torch.empty_strided(*map(numbers, (t.shape, t.stride()))) for t in vals(cat.args[0])
    ]
    assert torch.cat(laid_out, 1).stride() == numbers(cat.meta["val"].stride())
    gm.recompile()
    torch.testing.assert_close(gm(X, W, V), fn(X, W, V), rtol=1e-4, atol=1e-4)


def numbers(sizes: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(conv_cost.hint, sizes))


def vals(nodes: Iterable[Any]) -> list[Tensor]:
    return [n.meta["val"] for n in nodes]


def test_frozen_filters_are_turned_once() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor, m: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return (F.conv2d(F.batch_norm(F.conv2d(x, w, padding=1), m, s).relu(), v),)

    args = (X, W, V, torch.randn(32), torch.rand(32))
    table = compat.decompositions.decomposition_table()
    gm = make_fx(torch.func.functionalize(fn), table, "fake")(*args)
    image, *inputs = gm.graph.find_nodes(op="placeholder")
    fold_weights(gm, dict(zip(inputs, args[1:], strict=True)))
    gm.recompile()
    torch.testing.assert_close(gm(*args), fn(*args), rtol=1e-4, atol=1e-4)
    assert next(iter(moves(gm))).args[0] is image and len(moves(gm)) == 2
    filters = [c.args[1] for c in convolutions(gm)]
    assert all(f.op == "get_attr" and memory_format.lies_last(f.meta["val"]) for f in filters)


@pytest.mark.parametrize("how", ["pixels", "channels"])
def test_shuffles_between_convolutions_copy_once(how: str) -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(x, w, padding=1)
        y = F.pixel_shuffle(y, 2) if how == "pixels" else F.channel_shuffle(y, 4)
        y = y.relu() + 1
        return (F.conv2d(y, v[:, : y.shape[1]]),)

    gm, n = turned(fn, X, W, V)
    assert n == 3 and all(map(is_last, convolutions(gm)))
    assert len(moves(gm)) == n + 2  # the shuffle, and one for the result


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
