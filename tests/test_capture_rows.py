"""Rows of a tensor that a program writes one by one: as eager, and one concatenation where every
row is written and nothing reads what lies between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import plait
from plait.graph.rows import join_rows
from tests.schedule_tools import kernels

Fn = Callable[[Tensor], Tensor]


def written(order: list[int], dim: int = 1, dtype: torch.dtype | None = None) -> Fn:
    """Rows of twice x, in this order."""

    def fn(x: Tensor) -> Tensor:
        out = torch.ones_like(x, dtype=dtype)
        for k in order:
            out.select(dim, k).copy_(x.select(dim, k) * 2 + k)
        return out

    return fn


def read_between(x: Tensor) -> Tensor:
    """Each row is that before it, as it was written, and more."""
    out = torch.zeros_like(x)
    for k in range(5):
        out[:, k] = x[:, k] + (out[:, k - 1] if k else 0)
    return out


def columns_too(x: Tensor) -> Tensor:
    """Rows along one axis, over columns along another."""
    out = torch.zeros_like(x)
    for k in range(3):
        out[:, :, k] = x[:, :, k]
    for k in range(5):
        out[:, k] = x[:, k] * 3
    return out


def changed_later(x: Tensor) -> Tensor:
    """What a row was made of is written after the row."""
    y, out = x + 1, torch.zeros_like(x)
    for k in range(5):
        out[:, k] = y[:, k]
        y[:, (k + 1) % 5] *= 2
    return out + y


CASES: dict[str, tuple[Fn, int]] = {
    "all": (written([0, 1, 2, 3, 4]), 1),
    "backwards": (written([4, 3, 2, 1, 0]), 1),
    "from the end": (written([-1, 0, -4, 2, 3]), 1),
    "twice": (written([0, 1, 1, 2, 3, 4, 0]), 1),
    "along the first": (written([0, 1], 0), 1),
    "along the last": (written([2, 0, 1], -1), 1),
    "but one": (written([0, 1, 3, 4]), 0),
    "of another type": (written([0, 1, 2, 3, 4], dtype=torch.float64), 1),
    "read between": (read_between, 0),
    "columns too": (columns_too, 2),
    "changed later": (changed_later, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_written_one_by_one(name: str) -> None:
    fn, joined = CASES[name]
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(torch.compile(fn, backend="plait")(x), fn(x), rtol=0, atol=0)
    graph = make_fx(torch.func.functionalize(fn), tracing_mode="fake")(x)
    graph.graph.eliminate_dead_code()
    assert join_rows(graph) == joined
    graph.graph.eliminate_dead_code()
    left = len(
        graph.graph.find_nodes(op="call_function", target=torch.ops.aten.select_scatter.default)
    )
    assert (left > 0) == (not joined or name == "changed later")


def test_gradients_of_rows() -> None:
    fn = written([0, 1, 2, 3, 4])
    x, y = (torch.randn(2, 5, 3).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    torch.compile(fn, backend="plait")(x).square().sum().backward()
    fn(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_steps_of_a_recurrence_are_few_kernels() -> None:
    """What one step gives another is not written, however many steps there are."""

    def fn(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        a, b, c = (torch.zeros_like(x[:, 0]) for _ in range(3))
        for k in range(24):
            top = torch.maximum(c, x[:, k])
            e, f = torch.exp(c - top), torch.exp(x[:, k] - top)
            a, b, c = e * a + f * x[:, k], e * b + f, top
            out[:, k] = a / b
        return out

    x = torch.randn(4, 24, 256)
    call = plait.compile(fn, (x,))
    torch.testing.assert_close(call(x), fn(x))
    assert len(kernels(call.record.plan)) <= 5  # type: ignore[attr-defined]
