"""Integers that may need more than 64 bits, taken out of loops.

A kernel computes in 64 bits and does not look whether they suffice; whatever runs the program looks
at every expression of sizes that it evaluates. Comes in: the loops of a program. Goes out: the same
loops, in which a part of an integer value that no loop variable changes, and that might overflow,
is a symbol, which the program defines. Memory bounds the sizes of tensors, so what is computed from
them mostly stays in the loops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from plait.ir.expr import BUILD, INF, Atom, Expr, Mono, Size, bounds, free_symbols, symbol
from plait.ir.loops import (
    Buffer,
    Loop,
    Node,
    Op,
    Pointwise,
    Scatter,
    node,
    rewrite,
    walk,
    with_args,
)
from plait.runtime.functions import FUNCTIONS

_ELEMENTS = 2**48  # more than a tensor can have
_LEAST, _MOST = -(2**63), 2**63 - 1
_Range = tuple[float, float]
_COMPARISONS = ("eq", "ne", "lt", "le")


class _Overflow(Exception):
    """An expression may need more than 64 bits."""


def take_out_wide(
    ops: Sequence[Op], buffers: Iterable[Buffer], symbols: Mapping[str, object]
) -> tuple[list[Op], dict[str, Expr]]:
    """The ops of a program, and the symbols that they need beside those of `symbols`, with their
    values."""
    taken = _Taken(_Bounds(b.shape for b in buffers), symbols)

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op == "index" and isinstance(n.attr, Expr):
            return node("index", args, taken.out_of(n.attr), n.dtype)
        return with_args(n, args)

    out: list[Op] = []
    memo: dict[Node, Node] = {}
    for op in ops:
        if isinstance(op, Pointwise) and all(n.op != "index" for n in walk((op.body,))):
            pass  # most loops
        elif isinstance(op, Loop):
            op = replace(op, body=rewrite(op.body, fn, memo))
        if isinstance(op, Scatter):
            mask = None if op.mask is None else rewrite(op.mask, fn, memo)
            op = replace(
                op, index_args=tuple(rewrite(a, fn, memo) for a in op.index_args), mask=mask
            )
        out.append(op)
    return (out, taken.values) if taken.values else (list(ops), {})


class _Taken:
    """What is taken out of loops. values: by the name of the symbol that stands for it."""

    def __init__(self, bounds: _Bounds, symbols: Mapping[str, object]) -> None:
        self.values: dict[str, Expr] = {}
        self._bounds = bounds
        self._symbols = symbols
        self._names: dict[Expr, Expr] = {}

    def out_of(self, e: Expr) -> Size:
        """e with symbols for the parts that may overflow, e itself if none does."""
        if e.symbol is not None:
            return e
        if self._is_fixed(e):
            return self._name(e) if self._bounds.overflows(e) else e
        same: Size = e.const
        varying: Size = 0
        for mono, c in e.terms:
            factor: Size = c
            rest: Size = 1
            for a in mono:
                if self._is_fixed(a.expr):
                    factor = factor * a.expr
                else:
                    rest = rest * self._out_of_atom(a)
            if rest == 1:
                same = same + factor
            else:
                varying = varying + self._part(factor) * rest
        return self._part(same) + varying

    def _part(self, e: Size) -> Size:
        return self.out_of(e) if isinstance(e, Expr) else e

    def _out_of_atom(self, a: Atom) -> Size:
        if a.kind == "sym":
            return a.expr
        x, y = self._part(a.a), self._part(a.b)
        return BUILD[a.kind](x, y)

    def _is_fixed(self, e: Expr) -> bool:
        """Whether nothing but what the program knows before a loop is in e."""
        return all(a.name in self._symbols for a in free_symbols(e))

    def _name(self, e: Expr) -> Expr:
        if e not in self._names:
            lo, hi = bounds(e)
            name = f"wide{len(self.values)}"
            self.values[name] = e
            self._names[e] = symbol(name, lo if lo > _LEAST else -INF, hi if hi < _MOST else INF)
        return self._names[e]


class _Bounds:
    """How large expressions can be in a program with buffers of these shapes."""

    def __init__(self, shapes: Iterable[tuple[Size, ...]]) -> None:
        symbolic = ([e for e in shape if type(e) is not int] for shape in shapes)
        products = {tuple(a for e in some for a in _factors(e)) for some in symbolic if some}
        self._products = [Counter(p) for p in products if p]
        self._known: dict[Expr, bool] = {}

    def overflows(self, e: Expr) -> bool:
        """Whether e, or something on the way to it, may need more than 64 bits."""
        if e not in self._known:
            try:
                self._range(e)
                self._known[e] = False
            except _Overflow:
                self._known[e] = True
        return self._known[e]

    def _range(self, e: Size) -> _Range:
        if isinstance(e, int):
            return _within(e, e)
        lo: float = e.const
        hi: float = e.const
        for mono, c in e.terms:
            ends = _within(*sorted(c * end for end in self._product(mono)))
            lo, hi = _within(lo + ends[0], hi + ends[1])
        return lo, hi

    def _product(self, mono: Mono) -> _Range:
        if len(mono) > 1 and self._is_count(mono):
            return 0, _ELEMENTS
        lo: float = 1
        hi: float = 1
        for a in mono:
            ends = [x * y for x in (lo, hi) for y in self._atom(a)]
            lo, hi = _within(min(ends), max(ends))
        return lo, hi

    def _is_count(self, mono: Mono) -> bool:
        """Whether a product is a number of elements that some tensor has."""
        return any(Counter(mono) <= p for p in self._products)

    def _atom(self, a: Atom) -> _Range:
        if a.kind in FUNCTIONS:
            raise _Overflow
        if a.kind == "sym":
            lo, hi = max(a.lo, _LEAST), min(a.hi, _MOST)
        else:
            lo, hi = _combined(a.kind, self._range(a.a), self._range(a.b))
        return (max(lo, 0), min(hi, _ELEMENTS)) if self._is_count((a,)) else (lo, hi)


def _factors(e: Size) -> Mono:
    """What is bounded where a multiple of it, but for a constant, is a size."""
    if isinstance(e, Expr) and len(e.terms) == 1 and e.terms[0][1] > 0:
        return e.terms[0][0]
    return ()


def _combined(kind: str, x: _Range, y: _Range) -> _Range:
    if kind in _COMPARISONS:
        return 0, 1
    if kind == "min":
        return min(x[0], y[0]), min(x[1], y[1])
    if kind == "max":
        return max(x[0], y[0]), max(x[1], y[1])
    return (0, y[1] - 1) if kind == "mod" else (min(x[0], 0), max(x[1], 0))


def _within(lo: float, hi: float) -> _Range:
    if lo < _LEAST or hi > _MOST:
        raise _Overflow
    return lo, hi
