"""Tensors that a traced function takes from elsewhere: a closure, a global, an attribute that is no
buffer.

Tracing makes constants of them, as it does of `torch.tensor([1.0])` in the function. But these the
caller may change in place, and eager reads their memory at every call: so they become inputs that
are bound, like parameters.
"""

from __future__ import annotations

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node

from plait import compat
from plait.capture.plain_tensors import special_kind
from plait.graph.constants import FRESH_COPIES
from plait.graph.edit import replace

_OF = "_plait_value_of"


def value_of(x: torch.nn.Parameter) -> torch.Tensor:
    """A parameter as an operand of control flow, which takes no parameters of modules that are in
    a closure; it is bound as the parameter itself."""
    with compat.tracing.untraced_operators():
        value = x.detach()
    setattr(value, _OF, x)
    return value


def bind_outside(graph_module: GraphModule) -> list[torch.Tensor]:
    """Makes such constants of the graph inputs, behind the others; gives their tensors."""
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    mode = detect_fake_mode([n.meta.get("val") for n in placeholders])
    tensors: list[torch.Tensor] = []
    made: dict[int, Node] = {}
    for node in graph.nodes:
        value = _outside(graph_module, node)
        if value is None or mode is None:
            continue
        if id(value) not in made:
            with graph.inserting_after((*placeholders, *made.values())[-1]):
                made[id(value)] = graph.placeholder(f"outside_{len(made)}")
            made[id(value)].meta["val"] = mode.from_tensor(value.detach(), static_shapes=True)
            tensors.append(value)
        replace(node, made[id(value)])
    graph_module.recompile()
    return tensors


def _outside(graph_module: GraphModule, node: Node) -> torch.Tensor | None:
    """The tensor that a node gets from the function's surroundings."""
    # A copy is of a tensor that was made while tracing.
    if node.op != "get_attr" or all(user.target in FRESH_COPIES for user in node.users):
        return None
    value = getattr(graph_module, str(node.target), None)
    value = getattr(value, _OF, value)
    plain = isinstance(value, torch.Tensor) and not special_kind(value)
    return value if plain else None
