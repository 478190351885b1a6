"""What a joint graph needs before it is split into forward and backward: marks of what must be
saved, and repairs of what torch's derivatives of it have wrong."""

from __future__ import annotations

import operator

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from plait import compat
from plait.devices import facts_of
from plait.graph.edit import aten, base_of, insert, is_view, replace, value_of, written
from plait.graph.norm_results import forward_nodes, late_nodes

MOST_STEPS = 16
"""Nodes that are looked at between a value and what is compared with it: a bound on time."""


def save_random(joint: GraphModule) -> None:
    """What other random operators gave is saved, under checkpointing too: run again they give other
    numbers."""
    for node in joint.graph.nodes:
        if (
            torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            and "recompute" in node.meta
        ):
            for kept in (node, *(u for u in node.users if u.target is operator.getitem)):
                kept.meta["recompute"] = compat.tracing.MUST_SAVE


def save_compared(joint: GraphModule) -> None:
    """What is compared with one of its own elements, as by the gradient of `amax`, is saved: made
    again by another kernel it may differ in the last bit, and no element would be equal."""
    found = []
    for node in joint.graph.find_nodes(op="call_function", target=aten.eq.Tensor):
        for x, other in (node.args, reversed(node.args)):
            x = _exact_source(x)
            if x.all_input_nodes and value_of(x).is_floating_point():
                found += [x] * _comes_of(other, x)
    forward = forward_nodes(joint.graph) if found else set()
    for x in found:
        if x in forward and "recompute" not in x.meta:
            x.meta["recompute"] = compat.tracing.MUST_SAVE


def _exact_source(node: Node) -> Node:
    """The tensor that a value is made of by views, and by what is exact in every kernel."""
    found = node
    while is_view(node) or node.target in (aten.abs.default, aten.neg.default):
        node = node.all_input_nodes[0]
        if isinstance(value_of(node), torch.Tensor):  # else a list of tensors
            found = node
    return found


def _comes_of(node: Node, source: Node) -> bool:
    """Whether a value is made of another in a few steps."""
    seen, todo = {node}, [node]
    while todo and len(seen) < MOST_STEPS:
        if source in (inputs := todo.pop().all_input_nodes):
            return True
        todo += [n for n in inputs if n not in seen]
        seen.update(inputs)
    return False


def drop_bags(joint: GraphModule) -> None:
    """Of sums of bfloat16 on CPUs, `_embedding_bag` does not say which bag an index is in, where
    its fake kernel says so: the operators of its gradient find that themselves, given nothing."""
    for node in joint.graph.find_nodes(op="call_function", target=aten._embedding_bag.default):
        weight, mode = node.args[0].meta["val"], node.args[4] if len(node.args) > 4 else 0
        if not facts_of(weight.device).eager_cpu or (weight.dtype, mode) != (torch.bfloat16, 0):
            continue
        for bags in [u for u in node.users if u.args[1] == 1]:
            replace(bags, insert(bags, node.args[2], aten.new_empty.default, [0]))


def widen_logsumexp(joint: GraphModule) -> None:
    """What attention of float64 on CPUs saves is float64, where its fake kernel says float32 (torch
    2.11): in place."""
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    for node in joint.graph.find_nodes(op="call_function", target=attention):
        for saved in [u for u in node.users if u.args[1] == 1]:
            if node.args[0].meta["val"].dtype == torch.float64:
                saved.meta["val"] = saved.meta["val"].double()


def save_old_values(joint: GraphModule) -> None:
    """What is computed from an input that changes afterwards, at the end of the forward graph or in
    its wrapper, is saved: the backward pass must not make it again from the input, which would be
    too late. Under checkpointing it is made again all the same, as in eager."""
    changed = {n for n in written(joint.graph) if n.op == "placeholder"}
    changed |= set(compat.autograd.inputs_changed_after(joint))
    late = late_nodes(joint.graph) if changed else set()
    for node in joint.graph.nodes if changed else ():
        if (
            node.op != "call_function"
            or node in late
            or is_view(node)
            or (isinstance(node.target, OpOverload) and node.target._schema.is_mutable)
            or changed.isdisjoint(map(base_of, node.all_input_nodes))
        ):
            continue
        for kept in (node, *(u for u in node.users if u.target is operator.getitem)):
            kept.meta.setdefault("recompute", compat.tracing.MUST_SAVE)
