"""Indices that max pooling keeps for its gradient are saved as the smallest integers that hold
them.

PyTorch counts inside of an image with 64 bits, four times what the element itself takes in half
precision. Runs on a joint graph before it is split; indices that anything else reads stay as they
are.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait import compat
from plait.devices import facts_of
from plait.graph.edit import aten, insert, value_of

_POOLS: dict[Any, int] = {  # and the rank of their images
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}
_GRADIENTS: dict[Any, int] = {  # and which argument the indices are
    aten.max_pool2d_with_indices_backward.default: 7,
    aten.max_pool3d_with_indices_backward.default: 7,
    aten.adaptive_max_pool2d_backward.default: 2,
    aten.adaptive_max_pool3d_backward.default: 2,
}


def narrow_pool_indices(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many results are saved in another type."""
    narrowed = 0
    for node in list(gm.graph.nodes):
        dtype = _saved_as(node)
        if dtype is None:
            continue
        users = list(node.users)
        narrow = insert(node.next, node, aten._to_copy.default, dtype=dtype)
        narrow.meta["recompute"] = compat.tracing.MUST_SAVE
        wide = insert(narrow.next, narrow, aten._to_copy.default, dtype=torch.int64)
        for user in users:
            user.update_arg(_GRADIENTS[user.target], wide)
        narrowed += 1
    return narrowed


def _saved_as(node: Node) -> torch.dtype | None:
    """The type for a node if it is indices that only gradients read."""
    if node.target is not operator.getitem or node.args[1] != 1 or not node.users:
        return None
    pool: Any = node.args[0]
    rank = _POOLS.get(pool.target)
    if rank is None or not facts_of(value_of(node).device).streams:
        return None
    if not all(u.target in _GRADIENTS and u.args[_GRADIENTS[u.target]] is node for u in node.users):
        return None
    sizes = value_of(pool.args[0]).shape[-rank:]
    if not all(isinstance(n, int) for n in sizes):
        return None
    last = math.prod(sizes) - 1
    return next((t for t in (torch.int16, torch.int32) if last <= torch.iinfo(t).max), None)
