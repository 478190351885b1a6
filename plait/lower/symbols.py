"""The border to ShapeEnv: what tracing has for an integer becomes a size.

Comes in: ints, SymInts and SymBools from `meta["val"]`, or a SymPy expression with its ShapeEnv.
Goes out: an integer expression (`to_size`) with the ranges that the ShapeEnv knows; `size_rules`
has a rule for each kind. What functions other than sums, products, quotients and bounds make
(`int(n ** 0.5)`, `n & 3`) is a symbol, whose value is a call of `runtime/functions.py`: see
`number_functions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy import functions as sf
from torch.utils._sympy.value_ranges import bound_sympy

from plait import compat
from plait.errors import InexpressibleSize, Unsupported
from plait.ir import expr
from plait.ir.expr import INF, Expr, Size
from plait.lower.size_rules import RULES
from plait.runtime.functions import FUNCTIONS

SymScalar = bool | int | float | torch.SymBool | torch.SymInt | torch.SymFloat


@dataclass
class _Known:
    """What is remembered of one ShapeEnv.

    sizes: the size of each expression. A symbol keeps the range that it had when it was first met,
        so that two graphs (forward and backward) and two expressions of a graph name the same atom.
    functions: symbols for functions of sizes, by name: each symbol, and the function.
    """

    sizes: dict[sympy.Basic, Size] = field(default_factory=dict)
    functions: dict[str, tuple[Expr, Expr]] = field(default_factory=dict)


_known: WeakKeyDictionary[object, _Known] = WeakKeyDictionary()

_FAR = 2**62  # ranges this wide say nothing


def to_size(value: SymScalar | sympy.Basic, shape_env: Any = None) -> Size:
    """The Size of an int, a SymInt or a SymBool (0 or 1).

    shape_env: needed only for a bare SymPy expression. Raises InexpressibleSize for what sizes
    cannot express, and Unsupported for what is no number."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (torch.SymInt, torch.SymBool)):
        if is_ragged(value):
            hint = "read it from the nested tensor outside of the compiled function"
            raise Unsupported(f"the ragged size {value} of a nested tensor, as a number", hint=hint)
        shape_env, term = value.node.shape_env, value.node.expr
        if term.args and isinstance(value, torch.SymInt) and _is_one(value):
            return 1
    elif isinstance(value, sympy.Basic):
        term = value
    else:
        raise Unsupported(f"{value!r} is not an integer size")
    try:
        return _size(term, _known_of(shape_env), shape_env)
    except Unsupported as error:
        raise inexpressible(error, term) from None


def to_sizes(values: Iterable[int | torch.SymInt]) -> tuple[Size, ...]:
    """The sizes of several, most of which are numbers."""
    return tuple([n if type(n) is int else to_size(n) for n in values])


def inexpressible(error: Unsupported, term: sympy.Basic) -> InexpressibleSize:
    """The error for an expression without a rule, with the symbols that it is made of."""
    names = tuple(sorted(s.name for s in term.free_symbols))
    return InexpressibleSize(error.what, where=error.where, hint=error.hint, symbols=names)


def forget(shape_env: object) -> None:
    """Drops what is remembered of a ShapeEnv, whose symbols have become numbers."""
    _known.pop(shape_env, None)


def number_functions(shape_env: object) -> Mapping[str, tuple[Expr, Expr]]:
    """The symbols that stand for functions of sizes in the graph that is lowered next, by name:
    each symbol, and the function. None so far: `to_size` adds to it. Each graph numbers its own, so
    that its program does not depend on what was compiled before."""
    if shape_env is None:
        return {}
    known = _known_of(shape_env)
    if before := known.functions.keys():
        known.sizes = {e: n for e, n in known.sizes.items() if not before & _names(n)}
        known.functions = {}
    return known.functions


def _known_of(shape_env: object) -> _Known:
    known = _known.get(shape_env)
    if known is None:
        known = _known[shape_env] = _Known()
    return known


def _names(size: Size) -> set[str]:
    return {a.name for a in expr.free_symbols(size)}


def _is_one(size: torch.SymInt) -> bool:
    """Whether tracing found that an expression of symbols is 1. It broadcasts then, so it must not
    pass for a size that varies. Symbols are replaced by what they are found to be, expressions are
    not."""
    return size.node.hint in (1, None) and statically_known_true(size == 1)


def unranged(condition: torch.SymBool) -> Size:
    """A condition as 0 or 1, decided by nothing that the ShapeEnv knows of it: it may know that
    from the condition. Symbols that guards make numbers are these: no input brings them."""
    env, e = condition.node.shape_env, condition.node.expr
    return with_values(e, {s: n for s in e.free_symbols if isinstance(n := to_size(s, env), int)})


def with_values(e: sympy.Basic, values: Mapping[sympy.Basic, Size]) -> Size:
    """An expression where these symbols have these values, decided by nothing that a ShapeEnv
    knows of it."""
    return _size(e, _Known(dict(values)), None)


def is_ragged(value: object) -> bool:
    """Whether value is the ragged size of a nested tensor: the name of its lengths, no number."""
    return isinstance(value, torch.SymInt) and bool(value.node.is_nested_int())


def is_symbolic(value: object) -> bool:
    """Whether value is a SymInt, SymBool or SymFloat."""
    return isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat))


def _size(e: sympy.Basic, known: _Known, env: Any) -> Size:
    found = known.sizes.get(e)
    if found is None:
        found = known.sizes[e] = _convert(e, known, env)
    return found


def _convert(e: sympy.Basic, known: _Known, env: Any) -> Size:
    if isinstance(e, sympy.Symbol):
        return _pinned(e, env) or _symbol(e, env)
    if isinstance(e, sympy.Integer):
        return int(e)
    if e is sympy.true or e is sympy.false:
        return int(bool(e))
    if env is not None and isinstance(e, sf.FloorDiv):
        if _is_one(env.create_symintnode(e, hint=None)):
            return 1
        e = _by_factors(e, env)
    rule = RULES.get(type(e))
    if rule is None:
        raise Unsupported(
            f"a size that is {e} ({type(e).__name__})",
            hint="compute it outside of the compiled function",
        )
    found = rule(e, lambda a: _size(a, known, env))
    if env is None or not isinstance(found, Expr) or not _calls_function(found):
        return found
    fn = expr.symbol(f"fn{len(known.functions)}", *_range(e, env))
    known.functions[str(fn)] = fn, found
    return fn


def _calls_function(e: Expr) -> bool:
    return any(a.kind in FUNCTIONS for mono, _ in e.terms for a in mono)


def _range(e: sympy.Basic, env: Any) -> tuple[float, float]:
    """What the ShapeEnv knows of the value of an expression."""
    try:
        return _ends(bound_sympy(e, env.var_to_range))
    except Exception:  # noqa: BLE001  torch's rules raise whatever they meet
        return -INF, INF


def _ends(found: Any) -> tuple[float, float]:
    """A range of torch's; an end that says nothing is infinite."""
    lo, hi = (
        int(end) if isinstance(end, sympy.Integer) and abs(int(end)) < _FAR else far
        for end, far in ((found.lower, -INF), (found.upper, INF))
    )
    return lo, hi


def _holds(about: sympy.Basic, value: int, env: Any) -> bool:
    """Whether tracing found that an expression has this value. Only a guard that speaks of it can
    say so."""
    if not any(guard.expr.has(about) for guard in env.guards):
        return False
    return statically_known_true(env.create_symboolnode(sympy.Eq(about, value)))


def _pinned(s: sympy.Symbol, env: Any) -> int:
    """The value of a symbol that tracing found to be a multiple of a number, once it; 0 for others.
    Tracing replaces only what is found to be equal to a number."""
    found = None if env is None else compat.tracing.backed_values(env).get(s)
    n = int(found) if isinstance(found, int | sympy.Integer) else 0
    if n <= 1 or not any(g.expr.has(sf.FloorDiv) and g.expr.has(s) for g in env.guards):
        return 0  # mostly: to make a quotient takes longer
    return n if _holds(sf.FloorDiv(s, n), 1, env) and _holds(sf.Mod(s, n), 0, env) else 0


def _by_factors(e: Any, env: Any) -> sympy.Basic:
    """A quotient of a product as one of its factor that the divisor is known to divide, times the
    others."""
    factors, n = sympy.Mul.make_args(e.args[0]), e.args[1]
    varying = [f for f in factors if not f.is_number] if len(factors) > 1 else []
    divided = next((f for f in varying if _holds(sf.Mod(f, n), 0, env)), None)
    if divided is None:
        return e
    return sympy.Mul(sf.FloorDiv(divided, n), *(f for f in factors if f is not divided))


def _symbol(s: sympy.Symbol, env: Any) -> Size:
    found = None if env is None else env.var_to_range.get(s)
    lo, hi = (-INF, INF) if found is None else _ends(found)
    if s.is_nonnegative or (env is not None and s in env.size_like):
        lo = max(lo, 0)
    return expr.symbol(s.name, lo=lo, hi=hi)
