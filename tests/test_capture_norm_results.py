"""Results of batch norm that gradients of activations read are made again."""

from __future__ import annotations

import copy
from math import prod

import pytest
import torch
from torch import Tensor, nn

from plait.devices import facts_of
from plait.graph import norm_results
from plait.wrapper.instructions import TensorInput
from plait.wrapper.program import CompileRecord
from tests.product_programs import observing

CHANNELS, SIDE = 8, 7


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass takes a CPU for a GPU."""
    monkeypatch.setattr(norm_results, "facts_of", lambda device: facts_of("cuda"))


def trained(model: nn.Module, x: Tensor) -> list[CompileRecord]:
    """Of a model whose results and gradients are those of eager."""
    eager, records = copy.deepcopy(model), list[CompileRecord]()
    torch.compiler.reset()
    with observing(records):
        y = torch.compile(model, backend="plait")(x)
        y.square().sum().backward()
    want = eager(x)
    want.square().sum().backward()
    torch.testing.assert_close(y, want)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    for c, d in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(c, d)
    return records


def saved(model: nn.Module, x: Tensor) -> int:
    """How many images of the norm, maybe seen as matrices, are saved for the backward pass, whose
    gradients are those of eager."""
    records = trained(model, x)
    (backward,) = (r for r in records if r.kind == "backward")
    given = [i.shape for i in backward.wrapper.inputs if isinstance(i, TensorInput)]
    return sum(prod(shape) == len(x) * CHANNELS * SIDE * SIDE for shape in given)


def net(*after: nn.Module, affine: bool = True) -> nn.Sequential:
    norm = nn.BatchNorm2d(CHANNELS, affine=affine)
    return nn.Sequential(nn.Conv2d(4, CHANNELS, 3), norm, *after, nn.Conv2d(CHANNELS, 4, 1))


@pytest.mark.parametrize("act", [nn.ReLU6, nn.Hardswish, nn.SiLU, nn.GELU, nn.ReLU])
@pytest.mark.parametrize("affine", [True, False])
def test_only_what_the_norm_reads_and_the_convolution_is_saved(
    act: type[nn.Module], affine: bool
) -> None:
    assert saved(net(act(), affine=affine), torch.randn(2, 4, SIDE + 2, SIDE + 2)) == 2


@pytest.mark.parametrize("groups", [1, 4, CHANNELS])
@pytest.mark.parametrize("last", [False, True])
def test_groups(groups: int, last: bool) -> None:
    model, norm = net(nn.SiLU()), nn.GroupNorm(groups, CHANNELS)
    model[1] = norm
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 4, SIDE + 2, SIDE + 2)
    if last:
        x = x.to(memory_format=torch.channels_last)
    assert saved(model, x) == 2


def test_what_a_convolution_reads_is_saved() -> None:
    assert saved(net(), torch.randn(2, 4, SIDE + 2, SIDE + 2)) == 2


class Gated(nn.Module):
    """The norm's result in two places of the forward pass, and as the factor of another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        first, norm, _, last = self.net
        y = norm(first(x))
        found: Tensor = last(y * torch.sigmoid(y) + torch.tanh(y))
        return found


def test_two_readers() -> None:
    assert saved(Gated(), torch.randn(2, 4, SIDE + 2, SIDE + 2)) <= 4


def test_rows() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.SiLU(), nn.Linear(6, 4))
    saved(model, torch.randn(16, 4))
