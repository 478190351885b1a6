"""Masks of attention that are known at compile time, on Dynamo's graph, before AOTAutograd decides how attention runs.

PyTorch's fused attention kernels refuse a mask whose last dimension is broadcast, and attention is then written out in
float32. A mask that depends on no input is computed here: one that lets everything through is dropped. Any other one
with a broadcast last dimension is made dense, once for all its readers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

MAX_POINTS = 1 << 24
"""Elements of the largest mask that is computed while compiling."""

# Functions and methods that give the same whenever they are called and change nothing.
_PURE = frozenset(
    "arange ones zeros full ones_like zeros_like full_like tril triu getitem expand view reshape unsqueeze squeeze to "
    "bool contiguous add sub ge gt le lt eq ne and_ or_ xor logical_and logical_or logical_not bitwise_and bitwise_or "
    "__and__ __or__ invert where masked_fill".split()
)


def simplify_masks(gm: fx.GraphModule) -> None:
    """Changes gm in place."""
    dense: dict[fx.Node, fx.Node] = {}
    changed = False
    for n in gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        mask = n.args[3] if len(n.args) > 3 else n.kwargs.get("attn_mask")
        value = mask.meta.get("example_value") if isinstance(mask, fx.Node) else None
        if not isinstance(mask, fx.Node) or not isinstance(value, Tensor) or value.dim() == 0:
            continue
        new: fx.Node | None = None
        if not _lets_all_through(mask, value):
            if value.stride(-1) == 1 or value.shape[-1] == 1:
                continue
            if mask not in dense:
                with gm.graph.inserting_after(mask):
                    dense[mask] = gm.graph.call_method("contiguous", (mask,))
                dense[mask].meta["example_value"] = value.contiguous()
            new = dense[mask]
        if len(n.args) > 3:
            n.update_arg(3, new)
        else:
            n.update_kwarg("attn_mask", new)
        changed = True
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _is_pure(n: fx.Node) -> bool:
    name = n.target if n.op == "call_method" else getattr(n.target, "__name__", "")
    return n.op in ("call_function", "call_method") and name in _PURE


def _may_change(nodes: set[fx.Node]) -> bool:
    """Whether something else may write to one of these, or to a view of one."""
    seen, todo = set(nodes), list(nodes)
    while todo:
        for user in todo.pop().users:
            if user.target is F.scaled_dot_product_attention or user in seen:
                continue
            if not _is_pure(user):
                return True
            seen.add(user)
            todo.append(user)
    return False


def _lets_all_through(mask: fx.Node, value: Tensor) -> bool:
    """Whether the mask depends on no input and masks nothing out."""
    points = value.numel()
    if not isinstance(points, int) or points > MAX_POINTS:
        return False
    needed: set[fx.Node] = set()
    todo = [mask]
    while todo:
        n = todo.pop()
        if not _is_pure(n):
            return False
        needed.add(n)
        todo += [a for a in n.all_input_nodes if a not in needed]
    if _may_change(needed):
        return False
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for n in mask.graph.nodes:
        if n in needed:
            copied[n] = graph.node_copy(n, copied.__getitem__)
            if "device" in n.kwargs:
                copied[n].update_kwarg("device", "cpu")
    graph.output(copied[mask])
    with unset_fake_temporarily(), torch.no_grad():
        made = fx.GraphModule(torch.nn.Module(), graph)()
    return bool(made.all() if made.dtype == torch.bool else (made == 0).all())
