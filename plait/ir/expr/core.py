"""What an integer expression is: a constant plus a sum of coefficient * product of atoms.

An atom is a symbol or a function of two expressions: a quotient, a remainder, a minimum, a maximum,
a comparison, a function of FUNCTIONS. Atoms and expressions are immutable and interned. A constant
is always a plain `int`, so `Size = int | Expr`. The operators of expressions are those of
`simplify`, which sets them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeAlias, Union

from plait.runtime.functions import FUNCTIONS

Size: TypeAlias = Union[int, "Expr"]

INF = float("inf")
Bound: TypeAlias = float  # an int, or +-inf


class Atom:
    """A factor of a monomial. kind: 'sym', 'div', 'mod', 'min', 'max', 'eq', 'ne', 'lt', 'le', a
    name of FUNCTIONS.

    For 'sym', name/lo/hi/extent hold: lo <= value <= hi, and value < extent where extent is known
    (loop variables). For the others, a and b are the operands. key orders atoms and names them in
    text.
    """

    __slots__ = ("kind", "name", "lo", "hi", "extent", "a", "b", "key", "_hash", "_bounds", "_expr")

    def __init__(
        self, kind: str, key: str, name: str = "", lo: Bound = -INF, hi: Bound = INF,
        extent: Size | None = None, a: Size = 0, b: Size = 0,
    ) -> None:  # fmt: skip
        self.kind, self.key, self.name = kind, key, name
        self.lo, self.hi, self.extent = lo, hi, extent
        self.a, self.b = a, b
        self._hash = hash((kind, key, lo, hi, extent, a, b))  # symbols of one name differ in range
        self._bounds: tuple[Bound, Bound] | None = None
        self._expr: Expr | None = None

    @property
    def expr(self) -> Expr:
        """The expression that is this atom."""
        if self._expr is None:
            found = intern(0, (((self,), 1),))
            assert isinstance(found, Expr), "it has a term"
            self._expr = found
        return self._expr

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Atom)
            and self._hash == other._hash
            and (self.kind, self.key, self.lo, self.hi)
            == (other.kind, other.key, other.lo, other.hi)
            and self.extent == other.extent
            and self.a == other.a  # equal text does not do: symbols of one name may differ in range
            and self.b == other.b
        )

    def __repr__(self) -> str:
        return self.key


Mono: TypeAlias = tuple[Atom, ...]
Terms: TypeAlias = tuple[tuple[Mono, int], ...]


class Expr:
    """An integer expression that is no constant: const + sum(coefficient * product of atoms).

    symbol: the symbol that it is, or None if it is anything else."""

    __slots__ = ("const", "terms", "symbol", "_hash", "_key", "_bounds", "_free", "_nonneg")

    def __init__(self, const: int, terms: Terms) -> None:
        self.const, self.terms = const, terms
        self._hash = hash((const, terms))
        self._key: str | None = None
        self._bounds: tuple[Bound, Bound] | None = None
        self._free: frozenset[Atom] | None = None
        self._nonneg: bool | None = None
        (mono, c), *others = terms
        is_atom = const == 0 and not others and c == 1 and len(mono) == 1
        self.symbol = mono[0] if is_atom and mono[0].kind == "sym" else None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Expr)
            and self._hash == other._hash
            and self.const == other.const
            and self.terms == other.terms
        )

    __add__: ClassVar[Callable[[Expr, Size], Size]]
    __radd__: ClassVar[Callable[[Expr, Size], Size]]
    __sub__: ClassVar[Callable[[Expr, Size], Size]]
    __rsub__: ClassVar[Callable[[Expr, Size], Size]]
    __mul__: ClassVar[Callable[[Expr, Size], Size]]
    __rmul__: ClassVar[Callable[[Expr, Size], Size]]
    __neg__: ClassVar[Callable[[Expr], Size]]
    __floordiv__: ClassVar[Callable[[Expr, Size], Size]]
    __rfloordiv__: ClassVar[Callable[[Expr, Size], Size]]
    __mod__: ClassVar[Callable[[Expr, Size], Size]]
    __rmod__: ClassVar[Callable[[Expr, Size], Size]]

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of {self} is not known at compile time; use known_* functions")

    def __repr__(self) -> str:
        if self._key is None:
            self._key = expr_text(self, lambda a: a.key)
        return self._key


def atom_of(e: Expr) -> Atom:
    """The symbol that an expression is."""
    found = e.symbol
    assert found is not None, f"{e} is no symbol"
    return found


def expr_text(e: Size, atom: Callable[[Atom], str]) -> str:
    """An expression as text. atom: the text of an atom."""
    if isinstance(e, int):
        return str(e)
    parts = summands(e, atom, lambda c: "-" if c == -1 else f"{c}*")
    if e.const:
        parts.append(str(e.const))
    return " + ".join(parts).replace("+ -", "- ")


def summands(
    e: Expr, atom: Callable[[Atom], str], factor: Callable[[int], str], times: str = "*"
) -> list[str]:
    """The texts of what an expression adds up, but for its constant. factor: what stands before a
    product for a number other than 1. times: what stands between atoms."""
    return [("" if c == 1 else factor(c)) + times.join(map(atom, mono)) for mono, c in e.terms]


_atoms: dict[object, Atom] = {}
_exprs: dict[tuple[int, Terms], Expr] = {}
memo: dict[tuple[str, Size, Size], Size] = {}
"""Quotients and remainders that `simplify` has made: (kind, a, b) -> expression."""


def interned() -> int:
    """How many expressions the intern table holds."""
    return len(_exprs)


def forget() -> None:
    """Drops the intern tables. Expressions made before stay valid and compare equal to later
    ones."""
    _atoms.clear()
    _exprs.clear()
    memo.clear()


def intern(const: int, terms: Terms) -> Size:
    """The expression with these terms, which are in order."""
    if not terms:
        return const
    key = (const, terms)
    found = _exprs.get(key)
    if found is None:
        found = _exprs[key] = Expr(const, terms)
    return found


def declare(name: str, lo: Bound, hi: Bound, extent: Size | None) -> Expr:
    """The symbol with this name, range and extent."""
    key = ("sym", name, lo, hi, extent)
    found = _atoms.get(key)
    if found is None:
        found = _atoms[key] = Atom("sym", name, name, lo, hi, extent)
    return found.expr


_TEXT = {"div": "({} // {})", "mod": "({} % {})", "min": "min({}, {})", "max": "max({}, {})",
         "eq": "({} == {})", "ne": "({} != {})", "lt": "({} < {})", "le": "({} <= {})",
         **{name: f"{name}({{}}, {{}})" for name in FUNCTIONS}}  # fmt: skip


def _paren(e: Size) -> str:
    if isinstance(e, int) or e.symbol is not None:
        return str(e)
    text = str(e)
    if len(e.terms) == 1 and e.const == 0 and e.terms[0][1] == 1 and len(e.terms[0][0]) == 1:
        return text  # a single atom brings its own parentheses
    return f"({text})"


def function(kind: str, a: Size, b: Size) -> Expr:
    """The function `kind` of a and b, as it stands."""
    key = (kind, a, b)
    found = _atoms.get(key)
    if found is None:
        wrap = _paren if kind in ("div", "mod", "eq", "ne", "lt", "le") else str
        found = _atoms[key] = Atom(kind, _TEXT[kind].format(wrap(a), wrap(b)), a=a, b=b)
    return found.expr
