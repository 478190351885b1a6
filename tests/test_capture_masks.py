"""Attention masks that are known when a graph is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from plait.capture.masks import simplify_masks
from plait.graph.cse import merge_common


def graph_of(fn: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    """The graph that plait compiles; its results, and what it leaves in its arguments, are
    eager's."""
    made: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        simplify_masks(gm)
        gm.graph.lint()
        made.append(gm)
        return gm.forward

    torch.compiler.reset()
    ours, eager = [a.clone() for a in args], [a.clone() for a in args]
    torch.testing.assert_close(torch.compile(fn, backend=backend)(*ours), fn(*eager))
    torch.testing.assert_close(ours, eager)
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
        lambda q: (
            torch.ones(16, 16).masked_fill_(torch.eye(16).bool(), 0).bool()
        ),  # changed in place
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


def test_a_broadcast_mask_is_made_dense_for_every_reader() -> None:
    def fn(q: Tensor, rows: Tensor) -> Tensor:
        mask = rows[:, None].expand(16, 16)
        return F.scaled_dot_product_attention(q, q, q, mask) + F.scaled_dot_product_attention(
            q, q + 1, q, mask
        )

    first, second = masks(graph_of(fn, Q, torch.randn(16)))
    assert first is not second and first.target == second.target == "contiguous"
    counts = []

    def made(gm: fx.GraphModule, _: Any) -> Any:
        merge_common(gm)
        counts.append(
            len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default))
        )
        return gm.forward

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        simplify_masks(gm)
        return aot_autograd(fw_compiler=made)(gm, inputs)

    with torch.no_grad():
        torch.compile(fn, backend=backend)(Q, torch.randn(16))
    assert counts == [1]


def test_heads_and_batches_that_share_a_mask_go_on_sharing_it() -> None:
    def fn(q: Tensor, rows: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, rows[:, None, :, None].expand(-1, 4, -1, 16))

    (mask,) = masks(graph_of(fn, Q, torch.randn(2, 16)))
    assert mask.meta["example_value"].stride() == (256, 0, 16, 1)


@pytest.mark.parametrize("shape", [(1, 1), (16, 1), (1, 16)])
def test_repeated_elements_of_a_mask_have_gradients_of_their_own(shape: tuple[int, int]) -> None:
    mask = torch.randn(shape).expand(16, 16)
    found = []
    for run in (
        F.scaled_dot_product_attention,
        torch.compile(F.scaled_dot_product_attention, backend="plait"),
    ):
        leaf = mask.detach().requires_grad_()
        run(Q, Q, Q, leaf).square().sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0])


def test_a_mask_changed_between_two_calls_stays() -> None:
    def fn(q: Tensor) -> Tensor:
        mask = torch.zeros(16, 16)
        a = F.scaled_dot_product_attention(q, q, q, mask)
        mask[0, 0] = -1e9
        return a + F.scaled_dot_product_attention(q, q, q, mask)

    assert None not in masks(graph_of(fn, Q))


def _out(x: Tensor, _: Tensor) -> None:
    torch.add(x, 1, out=x)


def _augmented(x: Tensor, _: Tensor) -> None:
    x += 1


@pytest.mark.parametrize(
    "write",
    [
        lambda x, _: x.add_(1),
        lambda x, _: x.copy_(x + 1),
        lambda x, _: F.relu(x, inplace=True),
        lambda x, _: torch.sigmoid_(x),
        lambda x, _: x.index_copy_(0, torch.tensor([1]), torch.tensor([9.0])),
        lambda x, mask: x.logical_and_(mask[0]),
        _out,
        _augmented,
    ],
)
def test_updates_beside_a_mask_stay(write: Callable[[Tensor, Tensor], Any]) -> None:
    def fn(q: Tensor, x: Tensor) -> Tensor:
        mask = torch.ones(16, 16, dtype=torch.bool)
        write(x, mask)
        return F.scaled_dot_product_attention(q, q, q, mask)

    masks(graph_of(fn, Q, torch.randn(16)))


def test_a_dense_mask_has_what_its_source_holds_where_it_is_read() -> None:
    later = torch.where(torch.arange(16) > 3, -1e9, 0.0)[:, None]
    later[-1] = 1

    def before(q: Tensor, rows: Tensor) -> Tensor:
        mask = rows.expand(2, 1, 16, 16)
        rows.copy_(later[:16] * torch.arange(16)[:, None])
        return F.scaled_dot_product_attention(q, q, q, mask)

    def between(q: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        mask = rows.expand(2, 1, 16, 16)
        first = F.scaled_dot_product_attention(q, q, q, mask)
        rows.add_(torch.where(torch.arange(16)[:, None] > 3, -torch.inf, 0.0))
        return first, F.scaled_dot_product_attention(q, q, q, mask)

    def turned(q: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        mask = row.expand(16, 16)
        mask.t_()
        return F.scaled_dot_product_attention(q, q, q, mask), mask.t_()

    masks(graph_of(before, Q, torch.zeros(16, 1)))
    masks(graph_of(between, Q, torch.zeros(16, 1)))
    masks(graph_of(turned, Q, torch.randn(16)))


def test_a_mask_written_through_out_stays() -> None:
    def fn(q: Tensor, other: Tensor) -> Tensor:
        mask = torch.ones(16, 16, dtype=torch.bool)
        seen = mask.view(16, 16)
        torch.logical_and(mask, other, out=mask)
        return F.scaled_dot_product_attention(q, q, q, seen)

    assert None not in masks(graph_of(fn, Q, torch.ones(16, 16).tril().bool()))


def test_devices_in_any_form() -> None:
    seen: list[Any] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        simplify_masks(gm)
        seen.extend(masks(gm))
        return gm.forward

    def fn(q: Tensor) -> Tensor:
        mask = (
            torch.ones(16, 16, dtype=torch.bool, device=q.device)
            | torch.zeros(16, 16).to(q.device).bool()
        )
        by_name = torch.ones(16, 16).to("meta").bool() & torch.ones(16, 16, device="meta").bool()
        a = F.scaled_dot_product_attention(q, q, q, mask)
        return F.scaled_dot_product_attention(a, q, q, by_name)

    torch.compile(fn, backend=backend)(Q.to("meta"))
    assert seen == [None, None]


def test_a_mask_cut_from_something_huge_is_not_computed() -> None:
    def fn(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, q, q, torch.ones(1 << 13, 1 << 12, dtype=torch.bool)[:16, :16]
        )

    assert None not in masks(graph_of(fn, Q))


def test_a_mask_that_cannot_be_computed_stays() -> None:
    gm = fx.GraphModule(torch.nn.Module(), fx.Graph())
    ones = gm.graph.call_function(torch.ones, (16, 16))
    mask = gm.graph.call_method("view", (ones, 3, 3))
    for n in (ones, mask):
        n.meta["example_value"] = torch.ones(16, 16)
    q = gm.graph.placeholder("q")
    gm.graph.output(gm.graph.call_function(F.scaled_dot_product_attention, (q, q, q, mask)))
    simplify_masks(gm)
    assert masks(gm) == [mask]
