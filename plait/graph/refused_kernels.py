"""Calls whose kernel, of a kind that targets know, was refused by its compiler: they are compiled
without one from then on.
"""

from __future__ import annotations

from collections.abc import Set

from torch.fx import GraphModule, Node

_REFUSED = "refused_kernel"  # in the meta of a call


def refuse_kernels(graph: GraphModule, names: Set[str]) -> list[Node]:
    """The calls with these names, in a graph or one within it: they have no kernel from now on."""
    nodes = (n for g in graph.modules() if isinstance(g, GraphModule) for n in g.graph.nodes)
    found = [n for n in nodes if n.op == "call_function" and n.name in names]
    for n in found:
        n.meta[_REFUSED] = True
    return found


def is_refused(node: Node) -> bool:
    """Whether the kernel of a call was refused."""
    return _REFUSED in node.meta
