"""Walks over expressions, all by one `fold`: substitution, evaluation, coefficients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from plait.ir.expr.core import Atom, Size
from plait.ir.expr.simplify import call, compare, floordiv, from_terms, mod, smax, smin
from plait.runtime.functions import FUNCTIONS

RUN = 16  # elements side by side that count as contiguous


def free_symbols(e: Size) -> frozenset[Atom]:
    """All symbols in e, those inside divisions included."""
    if isinstance(e, int):
        return frozenset()
    if e._free is None:
        out: set[Atom] = set()
        for mono, _ in e.terms:
            for a in mono:
                if a.kind == "sym":
                    out.add(a)
                else:
                    out |= free_symbols(a.a) | free_symbols(a.b)
        e._free = frozenset(out)
    return e._free


def fold(
    e: Size, atom: Callable[[Atom], Any], number: Callable[[int], Any] | None = None,
    add: Callable[[Any, Any], Any] = operator.add, mul: Callable[[Any, Any], Any] = operator.mul,
) -> Any:  # fmt: skip
    """What an expression becomes, out of what atoms and numbers become (numbers stay as they are if
    number is None): `mul` makes its products, `add` their sum, the constant first. Factors of 1 and
    a constant of 0 are left out."""
    if isinstance(e, int):
        return e if number is None else number(e)
    out: Any = None
    if e.const:
        out = e.const if number is None else number(e.const)
    for mono, c in e.terms:
        term: Any = None
        if c != 1:
            term = c if number is None else number(c)
        for a in mono:
            term = atom(a) if term is None else mul(term, atom(a))
        out = term if out is None else add(out, term)
    return out


BUILD: dict[str, Callable[[Size, Size], Size]] = {
    "div": floordiv, "mod": mod, "min": smin, "max": smax,
    "eq": lambda a, b: compare("eq", a, b), "ne": lambda a, b: compare("ne", a, b),
    "lt": lambda a, b: compare("lt", a, b), "le": lambda a, b: compare("le", a, b),
    **{name: partial(call, name) for name in FUNCTIONS},
}  # fmt: skip
"""Kind of an atom -> what makes an expression of its two arguments."""


def substitute(e: Size, env: Mapping[Atom, Size]) -> Size:
    """e with symbols replaced, simplified again. env: symbol atom (`expr.symbol`) ->
    replacement."""
    if isinstance(e, int) or not env or free_symbols(e).isdisjoint(env):
        return e

    def replaced(a: Atom) -> Size:
        if a.kind == "sym":
            found = env.get(a)
            return a.expr if found is None else found
        return BUILD[a.kind](substitute(a.a, env), substitute(a.b, env))

    out: Size = fold(e, replaced)
    return out


_EVAL: dict[str, Callable[[int, int], int]] = {
    "div": lambda a, b: a // b, "mod": lambda a, b: a % b, "min": min, "max": max,
    "eq": lambda a, b: int(a == b), "ne": lambda a, b: int(a != b), "lt": lambda a, b: int(a < b),
    "le": lambda a, b: int(a <= b), **FUNCTIONS,
}  # fmt: skip


def evaluate(e: Size, env: Mapping[str, int]) -> int:
    """The value of e. env: symbol name -> value. Raises KeyError for a symbol without one."""
    if isinstance(e, int):
        return e

    def value(a: Atom) -> int:
        if a.kind == "sym":
            return env[a.name]
        return _EVAL[a.kind](evaluate(a.a, env), evaluate(a.b, env))

    out: int = fold(e, value)
    return out


def coefficient(e: Size, var: Atom) -> Size | None:
    """k where e == k*var + rest and rest does not hold var; None if var occurs in another way."""
    if isinstance(e, int) or var not in free_symbols(e):
        return 0
    out: Size = 0
    for mono, c in e.terms:
        n = mono.count(var)
        if n > 1:
            return None
        for a in mono:
            if a.kind != "sym" and (var in free_symbols(a.a) or var in free_symbols(a.b)):
                return None
        if n:
            rest = tuple([a for a in mono if a != var])
            out = out + (from_terms(0, {rest: c}) if rest else c)
    return out


def n_functions(e: Size) -> int:
    """How many quotients, remainders and the like an expression holds."""
    if isinstance(e, int):
        return 0
    atoms = (a for mono, _ in e.terms for a in mono if a.kind != "sym")
    return sum(1 + n_functions(a.a) + n_functions(a.b) for a in atoms)


def divisors(e: Size) -> list[int]:
    """What e divides by, with or without a remainder, least first."""
    if isinstance(e, int):
        return []
    atoms = [a for mono, _ in e.terms for a in mono if a.kind in ("div", "mod")]
    inside = {d for a in atoms for d in (*divisors(a.a), a.b) if isinstance(d, int)}
    return sorted(inside)


def is_contiguous(e: Size, var: Atom) -> bool:
    """Whether e grows by 1 with var, everywhere or within blocks of RUN elements or more."""
    step = coefficient(e, var)
    if step is not None:
        return step == 1
    last = min(RUN, var.extent) - 1 if isinstance(var.extent, int) else RUN - 1
    start: dict[Atom, Size] = {a: 0 for a in free_symbols(e) if a.extent is not None}
    return last > 0 and substitute(e, {**start, var: last}) - substitute(e, start) == last
