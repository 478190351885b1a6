"""Convolutions whose filters are points, of channels-last images on a GPU, as products: each point
of an image is a row of a matrix.

A product has faster kernels for many shapes, and may have what follows fused into it. Runs after
`channels_last`; inserts views only, so the results lie where those of the convolution did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.devices import facts_of
from plait.graph.conv_cost import convolution_of
from plait.graph.edit import aten, insert, replace, value_of
from plait.graph.memory_format import lies_last

LEAST_CHANNELS = 64
LEAST_SUMMED = 128
"""Fewer channels of results or of operands: cuDNN has better kernels (benchmarks/conv_gpu.py)."""


def multiply_points(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many convolutions it replaced."""
    found = [n for n in gm.graph.nodes if n.target in _REPLACE and _is_product(n)]
    for node in found:
        _REPLACE[node.target](node)
    return len(found)


def _is_product(node: Node) -> bool:
    """Whether a convolution multiplies each point of a channels-last image by one matrix."""
    c = convolution_of(node)
    if not facts_of(c.x.device).streams or not _has_tensor_cores(c.x.dtype) or c.x.dim() < 4:
        return False
    if not c.is_point or c.transposed or not all(type(n) is int for n in c.weight.shape):
        return False
    made, summed = c.weight.shape[:2]
    if min(made, summed) < LEAST_CHANNELS or (not c.wanted and summed < LEAST_SUMMED):
        return False
    several = sum(type(n) is not int for n in c.x.shape) > 1  # a view finds one size by itself
    return not several and all(map(lies_last, (c.x, c.result) if c.wanted else (c.x,)))


def _has_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether a product of this dtype runs where the convolution would: float32 only if the flag
    for products, which is off by default, lets it."""
    backends: Any = torch.backends
    if dtype == torch.float32:
        return bool(backends.cuda.matmul.fp32_precision == "tf32")
    return dtype in (torch.float16, torch.bfloat16)


def _rows(before: Node, x: Node) -> Node:
    """A channels-last image as a matrix with a row a point."""
    rank, channels = value_of(x).dim(), value_of(x).shape[1]
    moved = insert(before, x, aten.permute.default, [0, *range(2, rank), 1])
    return insert(before, moved, aten.view.default, [-1, channels])


def _replace(node: Node, rows: Node) -> None:
    """Puts the image whose points are rows in the place of a node."""
    shape = value_of(node).shape
    rank = len(shape)
    sizes = [n if type(n) is int else -1 for n in (shape[0], *shape[2:], shape[1])]
    image = insert(node, rows, aten.view.default, sizes)
    image = insert(node, image, aten.permute.default, [0, rank - 1, *range(1, rank - 1)])
    replace(node, image)


def _matrix(before: Node, weight: Node) -> Node:
    return insert(before, weight, aten.view.default, list(value_of(weight).shape[:2]))


def _forward(node: Node) -> None:
    x, weight, bias = node.args[:3]
    assert isinstance(x, Node) and isinstance(weight, Node), "tensors are nodes"
    turned = insert(node, _matrix(node, weight), aten.permute.default, [1, 0])
    rows = _rows(node, x)
    if isinstance(bias, Node):
        made = insert(node, bias, aten.addmm.default, rows, turned)
    else:
        made = insert(node, rows, aten.mm.default, turned)
    _replace(node, made)


def _backward(node: Node) -> None:
    grad, x, weight = node.args[:3]
    assert isinstance(grad, Node) and isinstance(x, Node) and isinstance(weight, Node), "as above"
    rows = _rows(node, grad)
    for user in [u for u in node.users if value_of(u) is not None]:
        if user.args[1] == 0:
            _replace(user, insert(user, rows, aten.mm.default, _matrix(user, weight)))
        elif user.args[1] == 1:
            turned = insert(user, rows, aten.permute.default, [1, 0])
            _replace(user, insert(user, turned, aten.mm.default, _rows(user, x)))
        else:
            places = [0, *range(2, value_of(grad).dim())]
            user.target, user.args = aten.sum.dim_IntList, (grad, places)
    if node.users:  # gradients that are not wanted
        node.update_arg(10, [False] * 3)
    else:
        node.graph.erase_node(node)


_REPLACE: dict[Any, Callable[[Node], None]] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
