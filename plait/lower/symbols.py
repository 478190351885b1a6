"""The border to ShapeEnv and the only file of plait that meets SymPy.

Comes in: ints, SymInts, SymBools and SymFloats from `meta["val"]`. Goes out: our own integer
expressions (`to_size`), with the ranges that the ShapeEnv knows, or a float64 node of a loop body
(`to_scalar_node`). An expression that has no counterpart raises `Unsupported`. What functions other
than sums, products, quotients and bounds make (`int(n ** 0.5)`, `n & 3`) is a symbol of its own,
whose value is a call of `runtime/functions.py`: see `definitions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import CallMethodKey, DivideByKey, statically_known_true
from torch.utils._pytree import SequenceKey
from torch.utils._sympy import functions as sf
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import bound_sympy

from plait import compat
from plait.errors import InexpressibleSize, Unsupported
from plait.graph.edit import shape_env_of
from plait.ir import expr
from plait.ir.dtypes import b1, f64
from plait.ir.expr import INF, Expr, Size
from plait.ir.loops import Node, apply
from plait.ir.record import Recorder
from plait.runtime.functions import FUNCTIONS, bits

SymScalar = bool | int | float | torch.SymBool | torch.SymInt | torch.SymFloat
_Memo = dict[sympy.Basic, Size]

# One table a ShapeEnv: a symbol keeps the range that it had when it was first met, so that two
# graphs of one ShapeEnv (forward and backward) and two expressions of one graph name the same atom.
_memos: WeakKeyDictionary[object, _Memo] = WeakKeyDictionary()

_made: WeakKeyDictionary[object, dict[str, tuple[Expr, Expr]]] = (
    WeakKeyDictionary()
)  # symbols of our own, and values

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
    memo = _memos.get(shape_env)
    if memo is None:
        memo = _memos[shape_env] = {}
    try:
        return _size(term, memo, shape_env)
    except Unsupported as error:
        raise _of_symbols(error, term) from None


def _of_symbols(error: Unsupported, term: sympy.Basic) -> InexpressibleSize:
    names = tuple(sorted(s.name for s in term.free_symbols))
    return InexpressibleSize(error.what, where=error.where, hint=error.hint, symbols=names)


def forget(shape_env: object) -> None:
    """Drops what is remembered of a ShapeEnv, whose symbols have become numbers."""
    _memos.pop(shape_env, None)
    _made.pop(shape_env, None)


def _is_one(size: torch.SymInt) -> bool:
    """Whether tracing found that an expression of symbols is 1. It broadcasts then, so it must not
    pass for a size that varies. Symbols are replaced by what they are found to be, expressions are
    not."""
    return size.node.hint in (1, None) and statically_known_true(size == 1)


def unranged(condition: torch.SymBool) -> Size:
    """A condition as 0 or 1, decided by nothing that the ShapeEnv knows of it: it may know that
    from the condition. Symbols that guards make numbers are these: no input brings them."""
    env, e = condition.node.shape_env, condition.node.expr
    numbers: _Memo = {s: n for s in e.free_symbols if isinstance(n := to_size(s, env), int)}
    return _size(e, numbers, None)


def is_ragged(value: object) -> bool:
    """Whether value is the ragged size of a nested tensor: the name of its lengths, no number."""
    return isinstance(value, torch.SymInt) and bool(value.node.is_nested_int())


def is_symbolic(value: object) -> bool:
    """Whether value is a SymInt, SymBool or SymFloat."""
    return isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat))


def _size(e: sympy.Basic, memo: _Memo, env: Any) -> Size:
    found = memo.get(e)
    if found is None:
        found = memo[e] = _convert(e, memo, env)
    return found


def _convert(e: sympy.Basic, memo: _Memo, env: Any) -> Size:
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
    rule = _RULES.get(type(e))
    if rule is None:
        raise Unsupported(
            f"a size that is {e} ({type(e).__name__})",
            hint="compute it outside of the compiled function",
        )
    found = rule(e, lambda a: _size(a, memo, env))
    if env is None or not isinstance(found, Expr) or not (set(_kinds(found)) & FUNCTIONS.keys()):
        return found
    made = _made.setdefault(env, {})
    fn = expr.symbol(f"fn{len(made)}", *_range(e, env))
    made[str(fn)] = fn, found
    return fn


def _kinds(e: Expr) -> Iterator[str]:
    return (a.kind for mono, _ in e.terms for a in mono)


def _range(e: sympy.Basic, env: Any) -> tuple[float, float]:
    """What the ShapeEnv knows of the value of an expression."""
    try:
        found = bound_sympy(e, env.var_to_range)
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        KeyError,
        NotImplementedError,
        TypeError,
        ValueError,
    ):
        return -INF, INF
    return _bound(found.lower, -1), _bound(found.upper, 1)


def definitions(vals: Iterable[Any]) -> Mapping[str, tuple[Expr, Expr]]:
    """The symbols that stand for functions of sizes, by name, each with the function, and those to
    come: `to_size` adds to it.

    vals: fake inputs."""
    env = next((e for v in vals if (e := shape_env_of(v)) is not None), None)
    return {} if env is None else _made.setdefault(env, {})


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
    return n if n > 1 and _holds(sf.FloorDiv(s, n), 1, env) and _holds(sf.Mod(s, n), 0, env) else 0


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
    lo, hi = -INF, INF
    found = env.var_to_range.get(s) if env is not None else None
    if found is not None:
        lo, hi = _bound(found.lower, -1), _bound(found.upper, 1)
    if env is not None and s in env.size_like:
        lo = max(lo, 0)
    elif s.is_nonnegative:
        lo = max(lo, 0)
    return expr.symbol(s.name, lo=lo, hi=hi)


def _bound(value: Any, side: int) -> float:
    if not isinstance(value, sympy.Integer) or abs(int(value)) >= _FAR:
        return side * INF
    return int(value)


Sub = Callable[[Any], Size]


def _mul(e: Any, sub: Sub) -> Size:
    out: Size = 1
    den = 1
    for a in e.args:
        if isinstance(a, sympy.Rational) and not isinstance(a, sympy.Integer):
            out, den = out * int(a.p), den * int(a.q)
        else:
            out = out * sub(a)
    return out if den == 1 else out // den  # a size is integral, so this division is exact


def _pow(e: Any, sub: Sub) -> Size:
    base, exponent = e.args
    if isinstance(exponent, sympy.Integer) and int(exponent) < 0:
        raise Unsupported(f"a size that is {e}")
    if isinstance(exponent, sympy.Integer) and int(exponent) <= 16:
        return expr.product([sub(base)] * int(exponent))
    return expr.call("power", sub(base), sub(exponent))


def _floordiv(e: Any, sub: Sub) -> Size:
    return _divide(sub(e.args[0]), sub(e.args[1]))


def _divide(a: Size, b: Size) -> Size:
    if expr.bounds(b)[1] < 0:
        a, b = -a, -b
    return a // b


def _mod(e: Any, sub: Sub) -> Size:
    a, b = sub(e.args[0]), sub(e.args[1])
    if expr.bounds(b)[1] < 0:  # the sign of Python's remainder is the divisor's
        return -(-a % -b)
    return a % b


def _modular_indexing(e: Any, sub: Sub) -> Size:
    a, b, m = (sub(x) for x in e.args)
    return a // b % m


def _where(e: Any, sub: Sub) -> Size:
    c, a, b = (sub(x) for x in e.args)
    return b + c * (a - b)


def _piecewise(e: Any, sub: Sub) -> Size:
    out: Size = 0
    for value, cond in reversed(e.args):
        v, c = sub(value), sub(cond)
        out = v if c == 1 else out + c * (v - out)
    return out


def _compare(op: str, swap: bool) -> Callable[[Any, Sub], Size]:
    def rule(e: Any, sub: Sub) -> Size:
        if any(map(_is_float, e.args)):
            left, right = (_real(a, sub) for a in e.args)
            return expr.call(f"real_{op}", *((right, left) if swap else (left, right)))
        a, b = sub(e.args[0]), sub(e.args[1])
        return expr.compare(op, b, a) if swap else expr.compare(op, a, b)

    return rule


def _shift(name: str) -> Callable[[Any, Sub], Size]:
    def rule(e: Any, sub: Sub) -> Size:
        a, n = sub(e.args[0]), sub(e.args[1])
        if not isinstance(n, int) or not 0 <= n < 63:
            return expr.call(name, a, n)
        return a * (1 << n) if name == "shift_left" else a // (1 << n)

    return rule


def _from_float(mode: str) -> Callable[[Any, Sub], Size]:
    """Integers out of a float expression: by integers alone where it is exactly p/q of integer
    sizes."""

    def rule(e: Any, sub: Sub) -> Size:
        try:
            p, q = _fraction(e.args[0], sub)
        except Unsupported:
            return expr.call(mode, _real(e.args[0], sub))
        if mode == "round" or (mode == "trunc" and expr.bounds(p)[0] < 0):
            return expr.call(mode, _real(e.args[0], sub))
        return expr.ceildiv(p, q) if mode == "ceil" else p // q

    return rule


def _real(e: Any, sub: Sub) -> Size:
    """The word of a float expression, see `runtime/functions.py`."""
    if isinstance(e, sympy.Number):
        return bits(float(e))
    if isinstance(e, sf.IntTrueDiv):
        return expr.call("true_div", sub(e.args[0]), sub(e.args[1]))
    if isinstance(e, sf.RoundDecimal):
        return expr.call("real_round", _real(e.args[0], sub), sub(e.args[1]))
    if isinstance(e, sf.ToFloat):
        return expr.call("real", sub(e.args[0]))
    if type(e) in _REAL_UNARY:
        return expr.call(_REAL_UNARY[type(e)], _real(e.args[0], sub))
    if type(e) in _REAL_BINARY and _is_float(e):
        name = _REAL_BINARY[type(e)]
        return reduce(lambda a, b: expr.call(name, a, b), (_real(a, sub) for a in e.args))
    if _is_whole(e):
        return expr.call("real", sub(e))
    raise Unsupported(
        f"the float {e} ({type(e).__name__})", hint="compute it outside of the compiled function"
    )


def _is_whole(e: Any) -> bool:
    """Whether an expression is an integer: torch does not say so of functions of bits."""
    return bool(e.is_integer) or isinstance(e, _OF_BITS)


def _is_float(e: Any) -> bool:
    """Whether Python computes an expression as a float."""
    if isinstance(e, _INTEGRAL):
        return False
    number = isinstance(e, sympy.Symbol) and not e.is_integer
    return number or isinstance(e, _FLOATS) or any(map(_is_float, e.args))


def _fraction(e: Any, sub: Sub) -> tuple[Size, Size]:
    """e == p / q in exact arithmetic, q > 0."""
    if isinstance(e, sf.IntTrueDiv | sf.FloatTrueDiv):
        (p1, q1), (p2, q2) = (_fraction(a, sub) for a in e.args)
        return p1 * q2, q1 * p2
    if isinstance(e, sf.ToFloat):
        return sub(e.args[0]), 1
    if isinstance(e, sympy.Float | sympy.Rational):
        ratio = _ratio(float(e))
        return ratio.numerator, ratio.denominator
    if isinstance(e, sympy.Mul):
        ps, qs = zip(*(_fraction(a, sub) for a in e.args), strict=True)
        return expr.product(ps), expr.product(qs)
    if isinstance(e, sympy.Add):
        parts = [_fraction(a, sub) for a in e.args]
        den = expr.product(q for _, q in parts)
        return expr.total(p * (den // q) for p, q in parts), den
    if _is_whole(e):
        return sub(e), 1
    raise Unsupported(f"a size made from the float {e}")


def _ratio(c: float) -> Fraction:
    """The simple fraction that the float c stands for (17/10 for 1.7), if integers times c round to
    integers where integers times the fraction are some. Raises Unsupported otherwise."""
    ratio = Fraction(c).limit_denominator(1024)
    p, q = ratio.numerator, ratio.denominator
    if p / q != c or any(float(k * q) * c != k * p for k in range(1, 2049)):
        raise Unsupported(f"a size that is made with the float {c}")
    return ratio


def _bool_not(e: Any, sub: Sub) -> Size:
    return 1 - sub(e.args[0])


_REAL_UNARY = {
    **{
        getattr(sf, f"OpaqueUnaryFn_{name}"): name
        for name in FUNCTIONS
        if hasattr(sf, f"OpaqueUnaryFn_{name}")
    },
    sympy.Abs: "real_abs",
    sf.TruncToFloat: "real_trunc",
}
_REAL_BINARY = {
    sympy.Add: "real_add", sympy.Mul: "real_mul", sf.FloatTrueDiv: "real_div",
    sf.FloatPow: "real_power", sympy.Pow: "real_power", sf.Max: "real_max", sf.Min: "real_min",
    sympy.Max: "real_max", sympy.Min: "real_min",
}  # fmt: skip
_FLOATS = (
    sympy.Float, sf.ToFloat, sf.IntTrueDiv, sf.RoundDecimal, sf.FloatTrueDiv, sf.FloatPow,
    *(kind for kind in _REAL_UNARY if kind is not sympy.Abs),
)  # fmt: skip
_OF_BITS = (sf.BitwiseFn_bitwise_and, sf.BitwiseFn_bitwise_or, sf.BitwiseFn_bitwise_xor)
_INTEGRAL = (sf.RoundToInt, sf.CeilToInt, sf.FloorToInt, sf.TruncToInt, sympy.floor, sympy.ceiling)

_RULES: dict[type, Callable[[Any, Sub], Size]] = {
    sympy.Add: lambda e, sub: expr.total(sub(a) for a in e.args),
    sympy.Mul: _mul,
    sympy.Pow: _pow,
    sf.PowByNatural: _pow,
    sf.FloorDiv: _floordiv,
    sf.CleanDiv: _floordiv,
    sf.CeilDiv: lambda e, sub: expr.ceildiv(sub(e.args[0]), sub(e.args[1])),
    sf.Mod: _mod,
    sf.PythonMod: _mod,
    sympy.Mod: _mod,
    sf.ModularIndexing: _modular_indexing,
    sf.Max: lambda e, sub: reduce(expr.smax, map(sub, e.args)),
    sf.Min: lambda e, sub: reduce(expr.smin, map(sub, e.args)),
    sympy.Max: lambda e, sub: reduce(expr.smax, map(sub, e.args)),
    sympy.Min: lambda e, sub: reduce(expr.smin, map(sub, e.args)),
    sympy.Abs: lambda e, sub: expr.smax(sub(e.args[0]), -sub(e.args[0])),
    sf.Where: _where,
    sympy.Piecewise: _piecewise,
    sf.Identity: lambda e, sub: sub(e.args[0]),
    sf.LShift: _shift("shift_left"),
    sf.RShift: _shift("shift_right"),
    sf.BitwiseFn_bitwise_and: lambda e, sub: expr.call("bit_and", sub(e.args[0]), sub(e.args[1])),
    sf.BitwiseFn_bitwise_or: lambda e, sub: expr.call("bit_or", sub(e.args[0]), sub(e.args[1])),
    sf.BitwiseFn_bitwise_xor: lambda e, sub: expr.call("bit_xor", sub(e.args[0]), sub(e.args[1])),
    sf.RoundToInt: _from_float("round"),
    sf.CeilToInt: _from_float("ceil"),
    sf.FloorToInt: _from_float("floor"),
    sf.TruncToInt: _from_float("trunc"),
    sympy.floor: _from_float("floor"),
    sympy.ceiling: _from_float("ceil"),
    sympy.Eq: _compare("eq", False),
    sympy.Ne: _compare("ne", False),
    sympy.Lt: _compare("lt", False),
    sympy.Le: _compare("le", False),
    sympy.Gt: _compare("lt", True),
    sympy.Ge: _compare("le", True),
    sympy.And: lambda e, sub: expr.product(sub(a) for a in e.args),
    sympy.Or: lambda e, sub: reduce(expr.smax, map(sub, e.args)),
    sympy.Not: _bool_not,
}


def size_hints(vals: Iterable[Any], names: Iterable[str]) -> dict[str, int]:
    """What the symbols of these names are in the example inputs, as far as that is known. vals:
    fake inputs."""
    env = next((e for v in vals if (e := shape_env_of(v)) is not None), None)
    known = {} if env is None else compat.tracing.size_hints(env)
    return {name: known[name] for name in names if name in known}


# --------------------------------------------------------------------------------- unbacked symbols
@dataclass(frozen=True)
class Binding:
    """A number that a graph node makes when it runs.

    names: what tracing calls it. path: where in the node's result it is found: steps ('item', k),
    ('size', dim), ('stride', dim), ('offset', 0), ('divided', by), or none for a result that is the
    number itself.
    found: a symbol for what is found there, which may be any number. traced: what tracing takes it
    for: a symbol with a range, a constant or another expression."""

    names: tuple[str, ...]
    path: tuple[tuple[str, int], ...]
    found: Expr
    traced: Size


def bindings(node: torch.fx.Node) -> tuple[Binding, ...]:
    """The numbers that a graph node makes when it runs."""
    given = node.meta.get("unbacked_bindings")
    if not given:
        return ()
    env = shape_env_of(node.meta["val"])
    return tuple(_binding(raw, _steps(path), env) for raw, path in given.items())


def _binding(raw: sympy.Symbol, path: tuple[tuple[str, int], ...], env: Any) -> Binding:
    known = env.unbacked_renamings.get(raw, raw)  # made again when the graph was traced again
    if not raw.is_integer:
        found = expr.symbol(known.name)
        return Binding((known.name,), path, found, found)
    traced = to_size(env.replace(known), env)
    atom = traced.symbol if isinstance(traced, Expr) else None
    name = known.name if atom is not None and atom.name == known.name else f"{raw.name}_found"
    return Binding((raw.name, known.name), path, expr.symbol(name, lo=-INF), traced)


def deferred_asserts(env: Any) -> list[sympy.Basic]:
    """The conditions that tracing takes for granted of numbers found at run time."""
    return [a.expr for found in env.deferred_runtime_asserts.values() for a in found]


def is_found(symbol: sympy.Basic) -> bool:
    """Whether a symbol stands for an integer that is found at run time."""
    return isinstance(symbol, sympy.Symbol) and symbol_is_type(symbol, SymT.UNBACKED_INT)


def is_found_float(symbol: sympy.Basic) -> bool:
    """Whether a symbol stands for a float that is found at run time."""
    return isinstance(symbol, sympy.Symbol) and symbol_is_type(symbol, SymT.UNBACKED_FLOAT)


def with_found(e: sympy.Basic, found: Mapping[sympy.Basic, Size]) -> Size:
    """A condition as 0 or 1 where all of its symbols are what is found at run time, so that nothing
    that the ShapeEnv concludes from the condition decides it."""
    return _size(e, dict(found), None)


def _steps(path: Any) -> tuple[tuple[str, int], ...]:
    out: list[tuple[str, int]] = []
    method = ""
    for key in path:
        if isinstance(key, CallMethodKey):
            method = key.name
            if method == "storage_offset":
                out.append(("offset", 0))
        elif isinstance(key, SequenceKey):
            out.append((method or "item", key.idx))
            method = ""
        elif isinstance(key, DivideByKey):
            out.append(("divided", int(key.divisor)))
    return tuple(out)


# ------------------------------------------------------------------------------------------- floats
def to_word(e: Any, env: Any) -> Size:
    """The word of a float that sizes make, as a symbol."""
    return _size(_Word(e), _memos.setdefault(env, {}), env)


class _Word(sympy.Function):  # type: ignore[misc]  # SymPy has no types
    """The word of a float, as an integer."""

    is_integer = True


_RULES[_Word] = lambda e, sub: _real(e.args[0], sub)

Floats = Mapping[str, Callable[[Recorder], Node]]

_FLOAT_UNARY = {
    sf.OpaqueUnaryFn_sqrt: "sqrt", sf.OpaqueUnaryFn_exp: "exp", sf.OpaqueUnaryFn_log: "log",
    sf.OpaqueUnaryFn_log2: "log2", sf.OpaqueUnaryFn_sin: "sin", sf.OpaqueUnaryFn_cos: "cos",
    sf.OpaqueUnaryFn_tan: "tan", sf.OpaqueUnaryFn_asin: "asin", sf.OpaqueUnaryFn_acos: "acos",
    sf.OpaqueUnaryFn_atan: "atan", sf.OpaqueUnaryFn_sinh: "sinh", sf.OpaqueUnaryFn_cosh: "cosh",
    sf.OpaqueUnaryFn_tanh: "tanh", sf.OpaqueUnaryFn_asinh: "asinh", sf.TruncToFloat: "trunc",
    sympy.Abs: "abs",
}  # fmt: skip
_FLOAT_BINARY = {
    sympy.Add: "add", sympy.Mul: "mul", sf.IntTrueDiv: "truediv", sf.FloatTrueDiv: "truediv",
    sf.FloatPow: "pow", sympy.Pow: "pow", sf.Max: "max", sf.Min: "min", sympy.Max: "max",
    sympy.Min: "min",
}  # fmt: skip


def to_scalar_node(ops: Recorder, value: SymScalar, floats: Floats | None = None) -> Node:
    """value as an f64 node. floats: how to read float symbols that are values of tensors
    (`x.item()`).

    Raises InexpressibleSize for what loop bodies cannot express."""
    if isinstance(value, (bool, int, float)):
        return ops.const(float(value), f64)
    if isinstance(value, (torch.SymInt, torch.SymBool)):
        return ops.cast(ops.index(to_size(value)), f64)
    node = value.node
    try:
        return _float_node(ops, node.expr, node.shape_env, floats or {})
    except Unsupported as error:
        raise _of_symbols(error, node.expr) from None


def _float_node(ops: Recorder, e: Any, env: Any, floats: Floats) -> Node:
    if isinstance(e, sympy.Number):
        return ops.const(float(e), f64)
    if isinstance(e, sympy.Symbol) and e.name in floats:
        return ops.cast(floats[e.name](ops), f64)
    if isinstance(e, sf.ToFloat):
        return _float_node(ops, e.args[0], env, floats)
    if _is_whole(e) and all(s.name not in floats for s in e.free_symbols):
        return ops.cast(ops.index(to_size(e, env)), f64)
    if not any(s.name in floats for s in e.free_symbols) and e.has(sf.RoundDecimal):
        return ops.bitcast(ops.index(to_word(e, env)), f64)
    if type(e) in _FLOAT_UNARY:
        return apply(_FLOAT_UNARY[type(e)], _float_node(ops, e.args[0], env, floats))
    if type(e) in _FLOAT_BINARY:
        args = [_float_node(ops, a, env, floats) for a in e.args]
        return reduce(lambda a, b: apply(_FLOAT_BINARY[type(e)], a, b), args)
    raise Unsupported(
        f"the float {e} ({type(e).__name__})", hint="compute it outside of the compiled function"
    )


_COMPARED = {
    sympy.Eq: "eq", sympy.Ne: "ne", sympy.StrictLessThan: "lt", sympy.LessThan: "le",
    sympy.StrictGreaterThan: "gt", sympy.GreaterThan: "ge",
}  # fmt: skip
_JOINED = {sympy.And: "and", sympy.Or: "or"}


def to_truth(ops: Recorder, e: Any, env: Any, floats: Floats) -> Node:
    """A condition of floats and sizes as a b1 node.

    Raises Unsupported for what loop bodies cannot express."""
    if isinstance(e, sympy.Not):
        return ~to_truth(ops, e.args[0], env, floats)
    if type(e) in _JOINED:
        return reduce(
            partial(apply, _JOINED[type(e)]), (to_truth(ops, a, env, floats) for a in e.args)
        )
    if type(e) in _COMPARED:
        return apply(_COMPARED[type(e)], *(_float_node(ops, a, env, floats) for a in e.args))
    return ops.cast(ops.index(to_size(e, env)), b1)
