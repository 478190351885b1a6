"""Prints integer expressions over loop variables, sizes and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plait.ir.expr import Atom, Size, bounds, known_nonneg, product, summands
from plait.ir.loops import Node
from plait.kernel.triton.layout import Layout, undivided
from plait.kernel.triton.lines import Lines
from plait.schedule.legalize.linear import extent
from plait.schedule.plan import PART

SIGN = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}


class Indices:
    """Prints the indices of one kernel: what is no plain sum of products gets a variable.

    type: Triton's type of indices.
    sizes: the argument that holds each size symbol.
    value: prints the value of a node.
    """

    def __init__(
        self, layout: Layout, type_: str, sizes: Mapping[str, str], lines: Lines,
        value: Callable[[Node], str],
    ) -> None:  # fmt: skip
        self.layout, self.type, self.sizes, self.lines = layout, type_, sizes, lines
        self.value = value

    def expr(self, e: Size) -> str:
        """An expression over loop variables, sizes and values."""
        return self.size(self.layout.walk_groups(e))

    def size(self, e: Size) -> str:
        """An expression over sizes, or one whose axes are to be written as they are."""
        if isinstance(e, int):
            return str(e)
        if known := self.lines.find(e):
            return known
        parts = summands(e, self._atom, lambda c: f"{c if c > 0 else f'({c})'} * ", " * ")
        if e.const:
            parts.append(str(e.const))
        plain = len(parts) == 1 and len(e.terms[0][0]) == 1 and e.terms[0][1] == 1
        return parts[0] if plain else f"({' + '.join(parts)})"

    def _atom(self, a: Atom) -> str:
        key = a.expr
        if known := self.lines.find(key):
            return known
        inner = self.layout.along in self.layout.dims_of_index(key)
        text = self._atom_text(a)
        if text.isidentifier():
            return text
        name = self.lines.define(text, inner, "i")
        self.lines.keep(key, name, inner)
        return name

    def _atom_text(self, a: Atom) -> str:
        if name := undivided(a):
            return name
        if a in self.layout.group_of:
            return self._axis(a)
        if a in self.layout.linear.indirect:
            return f"{self.value(self.layout.linear.indirect[a])}.to({self.type})"
        if a.kind == "sym":
            return "pid" if a.name == PART else self.sizes[a.name]
        return function_text(a, self.expr(a.a), self.expr(a.b), self.type)

    def _axis(self, a: Atom) -> str:
        """A loop variable out of the index that walks its group."""
        g = self.layout.group_of[a]
        if len(g.axes) == 1:
            return str(g.name)
        k = g.axes.index(a)
        inner = self.size(product(map(extent, g.axes[k + 1 :])))
        text = g.name if k == len(g.axes) - 1 else f"({g.name} // {inner})"
        return text if k == 0 else f"{text} % {self.size(extent(a))}"


def function_text(a: Atom, left: str, right: str, type_: str) -> str:
    """An atom that is no symbol, of the texts of its arguments. type_: Triton's type of it."""
    if a.kind in ("div", "mod"):
        if known_nonneg(a.a) and bounds(a.b)[0] > 0:
            return f"({left} {'//' if a.kind == 'div' else '%'} {right})"
        return f"p_index_{a.kind}({left}, {right})"
    if a.kind in ("min", "max"):
        return f"tl.{a.kind}imum({left}, {right})"
    return f"({left} {SIGN[a.kind]} {right}).to({type_})"
