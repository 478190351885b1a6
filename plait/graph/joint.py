"""Splits a joint graph into forward and backward: our random operators, layouts, losses and CSE,
then torch's min-cut.

Random operators are replaced before the split, so that a value recomputed in the backward pass
comes from the seed that the forward pass saved.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule

from plait import compat
from plait.config import Config
from plait.graph.cse import merge_common
from plait.graph.edit import aten, insert, replace
from plait.graph.items import list_items
from plait.graph.memory_format import channels_last
from plait.graph.pool_indices import narrow_pool_indices
from plait.graph.random import replace_random
from plait.graph.softmax import split_log_softmax


def partition(
    cfg: Config, joint: GraphModule, joint_inputs: Any, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """The partition function that AOTAutograd is given; kwargs are whatever its version passes
    on."""
    if not cfg.eager_random:
        replace_random(joint)
    _save_random(joint)
    channels_last(joint)
    split_log_softmax(joint)
    narrow_pool_indices(joint)
    list_items(joint)
    _drop_bags(joint)
    widen_logsumexp(joint)
    merge_common(joint)
    _save_old_values(joint)
    return compat.tracing.min_cut_partition(joint, joint_inputs, **kwargs)


def _save_random(joint: GraphModule) -> None:
    """What other random operators gave is saved, under checkpointing too: run again they give other
    numbers."""
    for node in joint.graph.nodes:
        if (
            torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            and "recompute" in node.meta
        ):
            for kept in (node, *(u for u in node.users if u.target is operator.getitem)):
                kept.meta["recompute"] = compat.tracing.MUST_SAVE


def _drop_bags(joint: GraphModule) -> None:
    """Of sums of bfloat16 on CPUs, `_embedding_bag` does not say which bag an index is in, where
    its fake kernel says so: the operators of its gradient find that themselves, given nothing."""
    for node in joint.graph.find_nodes(op="call_function", target=aten._embedding_bag.default):
        weight, mode = node.args[0].meta["val"], node.args[4] if len(node.args) > 4 else 0
        if (weight.device.type, weight.dtype, mode) != ("cpu", torch.bfloat16, 0):
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


def _save_old_values(joint: GraphModule) -> None:
    """What the forward pass reads of an input that its wrapper changes afterwards is a clone: the
    backward pass must not make it again from the input, which would be too late."""
    written = compat.autograd.inputs_changed_after(joint)
    for node in joint.graph.nodes:
        if node.target is aten.clone.default and node.args[0] in written:
            node.meta["recompute"] = compat.tracing.MUST_SAVE
