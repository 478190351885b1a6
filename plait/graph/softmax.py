"""log_softmax of a joint graph as its two reductions and what follows from them.

A classifier's loss reads few of its elements, and its gradient all. As one operator it would be
saved for that: as large as what goes in, twice as wide where that has half precision, and written
for nothing else. In parts, the forward pass saves a number or two a row.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from plait import compat
from plait.graph.edit import aten, base_of, insert, output_of, replace, value_of


def split_log_softmax(joint: GraphModule) -> int:
    """Changes the graph in place; returns how many operators it split. Values are those of the
    operator's rule. What the caller gets anyway may as well be saved."""
    given = {base_of(n) for n in output_of(joint.graph).all_input_nodes}
    n = 0
    for node in joint.graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        if node not in given and _splits(node):
            replace(node, _split(node))
            n += 1
    return n


def _splits(node: Node) -> bool:
    x, dim = value_of(node.args[0]), node.args[1]  # type: ignore[arg-type]
    size = x.shape[dim] if x.dim() > 0 else 0
    # So that views of the result are views of what takes its place.
    same = x.stride() == value_of(node).stride()
    return isinstance(size, int) and size > 0 and same


def _split(node: Node) -> Node:
    x, dim, _ = node.args
    assert isinstance(x, Node), x
    dtype = value_of(node).dtype
    if value_of(x).dtype in (torch.float16, torch.bfloat16):
        x = insert(node, x, aten._to_copy.default, dtype=torch.float32)
    x = insert(node, x, aten.sub.Tensor, insert(node, x, aten.amax.default, [dim], True))
    total = insert(node, insert(node, x, aten.exp.default), aten.sum.dim_IntList, [dim], True)
    result = insert(node, x, aten.sub.Tensor, insert(node, total, aten.log.default))
    if value_of(result).dtype != dtype:
        result = insert(node, result, aten._to_copy.default, dtype=dtype)
    result.meta["recompute"] = compat.tracing.MUST_RECOMPUTE
    return result
