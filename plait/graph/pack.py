"""Products and convolutions with constant weights as calls of what reads packed weights
(`plait/runtime/packed.py`). Runs before weights are folded, which then packs them.

Comes in: a graph, and which of its nodes weights alone decide. Goes out: the same graph with
other calls, which promise the strides that eager gives. Only f32, on a CPU; a product that is
smaller than a call stays a loop.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait import compat
from plait.devices import facts_of
from plait.graph.edit import aten, insert_like, replace, same_sizes, value_of
from plait.runtime.packed import DEEPEST, PACKED_SHAPES, panel_width

_plait: Any = torch.ops.plait
FEW_COLUMNS = 16
"""A panel for fewer would be more than half empty."""
FEW_CHANNELS = 32
FEW_TILES = 8
"""With fewer, Winograd's method is slower: benchmarks/packed_cpu.py."""


def pack_weights(
    gm: GraphModule, known: Set[Node], small_flops: int, winograd: bool = True
) -> None:
    """Changes the graph in place. known: nodes that weights alone decide. small_flops: products
    with no more stay loops. winograd: convolutions of many tiles are computed by his method."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not _is_f32(value_of(node)):
            continue
        if node.target in (aten.mm.default, aten.addmm.default):
            _pack_product(node, known, small_flops)
        elif node.target is aten.convolution.default:
            _pack_convolution(node, known, winograd)


def _is_f32(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.layout == torch.strided
        and facts_of(value.device).eager_cpu
    )


def _pack_product(node: Node, known: Set[Node], small_flops: int) -> None:
    *bias, a, matrix = node.args
    assert isinstance(a, Node) and isinstance(matrix, Node), node
    if matrix not in known or a in known or any(v != 1 for v in node.kwargs.values()):
        return
    (rows, depth), columns = value_of(a).shape, value_of(matrix).shape[1]
    small = isinstance(rows, int) and 2 * rows * depth * columns <= small_flops
    if small or depth < 2 or columns < FEW_COLUMNS or rows == 0:
        return
    panels = _packed(node, _plait.pack.default, matrix, panel_width(columns))
    val = value_of(node)
    made = insert_like(node, val, _plait.packed_mm.default, a, panels, columns)
    for addend in bias:
        made = insert_like(node, val, aten.add.Tensor, made, addend)
    replace(node, made)


def _pack_convolution(node: Node, known: Set[Node], winograd: bool) -> None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    assert isinstance(x, Node) and isinstance(weight, Node), node
    filters = value_of(weight)
    if weight not in known or x in known or filters.dim() != 4 or transposed:
        return
    if 0 in value_of(x).shape or not all(isinstance(n, int) for n in value_of(x).shape[1:2]):
        return
    columns, depth, *kernel = filters.shape
    geometry: list[Any] = [stride, padding, dilation]
    width, val = panel_width(columns), value_of(node)
    if groups == columns and depth == 1:
        points = _packed(node, _plait.pack_points.default, weight)
        made = insert_like(node, val, _plait.depthwise_conv.default, x, points, *geometry)
    elif groups == 1 and winograd and _is_for_winograd(x, filters, geometry):
        panels = _packed(node, _plait.pack_winograd.default, weight, width)
        made = insert_like(node, val, _plait.winograd_conv.default, x, panels, columns, padding)
    elif groups == 1 and columns >= FEW_COLUMNS:
        panels = _packed(node, _plait.pack_filters.default, weight, width)
        scaled = _scaled(x) if [kernel, *geometry] == _POINTS else None
        if scaled is not None:
            made = insert_like(node, val, _plait.scaled_conv.default, *scaled, panels, columns)
        else:
            operator = _plait.packed_conv.default
            made = insert_like(node, val, operator, x, panels, columns, kernel, *geometry)
    else:
        return
    if bias is not None:
        assert isinstance(bias, Node), node
        old = value_of(bias)
        with old.fake_mode:  # a fake `view` takes four times as long
            seen = old.as_strided((columns, 1, 1), old.stride() * 3)
        bias = insert_like(node, seen, aten.view.default, bias, [columns, 1, 1])
        made = insert_like(node, val, aten.add.Tensor, made, bias)
    replace(node, made)


def _packed(before: Node, packs: Any, weight: Node, *width: int) -> Node:
    """What packs a weight."""
    with compat.tracing.beside(value_of(weight)):
        val = PACKED_SHAPES[packs](value_of(weight), *width)
    return insert_like(before, val, packs, weight, *width)


_POINTS = [[1, 1], [1, 1], [0, 0], [1, 1]]
"""Kernel, stride, padding and dilation of a convolution of points."""


def _scaled(x: Node) -> tuple[Node, Node] | None:
    """What an image is a product of, where one factor is a number for each channel and nobody else
    reads it."""
    if x.target is not aten.mul.Tensor or len(x.users) > 1:
        return None
    for image, scale in (x.args, x.args[::-1]):
        if not (isinstance(image, Node) and isinstance(scale, Node)):
            return None
        whole, few = value_of(image), value_of(scale)
        made = value_of(x).shape
        shapes = same_sizes(whole.shape, made) and same_sizes(few.shape, (1, made[1], 1, 1))
        if shapes and whole.shape[0] == 1 and _is_f32(whole) and _is_f32(few):
            return image, scale
    return None


def _is_for_winograd(x: Node, filters: Any, geometry: list[Any]) -> bool:
    """Whether Winograd's method is faster: there are enough tiles of 2x2 results for each of the
    filters' sums, which are almost twice as many as their points, and enough channels."""
    columns, depth, *kernel = filters.shape
    stride, padding, dilation = geometry
    if kernel != [3, 3] or set(stride) != {1} or set(dilation) != {1} or len(padding) != 2:
        return False
    images, _, *sides = value_of(x).shape
    high, wide = (n + 2 * p - 2 for n, p in zip(sides, padding, strict=True))
    tiles = images * ((high + 1) // 2) * ((wide + 1) // 2)
    enough = not isinstance(tiles, int) or tiles >= FEW_TILES
    return enough and FEW_CHANNELS <= depth <= DEEPEST and columns >= FEW_CHANNELS
