"""Sizes of 1 where a traced program asks for them: `if batch != 1: x = x.expand(batch, -1)`.

Tracing takes a size that varies for 2 or more, so a program is traced with the answers for these,
and a call with the size 1 is refused. But often the other answer makes no difference: the function
is traced once more with it, and where both graphs compute the same for that size, it is allowed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.capture.python_state import same_program
from plait.compat.tracing import is_stand_in
from plait.graph.edit import aten

_SEEN_OTHERWISE = frozenset({
    aten.expand.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default,
    aten.slice.Tensor, aten.alias.default, aten.clone.default,
})  # fmt: skip
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def same_for_one(a: GraphModule, b: GraphModule, size: Any) -> bool:
    """Whether two graphs of the same inputs compute the same values where size, a symbol, is 1."""
    numbers: dict[str, int] = {}
    try:
        return same_program(a, b) or _results(a, size, numbers) == _results(b, size, numbers)
    except ZeroDivisionError:
        return False


def _results(gm: GraphModule, size: Any, numbers: dict[str, int]) -> str:
    """The results of a graph as text. Its values have numbers, the same for equal operations on
    equal operands."""
    values: dict[Node, str] = {}
    draws = 0
    for node in gm.graph.nodes:
        operands = repr(torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _Text(values[n])))
        if node.op == "output":
            return operands
        value = node.meta.get("val")
        if isinstance(value, _SYMBOLIC):
            values[node] = _at_one(value, size)
        elif node.target in _SEEN_OTHERWISE and _shape(value, size) == _shape(
            node.args[0].meta["val"], size
        ):
            values[node] = values[node.args[0]]
        else:
            what = _constant(gm, node) if node.op == "get_attr" else str(node.target)
            if _draws(node):
                draws += 1
                what = f"{what}, for the time {draws}"
            values[node] = f"%{numbers.setdefault(f'{what} {operands}', len(numbers))}"
    raise AssertionError("a graph without an output")


class _Text(str):
    """Printed as it is: the text of a size is that of a number in its place."""

    __repr__ = str.__str__


def _at_one(x: Any, size: Any) -> str:
    return str(x.node.expr.xreplace({size: 1})) if isinstance(x, _SYMBOLIC) else str(x)


def _shape(x: torch.Tensor, size: Any) -> list[str]:
    return [_at_one(n, size) for n in x.shape]


def _draws(node: Node) -> bool:
    """Whether a node draws random numbers: no other value is the same."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _constant(gm: GraphModule, node: Node) -> str:
    """The value of a constant, or an own name for what has no equal."""
    value = getattr(gm, str(node.target))
    if isinstance(value, torch.Tensor) and not is_stand_in(value) and value.numel() < 100:
        return f"{value.dtype} {value.tolist()}"
    return f"object {id(value)}"
