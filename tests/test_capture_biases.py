"""What convolutions make is saved without their biases, which the backward pass adds again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from plait.devices import facts_of
from plait.graph import biases, norm_results
from plait.graph.biases import split_biases
from plait.wrapper.instructions import CallExtern, Literal, Return
from plait.wrapper.program import CompileRecord
from tests.test_capture_norm_results import trained

SIDE = 7


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes take a CPU for a GPU."""
    for module in (biases, norm_results):
        monkeypatch.setattr(module, "facts_of", lambda device: facts_of("cuda"))


def saves_convolutions(records: list[CompileRecord]) -> bool:
    """Whether the first convolution has no bias and is saved."""
    (forward,) = (r.wrapper for r in records if r.kind == "forward")
    call = next(i for i in forward.body if isinstance(i, CallExtern) and "convolution" in str(i.op))
    (saved,) = (str(i) for i in forward.body if isinstance(i, Return))
    return str(call.args[2]) == str(Literal("none")) and repr(call.outs[0]) in saved


@pytest.mark.parametrize(
    "after",
    [
        (nn.BatchNorm2d(8), nn.ReLU()),
        (nn.BatchNorm2d(8), nn.SiLU()),
        (nn.GELU(),),
        (nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_results_are_saved_without_their_biases(after: tuple[nn.Module, ...], last: bool) -> None:
    x = torch.randn(2, 4, SIDE + 2, SIDE + 2)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), *copy.deepcopy(after), nn.Flatten())
    given = x.to(memory_format=torch.channels_last) if last else x
    assert saves_convolutions(trained(model, given))


@pytest.mark.parametrize(
    ("after", "n_split"),
    [(nn.GELU(), 1), (nn.Conv2d(8, 8, 1), 1), (nn.Flatten(), 0), (nn.GroupNorm(2, 8), 0)],
)
def test_what_no_kernel_reads_keeps_its_bias(
    monkeypatch: pytest.MonkeyPatch, after: nn.Module, n_split: int
) -> None:
    found: list[int] = []
    monkeypatch.setattr(
        "plait.pipelines.JOINT", (("split biases", lambda g: found.append(split_biases(g))),)
    )
    trained(nn.Sequential(nn.Conv2d(4, 8, 3), after, nn.GELU()), torch.randn(2, 4, 9, 9))
    assert found == [n_split]
