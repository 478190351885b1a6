"""log_softmax of a joint graph as its two reductions and what follows from them.

A classifier's loss reads few of its elements, and its gradient all. As one operator it would be saved for that: as
large as what goes in, twice as wide where that has half precision, and written for nothing else. In parts, the forward
pass saves a number or two a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait import compat
from plait.graph.edit import aten, base_of, output_of, value_of


def split_log_softmax(joint: GraphModule) -> int:
    """Changes the graph in place; returns how many operators it split. Values are those of the operator's rule. What
    the caller gets anyway may as well be saved."""
    given = {base_of(n) for n in output_of(joint.graph).all_input_nodes}
    found = [n for n in joint.graph.nodes if n.target is aten._log_softmax.default and n not in given and _splits(n)]
    for node in found:
        node.replace_all_uses_with(_split(node))
        joint.graph.erase_node(node)
    return len(found)


def _splits(node: Node) -> bool:
    x = value_of(node.args[0])  # type: ignore[arg-type]
    size = x.shape[node.args[1]] if x.dim() > 0 else 0
    return isinstance(size, int) and size > 0


def _split(node: Node) -> Node:
    x, dim, _ = node.args
    graph, out = node.graph, value_of(node)

    def op(target: Any, *args: Any, **kwargs: Any) -> Node:
        new = graph.call_function(target, args, kwargs)
        new.meta = {k: v for k, v in node.meta.items() if k != "val"}
        given: Any = torch.fx.node.map_arg((args, kwargs), value_of)
        with out.fake_mode:
            new.meta["val"] = target(*given[0], **given[1])
        return new

    with graph.inserting_before(node):
        if value_of(x).dtype in (torch.float16, torch.bfloat16):  # type: ignore[arg-type]
            x = op(aten._to_copy.default, x, dtype=torch.float32)
        x = op(aten.sub.Tensor, x, op(aten.amax.default, x, [dim], True))
        total = op(aten.sum.dim_IntList, op(aten.exp.default, x), [dim], True)
        result = op(aten.sub.Tensor, x, op(aten.log.default, total))
        if out.dtype != value_of(result).dtype:
            result = op(aten._to_copy.default, result, dtype=out.dtype)
    result.meta["recompute"] = compat.MUST_RECOMPUTE
    return result
