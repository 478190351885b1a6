"""What a joint graph needs before it is split into forward and backward: marks of what must be
saved, and repairs of what torch's derivatives of it have wrong."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule

from plait import compat
from plait.devices import facts_of
from plait.graph.edit import aten, insert, replace


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
    """What the forward pass reads of an input that its wrapper changes afterwards is a clone: the
    backward pass must not make it again from the input, which would be too late."""
    written = compat.autograd.inputs_changed_after(joint)
    for node in joint.graph.nodes:
        if node.target is aten.clone.default and node.args[0] in written:
            node.meta["recompute"] = compat.tracing.MUST_SAVE
