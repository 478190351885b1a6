"""Dead code: nodes that nobody uses go, effects stay.

A trailing `copy_` into a placeholder, asserts on sizes, prints and other effectful operators are kept; a random
operator whose result nobody uses is not.
"""

from __future__ import annotations

from torch.fx import GraphModule


def drop_dead(gm: GraphModule) -> int:
    """Erases unused pure nodes; returns how many went."""
    graph = gm.graph
    erased = 0
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if node.is_impure(impure_random=False):
            continue
        graph.erase_node(node)
        erased += 1
    return erased
