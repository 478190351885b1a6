"""Gradients of inputs as convolutions with filters turned round, of filters and biases as sums."""

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
from plait.graph import convolution_gradients, memory_format

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass takes a CPU for a GPU."""
    for module in (memory_format, convolution_gradients):
        monkeypatch.setattr(module, "facts_of", lambda device: facts_of("cuda"))


def split(fn: Callable[..., Tensor], *args: Tensor, wanted: tuple[int, ...] = (0, 1, 2)) -> int:
    """How many gradients the pass took from the operator; gradients and strides are checked."""

    def gradients(*a: Tensor) -> tuple[Tensor, ...]:
        def of_wanted(*b: Tensor) -> Tensor:
            given = iter(b)
            return fn(*(next(given) if k in wanted else x for k, x in enumerate(a)))

        y, back = torch.func.vjp(of_wanted, *(a[k] for k in wanted))
        found: tuple[Tensor, ...] = back(y)
        return found

    table = compat.decompositions.decomposition_table()
    gm = make_fx(torch.func.functionalize(gradients), table, "fake")(*args)
    n = convolution_gradients.split_gradients(gm)
    gm.graph.lint()
    gm.recompile()
    for a, b in zip(gm(*args), gradients(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.stride() == b.stride()
    assert convolution_gradients.split_gradients(gm) == 0
    return n


r = torch.randn
X, W, B = r(2, 6, 40), r(6, 1, 4), r(6)


@pytest.mark.parametrize(
    ("wanted", "n"), [((0,), 1), ((1,), 1), ((1, 2), 2), ((2,), 1), ((0, 1, 2), 3)]
)
@pytest.mark.parametrize(("padding", "dilation"), [(3, 1), (0, 1), (2, 2)])
def test_a_filter_a_channel(padding: int, dilation: int, wanted: tuple[int, ...], n: int) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv1d(x, w, b, padding=padding, dilation=dilation, groups=6)

    assert split(fn, X, W, B, wanted=wanted) == n


def test_long_filters_of_groups() -> None:
    args = r(2, 6, 40), r(9, 2, 36), r(9)
    assert split(lambda x, w, b: F.conv1d(x, w, b, padding=18, groups=3), *args) == 2
    image = r(2, 4, 8, 9), r(6, 2, 5, 7), r(6)
    assert split(lambda x, w, b: F.conv2d(x, w, b, padding=(1, 3), groups=2), *image) == 2


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, b: F.conv1d(x, w, b, stride=2, groups=6),
        lambda x, w, b: F.conv1d(x, w.expand(6, 6, 4), b),
        lambda x, w, b: F.conv1d(x, w.repeat(2, 1, 1), b.repeat(2), groups=6),
        lambda x, w, b: F.conv1d(x, w.expand(6, 3, 4), b, groups=2),
        lambda x, w, b: F.conv_transpose1d(x, w, b, groups=6),
    ],
)
def test_of_others_the_bias_alone(fn: Callable[..., Any]) -> None:
    assert split(fn, X, W, B) == 1
    assert split(fn, X, W, B, wanted=(0, 1)) == 0


def test_a_wide_border_is_in_no_other_border() -> None:
    assert split(lambda x, w, b: F.conv1d(x, w, b, padding=4, groups=6), X, W, B) == 2  # not of X
