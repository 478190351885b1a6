"""Masks of attention that are known at compile time, on Dynamo's graph, before AOTAutograd decides
how attention runs.

PyTorch's fused attention kernels refuse a mask whose last dimension is broadcast, and attention is
then written out in float32. A mask that depends on no input is computed here: one that lets
everything through is dropped. Any other one with a broadcast last dimension is made dense where it
is read. This graph may write to tensors, so two copies are not shared here: they are merged once it
is functional.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true

# A bound on compile time: chosen, not measured.
MAX_POINTS = 1 << 24
"""Elements of the largest tensor that is computed while compiling."""

# Functions and methods that give the same whenever they are called and change nothing.
_METHODS = frozenset(
    "arange ones zeros full ones_like zeros_like full_like tril triu getitem expand expand_as "
    "narrow view reshape unsqueeze squeeze to bool contiguous add sub ge gt le lt eq ne and_ or_ "
    "xor logical_and logical_or logical_not "
    "bitwise_and bitwise_or __and__ __or__ invert where masked_fill".split()
)
_FUNCTIONS = frozenset(
    getattr(module, name)
    for module in (torch, operator)
    for name in _METHODS
    if callable(getattr(module, name, None))
)


def simplify_masks(gm: fx.GraphModule) -> None:
    """Changes gm in place."""
    changed = False
    for n in gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        mask = n.args[3] if len(n.args) > 3 else n.kwargs.get("attn_mask")
        value = _value(mask)
        if not isinstance(mask, fx.Node) or value is None or value.dim() == 0:
            continue
        new: fx.Node | None = None
        if not _lets_all_through(mask):
            if value.stride(-1) == 1 or value.shape[-1] == 1:
                continue
            with gm.graph.inserting_before(n):
                new = _dense(mask, value)
        if len(n.args) > 3:
            n.update_arg(3, new)
        else:
            n.update_kwarg("attn_mask", new)
        changed = True
        if new is None:
            _erase(mask)
    if changed:
        gm.recompile()


def _value(n: Any) -> Tensor | None:
    value = n.meta.get("example_value") if isinstance(n, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _dense(mask: fx.Node, value: Tensor) -> fx.Node:
    """The mask with a dense last dimension. Other dimensions that repeat go on doing so."""
    steps = list(enumerate(value.stride()[:-1]))
    # What may change has the strides of the graph's end, and may have had others. Each repeated
    # element of what needs a gradient has one of its own.
    if _may_change({mask}) or value.requires_grad:
        steps = []
    repeated = [d for d, step in steps if statically_known_true(step == 0)]
    repeated = [d for d in repeated if statically_known_true(value.shape[d] > 1)]
    n = mask
    for d in repeated:
        n = _method(n, "narrow", d, 0, 1)
    n = _method(n, "contiguous")
    return _method(n, "expand_as", mask) if repeated else n


def _method(n: fx.Node, name: str, *args: Any) -> fx.Node:
    called = n.graph.call_method(name, (n, *args))
    called.meta["example_value"] = getattr(_value(n), name)(
        *(_value(a) if isinstance(a, fx.Node) else a for a in args)
    )
    return called


def _is_pure(n: fx.Node) -> bool:
    if "out" in n.kwargs:
        return False
    return (n.op == "call_method" and n.target in _METHODS) or (
        n.op == "call_function" and n.target in _FUNCTIONS
    )


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


def _lets_all_through(mask: fx.Node) -> bool:
    """Whether the mask depends on no input and masks nothing out."""
    needed: set[fx.Node] = set()
    todo = [mask]
    while todo:
        n = todo.pop()
        value = _value(n)
        points = None if value is None else value.numel()
        if not _is_pure(n) or not isinstance(points, int) or points > MAX_POINTS:
            return False
        needed.add(n)
        todo += [a for a in n.all_input_nodes if a not in needed]
    if _may_change(needed):
        return False
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for n in mask.graph.nodes:
        if n in needed:
            copied[n] = graph.node_copy(n, copied.__getitem__)
            copied[n].args = fx.node.map_aggregate(copied[n].args, _on_cpu)
            copied[n].kwargs = fx.node.map_aggregate(copied[n].kwargs, _on_cpu)
    graph.output(copied[mask])
    try:
        with unset_fake_temporarily(), torch.no_grad(), torch.device("cpu"):
            made = fx.GraphModule(torch.nn.Module(), graph)()
            return bool(made.all() if made.dtype == torch.bool else (made == 0).all())
    except Exception:  # noqa: BLE001  (a device in a form of its own, no memory: the mask stays)
        return False


def _on_cpu(argument: Any) -> Any:
    """Where tensors go, in the arguments of the functions above: as a device or its name."""
    return "cpu" if isinstance(argument, (torch.device, str)) else argument


def _erase(n: fx.Node) -> None:
    """Takes out n, and what was there for it alone."""
    if n.users or not _is_pure(n):
        return
    inputs = n.all_input_nodes
    n.graph.erase_node(n)
    for a in inputs:
        _erase(a)
