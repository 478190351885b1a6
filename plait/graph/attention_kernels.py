"""Which calls of FlexAttention a kernel of a GPU holds, and their functions of scores as graphs of
scalars.

The other calls are written out as ATen operators (`write_out.py`); `lower/attention.py` makes the
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from plait import compat
from plait.devices import facts_of
from plait.graph import attention
from plait.graph.constants import FRESH_COPIES
from plait.graph.edit import aten, output_of, value_of
from plait.graph.refused_kernels import is_refused

_backward = torch.ops.higher_order.flex_attention_backward
_OPERATORS = (torch.ops.higher_order.flex_attention, _backward)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_WIDTH = 256  # of a key: what fits beside others in a multiprocessor
_FORMULAS = frozenset((
    aten.index.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.view.default, aten.expand.default, aten.alias.default,
    aten.detach.default, aten.full.default, aten.full_like.default, aten.new_full.default,
    aten.new_ones.default, aten.new_zeros.default, aten.ones_like.default, aten.zeros_like.default,
    aten.scalar_tensor.default, aten._to_copy.default, aten.clone.default,
))  # fmt: skip
"""Operators besides pointwise ones that formulas are made of."""


def is_written_out(node: Node) -> bool:
    """Whether a call, of the operator or of its backward, is written out."""
    graphs = _graphs(node)[0]
    for graph in graphs:
        _inline_scalars(graph)
    if node.target is _backward:
        given: Any = node.args[0]
        _keep_precision(graphs[1], value_of(given).dtype)
        _give_gradient(graphs[1])
    return attention.is_regular(node) and (is_refused(node) or not _has_kernel(node))


def _has_kernel(node: Node) -> bool:
    operands: Any = node.args[:3]
    q, k, v = map(value_of, operands)
    known = (*q.shape[1::2], *k.shape[1::2], *v.shape[1::2])
    if facts_of(q.device.type).is_host or q.dtype not in _DTYPES:
        return False
    if not q.dtype == k.dtype == v.dtype or max(known[1], known[5]) > _MOST_WIDTH:
        return False
    if not all(isinstance(n, int) and n > 0 for n in known):
        return False
    graphs, block_mask = _graphs(node)
    rows, columns, _ = block_mask[-3:]
    if any(not isinstance(n, int) or n % 16 for n in (rows, columns)):
        return False
    if node.target is _backward:
        sums = None if node.args[5] is None else sums_of(graphs[1])
        if sums is None:
            return False
        graphs[1] = with_sums(graphs[1], sums)
    return all(map(_is_formula, graphs))


def _inline_scalars(graph: GraphModule) -> None:
    """Numbers that tracing made tensors of, such as the 0 of `bias[h, 0]`, become nodes: as a
    position is a tensor where the graph is mapped, since vmap refuses an index by both kinds."""
    position = graph.graph.find_nodes(op="placeholder")[2]
    for n in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, n.target)
        if not isinstance(value, Tensor) or value.dim():
            continue
        with torch.utils._python_dispatch._disable_current_modes():
            number = value.item()
        args: Any = position, number
        kind: dict[str, Any] = {"dtype": value.dtype}
        with graph.graph.inserting_before(n):
            made = graph.graph.call_function(aten.full_like.default, args, kind)
        made.meta = dict(n.meta)
        for user in (*n.users, n):
            if user is n or user.target in FRESH_COPIES:
                user.replace_all_uses_with(made)
                graph.graph.erase_node(user)
    graph.recompile()


def _keep_precision(joint: GraphModule, traced: torch.dtype) -> None:
    """Eager gives it scores of float32. What tracing rounded to the type of queries, of which its
    scores were, as in a gradient that was taken apart, is float32 there."""
    if traced not in (torch.float16, torch.bfloat16):
        return
    for target in (aten._to_copy.default, torch.ops.prims.convert_element_type.default):
        for n in joint.graph.find_nodes(op="call_function", target=target):
            if n.kwargs.get("dtype") == traced:
                n.kwargs = {**n.kwargs, "dtype": torch.float32}
            n.args = tuple(torch.float32 if a == traced else a for a in n.args)
    joint.recompile()


def _give_gradient(joint: GraphModule) -> None:
    """The gradient of a score that its function ignores is 0; tracing gives none."""
    output = output_of(joint.graph)
    results: Any = output.args[0]
    first, *others = results
    if first is not None:
        return
    (score, *_) = joint.graph.find_nodes(op="placeholder")
    with joint.graph.inserting_before(output):
        first = joint.graph.call_function(aten.zeros_like.default, (score,))
    first.meta = {**score.meta}
    output.args = ([first, *others],)
    joint.recompile()


def _graphs(node: Node) -> tuple[list[GraphModule], Sequence[Any]]:
    """The graphs of scalars of a call, the mask's the last, and its block mask."""
    args: Any = node.args
    block_mask = args[9] if node.target is _backward else args[4]
    places = [*(args[7:9] if node.target is _backward else args[3:4]), block_mask[-1]]
    owner = node.graph.owning_module
    return [getattr(owner, n.target) for n in places], block_mask


def scatter_operator() -> OpOverload | None:
    """PyTorch's operator for the gradient of an indexed tensor, where there is one."""
    found = getattr(torch.ops.flex_lib, "zeros_and_scatter", None)
    return None if found is None else found.default


@dataclass(frozen=True)
class Sum:
    """A part of the gradient of a tensor that scores were made of.

    to: its number among those that are captured.
    index: the place in it that a score adds to.
    value: what it adds.
    """

    to: int
    index: tuple[Any, ...]
    value: Node


def sums_of(joint: GraphModule) -> list[Sum] | None:
    """The gradients of what is captured, of the graph that has them; None for others."""
    results: Any = output_of(joint.graph).args[0]
    found: list[Sum] = []
    for k, result in enumerate(results[5:]):
        parts = [result] if isinstance(result, Node) else []
        while parts:
            n: Any = parts.pop()
            if n.target is aten.add.Tensor and value_of(n).dim() and not n.kwargs:
                parts += n.args
            elif n.target is scatter_operator() and len(n.args[1]) == len(n.args[0]):
                found.append(Sum(k, tuple(n.args[1]), n.args[2]))
            elif value_of(n).dim() == 0:
                found.append(Sum(k, (), n))
            else:
                return None
        if not isinstance(result, Node) and result is not None:
            return None
    in_any_order = not facts_of(value_of(results[0]).device).is_host
    if found and in_any_order and torch.are_deterministic_algorithms_enabled():
        return None
    return found


def with_sums(joint: GraphModule, sums: Sequence[Sum]) -> GraphModule:
    """The graph that gives the gradient of a score and, flat, the indices and value of each sum."""
    results: Any = output_of(joint.graph).args[0]
    made = Graph()
    env: dict[Node, Node] = {}
    made.graph_copy(joint.graph, env)
    wanted = [results[0], *(n for s in sums for n in (*s.index, s.value))]
    made.output(tuple(env.get(n, n) for n in wanted))
    made.eliminate_dead_code()
    return GraphModule(joint, made)


def _is_formula(graph: GraphModule) -> bool:
    """Whether a graph has only operators that work on one score."""
    calls = (n for n in graph.graph.nodes if n.op not in ("placeholder", "output"))
    return all(
        isinstance(n.target, OpOverload)
        and (n.target in _FORMULAS or torch.Tag.pointwise in n.target.tags)
        and torch.Tag.nondeterministic_seeded not in n.target.tags
        for n in calls
    )


def scalar_graph(
    graph: GraphModule, like: Tensor, n_before: int, n_after: int, captured: Sequence[Any]
) -> GraphModule:
    """A function of a score as eager calls it: on float32 and 64-bit positions, not on the types
    that it was traced with. like: a fake tensor of the call.

    n_before, n_after: scores before, and gradients after the positions. captured: arguments of the
    call; those that are no nodes are constants."""
    with like.fake_mode:  # type: ignore[attr-defined]
        numbers = [like.new_empty((), dtype=torch.float32) for _ in range(n_before + n_after)]
        places = [like.new_empty((), dtype=torch.int64) for _ in range(4)]
    own = [*numbers[:n_before], *places, *numbers[n_before:]]
    nodes = [n for n in captured if isinstance(n, Node)]

    def run(*values: Any) -> Any:
        given = dict(zip(nodes, values[len(own) :], strict=True))
        return graph(*values[: len(own)], *(given.get(n, n) for n in captured))

    return compat.tracing.trace_values(run, [*own, *map(value_of, nodes)], {})
