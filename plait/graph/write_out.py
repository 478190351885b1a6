"""Operators on graphs that are no control flow become the operators that their definitions call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from plait import compat
from plait.graph import associative, attention
from plait.graph.attention_kernels import is_written_out, scatter_operator
from plait.graph.edit import (
    aten,
    output_of,
    replace,
    results_read,
    same_size,
    source_meta,
    value_of,
)

Definition = Callable[..., Any]
"""Is given the operator's arguments and, as `wanted`, its fake results, None for those that nobody
reads; returns results."""

_hop = torch.ops.higher_order
DEFINITIONS: dict[Any, tuple[Callable[[Node], bool], Definition]] = {
    _hop.flex_attention: (is_written_out, attention.attention),
    _hop.flex_attention_backward: (is_written_out, attention.attention_backward),
    _hop.associative_scan: (lambda node: True, associative.associative_scan),
}
"""Of each operator: which calls have the definition, and the definition."""


def write_out(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many calls it wrote out."""
    known = [n for n in gm.graph.nodes if n.target in DEFINITIONS]
    nodes = [n for n in known if DEFINITIONS[n.target][0](n)]
    for node in nodes:
        _write_out(gm, node, DEFINITIONS[node.target][1])
    return len(nodes)


def _write_out(gm: GraphModule, node: Node, definition: Definition) -> None:
    given = [n for n in node.all_input_nodes if n.op != "get_attr" or "val" in n.meta]
    read = results_read(node)
    wanted = [x if k in read else None for k, x in enumerate(value_of(node))]

    def run(*values: Any) -> Any:
        known = dict(zip(given, values, strict=True))
        args = torch.fx.node.map_arg(
            node.args, lambda n: known[n] if n in known else getattr(gm, str(n.target))
        )
        return _laid_out(definition(*args, wanted=wanted), wanted)

    inner = compat.tracing.trace_values(run, [value_of(n) for n in given], _spelled())
    env = dict(zip(inner.graph.find_nodes(op="placeholder"), given, strict=True))
    with gm.graph.inserting_before(node):
        for n in inner.graph.nodes:
            if n.op in ("placeholder", "output"):
                continue
            if n.target is aten._to_copy.default and not isinstance(n.args[0], Node):
                n.target = aten.scalar_tensor.default  # vmap makes tensors of numbers
            env[n] = gm.graph.node_copy(n, env.__getitem__)
            if n.op == "get_attr":  # a graph that control flow runs
                env[n].target = f"{node.name}_{n.target}"
                gm.add_submodule(env[n].target, getattr(inner, str(n.target)))
                continue
            bindings = {k: n.meta[k] for k in ("unbacked_bindings",) if k in n.meta}
            env[n].meta = {**source_meta(node), **bindings, "val": value_of(n)}
    (results,) = output_of(inner.graph).args
    replace_items(node, torch.fx.node.map_arg(results, env.__getitem__))


def _laid_out(made: Any, like: Any) -> Any:
    """Results in the dtypes of like and in its orders of dimensions, since that is what readers go
    by; those that nobody reads as they are."""
    if like is None:
        return made
    if not isinstance(like, Tensor):
        return [_laid_out(x, as_said) for x, as_said in zip(made, like, strict=True)]
    if statically_known_true(like.numel() == 0):
        return made.new_empty_strided(like.shape, like.stride(), dtype=like.dtype)
    made = made.to(like.dtype)
    order = sorted(range(like.dim()), key=lambda d: -compat.tracing.hint_of(like.stride(d)))
    made = made.permute(order).contiguous().permute([order.index(d) for d in range(like.dim())])
    if all(map(same_size, made.stride(), like.stride())):
        return made
    # Of a size that nobody knows, Max(1, u0) may stand for u0.
    return aten.copy.default(made.new_empty_strided(like.shape, like.stride()), made)


def _spelled() -> dict[Any, Definition]:
    scatter = scatter_operator()
    return {} if scatter is None else {scatter: _zeros_and_scatter}


def _zeros_and_scatter(shape: Sequence[int], indices: Sequence[Tensor], x: Tensor) -> Tensor:
    """The sums of x by place in a tensor of zeros: first over dimensions that move no index."""
    still = [d for d in range(x.dim()) if all(same_size(i.stride(d), 0) for i in indices)]
    for d in reversed(still):
        indices = [i.select(d, 0) for i in indices]
    x = x.sum(still) if still else x
    return x.new_zeros(shape).index_put(list(indices), x, accumulate=True)


def replace_items(node: Node, values: Any) -> None:
    """The items of node become values, a tree of nodes; node is erased."""
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user.format_node()} takes all results"
        value = values[user.args[1]]
        if isinstance(value, Node) and user.users:
            replace(user, value)
        elif not user.users:
            node.graph.erase_node(user)
        else:
            replace_items(user, value)
    node.graph.erase_node(node)
