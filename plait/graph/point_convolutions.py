"""Convolutions whose filters are points, as products: each point of a channels-last image is a row
of a matrix, and of an image in rows, which are multiplied on a CPU only, a column.

A product has faster kernels for many shapes, and may have what follows fused into it. On a CPU a
convolution turns its filters at each call, and images in rows: products take 0.7 of its time, or
0.4 (benchmarks/conv_cpu.py). Runs after `channels_last`; inserts views only, so the results lie
where those of the convolution did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.compat import precision
from plait.devices import facts_of
from plait.graph.conv_cost import Convolution, convolution_of
from plait.graph.edit import aten, insert, replace, value_of
from plait.graph.memory_format import lies_in_rows, lies_last

LEAST_CHANNELS = 64
LEAST_SUMMED = 128
"""Fewer channels of results or of operands: cuDNN has better kernels (benchmarks/conv_gpu.py)."""


def multiply_points(gm: GraphModule, packs: bool = False) -> int:
    """Changes the graph in place; returns how many convolutions it replaced. packs: those of a CPU
    will read packed filters."""
    found = [n for n in gm.graph.nodes if n.target in _REPLACE]
    if packs:
        found = [n for n in found if not convolution_of(n).is_on_host]
    found = [n for n in found if _is_product(n)]
    for node in found:
        _REPLACE[node.target](node)
    return len(found)


def _is_product(node: Node) -> bool:
    """Whether a convolution multiplies each point of a channels-last image by one matrix."""
    c = convolution_of(node)
    if c.x.dim() < 4 or not c.is_point or c.transposed:
        return False
    if not all(type(n) is int for n in c.weight.shape):
        return False
    if sum(type(n) is not int for n in c.x.shape) > 1:  # a view finds one size by itself
        return False
    facts = facts_of(c.x.device)
    if facts.is_host:
        return _is_hosts_product(c)
    made, summed = c.weight.shape[:2]
    if not facts.streams or not _has_tensor_cores(c.x.dtype):
        return False
    if min(made, summed) < LEAST_CHANNELS or (not c.wanted and summed < LEAST_SUMMED):
        return False
    return all(map(lies_last, (c.x, c.result) if c.wanted else (c.x,)))


def _is_hosts_product(c: Convolution) -> bool:
    """Whether a CPU multiplies matrices as exactly as it convolves, and the images lie as they
    must."""
    if c.x.dtype != torch.float32:
        return False
    images = c.x, c.result
    if not all(map(lies_last, images)):
        in_rows = type(c.x.shape[0]) is int and all(map(lies_in_rows, images))
        if not in_rows or c.wanted:
            return False
    return all(precision.of_host(op) not in ("bf16", "tf32") for op in ("matmul", "conv"))


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
    # With one channel images lie both ways: the result says which is meant.
    if not all(map(lies_last, (value_of(x), value_of(node)))):
        _forward_in_rows(node, x, weight, bias)
        return
    turned = insert(node, _matrix(node, weight), aten.permute.default, [1, 0])
    rows = _rows(node, x)
    if not isinstance(bias, Node):
        made = insert(node, rows, aten.mm.default, turned)
    elif facts_of(value_of(x).device).is_host:  # a vendor's kernel would write the bias out first
        made = insert(node, rows, aten.mm.default, turned)
        made = insert(node, made, aten.add.Tensor, bias)
    else:
        made = insert(node, bias, aten.addmm.default, rows, turned)
    _replace(node, made)


def _forward_in_rows(node: Node, x: Node, weight: Node, bias: Any) -> None:
    """The same of images in rows: each is the filters' matrix times its own."""
    batch, channels, *_ = value_of(x).shape
    matrix, shape = _matrix(node, weight), value_of(node).shape
    if batch == 1:
        made = insert(
            node, matrix, aten.mm.default, insert(node, x, aten.view.default, [channels, -1])
        )
    else:
        matrix = insert(node, matrix, aten.expand.default, [batch, *value_of(matrix).shape])
        images = insert(node, x, aten.view.default, [batch, channels, -1])
        made = insert(node, matrix, aten.bmm.default, images)
    if isinstance(bias, Node):
        column = insert(node, bias, aten.view.default, [shape[1], 1])
        made = insert(node, made, aten.add.Tensor, column)
    sizes = [n if type(n) is int else -1 for n in shape]
    replace(node, insert(node, made, aten.view.default, sizes))


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
