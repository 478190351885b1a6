"""Convolutions of few channels whose windows lie side by side, as those of points: what embeds the
patches of an image.

Their input is rearranged so that each patch is one point with all of its elements as channels. Of
three channels tensor cores, which want eight or more, make little: a product over whole patches is
5 to 7 times as fast on a GPU (benchmarks/conv_gpu.py). Small windows that overlap are copied apart
where even that is sooner. Runs before `channels_last`. No value
changes but by the order in which a window is summed.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.graph.conv_cost import BYTES_A_NS, FEW_CHANNELS, Convolution, convolution_of, hint
from plait.graph.edit import aten, insert, replace, value_of
from plait.graph.memory_format import is_candidate, laid_out_as

MOST_CHANNELS = 16
"""With more, a convolution uses what tensor cores have."""
MOST_COPIED = 48  # elements of a patch
PRODUCTS_A_NS = 500.0
"""Of a float32 convolution of so few channels with a small window, channels-last, by cuDNN."""
MARGIN = 2.0
"""How much sooner a product of patches must be that overlap."""


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
    """Whether a convolution of few channels, of known sizes, is sooner as one of patches."""
    sizes = (*c.x.shape[1:], *c.weight.shape, *c.stride, *c.padding, *c.dilation, c.groups)
    if c.transposed or c.x.dim() < 4 or not all(type(n) is int for n in sizes):
        return False
    fits = all(
        0 < k <= n + 2 * p for k, n, p in zip(c.window, c.x.shape[2:], c.padding, strict=True)
    )
    plain = {*c.dilation} == {1} and c.groups == 1 and c.weight.is_contiguous() and fits
    if not plain or prod(c.window) == 1 or c.x.shape[1] > MOST_CHANNELS:
        return False
    return (c.window == c.stride and {*c.padding} == {0}) or _is_worth_copies(c)


def _is_worth_copies(c: Convolution) -> bool:
    """Whether patches that overlap may be copied apart: nobody wants the gradient of the image."""
    if c.x.shape[1] > FEW_CHANNELS or c.x.dtype != torch.float32 or any(c.wanted[:1]):
        return False
    points = hint(c.result.shape[0]) * prod(c.result.shape[2:])
    filters, *patch = c.weight.shape
    moved = points * (_whole(prod(patch)) + filters) * c.x.dtype.itemsize
    sooner = points * prod(patch) * filters / PRODUCTS_A_NS > MARGIN * moved / BYTES_A_NS
    return sooner and prod(patch) <= MOST_COPIED


def _whole(patch: int) -> int:
    """Elements of a patch, with as many zeros that vectors of 16 bytes begin at all of them."""
    return -(-patch // 8) * 8


def _padded(before: Node, x: Node, last: int) -> Node:
    """x with zeros at the end of its last dimension, which is so long then."""
    n = value_of(x).shape[-1]
    return x if n == last else insert(before, x, aten.constant_pad_nd.default, [0, last - n])


def _points(before: Node, x: Node, c: Convolution) -> Node:
    """A channels-last image with a point for each patch of x."""
    channels, rank, patch = c.x.shape[1], len(c.window), prod(c.weight.shape[1:])
    if any(c.padding):
        sides = [p for p in reversed(c.padding) for _ in range(2)]
        x = insert(before, x, aten.constant_pad_nd.default, sides)
    for d, (k, step) in enumerate(zip(c.window, c.stride, strict=True), 2):
        x = insert(before, x, aten.unfold.default, d, k, step)
    batch, _, *counts = value_of(x).shape[: rank + 2]
    places, inside = range(2, rank + 2), range(rank + 2, 2 * rank + 2)
    x = _copied(before, insert(before, x, aten.permute.default, [0, *places, 1, *inside]))
    x = insert(before, x, aten.view.default, [_size(batch), *counts, channels * prod(c.window)])
    x = _padded(before, x, _whole(patch))
    return insert(before, x, aten.permute.default, [0, rank + 1, *range(1, rank + 1)])


def _image(before: Node, points: Node, c: Convolution) -> Node:
    """The image whose patches are points; zeros where it has no whole patch."""
    batch, channels, *sizes = c.x.shape
    counts, rank = value_of(points).shape[2:], len(c.window)
    x = insert(before, points, aten.slice.Tensor, 1, 0, channels * prod(c.window))
    x = _copied(before, insert(before, x, aten.permute.default, [0, *range(2, rank + 2), 1]))
    x = insert(before, x, aten.view.default, [_size(batch), *counts, channels, *c.window])
    order = [n for d in range(rank) for n in (1 + d, rank + 2 + d)]
    x = _copied(before, insert(before, x, aten.permute.default, [0, rank + 1, *order]))
    covered = [k * count for k, count in zip(c.window, counts, strict=True)]
    x = insert(before, x, aten.view.default, [_size(batch), channels, *covered])
    rest = [m for n, n_covered in zip(sizes, covered, strict=True) for m in (n - n_covered, 0)]
    if any(rest):
        x = insert(before, x, aten.constant_pad_nd.default, rest[::-1])
    return laid_out_as(before, x, c.x)


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
    rows = insert(before, weight, aten.view.default, [filters, prod(patch)])
    rows = _padded(before, rows, _whole(prod(patch)))
    return insert(before, rows, aten.view.default, [filters, _whole(prod(patch)), *ones])


def _forward(node: Node) -> None:
    x, weight, bias = node.args[:3]
    assert isinstance(x, Node) and isinstance(weight, Node), "tensors are nodes"
    c = convolution_of(node)
    points = _points(node, x, c)
    made = insert(node, points, node.target, _filters(node, weight), bias, *_of_points(c))  # type: ignore[arg-type]
    replace(node, laid_out_as(node, made, value_of(node)))


def _backward(node: Node) -> None:
    grad, x, weight, sizes = node.args[:4]
    assert isinstance(grad, Node) and isinstance(x, Node) and isinstance(weight, Node), "as above"
    c = convolution_of(node)
    points, filters = _points(node, x, c), _filters(node, weight)
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
            picked = _image(user, picked, c)
        elif k == 1:
            patch = prod(c.weight.shape[1:])
            if _whole(patch) != patch:
                picked = insert(user, picked, aten.slice.Tensor, 1, 0, patch)
            picked = insert(user, picked, aten.reshape.default, list(c.weight.shape))
            picked = laid_out_as(user, picked, value_of(user))
        replace(user, picked)
    node.graph.erase_node(node)
