"""Common subexpressions: of two pure nodes with equal targets and arguments, the later one goes.

Used on joint graphs before they are partitioned and as a pass on every graph. Random, mutating and
effectful nodes stay, and two results that the caller could tell apart by writing into one of them
are never merged.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.graph.edit import base_of, escaping, is_pure, is_view, replace
from plait.graph.streams import stream_of


def merge_common(gm: GraphModule) -> int:
    """Merges equal nodes; returns how many went. Those of different checkpoint regions or streams
    are not merged."""
    seen: dict[Any, Node] = {}
    kept_memory = escaping(gm.graph)
    merged = 0
    for node in list(gm.graph.nodes):
        # What makes a size is needed to tell it.
        if not is_pure(node) or node.meta.get("unbacked_bindings"):
            continue
        key = _key(node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if node in kept_memory and first in kept_memory:
            continue  # both outputs are visible: eager gives them memory of their own
        if is_view(node) and _is_output(node) and _is_output(first):
            continue
        if node in kept_memory:
            kept_memory.add(base_of(first))
        replace(node, first)
        merged += 1
    return merged


def _is_output(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _key(node: Node) -> Any:
    """What must be equal for two nodes to be equal; None if some argument has no such key."""
    region = (node.meta.get("recompute"), node.meta.get("ac_graph_id"), stream_of(node))
    if node.target is operator.getitem and type(node.args[1]) is int:
        return node.target, node.args, region
    args = _freeze(node.args)
    kwargs = _freeze(node.kwargs)
    if args is None or kwargs is None:
        return None
    return node.target, args, kwargs, region


_EXACT = (int, bool, str, type(None))
"""Values of these types are equal only if they are the same to an operator."""


def _freeze(value: Any) -> Any:
    """A hashable form in which 1, 1.0 and True differ, as do 0.0 and -0.0; None if there is
    none."""
    if type(value) is Node:
        return value
    if type(value) in _EXACT:
        return type(value), value
    if isinstance(value, (list, tuple)):
        items = tuple([_freeze(v) for v in value])
        return None if None in items else (type(value).__name__, items)
    if isinstance(value, dict):
        items = tuple((k, _freeze(v)) for k, v in value.items())
        return None if any(i[1] is None for i in items) else ("dict", items)
    if isinstance(value, slice):
        return _freeze((value.start, value.stop, value.step))
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, complex):
        return ("complex", value.real.hex(), value.imag.hex())
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return (type(value).__name__, value)
    return None
