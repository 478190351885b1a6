"""Gradients of some convolutions, by what has faster kernels on a GPU.

The gradient of an input is the convolution of the result's gradient with the filters turned round.
So it is computed of sequences whose channels have a filter each, which is a loop of ours then (a
fourth of the time), and of float32 with groups and long filters, for which cuDNN has no fast kernel
(3.6 ms against 0.6 for the positions of a speech model: benchmarks/conv_gpu.py). The gradients of
such sequences' filters are sums of products, an element each. Gradients of biases are sums of the
result's gradient, computed with what makes that: ATen sums in a kernel of its own, 13 % of a
training step of VGG. Runs before `channels_last`. No value changes but by the order of sums.
"""

from __future__ import annotations

import sys
from math import prod

import torch
from torch.fx import GraphModule, Node

from plait.devices import facts_of
from plait.graph.conv_cost import Convolution, convolution_of
from plait.graph.edit import aten, insert, replace, source_meta, value_of
from plait.graph.long_groups import LEAST_TAPS
from plait.graph.memory_format import is_candidate, laid_out_as

MOST_SUMS = 8
"""Elements of a filter whose gradients are summed side by side: a bound on a kernel's size."""


def split_gradients(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many gradients are computed otherwise from now on."""
    count = 0
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        of_bias = bool(node.args[10][2]) and facts_of(value_of(node.args[0]).device).streams
        if of_bias:
            _sum_bias(node)
        count += of_bias
        if is_candidate(node):
            c = convolution_of(node)
            of_input, of_filter = _is_input_sooner(c), _are_sums(c)
            if of_input:
                _split_input(node, c)
            if of_filter:
                _sum_filters(node, c)
            count += of_input + of_filter
        if not any(node.args[10]) and not node.users:
            gm.graph.erase_node(node)
    return count


def _is_plain(c: Convolution) -> bool:
    """Whether sizes are known, and the windows of neighbours lie next to each other."""
    sizes = (*c.weight.shape, *c.stride, *c.padding, *c.dilation, c.groups, c.x.shape[1])
    known = all(type(n) is int for n in sizes)
    return known and not c.transposed and {*c.stride} == {1} and c.groups > 1


def _is_line(c: Convolution) -> bool:
    """Whether each channel has one filter, of one row."""
    return c.is_depthwise and prod(c.window[:-1]) == 1 and c.weight.shape[0] == c.x.shape[1]


def _is_input_sooner(c: Convolution) -> bool:
    if not c.wanted[0] or not _is_plain(c) or min(_padding(c)) < 0:
        return False
    if c.is_depthwise:
        return _is_line(c) and c.is_loop
    return c.x.dtype == torch.float32 and prod(c.window) >= LEAST_TAPS


def _are_sums(c: Convolution) -> bool:
    plain = c.wanted[1] and _is_plain(c) and _is_line(c) and not any(c.padding[:-1])
    return plain and 0 < c.window[-1] <= MOST_SUMS


def _padding(c: Convolution) -> list[int]:
    """By how much the result's gradient reaches beyond itself."""
    return [d * (k - 1) - p for k, p, d in zip(c.window, c.padding, c.dilation, strict=True)]


def _split_input(node: Node, c: Convolution) -> None:
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
    _take(node, 0, made)


def _sum_filters(node: Node, c: Convolution) -> None:
    grad, x = node.args[:2]
    assert isinstance(grad, Node) and isinstance(x, Node), "tensors are nodes"
    others = [0, *range(2, c.x.dim())]
    if c.padding[-1]:
        x = insert(node, x, aten.constant_pad_nd.default, [c.padding[-1]] * 2)
    wide = insert(node, grad, aten._to_copy.default, dtype=torch.float32)
    sums = []
    for k in range(c.window[-1]):
        first, rest = k * c.dilation[-1], (c.window[-1] - 1 - k) * c.dilation[-1]
        seen = insert(node, x, aten.slice.Tensor, -1, first, -rest if rest else sys.maxsize)
        seen = insert(node, seen, aten._to_copy.default, dtype=torch.float32)
        terms = insert(node, seen, aten.mul.Tensor, wide)
        total = insert(node, terms, aten.sum.dim_IntList, others)
        sums.append(insert(node, total, aten.unsqueeze.default, 1))
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.cat.default, (sums, 1))
    made.meta = source_meta(node)
    with value_of(grad).fake_mode:
        made.meta["val"] = torch.cat([value_of(n) for n in sums], 1)
    made = insert(node, made, aten._to_copy.default, dtype=c.weight.dtype)
    made = insert(node, made, aten.view.default, list(c.weight.shape))
    _take(node, 1, laid_out_as(node, made, c.weight))


def _sum_bias(node: Node) -> None:
    grad = node.args[0]
    assert isinstance(grad, Node), "tensors are nodes"
    others = [d for d in range(value_of(grad).dim()) if d != 1]
    _take(node, 2, insert(node, grad, aten.sum.dim_IntList, others))


def _take(node: Node, k: int, made: Node) -> None:
    """Hands the users of one gradient another value; the others are still those of the operator."""
    for user in [u for u in node.users if u.args[1] == k]:
        replace(user, made)
    wanted = [w and n != k for n, w in enumerate(node.args[10])]  # type: ignore[arg-type]
    node.update_arg(10, wanted)
    node.meta["val"] = tuple(v if w else None for v, w in zip(value_of(node), wanted, strict=True))
