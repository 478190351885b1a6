"""Singular and eigenvalues without their vectors, where a program asks for no more.

PyTorch decides whether to compute vectors by whether its operand may have a gradient, and takes
any tensor for such while it traces: `svdvals`, `eigvalsh`, `cond`, `matrix_rank` and the nuclear
norm reach us as calls that make vectors, which take twice the time and end in other bits.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from plait.graph.edit import aten, insert, replace, results_read

_VALUES = {aten._linalg_svd.default: 1, aten._linalg_eigh.default: 0}
"""Which of their results are values."""
_OF_VECTORS = ("svd", "linalg_svd", "linalg_eigh")
"""Functions that compute vectors whether or not a program looks at them."""


def drop_vectors(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many calls compute values alone now."""
    found = [n for op in _VALUES for n in gm.graph.find_nodes(op="call_function", target=op)]
    changed = [n for n in found if _wants_values(n)]
    for node in changed:
        matrix, *form = node.args[:2]
        form = form or ["L" if node.target is aten._linalg_eigh.default else False]
        assert isinstance(matrix, Node), "a tensor is a node"
        replace(node, insert(node, matrix, node.target, *form, False, **node.kwargs))
    return len(changed)


def _wants_values(node: Node) -> bool:
    makes_vectors = len(node.args) < 3 or node.args[2] is True
    wanted = results_read(node) == {_VALUES[node.target]}  # type: ignore[index]
    return makes_vectors and wanted and _asked(node) not in _OF_VECTORS


def _asked(node: Node) -> str:
    """The name of the function in the user's program."""
    stack: list[Any] = node.meta.get("source_fn_stack") or []
    if stack:
        name = stack[-1][1]
        return name if isinstance(name, str) else getattr(name, "__name__", "")
    exported: tuple[str, ...] = node.meta.get("torch_fn") or ("", "")
    return exported[1].rpartition(".")[2]
