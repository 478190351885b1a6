"""Splits a joint graph into forward and backward: our random operators, our CSE, then torch's min-cut.

Random operators are replaced before the split, so that a value recomputed in the backward pass comes from the seed
that the forward pass saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait import compat
from plait.config import Config
from plait.graph.channels import channels_last
from plait.graph.cse import merge_common
from plait.graph.edit import aten, replace, same_layout, value_of
from plait.graph.random import replace_random

_NLL_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


def partition(cfg: Config, joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """The partition function that AOTAutograd is given; kwargs are whatever its version passes on."""
    if not cfg.eager_random:
        replace_random(joint)
    channels_last(joint)
    _open_log_softmax(joint)
    merge_common(joint)
    _save_old_values(joint)
    return compat.min_cut_partition(joint, joint_inputs, **kwargs)


def _open_log_softmax(joint: GraphModule) -> None:
    """On a GPU, log_softmax as what it is made of: the backward pass can then make it again from its input and two
    numbers a row, which together may be half as large. The gradient of nll_loss needs its sizes alone."""
    for node in joint.graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        x, dim, _ = node.args
        like = value_of(node)
        if like.device.type == "cpu" or like.dim() == 0:
            continue
        if not isinstance(like.shape[dim], int) or like.shape[dim] == 0:  # amax of nothing is an error
            continue
        wide = torch.promote_types(like.dtype, torch.float32)
        e = _before(node, aten._to_copy.default, x, dtype=wide) if value_of(x).dtype != wide else x
        off = _before(node, aten.sub.Tensor, e, _before(node, aten.amax.default, e, [dim], True))
        total = _before(node, aten.sum.dim_IntList, _before(node, aten.exp.default, off), [dim], True)
        result = _before(node, aten.sub.Tensor, off, _before(node, aten.log.default, total))
        if like.dtype != wide:
            result = _before(node, aten._to_copy.default, result, dtype=like.dtype)
        if not same_layout(value_of(result), like):
            continue
        for user in list(node.users):
            if user.target in _NLL_BACKWARD and user.args[1] is node and all(isinstance(n, int) for n in like.shape):
                sizes = _before(user, aten.new_empty.default, user.args[0], list(like.shape), dtype=like.dtype)
                user.update_arg(1, sizes)
        replace(node, result)


def _before(at: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node before another, with its fake value and the other's place in the user's program."""
    with at.graph.inserting_before(at):
        new = at.graph.call_function(target, args, kwargs)
    new.meta = {k: v for k, v in at.meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")}
    values: Any = torch.fx.node.map_arg(args, value_of)
    with value_of(at).fake_mode:
        new.meta["val"] = target(*values, **kwargs)
    return new


def _save_old_values(joint: GraphModule) -> None:
    """What the forward pass reads of an input that its wrapper changes afterwards is a clone: the backward pass must
    not make it again from the input, which would be too late."""
    written = compat.inputs_changed_after(joint)
    for node in joint.graph.nodes:
        if node.target is aten.clone.default and node.args[0] in written:
            node.meta["recompute"] = compat.MUST_SAVE
