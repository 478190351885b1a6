"""Sizes that a trace leaves out, and whether its program is right for them all the same.

Tracing takes a size that varies for 2 or more, so a program that asks (`if batch != 1: x =
x.expand(batch, -1)`) is traced with the answers for these, and a call with the size 1 is refused.
An operator asks too: `cache[:, :t]` lies in memory without gaps where t is the whole length, and
torch has what was traced refuse that t. But often the other answer makes no difference: the
function is traced once more with it, and where both graphs compute the same for that size, it is
allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.capture.python_state import same_program
from plait.compat.tracing import is_stand_in
from plait.graph.captured import InputView
from plait.graph.edit import aten, output_of

_RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
_SEEN_OTHERWISE = _RESHAPES | {
    aten.expand.default, aten.slice.Tensor, aten.alias.default, aten.clone.default
}  # fmt: skip
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


Point = Mapping[Any, Any]
"""The values of some symbols."""


def same_at(a: GraphModule, b: GraphModule, point: Point, whole: bool = False) -> bool:
    """Whether two graphs of the same inputs compute the same values there. whole: a product of
    matrices is not the same as one of a batch of them, in the last bits."""
    numbers: dict[str, int] = {}
    try:
        return same_program(a, b) or (
            _Values(a, point, numbers, whole).results == _Values(b, point, numbers, whole).results
        )
    except ZeroDivisionError:
        return False


def same_layout(a: GraphModule, b: GraphModule, point: Point) -> bool:
    """Whether the results of two graphs lie alike there."""
    try:
        return _strides(a, point) == _strides(b, point)
    except ZeroDivisionError:
        return False


def same_views(a: Mapping[int, InputView], b: Mapping[int, InputView], point: Point) -> bool:
    """Whether the same results lie in inputs there, at the same places."""
    found = [
        {k: (v.input, v.whole, _lie(v, point), _at(v.offset, point)) for k, v in views.items()}
        for views in (a, b)
    ]
    return found[0] == found[1]


def _strides(gm: GraphModule, point: Point) -> list[Any]:
    results: Any = output_of(gm.graph).args[0]
    values = [x.meta.get("val") for x in results if isinstance(x, Node)]
    return [_lie(x, point) for x in values if isinstance(x, torch.Tensor)]


def _lie(x: Any, point: Point) -> Any:
    """The strides of a tensor or a view there, of dimensions of several elements."""
    if isinstance(x, torch.Tensor) and x.layout != torch.strided:
        return None
    strides = x.stride() if isinstance(x, torch.Tensor) else x.strides
    sizes = [_at(n, point) for n in x.shape]
    return [(n, _at(s, point)) for n, s in zip(sizes, strides, strict=True) if n != "1"]


class _Values:
    """The values of a graph as text: they have numbers, the same for equal operations on equal
    operands. results: what it returns."""

    def __init__(self, gm: GraphModule, point: Point, numbers: dict[str, int], whole: bool) -> None:
        self.gm, self.point, self.numbers, self.whole = gm, point, numbers, whole
        self.texts: dict[Node, str] = {}
        self.dense: dict[str, str] = {}  # what a value is with its elements in other dimensions
        self.draws = 0
        for node in gm.graph.nodes:
            operands = torch.fx.node.map_arg((node.args, node.kwargs), self._operand)
            if node.op == "output":
                self.results = repr(operands)
            else:
                self.texts[node] = self._text(node, operands)

    def _operand(self, node: Node) -> _Text:
        return _Text(self.texts[node])

    def _text(self, node: Node, operands: Any) -> str:
        value = node.meta.get("val")
        if isinstance(value, _SYMBOLIC):
            return _at(value, self.point)
        if node.target in _SEEN_OTHERWISE and self._shape(node) == self._shape(node.args[0]):
            return self.texts[node.args[0]]  # type: ignore[index]
        if node.target in _RESHAPES:
            return self._reshaped(self._flat(node.args[0]), node)
        product = None if self.whole else self._product(node)
        if product is not None:
            return self._reshaped(product, node)
        what = _constant(self.gm, node) if node.op == "get_attr" else str(node.target)
        if _draws(node):
            self.draws += 1
            what = f"{what}, for the time {self.draws}"
        return self._number(f"{what} {operands!r}")

    def _number(self, what: str) -> str:
        return f"%{self.numbers.setdefault(what, len(self.numbers))}"

    def _shape(self, node: Any) -> list[str]:
        return [_at(n, self.point) for n in node.meta["val"].shape]

    def _flat(self, node: Any) -> str:
        """A value whose elements, in order, are those of a node."""
        return self.dense.get(self.texts[node], self.texts[node])

    def _reshaped(self, flat: str, node: Node) -> str:
        """The node whose elements are those of flat, which is known by them and its shape."""
        text = self._number(f"{flat} as {self._shape(node)}")
        self.dense[text] = flat
        return text

    def _product(self, node: Node) -> str | None:
        """The rows of a product with one matrix, which may have gained a number for each column:
        of rows, or of a batch of rows and as many times that matrix."""
        args: Any = node.args
        if node.kwargs:
            return None
        if node.target == aten.mm.default:
            return self._number(f"rows {self._flat(args[0])} by {self.texts[args[1]]}")
        if node.target == aten.bmm.default:
            matrix = _repeated(args[1])
            found = f"rows {self._flat(args[0])} by {self.texts[matrix]}" if matrix else None
            return found and self._number(found)
        if node.target == aten.addmm.default and len(self._shape(args[0])) == 1:
            product = self._number(f"rows {self._flat(args[1])} by {self.texts[args[2]]}")
            return self._number(f"{product} with {self._flat(args[0])}")
        if node.target == aten.add.Tensor and all(isinstance(x, Node) for x in args):
            rows = self._flat(args[0])
            if rows != self.texts[args[0]] and self._shape(args[1]) == self._shape(args[0])[-1:]:
                return self._number(f"{rows} with {self._flat(args[1])}")
        return None


def _repeated(node: Any) -> Node | None:
    """The matrix of which a batch holds nothing but repetitions."""
    while node.target in _SEEN_OTHERWISE:
        given, shape = node.args[0], node.meta["val"].shape
        if node.target == aten.expand.default and given.meta["val"].dim() == 2:
            return given  # type: ignore[no-any-return]
        if str(given.meta["val"].shape) != str(shape):
            return None
        node = given
    return None


class _Text(str):
    """Printed as it is: the text of a size is that of a number in its place."""

    __repr__ = str.__str__


def _at(x: Any, point: Point) -> str:
    return str(x.node.expr.xreplace(point)) if isinstance(x, _SYMBOLIC) else str(x)


def _draws(node: Node) -> bool:
    """Whether a node draws random numbers: no other value is the same."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _constant(gm: GraphModule, node: Node) -> str:
    """The value of a constant, or an own name for what has no equal."""
    value = getattr(gm, str(node.target))
    if isinstance(value, torch.Tensor) and not is_stand_in(value) and value.numel() < 100:
        return f"{value.dtype} {value.tolist()}"
    return f"object {id(value)}"
