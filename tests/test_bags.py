"""Bags of embeddings that are equally long, as loops of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from plait import compat
from plait.devices import facts_of
from plait.graph import bags
from plait.graph.dead import drop_dead
from plait.wrapper.program import CompileRecord, observers
from plait.wrapper.text import text

aten = torch.ops.aten
AT = torch.randint(11, (5, 4), generator=torch.Generator().manual_seed(0))
TABLE, FACTORS, GRAD = torch.randn(11, 6), torch.randn(5, 4), torch.randn(5, 6)
Bag = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass takes a CPU for a GPU."""
    monkeypatch.setattr(bags, "facts_of", lambda device: facts_of("cuda"))


def differentiated(bag: Bag) -> Callable[..., tuple[Tensor, ...]]:
    """The function whose results are those of a bag, and its gradients."""

    def fn(at: Tensor, grad: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        def run(*given: Tensor) -> Tensor:
            return bag(at, given[0], per_sample_weights=given[1] if len(given) > 1 else None)

        made, gradients = torch.func.vjp(run, *given)[:2]
        return made, *gradients(grad)

    return fn


def left(fn: Callable[..., Any], *args: Tensor) -> tuple[int, set[str]]:
    """How many results the pass has written out, and the bags that are left; the results of the
    graph are checked."""
    table = compat.decompositions.decomposition_table()
    gm = make_fx(torch.func.functionalize(fn), table, "fake")(*args)
    n = bags.write_out_bags(gm)
    drop_dead(gm)
    gm.graph.lint()
    gm.recompile()
    for a, b in zip(gm(*args), fn(*args), strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    return n, {str(node.target) for node in gm.graph.nodes if "bag" in str(node.target)}


@pytest.mark.parametrize("padding", [None, 3])
def test_sums_means_and_gradients(padding: int | None) -> None:
    for kind in ("sum", "mean"):
        bag = partial(F.embedding_bag, mode=kind, padding_idx=padding)
        assert left(differentiated(bag), AT, GRAD, TABLE) == (2, set())
        assert left(differentiated(bag), AT.int(), GRAD, TABLE) == (2, set())
    scaled = partial(F.embedding_bag, mode="sum", padding_idx=padding)
    assert left(differentiated(scaled), AT, GRAD, TABLE, FACTORS) == (3, set())


def test_nothing_but_padding() -> None:
    """Such a bag is zeros, whatever the row of padding holds."""
    at, table = torch.full((2, 3), 1), torch.tensor([[1.0], [float("nan")]])

    def fn(at: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        bag = partial(F.embedding_bag, at, table, padding_idx=1)
        return bag(mode="sum"), bag(mode="mean")

    assert left(fn, at, table) == (2, set())


def test_sums_of_half_precision_are_wide() -> None:
    """Each is rounded once, as the operator's are: 256 + 1 + 1 is 256 in bfloat16, step by step."""
    table, at = torch.tensor([[256.0], [1.0]]).bfloat16(), torch.tensor([[0, 1, 1]])

    def fn(at: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        factors = torch.ones(1, 3).bfloat16()
        bag = partial(F.embedding_bag, mode="sum")
        return bag(at, table), bag(at, table, per_sample_weights=factors)

    got = torch.compile(fn, backend="plait")(at, table)
    assert [x.item() for x in got] == [258.0, 258.0]


def test_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bags that begin where data says, or of the largest element, are the operator's; so is all of
    it on a CPU, and where sums must have an order."""
    flat, begin = AT.flatten(), torch.tensor([0, 3, 7])
    others: list[Callable[..., tuple[Tensor, ...]]] = [
        lambda at, t, begin: (F.embedding_bag(at, t, begin, mode="sum"),),
        lambda at, t, begin: (F.embedding_bag(at, t, torch.arange(0, 20, 3), mode="sum"),),
        lambda at, t, begin: (F.embedding_bag(at, t, torch.arange(0, 16, 4), mode="sum"),),
        lambda at, t, begin: (F.embedding_bag(at, t, torch.arange(1, 21, 4) - 1, mode="sum"),),
        lambda at, t, begin: (F.embedding_bag(at.view(5, 4), t, mode="max"),),
    ]
    for fn in others:
        n, ops = left(fn, flat, TABLE, begin)
        assert n == 0 and len(ops) == 1

    def bag(at: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return (F.embedding_bag(at, table),)

    with monkeypatch.context() as m:
        m.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert left(bag, AT, TABLE)[0] == 0
    monkeypatch.undo()
    assert left(bag, AT, TABLE)[0] == 0


class Tables(nn.Module):
    """A bag of each of three tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(11, 6, mode="mean", padding_idx=2) for _ in range(3)
        )

    def forward(self, at: Tensor) -> Tensor:
        return torch.cat([table(at + k) for k, table in enumerate(self.tables)], 1).sin()


def test_in_training_with_any_number_of_bags() -> None:
    """Forward and backward agree on it: neither calls the operator."""
    model = Tables()
    compiled = torch.compile(model, backend="plait", dynamic=None)
    records: list[CompileRecord] = []
    token = observers.set((records.append,))
    for n in (5, 3):
        at = AT[:n] % 9
        torch._dynamo.maybe_mark_dynamic(at, 0)
        results = []
        for run in (compiled, model):
            model.zero_grad()
            made = run(at)
            made.sum().backward()
            results.append([made, *(p.grad for p in model.parameters())])
        torch.testing.assert_close(*results)
    observers.reset(token)
    assert len(records) == 2
    assert not any("aten::_embedding_bag" in text(r.wrapper) for r in records)
