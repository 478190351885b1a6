"""Folding of weights: what depends on nothing but weights that nobody writes is computed once, while compiling. Batch
norms after convolutions become part of their weights first.

A value is made a constant of the module where the rest of the graph meets it. Views stay in the graph, since they cost
nothing there; what is much larger than what it is made of is computed at every call, from what it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from plait.graph.constants import compute, settled
from plait.graph.dead import drop_dead
from plait.graph.edit import aten, escaping, insert, is_pure, is_view, replace, value_of

MAX_GROWTH = 4
"""A folded value takes at most so many times the memory of the weights that it is made of."""
SMALL_NBYTES = 1 << 16
"""Growth does not matter below this."""


def fold_weights(gm: GraphModule, weights: Mapping[Node, torch.Tensor]) -> set[Node]:
    """Folds in place; returns the placeholders whose values are now built in. weights: placeholders that keep their
    value for good. One that is returned and still has users has become a constant for these as well."""
    _norms_into_weights(gm, weights)
    known = {node: frozenset((node,)) for node in weights}  # node -> the weights that its value is made of
    values = dict(weights)
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" and isinstance(value := getattr(gm, node.target), torch.Tensor):
            known[node], values[node] = frozenset(), value
        elif is_pure(node) and isinstance(value_of(node), torch.Tensor) and all(i in known for i in inputs):
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
    frozen: set[Node] = set()
    for node in [node for node in gm.graph.nodes if node in wanted]:
        try:
            value = _computed(node, values)
        except (RuntimeError, AssertionError, IndexError):
            continue  # it fails at a call too, or takes a device that this machine lacks
        with gm.graph.inserting_before(node):
            constant = _constant(gm, value, node)
        values[constant] = value
        node.replace_all_uses_with(constant, propagate_meta=False)
        frozen |= known[node]
    drop_dead(gm)
    for node in frozen:
        if node.users:
            with gm.graph.inserting_after(node):
                constant = _constant(gm, weights[node].detach(), node)
            node.replace_all_uses_with(constant, propagate_meta=False)
    return frozen


def _norms_into_weights(gm: GraphModule, weights: Mapping[Node, torch.Tensor]) -> None:
    """A batch norm with fixed statistics right after a convolution becomes arithmetic on the convolution's weights."""
    for norm in gm.graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_no_training.default):
        conv, gamma, beta, mean, var, _, eps = norm.args
        if conv.target is not aten.convolution.default or len(conv.users) > 1 or any(u.args[1] for u in norm.users):
            continue
        x, weight, bias, *geometry = conv.args
        given = [n for n in (weight, bias, gamma, beta, mean, var) if n is not None]
        if geometry[3] or any(n not in weights for n in given):  # [3]: transposed, with channels elsewhere
            continue

        def exact(source: Node, norm: Node = norm) -> Node:
            return insert(norm, source, aten._to_copy.default, dtype=torch.float64)

        def done(source: Node, norm: Node = norm, like: Node = weight) -> Node:
            return insert(norm, source, aten._to_copy.default, dtype=value_of(like).dtype)

        scale = insert(norm, insert(norm, exact(var), aten.add.Scalar, eps), aten.rsqrt.default)
        if gamma is not None:
            scale = insert(norm, scale, aten.mul.Tensor, exact(gamma))
        rows = insert(norm, scale, aten.view.default, [-1] + [1] * (value_of(weight).dim() - 1))
        shift = insert(norm, exact(mean), aten.neg.default)
        if bias is not None:
            shift = insert(norm, shift, aten.add.Tensor, exact(bias))
        shift = insert(norm, shift, aten.mul.Tensor, scale)
        if beta is not None:
            shift = insert(norm, shift, aten.add.Tensor, exact(beta))
        scaled = insert(norm, exact(weight), aten.mul.Tensor, rows)
        made = insert(norm, x, conv.target, done(scaled), done(shift), *geometry)
        for first in list(norm.users):
            replace(first, made)


def _grows(node: Node, sources: frozenset[Node]) -> bool:
    nbytes = _nbytes(value_of(node))
    return nbytes > max(SMALL_NBYTES, MAX_GROWTH * sum(_nbytes(value_of(s)) for s in sources))


def _nbytes(value: torch.Tensor) -> int:
    return int(value.numel()) * value.element_size()


def _computed(node: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor:
    """The value of a node, of which values has the weights."""
    todo = [node]
    while todo:
        last = todo[-1]
        missing = [i for i in last.all_input_nodes if i not in values]
        if not missing:
            values[todo.pop()] = compute(last, values)
        todo += missing
    return settled(values[node], value_of(node))


def _constant(gm: GraphModule, value: torch.Tensor, like: Node) -> Node:
    name = f"_weight_{sum(1 for n in gm.graph.nodes if n.op == 'get_attr')}"
    gm.register_buffer(name, value, persistent=False)
    node = gm.graph.get_attr(name)
    node.meta = {k: v for k, v in like.meta.items() if k in ("val", "stack_trace")}
    return node
