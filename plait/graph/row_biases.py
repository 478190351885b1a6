"""Biases are added before a product is rounded, under `batch_invariant`.

`aten.linear` is written out by where its input lies in memory: a product with a bias, which is
rounded once, or a product and a sum, which are rounded each. Of a batch of one, any order of
dimensions is as good as contiguous, so that a row alone would be rounded otherwise than among
others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.graph.edit import aten, insert, replace, same_layout, same_size, same_sizes, value_of

_PRODUCTS = (aten.mm.default, aten.bmm.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_SHORT = (torch.bfloat16, torch.float16)


def join_biases(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many sums it replaced."""
    found = 0
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        found += not node.kwargs and (_joined(node, *node.args) or _joined(node, *node.args[::-1]))
    return found


def _joined(node: Node, x: Any, bias: Any) -> bool:
    """Replaces x + bias if nobody else reads the product that x is."""
    product, views = _behind_views(x)
    if product is None or not isinstance(bias, Node):
        return False
    n, made, added = value_of(product).shape[-1], value_of(node), value_of(bias)
    if type(n) is not int or made.dtype not in _SHORT or added.dtype != made.dtype:
        return False
    # Of more dimensions, it may be what a layer adds to its only row.
    alike = same_size(made.shape[-1], n) and same_layout(value_of(x), made)
    if not alike or not same_sizes(added.shape, (n,)):
        return False
    op = aten.addmm.default if product.target is aten.mm.default else aten.baddbmm.default
    joined = insert(node, bias, op, *product.args)
    for view in reversed(views):
        joined = insert(node, joined, aten.view.default, *view.args[1:])
    replace(node, joined)
    return True


def _behind_views(x: Any) -> tuple[Node | None, list[Node]]:
    """The product that x shows and the views on the way, each with one reader, the last first."""
    views: list[Node] = []
    while isinstance(x, Node) and len(x.users) == 1:
        if x.target in _PRODUCTS:
            return x, views
        if x.target not in _VIEWS:
            break
        views.append(x)
        x = x.args[0]
    return None, views
