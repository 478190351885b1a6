"""What the FX passes share: which nodes are views, which storage escapes, and replacing a node.

A pass changes an `fx.Graph` in place. All facts here are read off operator schemas and
`meta["val"]`, so that an operator nobody thought of is treated with care rather than wrongly.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from plait import compat
from plait.ir.calls import WAIT

aten = torch.ops.aten

# Views in all but their schema: the result may be the argument's memory.
_HIDDEN_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.contiguous.default,
        aten.lift_fresh.default,
    }
)


# Operators in which all ranks of a group take part: each rank runs all of them, in their order.
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "symm_mem")


def has_effect(op: OpOverload) -> bool:
    """Whether an operator runs even if nobody uses its result, besides what its schema says."""
    return op.namespace in _COLLECTIVES or op in torch.fx.node._side_effectful_functions


def is_view(node: Node) -> bool:
    """Whether the result may share the memory of its first argument."""
    target = node.target
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    return (
        target in _HIDDEN_VIEWS
        or target._schema.name == WAIT
        or (
            not target._schema.is_mutable
            and any(r.alias_info is not None for r in target._schema.returns)
        )
    )


def results_read(node: Node) -> set[Any]:
    """The numbers of the results of a call that something reads."""
    return {u.args[1] for u in node.users if u.users and u.target is operator.getitem}


def base_of(node: Node) -> Node:
    """The node whose memory this one may share: follows views to their source."""
    while node.op == "call_function" and is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def begins_anywhere(node: Any) -> bool:
    """Whether a view, or one on the way to it, says where in the storage it begins: its offset does
    not depend on where its base begins."""
    while isinstance(node, Node) and node.op == "call_function" and is_view(node):
        if (
            node.target is aten.as_strided.default
            and len(node.args) > 3
            and node.args[3] is not None
        ):
            return True
        node = node.args[0] if isinstance(node.args[0], Node) else None
    return False


def output_of(graph: Graph) -> Node:
    """The output node."""
    node: Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return node


def drop_tokens(graph: Graph, count: int) -> None:
    """Takes the first inputs and outputs from a graph: tokens, which only say in which order
    effects happen."""
    for token in [n for n in graph.nodes if n.op == "placeholder"][:count]:
        for user in tuple(token.users):
            user.args = (None, *user.args[1:])
        graph.erase_node(token)
    results = output_of(graph)
    assert isinstance(results.args[0], (tuple, list)), results.args[0]
    results.args = (tuple(results.args[0][count:]),)


def insert(before: Node, source: Node, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
    """A new node target(source, ...) before another one, from whose line it is."""
    with before.graph.inserting_before(before):
        new = before.graph.call_function(target, (source, *args), kwargs)
    new.meta = source_meta(before)
    given: Any = torch.fx.node.map_arg((source, *args), value_of)
    with compat.tracing.beside(given[0]):
        new.meta["val"] = target(*given, **kwargs)
    return new


def insert_like(before: Node, val: Any, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
    """A new node target(...) before another one, with a value like val: no fake tensor has to go
    through the operator."""
    with before.graph.inserting_before(before):
        new = before.graph.call_function(target, args, kwargs)
    new.meta = {**source_meta(before), "val": val}
    return new


def source_meta(node: Node) -> dict[str, Any]:
    """Of a node's meta what says from which lines of the program it is."""
    names = "stack_trace", "nn_module_stack", "source_fn_stack"
    return {name: node.meta[name] for name in names if name in node.meta}


def escaping(graph: Graph) -> set[Node]:
    """Nodes whose memory the caller may see: bases of outputs, placeholders and constants."""
    found = {base_of(node) for node in output_of(graph).all_input_nodes}
    found.update(node for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    return found


def written(graph: Graph) -> set[Node]:
    """Nodes whose memory an operator of the graph writes."""
    found: set[Node] = set()
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            continue
        for k, formal in enumerate(node.target._schema.arguments):
            arg = node.args[k] if k < len(node.args) else node.kwargs.get(formal.name)
            if formal.alias_info is None or not formal.alias_info.is_write:
                continue
            items = arg if isinstance(arg, (list, tuple)) else (arg,)
            found.update(base_of(a) for a in items if isinstance(a, Node))
    return found


def shape_env_of(val: Any) -> Any:
    """The ShapeEnv behind a fake value, or behind one of several; None if it has none."""
    for v in val if isinstance(val, (tuple, list)) else (val,):
        if isinstance(v, (torch.SymInt, torch.SymBool, torch.SymFloat)):
            return v.node.shape_env
        if isinstance(v, FakeTensor) and v.fake_mode.shape_env is not None:
            return v.fake_mode.shape_env
    return None


def is_pure(node: Node) -> bool:
    """Whether calling the node twice with equal arguments gives equal values and does nothing else.

    Random operators, mutating ones, uninitialised memory and higher-order operators are not pure.
    """
    if node.op != "call_function":
        return False
    target = node.target
    if target is operator.getitem:  # of large graphs most nodes are
        return True
    if isinstance(target, OpOverload):
        return (
            not target._schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in target.tags
            and target not in _UNINITIALISED
            and not has_effect(target)
            and not node.is_impure()
        )
    return not isinstance(target, HigherOrderOperator) and not node.is_impure()


_EMPTY: tuple[Any, ...] = (
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.empty_permuted,
)
_UNINITIALISED = frozenset(getattr(p, overload) for p in _EMPTY for overload in p.overloads())


def value_of(node: Node) -> Any:
    """The fake tensor, SymInt or plain value of a node, or None if it has none."""
    return node.meta.get("val")


def is_contiguous(x: torch.Tensor) -> bool:
    """Whether a tensor has known sizes and strides, and is contiguous."""
    return all(type(n) is int for n in (*x.shape, *x.stride())) and x.is_contiguous()


def same_layout(a: Any, b: Any) -> bool:
    """Whether two fake tensors have equal dtype, device, sizes, strides and offset, known
    statically."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.dtype != b.dtype or a.device != b.device or a.layout != b.layout or a.dim() != b.dim():
        return False
    if a.layout != torch.strided:
        return False
    one, other = ((*x.shape, *x.stride(), x.storage_offset()) for x in (a, b))
    return same_sizes(one, other)


def same_sizes(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Whether shapes are equal, as `same_size` has it: Python's == asks a guard of each pair, also
    where one is shorter."""
    return len(a) == len(b) and all(map(same_size, a, b))


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal by their expressions alone: asks no guard of the ShapeEnv."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return False


def replace(node: Node, value: Node) -> None:
    """All users of node take value instead; node is erased. Views of node are views of value from
    now on."""
    if same_layout(value_of(node), value_of(value)):
        value.meta["memory"] = (*memory_of(value), *memory_of(node))
    node.replace_all_uses_with(value, propagate_meta=False)
    node.graph.erase_node(node)


def know_replaced(gm: GraphModule) -> int:
    """Notes at a node the memory of one that PyTorch's own passes have put it in the place of:
    views still say that they lie there."""
    found = 0
    for node in gm.graph.nodes:
        if not isinstance(node.target, OpOverload):  # an item of a list is no view of it
            continue
        source = node.args[0] if node.args else None
        if node.target in _HIDDEN_VIEWS or not is_view(node) or not isinstance(source, Node):
            continue
        view, memory = value_of(node), memory_of(source)
        if all(isinstance(x, FakeTensor) and x.layout == torch.strided for x in (view, *memory)):
            storages = [compat.tracing.storage_of(x) for x in memory]
            if compat.tracing.storage_of(view) not in storages:
                source.meta["memory"] = (*memory, view)
                found += 1
    return found


def memory_of(node: Node) -> tuple[Any, ...]:
    """Fake tensors whose storage views of a node's value may have: its own, and those of nodes that
    it replaced."""
    found: tuple[Any, ...] = node.meta.get("memory", (value_of(node),))
    return found


@cache
def last_frame(stack_trace: str) -> str:
    """'file.py:12' of the innermost frame outside of torch's layers, "" where none is known: that
    of `plait.explain`, which calls the user's function, does not count."""
    found = re.findall(r'File "(?!.*/plait/tools/)(.*?)([^"/]*)", line (\d+)', stack_trace)
    users = [frame for frame in found if not frame[0].endswith("/torch/nn/modules/")]
    return ":".join((users or found)[-1][1:]) if found else ""
