"""Biases of convolutions are operators of their own when a joint graph is split, on a GPU: the
backward pass is saved what the convolution makes, which lies in memory anyway, and adds the bias
again. Saved with its bias the result would be written once more.

The kernels add biases either way (lower/conv.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.devices import facts_of
from plait.graph.edit import aten, insert, insert_like, replace, value_of
from plait.graph.norm_results import forward_nodes, is_elementwise

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NORM = aten._native_batch_norm_legit_functional.default  # its gradient is elementwise operators


def split_biases(joint: GraphModule) -> int:
    """Changes the graph in place; returns how many convolutions it changed."""
    nodes = joint.graph.find_nodes(op="call_function", target=aten.convolution.default)
    found = [n for n in nodes if _has_bias(n)]
    if not found:
        return 0
    forward = forward_nodes(joint.graph)
    for node in found:
        x, weight, _, *rest = node.args
        late = [u for u in node.users if u not in forward]
        bare = insert_like(node, value_of(node), aten.convolution.default, x, weight, None, *rest)
        for user in late:
            column = _column(user, node)
            # The other way round: equal nodes would become one.
            total = insert_like(user, value_of(node), aten.add.Tensor, column, bare)
            user.replace_input_with(node, total)
        replace(node, insert(node, bare, aten.add.Tensor, _column(node, node)))
    return len(found)


def _column(before: Node, convolution: Node) -> Node:
    bias: Any = convolution.args[2]
    made = value_of(convolution)
    return insert(before, bias, aten.view.default, [made.shape[1], *([1] * (made.dim() - 2))])


def _has_bias(node: Node) -> bool:
    """Whether a convolution has a bias that all its readers add on their way, on a GPU."""
    made: Any = value_of(node)
    return (
        isinstance(node.args[2], Node)
        and all(u.target is _NORM or is_elementwise(u) for u in node.users)
        and made.dtype in _DTYPES
        and value_of(node.args[2]).dtype == made.dtype
        and type(made.shape[1]) is int
        and facts_of(made.device).streams
    )
