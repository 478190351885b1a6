"""Dead code: nodes that nobody uses go, effects stay.

A trailing `copy_` into a placeholder, asserts on sizes, prints and other effectful operators are
kept, and so is what makes a number of which tracing takes something for granted; a random operator
whose result nobody uses is not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops import effects
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from plait.graph.edit import has_effect, shape_env_of

_CHECK = "aten::_linalg_check_errors"
# torch 2.11 takes it for pure, and drops it while it traces.
if effects._get_effect(_CHECK) is None:
    effects._register_effectful_op(_CHECK, effects._EffectType.ORDERED)
# torch takes them for pure.
_EFFECTS = (torch.ops.higher_order.with_effects, torch.ops.aten._assert_async.default)


def drop_dead(gm: GraphModule) -> int:
    """Erases unused pure nodes; returns how many went."""
    graph = gm.graph
    erased = 0
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if node.is_impure(impure_random=False) or node.target in _EFFECTS or _is_asserted(node):
            continue
        if isinstance(node.target, OpOverload) and has_effect(node.target):
            continue
        graph.erase_node(node)
        erased += 1
    return erased


def _is_asserted(node: Node) -> bool:
    """Whether a node makes a number that tracing takes for something else, or of which it assumes a
    condition."""
    made: dict[Any, Any] = node.meta.get("unbacked_bindings") or {}
    env: Any = shape_env_of(node.meta["val"]) if made else None
    for raw in made:
        symbol = env.unbacked_renamings.get(raw, raw)
        if env.replace(symbol) != symbol:
            return True
        conditions = (a.expr for found in env.deferred_runtime_asserts.values() for a in found)
        if any(not {raw, symbol}.isdisjoint(e.free_symbols) for e in conditions):
            return True
    return False
