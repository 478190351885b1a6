"""Rows of lengths of their own to and from padded tensors: kernels that compute what eager does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from plait.capture.backend import plait_backend
from plait.tools.explain import explain

aten = torch.ops.aten
X = torch.arange(1.0, 22).view(7, 3)


def padded(x: Tensor, offsets: Tensor) -> Tensor:
    found: Tensor = aten._jagged_to_padded_dense_forward(x + 1, [offsets], [4], -2.0)
    return found * 2


def jagged(x: Tensor, offsets: Tensor, n: int = 5) -> Tensor:
    found: Tensor = aten._padded_dense_to_jagged_forward(x + 1, [offsets], n)
    return found * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(
    "rows", [[0, 3, 7], [0, 0, 4, 4, 7], [0, 6, 7], [0, 7, 7], [0, 0]], ids=str
)
def test_padded(rows: list[int], dtype: torch.dtype) -> None:
    """Rows without elements, and longer ones than fit."""
    x, offsets = X.to(dtype), torch.tensor(rows)
    report = explain(padded, x, offsets, quiet=True)
    assert not report.ladder and not report.extern_calls, report.ladder
    torch.testing.assert_close(
        torch.compile(padded, backend="plait")(x, offsets), padded(x, offsets)
    )


@pytest.mark.parametrize("rows", [[0, 3, 4, 5], [0, 0, 2, 5], [0, 2, 5, 5]], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_jagged(rows: list[int], dynamic: bool) -> None:
    x, offsets = torch.arange(24.0).view(2, 6, 2), torch.tensor([0, 3, 5])
    report = explain(jagged, x, offsets, quiet=True)
    assert not report.ladder and not report.extern_calls, report.ladder
    compiled = torch.compile(jagged, backend="plait", dynamic=dynamic or None)
    for given in ((x, offsets), (torch.arange(60.0).view(3, 4, 5), torch.tensor(rows))):
        torch.testing.assert_close(compiled(*given), jagged(*given))
    for fn in (jagged, compiled):
        with pytest.raises(RuntimeError, match="final offset should match total_L"):
            fn(x, torch.tensor([0, 3, 4]))


def test_no_values() -> None:
    x, offsets = torch.ones(0, 3), torch.zeros(3, dtype=torch.int64)
    torch.testing.assert_close(
        torch.compile(padded, backend="plait")(x, offsets), padded(x, offsets)
    )


def test_offsets_that_go_too_far() -> None:
    with pytest.raises(RuntimeError, match="beyond its values"):
        torch.compile(padded, backend="plait")(X, torch.tensor([0, 5, 9]))


def test_training() -> None:
    """Batches of as many rows, of other lengths, a loss of padded and of plain values: eager's
    losses, and one graph."""
    gen = torch.Generator().manual_seed(0)
    data = [
        torch.nested.nested_tensor(
            [torch.randn(n, 8, generator=gen) for n in lengths], layout=torch.jagged
        )
        for lengths in ((3, 5, 2), (4, 2, 6), (7, 2, 3))
    ]
    runs, graphs = [], []

    def backend(gm: GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(gm)
        return plait_backend(gm, inputs)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        padded: Tensor = y.to_padded_tensor(0.5)
        return y.values().square().mean() + padded.sum(1).square().mean()

    for fn in (torch.compile(loss_of, backend=backend, fullgraph=True), loss_of):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for x in data:
            optimizer.zero_grad()
            loss = fn(model, x)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        runs.append(torch.stack(losses))
    torch.testing.assert_close(*runs)
    assert len(graphs) == 1, graphs
