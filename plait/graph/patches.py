"""Convolutions of few channels whose windows lie side by side, as those of points: what embeds the
patches of an image.

Their input is rearranged so that each patch is one point with all of its elements as channels. Of
three channels tensor cores, which want eight or more, make little: a product over whole patches is
5 to 10 times as fast on a GPU (benchmarks/conv_gpu.py). Runs before `channels_last`. No value
changes but by the order in which a window is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.graph.conv_cost import Convolution, convolution_of
from plait.graph.edit import aten, insert, value_of
from plait.graph.memory_format import is_candidate, laid_out_as

MOST_CHANNELS = 16
"""With more, a convolution uses what tensor cores have."""


def unfold_patches(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many convolutions it replaced."""
    found = [n for n in gm.graph.nodes if is_candidate(n) and _is_of_patches(convolution_of(n))]
    for node in found:
        if node.target is aten.convolution.default:
            _forward(node)
        else:
            _backward(node)
    return len(found)


def _is_of_patches(c: Convolution) -> bool:
    """Whether windows lie side by side, in images of few channels and known sizes."""
    sizes = (*c.x.shape[1:], *c.weight.shape, *c.stride, *c.padding, *c.dilation, c.groups)
    if c.transposed or c.x.dim() < 4 or not all(type(n) is int for n in sizes):
        return False
    plain = {*c.padding} == {0} and {*c.dilation} == {1} and c.groups == 1
    covers = all(0 < k <= n for k, n in zip(c.window, c.x.shape[2:], strict=True))
    several = prod(c.window) > 1 and c.window == c.stride
    return (
        plain and covers and several and c.weight.is_contiguous() and c.x.shape[1] <= MOST_CHANNELS
    )


def _points(before: Node, x: Node, window: Sequence[int]) -> Node:
    """A channels-last image with a point for each patch of x."""
    channels, rank = value_of(x).shape[1], len(window)
    for d, k in enumerate(window, 2):
        x = insert(before, x, aten.unfold.default, d, k, k)
    batch, _, *counts = value_of(x).shape[: rank + 2]
    places, inside = range(2, rank + 2), range(rank + 2, 2 * rank + 2)
    x = _copied(before, insert(before, x, aten.permute.default, [0, *places, 1, *inside]))
    x = insert(before, x, aten.view.default, [_size(batch), *counts, channels * prod(window)])
    return insert(before, x, aten.permute.default, [0, rank + 1, *range(1, rank + 1)])


def _image(before: Node, points: Node, like: Any, window: Sequence[int]) -> Node:
    """The image whose patches are points; zeros where it has no whole patch."""
    batch, channels, *sizes = like.shape
    counts = value_of(points).shape[2:]
    rank = len(window)
    x = insert(before, points, aten.permute.default, [0, *range(2, rank + 2), 1])
    x = x if value_of(x).is_contiguous() else _copied(before, x)
    x = insert(before, x, aten.view.default, [_size(batch), *counts, channels, *window])
    order = [n for d in range(rank) for n in (1 + d, rank + 2 + d)]
    x = _copied(before, insert(before, x, aten.permute.default, [0, rank + 1, *order]))
    covered = [k * count for k, count in zip(window, counts, strict=True)]
    x = insert(before, x, aten.view.default, [_size(batch), channels, *covered])
    rest = [n - c for n, c in zip(sizes, covered, strict=True)]
    if any(rest):
        x = insert(
            before, x, aten.constant_pad_nd.default, [m for n in reversed(rest) for m in (0, n)]
        )
    return laid_out_as(before, x, like)


def _copied(before: Node, x: Node) -> Node:
    return insert(before, x, aten.clone.default, memory_format=torch.contiguous_format)


def _size(n: Any) -> int:
    """A size as a view takes it, which finds one by itself."""
    return n if type(n) is int else -1


def _of_points(c: Convolution) -> tuple[Any, ...]:
    """A convolution of points: stride, padding, dilation, transposed, output padding, groups."""
    rank = len(c.window)
    ones, zeros = [1] * rank, [0] * rank
    return ones, zeros, ones, False, zeros, 1


def _filters(before: Node, weight: Node) -> Node:
    """Filters as points, whose channels are the elements of a patch."""
    filters, *patch = value_of(weight).shape
    ones = [1] * (len(patch) - 1)
    return insert(before, weight, aten.view.default, [filters, prod(patch), *ones])


def _forward(node: Node) -> None:
    x, weight, bias = node.args[:3]
    assert isinstance(x, Node) and isinstance(weight, Node), "tensors are nodes"
    c = convolution_of(node)
    points = _points(node, x, c.window)
    made = insert(node, points, node.target, _filters(node, weight), bias, *_of_points(c))  # type: ignore[arg-type]
    _replace(node, laid_out_as(node, made, value_of(node)))


def _backward(node: Node) -> None:
    grad, x, weight, sizes = node.args[:4]
    assert isinstance(grad, Node) and isinstance(x, Node) and isinstance(weight, Node), "as above"
    c = convolution_of(node)
    points, filters = _points(node, x, c.window), _filters(node, weight)
    wanted = node.args[10]
    made = insert(node, grad, node.target, points, filters, sizes, *_of_points(c), wanted)  # type: ignore[arg-type]
    for user in list(node.users):
        k = user.args[1]
        if value_of(user) is None:  # a gradient that is not wanted
            user.update_arg(0, made)
            continue
        picked = node.graph.create_node("call_function", user.target, (made, k))
        user.prepend(picked)
        picked.meta = {**user.meta, "val": value_of(made)[k]}
        if k == 0:
            picked = _image(user, picked, c.x, c.window)
        elif k == 1:
            picked = insert(user, picked, aten.reshape.default, list(c.weight.shape))
            picked = laid_out_as(user, picked, value_of(user))
        _replace(user, picked)
    node.graph.erase_node(node)


def _replace(node: Node, by: Node) -> None:
    node.replace_all_uses_with(by, propagate_meta=False)
    node.graph.erase_node(node)
