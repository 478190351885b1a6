"""What a ShapeEnv knows of the sizes of a graph, as data that can be stored, and a ShapeEnv that
knows it again.

`stored` gives plain data (lists, dicts, strings and numbers, for JSON), `restored` reads it. An
expression is an int, the name of a symbol, {"real": text}, {"rational": [p, q]} or
[function, argument, ...], where a function is a class of SymPy's or of torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._guards import SLoc
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import RuntimeAssert, ShapeEnv
from torch.utils._sympy import functions, numbers
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from plait.compat.tracing import backed_values

_PAIRS = ("replacements", "unbacked_renamings")
_NAMED = {"oo": sympy.oo, "-oo": -sympy.oo, "int_oo": int_oo, "-int_oo": -int_oo, "nan": sympy.nan}
_TRUTH = {True: sympy.true, False: sympy.false}
_ASSUMED = ("integer", "real", "positive", "nonnegative")


def stored(env: Any) -> dict[str, Any]:
    """The facts of a ShapeEnv: symbols with their hints and ranges, what they are replaced by, what
    is known to hold, and what a run has to check."""
    hints, chosen = backed_values(env), getattr(env, "var_to_hint_override", {})
    known = {*env.var_to_range, *hints, *(s for name in _PAIRS for s in getattr(env, name))}
    symbols = {}
    for s in sorted(known, key=lambda s: str(s.name)):
        found = env.var_to_range.get(s)
        symbols[s.name] = {
            "assumed": [a for a in _ASSUMED if s.assumptions0.get(a)],
            "hint": None if s not in hints else expression(hints[s]),
            "chosen": chosen.get(s),
            "range": None if found is None else [expression(found.lower), expression(found.upper)],
            "size_like": s in env.size_like,
        }
    asserts = env.deferred_runtime_asserts.items()
    return {
        "symbols": symbols,
        **{name: _pairs(getattr(env, name)) for name in _PAIRS},
        "axioms": _pairs(env.axioms),
        "guards": [expression(guard.expr) for guard in env.guards],
        "divisible": sorted((expression(e) for e in env.divisible), key=str),
        "asserts": [
            [s and s.name, [[expression(a.expr), a.msg] for a in found]] for s, found in asserts
        ],
    }


def restored(facts: dict[str, Any]) -> FakeTensorMode:
    """A mode for fake tensors whose ShapeEnv knows `facts`."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    names: dict[str, sympy.Symbol] = {}
    for name, row in facts["symbols"].items():
        names[name] = s = sympy.Symbol(name, **dict.fromkeys(row["assumed"], True))
        if row["hint"] is not None:
            backed_values(env)[s] = read(row["hint"], names)
        if row["chosen"] is not None:
            env.var_to_hint_override[s] = row["chosen"]
        if row["range"] is not None:
            env.var_to_range[s] = ValueRanges(*(read(e, names) for e in row["range"]))
        if row["size_like"]:
            env.size_like.add(s)
        env.var_to_sources[s] = [ConstantSource(name)]
    for field in (*_PAIRS, "axioms"):
        getattr(env, field).update({read(k, names): read(v, names) for k, v in facts[field]})
    guard = symbolic_shapes.ShapeGuard  # type: ignore[attr-defined]
    env.guards += [guard(read(e, names), SLoc(None, None), False) for e in facts["guards"]]
    env.divisible.update(read(e, names) for e in facts["divisible"])
    for name, found in facts["asserts"]:
        made = [RuntimeAssert(read(e, names), msg, None) for e, msg in found]  # type: ignore[arg-type]
        env.deferred_runtime_asserts[names[name] if name else None] = made
        env.num_deferred_runtime_asserts += len(made)
    return mode


@contextmanager
def trusting(mode: FakeTensorMode) -> Iterator[None]:
    """Tensors that are made inside teach the ShapeEnv nothing."""
    with mode, mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext():
        yield


def scalar(value: Any, mode: FakeTensorMode, kind: type) -> Any:
    """The SymInt, SymFloat or SymBool (kind: int, float or bool) of a stored expression."""
    env = mode.shape_env
    assert env is not None, "a fake mode without a ShapeEnv"
    expr = read(value, symbols(mode))
    hint = expr.xreplace(backed_values(env))
    wrapper = {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}[kind]
    known = kind(hint) if not hint.free_symbols else None
    return wrapper(SymNode(expr, env, kind, known))  # type: ignore[no-untyped-call]


def symbols(mode: FakeTensorMode) -> dict[str, sympy.Symbol]:
    """The symbols of a restored ShapeEnv by name."""
    assert mode.shape_env is not None, "a fake mode without a ShapeEnv"
    return {s.name: s for s in mode.shape_env.var_to_sources}


def _pairs(found: dict[Any, Any]) -> list[Any]:
    return sorted(([expression(k), expression(v)] for k, v in found.items()), key=str)


def expression(e: Any) -> Any:
    """A SymPy expression as plain data."""
    if isinstance(e, (bool, int)):
        return e
    if isinstance(e, sympy.logic.boolalg.BooleanAtom):
        return bool(e)
    if isinstance(e, sympy.Integer):
        return int(e)
    if isinstance(e, sympy.Symbol):
        return e.name
    for name, atom in _NAMED.items():
        if e is atom or e == atom:
            return {"named": name}
    if isinstance(e, sympy.Rational):
        return {"rational": [int(e.p), int(e.q)]}
    if isinstance(e, sympy.Float):
        return {"real": sympy.srepr(e)[len("Float('") :].partition("'")[0], "precision": e._prec}
    if _class(type(e).__name__) is None:
        raise ValueError(f"the size {e}")
    return [type(e).__name__, *map(expression, e.args)]


def _class(name: str) -> Any:
    """The class of SymPy's or of torch's expressions of that name; None if there is none."""
    found = (getattr(m, name, None) for m in (functions, numbers, sympy))
    made = next((f for f in found if isinstance(f, type)), None)
    return made if made is not None and issubclass(made, sympy.Basic) else None


def read(e: Any, names: dict[str, sympy.Symbol]) -> Any:
    """The expression of what `expression` gave. names: the symbols. Raises ValueError for what it
    did not give."""
    match e:
        case bool():
            return _TRUTH[e]
        case int():
            return sympy.Integer(e)
        case str() if e in names:
            return names[e]
        case {"named": str(name)} if name in _NAMED:
            return _NAMED[name]
        case {"rational": [int(p), int(q)]}:
            return sympy.Rational(p, q)
        case {"real": str(digits), "precision": int(precision)}:
            return sympy.Float(digits, precision=precision)
        case [str(name), *args] if (made := _class(name)) is not None:
            relation = issubclass(made, sympy.core.relational.Relational)
            as_it_was = {"evaluate": False} if relation else {}
            return made(*(read(a, names) for a in args), **as_it_was)
    raise ValueError(f"{e!r} is no stored expression")
