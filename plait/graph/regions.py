"""Regions (`torch.compiler.nested_compile_region`) written out where they are called.

A program that is recorded as CUDA graphs has them so: a call of a subprogram could not be recorded.
Elsewhere a region stays a subprogram, which is compiled once however often it is called.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.graph.write_out import replace_items


def inline_regions(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many calls it wrote out. A region that finds numbers,
    or that has constants, stays."""
    invoke = torch.ops.higher_order.invoke_subgraph
    calls = gm.graph.find_nodes(op="call_function", target=invoke)
    found = [(n, attrgetter(n.args[0].target)(gm)) for n in calls]
    plain = [(n, region) for n, region in found if _is_plain(region)]
    for node, region in plain:
        _inline(gm, node, region)
    return len(plain)


def _is_plain(region: GraphModule) -> bool:
    return all(n.op != "get_attr" and "unbacked_bindings" not in n.meta for n in region.graph.nodes)


def _inline(gm: GraphModule, node: Node, region: GraphModule) -> None:
    *nodes, end = region.graph.nodes
    env: dict[Node, Any] = dict(zip(nodes, node.args[2:], strict=False))  # placeholders come first
    with gm.graph.inserting_before(node):
        for n in nodes[len(env) :]:
            env[n] = gm.graph.node_copy(n, env.__getitem__)
    replace_items(node, torch.fx.node.map_arg(end.args[0], env.__getitem__))
