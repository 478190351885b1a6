"""Linear layers with their activations as one call, on a GPU: the vendor's library computes `gelu`
(by tanh) of a product with a bias before it stores it.

Eager rounds the sum to 16 bits first; without that the result is nearer to the exact one. A layer
whose sum is read by another operator, such as a gradient, stays. What the lowering rule computes
with kernels of plait is rounded as ever.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from plait.devices import facts_of
from plait.graph.edit import aten, insert, replace, same_layout, value_of

_MOVES = (
    aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.unsqueeze.default,
)  # fmt: skip
"""Views with each element once."""
_ALIGNED = 8
"""Columns: of others the executor cuts a product into parts, which have no activation."""


def join_activations(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many activations it joined."""
    found = [n for n in gm.graph.nodes if n.target is aten.addmm.default and _is_layer(n)]
    return sum(_join(node) for node in found)


def _is_layer(node: Node) -> bool:
    """Whether a product has a bias for each column, and may have an activation."""
    bias, made = value_of(node.args[0]), value_of(node)  # type: ignore[arg-type]
    if node.kwargs or made.dtype not in (torch.float16, torch.bfloat16) or bias.dim() != 1:
        return False
    aligned = type(bias.shape[0]) is int and bias.shape[0] % _ALIGNED == 0
    return facts_of(made.device).streams and bias.dtype == made.dtype and aligned


def _join(node: Node) -> bool:
    """Whether the only reader of a layer, behind views, is an activation, which it then has."""
    last = node
    while len(last.users) == 1:
        (user,) = last.users
        if user.target in _MOVES and user.args[0] is last:
            last = user
            continue
        if user.target is not aten.gelu.default or user.kwargs.get("approximate") != "tanh":
            return False
        if not same_layout(value_of(user), value_of(last)):
            return False
        replace(user, last)
        bias, *factors = node.args
        assert isinstance(bias, Node), "tensors are nodes"
        made = insert(node, bias, aten._addmm_activation.default, *factors, use_gelu=True)
        node.replace_all_uses_with(made, propagate_meta=False)
        node.graph.erase_node(node)
        return True
    return False
