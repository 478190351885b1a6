"""Numbers that the graph reads from tensors, although tracing lists them at no node.

PyTorch's `tensor_split` with a tensor of indices takes the numbers that it reads off the list of
what must be found in a result, for it gives slices alone. The sizes and offsets of these depend on
the numbers all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.graph.edit import aten, value_of


def list_items(gm: GraphModule) -> int:
    """Lists a number at the node that reads it, if no node before lists it or is it; returns how
    many."""
    if not gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
        return 0
    known: set[Any] = set()
    listed = 0
    for node in gm.graph.nodes:
        symbol = _symbol(node)
        known.update(node.meta.get("unbacked_bindings") or ())
        if node.op == "placeholder":
            known.add(symbol)
        elif (
            node.target is aten._local_scalar_dense.default
            and symbol is not None
            and symbol not in known
        ):
            node.meta["unbacked_bindings"] = {symbol: ()}
            known.add(symbol)  # a tensor that is read twice gives one number
            listed += 1
    return listed


def _symbol(node: Node) -> Any:
    """The symbol that is a node's value, None if another value is."""
    value = value_of(node)
    e = value.node._expr if isinstance(value, torch.SymInt) else None
    return e if e is not None and e.is_symbol else None
