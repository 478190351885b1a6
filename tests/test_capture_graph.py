"""The FX passes on small hand-written graphs: what goes, what must stay, and that a second run
changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from plait.config import Config
from plait.graph.captured import Captured
from plait.graph.constants import fold_constants
from plait.graph.cse import merge_common
from plait.graph.dead import drop_dead
from plait.graph.noop import drop_noops
from plait.pipelines import GRAPH, clean_graph

aten = torch.ops.aten


def graph(fn: Callable[..., Any], *args: Tensor) -> GraphModule:
    """fn as an ATen graph with fake values, outputs as a tuple."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a) for a in args]
        gm = make_fx(lambda *a: fn(*a))(*fakes)
    gm.graph.output_node().args = (tuple(_flat(gm.graph.output_node().args[0])),)
    gm.recompile()
    return gm


def _flat(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


def ops(gm: GraphModule) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in gm.graph.nodes if n.op == "call_function"]


X = torch.linspace(0, 1, 24).view(4, 6)


def same_results(gm: GraphModule, before: GraphModule, *args: Tensor) -> None:
    gm.graph.lint()
    gm.recompile()
    for a, b in zip(gm(*args), before(*args), strict=True):
        torch.testing.assert_close(a, b)


# ------------------------------------------------------------------------------------------ merging
def test_equal_nodes_are_merged() -> None:
    gm = graph(lambda x: (aten.exp(x) + aten.exp(x)) * 2, X)
    assert merge_common(gm) == 1
    assert ops(gm) == ["exp.default", "add.Tensor", "mul.Tensor"]
    assert merge_common(gm) == 0


def test_arguments_of_other_types_are_not_equal() -> None:
    add = aten.add
    gm = graph(lambda x: add(x, 1) * add(x, 1.0) * add(x, True) * add(x, 0.0) * add(x, -0.0), X)
    assert merge_common(gm) == 0


def test_random_nodes_are_not_merged() -> None:
    gm = graph(lambda x: aten.rand_like(x) + aten.rand_like(x), X)
    assert merge_common(gm) == 0


def test_uninitialised_memory_is_not_merged() -> None:
    gm = graph(lambda x: aten.fill(aten.empty_like(x), 1) + aten.fill(aten.empty_like(x), 2), X)
    assert merge_common(gm) == 0


def test_two_equal_results_stay_two() -> None:
    gm = graph(lambda x: (aten.exp(x), aten.exp(x)), X)
    assert merge_common(gm) == 0
    gm = graph(lambda x: (aten.exp(x), aten.view(aten.exp(x), [24])), X)
    assert merge_common(gm) == 0


def test_a_result_may_be_merged_with_an_inner_node() -> None:
    gm = graph(lambda x: (aten.exp(x).sum(), aten.exp(x)), X)
    assert merge_common(gm) == 1


def test_three_equal_nodes_of_which_two_are_results() -> None:
    gm = graph(lambda x: (aten.exp(x).sum(), aten.exp(x), aten.exp(x)), X)
    before = copy.deepcopy(gm)
    merge_common(gm)
    gm.recompile()
    a, b = gm(X)[1:]
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    same_results(gm, before, X)


def test_copy_into_input_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        y = aten.add(x, 1)
        aten.copy_(x, y)
        return aten.mul(y, 2)

    gm = graph(fn, X.clone())
    before = ops(gm)
    assert merge_common(gm) == 0 and drop_dead(gm) == 0
    assert ops(gm) == before


# ---------------------------------------------------------------------------------------- dead code
def test_dead_code_goes_with_its_arguments() -> None:
    def fn(x: Tensor) -> Tensor:
        aten.sum(aten.exp(x))
        aten.rand_like(x)
        return aten.neg(x)

    gm = graph(fn, X)
    drop_dead(gm)
    assert ops(gm) == ["neg.default"]
    assert drop_dead(gm) == 0


def test_asserts_stay() -> None:
    def fn(x: Tensor) -> Tensor:
        aten._assert_async.msg(aten.gt(aten.sum(x), -1), "negative")
        return aten.neg(x)

    gm = graph(fn, X)
    drop_dead(gm)
    assert "_assert_async.msg" in ops(gm)


# ------------------------------------------------------------------------------------------- no-ops
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: aten.sin(aten.clone(aten.exp(x))),
        lambda x: aten.sin(aten.view(aten.exp(x), [4, 6])),
        lambda x: aten.sin(aten.expand(aten.exp(x), [4, 6])),
        lambda x: aten.sin(aten.permute(aten.exp(x), [0, 1])),
        lambda x: aten.sin(aten.slice(aten.exp(x), 0, 0, 100)),
        lambda x: aten.sin(aten._to_copy(aten.exp(x), dtype=torch.float32)),
        lambda x: aten.sin(aten.alias(aten.exp(x))),
        lambda x: aten.clone(aten.sin(aten.exp(x))),
    ],
)
def test_noop_goes(fn: Callable[[Tensor], Tensor]) -> None:
    gm = graph(fn, X)
    before = copy.deepcopy(gm)
    assert drop_noops(gm) == 1
    assert sorted(ops(gm)) == ["exp.default", "sin.default"]
    assert drop_noops(gm) == 0
    same_results(gm, before, X)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: aten.clone(x),
        lambda x: (y := aten.exp(x), aten.clone(y)),
        lambda x: aten.clone(aten.view(x, [24])),
        lambda x: aten.clone(aten.exp(x)[1]),
        lambda x: (y := aten.exp(x), aten.view(y, [4, 6])),
        lambda x: aten.view(x, [4, 6]),
        lambda x: aten.clone(
            aten.permute(aten.exp(x), [1, 0]), memory_format=torch.contiguous_format
        ),
        lambda x: aten._to_copy(aten.exp(x), dtype=torch.float64),
        lambda x: (y := aten.exp(x), aten.clone(y), aten.clone(y)),
    ],
)
def test_what_the_caller_can_tell_apart_stays(fn: Callable[[Tensor], Any]) -> None:
    gm = graph(fn, X)
    before = copy.deepcopy(gm)
    for _, run in GRAPH:
        run(gm)
    same_results(gm, before, X)
    got, want = gm(X), before(X)

    def owners(values: Any) -> list[int]:
        where = [v.untyped_storage().data_ptr() for v in (X, *values)]
        return [where.index(w) for w in where]

    assert owners(got) == owners(want)
    assert [v.untyped_storage().nbytes() for v in got] == [
        v.untyped_storage().nbytes() for v in want
    ]


def test_of_three_copies_two_remain_apart() -> None:
    gm = graph(lambda x: (aten.clone(y := aten.exp(x)), aten.clone(y)), X)
    drop_noops(gm)
    gm.recompile()
    a, b = gm(X)
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


# ---------------------------------------------------------------------------------------- constants
def with_constant(body: Callable[[Tensor, Tensor], Any], constant: Tensor) -> GraphModule:
    gm = graph(body, X, constant)
    hole = [n for n in gm.graph.nodes if n.op == "placeholder"][1]
    gm.register_buffer("_tensor_constant0", constant)
    with gm.graph.inserting_before(hole):
        new = gm.graph.get_attr("_tensor_constant0")
    new.meta = dict(hole.meta)
    hole.replace_all_uses_with(new)
    gm.graph.erase_node(hole)
    gm.recompile()
    return gm


def test_constants_are_folded() -> None:
    gm = with_constant(
        lambda x, c: aten.add(x, aten.exp(aten.mul(aten.lift_fresh_copy(c), 2))), torch.arange(6.0)
    )
    before = copy.deepcopy(gm)
    assert fold_constants(gm) == 3
    drop_dead(gm)
    assert ops(gm) == ["add.Tensor"]
    assert fold_constants(gm) == 0
    same_results(gm, before, X)


def test_folded_views_keep_their_strides() -> None:
    gm = with_constant(
        lambda x, c: aten.add(x, aten.permute(c, [1, 0])), torch.arange(24.0).view(6, 4)
    )
    before = copy.deepcopy(gm)
    assert fold_constants(gm) == 1
    folded = next(n for n in gm.graph.nodes if n.op == "get_attr" and "folded" in n.target)
    assert folded.meta["val"].stride() == getattr(gm, folded.target).stride() == (1, 4)
    same_results(gm, before, X)


def test_views_that_overlap_are_not_folded() -> None:
    gm = with_constant(
        lambda x, c: (x, aten.neg(aten.as_strided(c, [3, 4], [1, 1]))), torch.arange(6.0)
    )
    before = copy.deepcopy(gm)
    assert fold_constants(gm) == 0
    same_results(gm, before, X)


def test_a_constant_result_is_new_memory_every_time() -> None:
    gm = with_constant(lambda x, c: (aten.exp(c), aten.clone(c)), torch.arange(6.0))
    assert fold_constants(gm) == 0


def test_large_results_are_not_folded() -> None:
    gm = with_constant(
        lambda x, c: aten.add(x, aten.expand(c, [100, 100, 1, 1]).sum([0, 1])), torch.ones(1, 1)
    )
    assert fold_constants(gm) == 0


def test_random_is_not_folded() -> None:
    gm = with_constant(lambda x, c: aten.add(x, aten.rand_like(c)), torch.ones(6))
    assert fold_constants(gm) == 0


# -------------------------------------------------------------------------------------- all of them
def test_clean_graph_is_idempotent_and_keeps_results() -> None:
    def fn(x: Tensor) -> Any:
        y = aten.clone(aten.view(x, [4, 6]))
        z = aten.exp(y) + aten.exp(aten.clone(y))
        aten.cos(z)
        return z, aten.view(z, [24])

    gm = graph(fn, X)
    before = copy.deepcopy(gm)
    captured = clean_graph(Captured(gm, "inference_0", "inference"), Config())
    once = str(captured.graph.graph)
    clean_graph(captured, Config())
    assert str(captured.graph.graph) == once
    assert ops(gm).count("exp.default") == 1 and "cos.default" not in ops(gm)
    same_results(gm, before, X)
