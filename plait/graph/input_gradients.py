"""Gradients of the inputs of some convolutions, as convolutions of the results' gradients with the
filters turned round.

So for sequences whose channels have a filter each, which are loops of ours then (a fourth of the
time), and for float32 with groups and long filters, whose gradients cuDNN has no fast kernel for
(3.6 ms against 0.6 for the positions of a speech model: benchmarks/conv_gpu.py). Runs before
`channels_last`. No value changes but by the order of sums.
"""

from __future__ import annotations

from math import prod

import torch
from torch.fx import GraphModule, Node

from plait.graph.conv_cost import MOST_TAPS, Convolution, convolution_of
from plait.graph.edit import aten, insert, value_of
from plait.graph.long_groups import LEAST_TAPS
from plait.graph.memory_format import is_candidate, laid_out_as


def split_input_gradients(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many gradients are convolutions from now on."""
    found = [
        n
        for n in gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
        if is_candidate(n) and _is_sooner(convolution_of(n))
    ]
    for node in found:
        _split(node, convolution_of(node))
    return len(found)


def _is_sooner(c: Convolution) -> bool:
    sizes = (*c.weight.shape, *c.stride, *c.padding, *c.dilation, c.groups, c.x.shape[1])
    if not c.wanted[0] or c.transposed or not all(type(n) is int for n in sizes):
        return False
    if {*c.stride} != {1} or min(_padding(c)) < 0 or c.groups == 1:
        return False
    taps = prod(c.window)
    if c.is_depthwise:
        is_line = prod(c.window[:-1]) == 1
        return is_line and 0 < taps <= MOST_TAPS and c.weight.shape[0] == c.x.shape[1]
    return c.x.dtype == torch.float32 and taps >= LEAST_TAPS


def _padding(c: Convolution) -> list[int]:
    """By how much the result's gradient reaches beyond itself."""
    return [d * (k - 1) - p for k, p, d in zip(c.window, c.padding, c.dilation, strict=True)]


def _split(node: Node, c: Convolution) -> None:
    grad, _, weight = node.args[:3]
    assert isinstance(grad, Node) and isinstance(weight, Node), "tensors are nodes"
    filters, channels, *window = c.weight.shape
    rank, apart = len(window), [c.groups, filters // c.groups, channels, *window]
    turned = insert(node, weight, aten.view.default, apart)
    turned = insert(node, turned, aten.transpose.int, 1, 2)
    turned = insert(
        node, turned, aten.reshape.default, [c.x.shape[1], filters // c.groups, *window]
    )
    turned = insert(node, turned, aten.flip.default, [*range(2, rank + 2)])
    ones, zeros = [1] * rank, [0] * rank
    rest = (None, ones, _padding(c), list(c.dilation), False, zeros, c.groups)
    made = insert(node, grad, aten.convolution.default, turned, *rest)
    made = laid_out_as(node, made, c.x)
    for user in [u for u in node.users if u.args[1] == 0]:
        user.replace_all_uses_with(made, propagate_meta=False)
        node.graph.erase_node(user)
    node.update_arg(10, [False, *node.args[10][1:]])  # type: ignore[index, misc]
    node.meta["val"] = (None, *value_of(node)[1:])
    if not any(node.args[10]):  # type: ignore[arg-type]
        node.graph.erase_node(node)
