"""Results of batch and group norm that gradients of activations read, on a GPU: the backward pass
makes them again from what it reads anyway, the input and its statistics, and nothing more is saved
or read. Runs on a joint graph before it is split.

A result that a product or a convolution reads again is in memory either way. relu needs none of
this, for its gradient reads relu's result.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from plait import compat
from plait.devices import facts_of
from plait.graph.edit import aten, insert, output_of, same_layout, value_of

_GRADIENTS = (aten.hardtanh_backward.default, aten.hardswish_backward.default)
"""Of one element each, though no tag says so."""


def remake_norm_results(joint: GraphModule) -> int:
    """Changes the graph in place; returns how many results are made again."""
    ops = (aten._native_batch_norm_legit_functional.default, aten.native_group_norm.default)
    norms = [n for op in ops for n in joint.graph.find_nodes(op="call_function", target=op)]
    found = list(filter(_may_remake, norms))
    if not found:
        return 0
    forward = forward_nodes(joint.graph)
    return sum(_remake(n, forward) for n in found)


def _may_remake(norm: Node) -> bool:
    x = value_of(norm.args[0])  # type: ignore[arg-type]
    of_batch = norm.target is aten._native_batch_norm_legit_functional.default
    if of_batch and not norm.args[5]:
        return False  # statistics that are given
    results = {u.args[1]: value_of(u) for u in norm.users}
    if not results.keys() >= {0, 1, 2} or not facts_of(x.device).streams:
        return False
    exact = results[1].dtype in (torch.float32, torch.float64)  # those of groups may be short
    return exact and (of_batch or all(type(n) is int for n in x.shape))


def late_nodes(graph: Graph) -> set[Node]:
    """What depends on a gradient."""
    late = {n for n in graph.find_nodes(op="placeholder") if compat.autograd.is_tangent(n)}
    for n in graph.nodes:
        if not late.isdisjoint(n.all_input_nodes):
            late.add(n)
    return late


def forward_nodes(graph: Graph) -> set[Node]:
    """What results that depend on no gradient are computed from."""
    late = late_nodes(graph)
    output = output_of(graph)
    needed = {n for n in output.all_input_nodes if n not in late}
    for n in reversed(graph.nodes):
        if n in needed:
            needed.update(n.all_input_nodes)
    return needed


def _remake(norm: Node, forward: Set[Node]) -> bool:
    results: dict[Any, Node] = {u.args[1]: u for u in norm.users}
    readers = [u for u in results[0].users if u not in forward]
    if not readers or not all(map(is_elementwise, readers)):
        return False
    x, weight, bias = norm.args[:3]
    assert isinstance(x, Node), "tensors are nodes"
    made = value_of(results[0])
    if not same_layout(made, value_of(x)):
        return False
    first = min(readers)
    statistics = value_of(results[1])
    points = [1] * (made.dim() - 2)

    def channels(of: Any) -> Node:
        return insert(first, of, aten.view.default, [*value_of(of).shape, *points])

    value = insert(first, x, aten._to_copy.default, dtype=statistics.dtype)
    if statistics.dim() == 2:  # of groups of channels
        points = [1, *points]
        shape = [*statistics.shape, -1, *made.shape[2:]]
        value = insert(first, value, aten.view.default, shape)
    value = insert(first, value, aten.sub.Tensor, channels(results[1]))
    value = insert(first, value, aten.mul.Tensor, channels(results[2]))
    if statistics.dim() == 2:
        points = points[1:]
        value = insert(first, value, aten.view.default, [*made.shape])
    if weight is not None:
        value = insert(first, value, aten.mul.Tensor, channels(weight))
    if bias is not None:
        value = insert(first, value, aten.add.Tensor, channels(bias))
    value = insert(first, value, aten._to_copy.default, dtype=made.dtype)
    for reader in readers:
        reader.replace_input_with(results[0], value)
    return True


def is_elementwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target in (aten._to_copy.default, *_GRADIENTS)
