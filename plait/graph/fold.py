"""Folding of weights: what depends on nothing but weights that nobody writes is computed once,
while compiling. Batch norms after convolutions become part of their weights first.

A value is made a constant of the module where the rest of the graph meets it. Views stay in the
graph, since they cost nothing there; what is much larger than what it is made of is computed at
every call, from what it is made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from plait import compat
from plait.graph.constants import compute, settled
from plait.graph.dead import drop_dead
from plait.graph.edit import aten, escaping, is_pure, is_view, replace, value_of

# Bounds on memory: chosen, not measured.
MAX_GROWTH = 4
"""A folded value takes at most so many times the memory of the weights that it is made of."""
SMALL_NBYTES = 1 << 16
"""Growth does not matter below this."""


def fold_weights(gm: GraphModule, weights: Mapping[Node, torch.Tensor]) -> set[Node]:
    """Folds in place; returns the placeholders whose values are now built in. weights: placeholders
    that keep their value for good. One that is returned and still has users has become a constant
    for these as well."""
    frozen = _norms_into_weights(gm, weights)
    # Node -> the weights that its value is made of.
    known = {node: frozenset((node,)) for node in weights}
    values = dict(weights)
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" and isinstance(value := getattr(gm, node.target), torch.Tensor):
            known[node], values[node] = frozenset(), value
        elif (
            is_pure(node)
            and isinstance(value_of(node), torch.Tensor)
            and all(i in known for i in inputs)
        ):
            known[node] = frozenset().union(*(known[i] for i in inputs))
    visible = escaping(gm.graph)
    wanted: dict[Node, None] = {}

    def want(node: Node) -> None:
        """Has the value of a node that is met: folds it, or what it is made of."""
        if node.op != "call_function" or not known[node]:
            return  # a weight itself, or what is made of numbers alone
        if node in wanted:
            return
        if is_view(node) or node in visible or _grows(node, known[node]):
            for source in node.all_input_nodes:
                want(source)
        else:
            wanted[node] = None

    for node in gm.graph.nodes:
        if node not in known:
            for source in node.all_input_nodes:
                if source in known:
                    want(source)
    memory = Counter(compat.tracing.storage_of(value) for value in values.values())
    for node in [node for node in gm.graph.nodes if node in wanted]:
        try:
            value = _computed(node, values, memory)
        except (RuntimeError, AssertionError, IndexError):
            continue  # it fails at a call too, or takes a device that this machine lacks
        with gm.graph.inserting_before(node):
            constant = _constant(gm, value, value_of(node))
        values[constant] = value
        memory[compat.tracing.storage_of(value)] += 1
        node.replace_all_uses_with(constant, propagate_meta=False)
        frozen |= known[node]
    drop_dead(gm)
    for node in frozen:
        if node.users:
            with gm.graph.inserting_after(node):
                constant = _constant(gm, weights[node].detach(), value_of(node))
            node.replace_all_uses_with(constant, propagate_meta=False)
    return frozen


def _norms_into_weights(gm: GraphModule, weights: Mapping[Node, torch.Tensor]) -> set[Node]:
    """A batch norm with fixed statistics right after a convolution goes into the convolution's
    weights. Returns what these were made of."""
    frozen: set[Node] = set()
    for norm in gm.graph.find_nodes(
        op="call_function", target=aten._native_batch_norm_legit_no_training.default
    ):
        conv, gamma, beta, mean, var, _, eps = norm.args
        if (
            conv.target is not aten.convolution.default
            or len(conv.users) > 1
            or any(u.args[1] for u in norm.users)
        ):
            continue
        x, weight, bias, *geometry = conv.args
        given = [n for n in (weight, bias, gamma, beta, mean, var) if n is not None]
        # [3]: transposed, with channels elsewhere.
        if geometry[3] or any(n not in weights for n in given):
            continue
        old = weights[weight]
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            scale = (weights[var].double() + eps).rsqrt() * (1 if gamma is None else weights[gamma])
            shift = ((0 if bias is None else weights[bias]) - weights[mean].double()) * scale
            shift = shift + (0 if beta is None else weights[beta])
            wide = scale.to(torch.promote_types(old.dtype, torch.float32)).view(
                -1, *[1] * (old.dim() - 1)
            )
            values = settled(old * wide, value_of(weight)), shift.to(old.dtype)
        with value_of(weight).fake_mode:
            fakes = value_of(weight), value_of(mean).to(old.dtype)
        with gm.graph.inserting_before(conv):
            made = [_constant(gm, value, fake) for value, fake in zip(values, fakes, strict=True)]
        conv.args = (x, *made, *geometry)
        for first in list(norm.users):
            replace(first, conv)
        frozen.update(given)
    return frozen


def _grows(node: Node, sources: frozenset[Node]) -> bool:
    nbytes = _nbytes(value_of(node))
    return nbytes > max(SMALL_NBYTES, MAX_GROWTH * sum(_nbytes(value_of(s)) for s in sources))


def _nbytes(value: torch.Tensor) -> int:
    return int(value.numel()) * value.element_size()


def _computed(node: Node, values: dict[Node, torch.Tensor], memory: Counter[int]) -> torch.Tensor:
    """The value of a node, of which values has the weights. memory: how many values each storage
    has."""
    todo = [node]
    while todo:
        last = todo[-1]
        missing = [i for i in last.all_input_nodes if i not in values]
        if not missing:
            values[todo.pop()] = value = compute(last, values)
            memory[compat.tracing.storage_of(value)] += 1
        todo += missing
    value, like = values[node], value_of(node)
    shared = memory[compat.tracing.storage_of(value)] > 1
    return settled(value, like) if shared or value.stride() != like.stride() else value


def _constant(gm: GraphModule, value: torch.Tensor, fake: torch.Tensor) -> Node:
    name = f"_weight_{len(gm._buffers)}"
    gm.register_buffer(name, value, persistent=False)
    node = gm.graph.get_attr(name)
    node.meta["val"] = fake
    return node
