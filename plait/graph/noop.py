"""No-ops: views, copies and casts that change nothing are replaced by their argument.

A view goes when sizes and strides stay the same. A copy also needs that nobody can tell the two
memories apart: its result must not be visible to the caller, or its source must be a value of the
graph's own that is not visible. A copy of memory that the graph writes later keeps the old values
and stays.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from plait.graph.edit import (
    aten,
    base_of,
    escaping,
    is_view,
    output_of,
    replace,
    same_layout,
    value_of,
    written,
)

# Results are always new memory, but equal to the argument if dtype and layout stay the same.
_COPIES = frozenset(
    {
        aten.clone.default,
        aten._to_copy.default,
        aten.lift_fresh_copy.default,
        torch.ops.prims.convert_element_type.default,
        torch.ops.prims.clone.default,
    }
)
_VIEWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.permute.default,
        aten.slice.Tensor,
        aten.squeeze.dims,
        aten.as_strided.default,
    }
)


def drop_noops(gm: GraphModule) -> int:
    """Removes no-ops in place; returns how many went."""
    visible = escaping(gm.graph)
    outputs = set(output_of(gm.graph).all_input_nodes)
    changed = written(gm.graph)
    dropped = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _COPIES and node.target not in _VIEWS:
            continue
        source = node.args[0]
        if not isinstance(source, Node) or not same_layout(value_of(node), value_of(source)):
            continue
        if node.target in _VIEWS:
            # Two names of one tensor among the outputs must stay two tensors.
            if node in outputs and (source in outputs or source.op != "call_function"):
                continue
        elif base_of(source) in changed:
            continue
        elif node in visible:
            base = base_of(source)
            if base in visible or _is_multi_view(source):
                continue
            visible.add(base)
        if node in outputs:
            outputs.add(source)
        replace(node, source)
        dropped += 1
    return dropped


def _is_multi_view(node: Node) -> bool:
    """Whether node names only a part of a larger memory, which would then be kept alive by an
    output."""
    return (
        is_view(node)
        and base_of(node) is not node
        and not same_layout(value_of(node), value_of(base_of(node)))
    )
