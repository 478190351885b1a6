"""Constant folding: small results of constants alone are computed once, while compiling.

Only tensors that live in the module (`get_attr`) count as constants: `full` and `arange` stay,
because they cost nothing inside a kernel. Results of more than MAX_NUMEL elements stay too, for
memory's sake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.graph.edit import aten, escaping, is_pure, replace, value_of

# A bound on compile time and on what a program holds: chosen, not measured.
MAX_NUMEL = 4096

FRESH_COPIES = frozenset({aten.lift_fresh_copy.default, aten.lift_fresh.default})


def fold_constants(gm: GraphModule) -> int:
    """Folds in place; returns how many nodes were folded."""
    graph = gm.graph
    constants = {
        node: getattr(gm, node.target)
        for node in graph.nodes
        if node.op == "get_attr" and isinstance(getattr(gm, node.target, None), torch.Tensor)
    }
    if not constants:
        return 0
    visible = escaping(graph)
    folded = 0
    for node in list(graph.nodes):
        if not _foldable(node, constants) or node in visible:
            continue  # an output must be new memory at every call
        try:
            result = compute(node, constants)
        except (RuntimeError, IndexError):
            continue  # it fails when the program runs, as in eager
        if not isinstance(result, torch.Tensor):
            continue
        # Even where the operator is a view: constants never alias.
        value = settled(result, value_of(node))
        name = f"_folded_{folded}"
        while hasattr(gm, name):
            name += "_"
        gm.register_buffer(name, value, persistent=False)
        with graph.inserting_before(node):
            new = graph.get_attr(name)
        new.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace")}
        constants[new] = value
        replace(node, new)
        folded += 1
    return folded


def _foldable(node: Node, constants: dict[Node, torch.Tensor]) -> bool:
    inputs = node.all_input_nodes
    if not inputs or any(i not in constants for i in inputs):
        return False
    if node.target not in FRESH_COPIES and not is_pure(node):
        return False
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    numel = value.numel()
    if not isinstance(numel, int) or numel > MAX_NUMEL:
        return False
    layout = torch.empty_strided(value.shape, value.stride(), device="meta")
    # An overlapping result has no memory of its own to fill.
    return torch._debug_has_internal_overlap(layout) == 0


def compute(
    node: Node, values: Mapping[Node, torch.Tensor], function: Callable[..., Any] | None = None
) -> Any:
    """What a node's operator, or another function, gives for real values. Raises what it raises."""
    run: Any = function or node.target
    assert callable(run), node.target
    args = torch.fx.node.map_arg(node.args, values.__getitem__)
    kwargs = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
    with (
        torch._guards.tracing(None),
        torch.utils._python_dispatch._disable_current_modes(),
        torch.no_grad(),
    ):
        return run(*args, **kwargs)


def settled(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same values in memory of their own, with the dtype and strides of a fake tensor."""
    with (
        torch._guards.tracing(None),
        torch.utils._python_dispatch._disable_current_modes(),
        torch.no_grad(),
    ):
        out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=result.device)
        return out.copy_(result)
