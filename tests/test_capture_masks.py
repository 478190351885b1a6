"""Attention masks that are known when a graph is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from plait.capture.masks import simplify_masks


def graph_of(fn: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    made: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        simplify_masks(gm)
        made.append(gm)
        return gm.forward

    torch.testing.assert_close(torch.compile(fn, backend=backend)(*args), fn(*args))
    return made[0]


def masks(gm: fx.GraphModule) -> list[Any]:
    calls = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    return [n.args[3] if len(n.args) > 3 else n.kwargs.get("attn_mask") for n in calls]


def _one_row_off(mask: Tensor) -> Tensor:
    mask[0].fill_(-1e9)
    return mask


Q = torch.randn(2, 4, 16, 8)


def test_a_mask_that_masks_nothing_goes() -> None:
    def fn(q: Tensor) -> Tensor:
        mask = (torch.arange(16, device=q.device) >= 0)[None, None, None].expand(2, 1, 16, 16)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    def by_position(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, torch.zeros(16, 16, device=q.device))

    assert masks(graph_of(fn, Q)) == [None] and masks(graph_of(by_position, Q)) == [None]


@pytest.mark.parametrize(
    "make",
    [
        lambda q: torch.arange(16)[None].expand(16, 16).ge(3),  # masks something
        lambda q: torch.ones(16, 16).masked_fill_(torch.eye(16).bool(), 0).bool(),  # changed in place
        lambda q: _one_row_off(torch.zeros(16, 16)),  # changed through a view
        lambda q: (q.sum() > -1e9).expand(16, 16),  # depends on an input
        lambda q: torch.rand(16, 16) >= 0,  # need not be the same at the next call
    ],
)
def test_other_masks_stay(make: Callable[[Tensor], Tensor]) -> None:
    def fn(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=make(q))

    (mask,) = masks(graph_of(fn, Q))
    assert mask is not None and mask.meta["example_value"].stride(-1) == 1


def test_a_broadcast_mask_is_made_dense_once() -> None:
    def fn(q: Tensor, rows: Tensor) -> Tensor:
        mask = rows[:, None].expand(16, 16)
        return F.scaled_dot_product_attention(q, q, q, mask) + F.scaled_dot_product_attention(q, q + 1, q, mask)

    first, second = masks(graph_of(fn, Q, torch.randn(16)))
    assert first is second and first.target == "contiguous"


def test_a_mask_changed_between_two_calls_stays() -> None:
    def fn(q: Tensor) -> Tensor:
        mask = torch.zeros(16, 16)
        a = F.scaled_dot_product_attention(q, q, q, mask)
        mask[0, 0] = -1e9
        return a + F.scaled_dot_product_attention(q, q, q, mask)

    assert None not in masks(graph_of(fn, Q))
