"""Named rewrites of bodies, all exact: the new node has the same value bit for bit (NaN payloads
aside) wherever the old one has one. Only a loose cast need not round where its value is widened
again.

A rule takes a node whose arguments are simplified already and returns its replacement, or None
where it does not match. `Simplifier` applies the rules to a fixed point, bottom-up, and remembers
what it has done. On floats x + 0 is not x (for -0.0), so no such rule is here.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Iterable
from fractions import Fraction

from plait.ir import expr
from plait.ir.checks import Bound
from plait.ir.dtypes import DType, b1, bf16, f16, f32, f64, i64
from plait.ir.expr import Atom, Expr, Size
from plait.ir.loops import LOOSE, Attr, Load, Node, const, index_exprs, is_arg, node, with_args

Rule = Callable[["Simplifier", Node], Node | None]

_MANTISSA = {f16: 11, bf16: 8, f32: 24, f64: 53}
_EXPONENT = {f16: 5, bf16: 8, f32: 8, f64: 11}


def preserves(a: DType, b: DType) -> bool:
    """Whether every value of dtype a is a value of dtype b."""
    if a in (b, b1):
        return True
    if a.is_float:
        if not b.is_float:
            return False
        return _MANTISSA[a] <= _MANTISSA[b] and _EXPONENT[a] <= _EXPONENT[b]
    bits = a.nbytes * 8 - (a.kind == "i")
    if b.is_float:
        return bits <= _MANTISSA[b] and bits < 1 << (_EXPONENT[b] - 1)
    if b == b1 or (a.kind == "i" and b.kind == "u"):
        return False
    return bits <= b.nbytes * 8 - (b.kind == "i")


# ----------------------------------------------------------------------------------------- matching
def _const(n: Node) -> bool | int | float | None:
    if n.op == "const":
        assert isinstance(n.attr, (bool, int, float)), n
        return n.attr
    return None


def _is(n: Node, value: bool | int | float) -> bool:
    """Whether n is that constant; -0.0 is not 0.0."""
    c = _const(n)
    return c is not None and c == value and math.copysign(1, c) == math.copysign(1, value)


def _integer(n: Node) -> tuple[Size, tuple[Node, ...]] | None:
    """(expression, its arguments) of an i64 node that is an integer expression or constant."""
    if n.dtype != i64:
        return None
    if n.op == "index":
        return index_exprs(n)[0], n.args
    if n.op == "const":
        assert isinstance(n.attr, int), n
        return int(n.attr), ()
    return None


def _pair(n: Node) -> tuple[Size, Size, tuple[Node, ...]] | None:
    """Two integer expressions over one argument list, from a node's two arguments."""
    x, y = _integer(n.args[0]), _integer(n.args[1])
    if x is None or y is None or (x[1] and y[1] and x[1] != y[1]):
        return None
    return x[0], y[0], x[1] or y[1]


def _index(e: Size, args: tuple[Node, ...]) -> Node:
    """The i64 node of an expression; arguments that it does not use any more are left out."""
    if isinstance(e, int):
        return const(e, i64)
    used = sorted({int(a.name[1:]) for a in expr.free_symbols(e) if is_arg(a)})
    if len(used) < len(args):
        env: dict[Atom, Size] = {}
        for a in expr.free_symbols(e):
            if is_arg(a):
                k = used.index(int(a.name[1:]))
                env[a] = expr.symbol(f"${k}", a.lo, a.hi, a.extent)
        e = expr.substitute(e, env)
        args = tuple(args[k] for k in used)
    return node("index", args, e, i64)


# ----------------------------------------------------------------------------------------- integers
_INDEX_OPS: dict[str, Callable[[Size, Size], Size]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
}


def index_arithmetic(s: Simplifier, n: Node) -> Node | None:
    if n.dtype != i64:
        return None
    found = _pair(n)
    return None if found is None else _index(_INDEX_OPS[n.op](found[0], found[1]), found[2])


def index_division(s: Simplifier, n: Node) -> Node | None:
    if n.dtype != i64:
        return None
    found = _pair(n)
    if found is None or expr.bounds(found[1])[0] <= 0:
        return None
    signs_agree = expr.known_nonneg(found[0])
    if n.op in ("truncdiv", "rem") and not signs_agree:
        return None
    a, b, symbols = found
    return _index(a // b if n.op in ("floordiv", "truncdiv") else a % b, symbols)


_COMPARE: dict[str, Callable[[Size, Size], Size]] = {
    **{op: expr.BUILD[op] for op in ("eq", "ne", "lt", "le")},
    "gt": lambda a, b: expr.compare("lt", b, a),
    "ge": lambda a, b: expr.compare("le", b, a),
}


def index_comparison(s: Simplifier, n: Node) -> Node | None:
    found = _pair(n)
    if found is None:
        return None
    value = _COMPARE[n.op](found[0], found[1])
    return const(bool(value), b1) if isinstance(value, int) else None


def index_negated(s: Simplifier, n: Node) -> Node | None:
    found = _integer(n.args[0])
    return None if found is None else _index(-found[0], found[1])


def index_extreme(s: Simplifier, n: Node) -> Node | None:
    found = _pair(n)
    if found is None:
        return None
    a, b, _ = found
    if expr.compare("le", a, b) == 1:
        return n.args[0] if n.op == "min" else n.args[1]
    if expr.compare("le", b, a) == 1:
        return n.args[1] if n.op == "min" else n.args[0]
    return None


def bounded_for_sure(s: Simplifier, n: Node) -> Node | None:
    found = _integer(n.args[0])
    assert isinstance(n.attr, Bound), n
    if found is not None and expr.known_nonneg(found[0]) and expr.known_lt(found[0], n.attr.size):
        return n.args[0]
    low, high = _values(n.args[0])
    if low >= 0 and isinstance(n.attr.size, int) and high < n.attr.size:
        return n.args[0]
    return _always_checked(n)


def value_comparison(s: Simplifier, n: Node) -> Node | None:
    if not n.args[0].dtype.is_int or _INDEXED & {a.op for a in n.args}:
        return None
    (low, high), (least, most) = map(_values, n.args)
    if n.op == "lt":
        return const(True, b1) if high < least else const(False, b1) if low >= most else None
    return const(True, b1) if high <= least else const(False, b1) if low > most else None


_INDEXED = {"index"}  # which other rules compare
_DEEP = 8  # ops below a value that are looked at


def _values(n: Node, deep: int = _DEEP) -> tuple[int, int]:
    """The least and the greatest value that an integer node may have."""
    bits = 1 if n.dtype == b1 else 8 * n.dtype.nbytes
    all_ = (
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if n.dtype.kind == "i" else (0, (1 << bits) - 1)
    )
    if n.op == "const":
        assert isinstance(n.attr, (bool, int)), n
        return int(n.attr), int(n.attr)
    if not deep or n.op not in ("cast", "and", "shr", "where"):
        return all_
    args = n.args[1:] if n.op == "where" else n.args
    if any(a.dtype.is_float or a.dtype.kind not in "iub" for a in args):
        return all_
    found = [_values(a, deep - 1) for a in args]
    if n.op == "cast":
        ((low, high),) = found
        return (low, high) if all_[0] <= low and high <= all_[1] else all_
    if n.op == "where":
        return min(low for low, _ in found), max(high for _, high in found)
    if n.op == "and":
        tops = [high for low, high in found if low >= 0]
        return (0, min(tops)) if tops else all_
    (low, high), (shift, same) = found
    return (low >> shift, high >> shift) if shift == same and 0 <= shift < bits else all_


def nonzero_for_sure(s: Simplifier, n: Node) -> Node | None:
    value = n.args[0]
    found = _integer(value)
    if (value.op == "const" and value.attr) or (
        found is not None and not expr.may_be_zero(found[0])
    ):
        return value
    return _always_checked(n)


def _always_checked(n: Node) -> Node | None:
    """A check whose mask holds everywhere, without the mask."""
    if len(n.args) == 2 and _is(n.args[1], True):
        return node(n.op, n.args[:1], n.attr, n.dtype)
    return None


def known_arguments(s: Simplifier, n: Node) -> Node | None:
    """A `$k` whose argument is an integer expression becomes that expression."""
    masked = isinstance(n.attr, Load) and n.attr.masked
    args = n.args[:-1] if masked else n.args
    known = {k: found for k, a in enumerate(args) if (found := _integer(a)) is not None}
    if not known:
        return None
    kept: list[Node] = []
    for k, arg in enumerate(args):
        for inner in known[k][1] if k in known else (arg,):
            if inner not in kept:
                kept.append(inner)
    exprs = []
    for e in index_exprs(n):
        env: dict[Atom, Size] = {}
        for a in expr.free_symbols(e) if isinstance(e, Expr) else ():
            if is_arg(a):
                k = int(a.name[1:])
                found = known.get(k)
                if found is None:
                    env[a] = expr.symbol(f"${kept.index(args[k])}", a.lo, a.hi, a.extent)
                else:
                    env[a] = _renumbered(found, kept)
        exprs.append(expr.substitute(e, env))
    if n.op == "index":
        return _index(exprs[0], tuple(kept))
    assert isinstance(n.attr, Load), n
    rest = n.args[-1:] if masked else ()
    return node("load", (*kept, *rest), Load(n.attr.buf, tuple(exprs), masked), n.dtype)


def _renumbered(found: tuple[Size, tuple[Node, ...]], kept: list[Node]) -> Size:
    e, args = found
    env: dict[Atom, Size] = {}
    for a in expr.free_symbols(e) if isinstance(e, Expr) else ():
        if is_arg(a):
            k = kept.index(args[int(a.name[1:])])
            env[a] = expr.symbol(f"${k}", a.lo, a.hi, a.extent)
    return expr.substitute(e, env)


def mask_known(s: Simplifier, n: Node) -> Node | None:
    if not isinstance(n.attr, Load) or not n.attr.masked:
        return None
    mask = _const(n.args[-1])
    if mask is None:
        return None
    if not mask:
        return const(0, n.dtype)
    return node("load", n.args[:-1], Load(n.attr.buf, n.attr.index), n.dtype)


# -------------------------------------------------------------------------------------------- logic
def logic(s: Simplifier, n: Node) -> Node | None:
    """and, or, xor of b1 with a constant or with itself."""
    if n.dtype != b1:
        return None
    a, b = n.args
    if _const(a) is not None:
        a, b = b, a
    c = _const(b)
    if a == b:
        return const(False, b1) if n.op == "xor" else a
    if c is None:
        return None
    if n.op == "and":
        return a if c else b
    if n.op == "or":
        return b if c else a
    return s.make("not", a) if c else a


def negation(s: Simplifier, n: Node) -> Node | None:
    (a,) = n.args
    if a.op == n.op:
        return a.args[0]
    c = _const(a)
    return const(not c, b1) if c is not None and n.dtype == b1 else None


def where_decided(s: Simplifier, n: Node) -> Node | None:
    cond, a, b = n.args
    c = _const(cond)
    if c is not None:
        return a if c else b
    if a == b:
        return a
    if n.dtype == b1 and _is(a, True) and _is(b, False):
        return cond
    return None


def where_nested(s: Simplifier, n: Node) -> Node | None:
    cond, a, b = n.args
    if a.op == "where" and a.args[0] == cond:
        return s.make("where", cond, a.args[1], b)
    if b.op == "where" and b.args[0] == cond:
        return s.make("where", cond, a, b.args[2])
    return None


def where_not(s: Simplifier, n: Node) -> Node | None:
    cond, a, b = n.args
    return s.make("where", cond.args[0], b, a) if cond.op == "not" else None


def turned_comparison(s: Simplifier, n: Node) -> Node | None:
    return s.make("lt" if n.op == "gt" else "le", n.args[1], n.args[0])


_OPPOSITE = {"lt": "le", "le": "lt", "eq": "ne", "ne": "eq"}


def _opposite(c: Node) -> Node | None:
    """The comparison that holds just where c does not, among integers (a NaN breaks both)."""
    if c.op not in _OPPOSITE or c.args[0].dtype.is_float:
        return None
    args = c.args if c.op in ("eq", "ne") else c.args[::-1]
    return node(_OPPOSITE[c.op], args)


def not_of_comparison(s: Simplifier, n: Node) -> Node | None:
    found = _opposite(n.args[0])
    return None if found is None else s.make(found.op, *found.args)


def where_opposite(s: Simplifier, n: Node) -> Node | None:
    cond, a, b = n.args
    other = _opposite(cond)
    if other is None:
        return None
    if b.op == "where" and b.args[0] == other:
        return s.make("where", cond, a, b.args[1])
    if a.op == "where" and a.args[0] == other:
        return s.make("where", cond, a.args[2], b)
    return None


# -------------------------------------------------------------------------------------------- casts
def cast_of_cast(s: Simplifier, n: Node) -> Node | None:
    (a,) = n.args
    if a.op != "cast":
        return None
    x = a.args[0]
    if preserves(x.dtype, a.dtype) or (a.attr == LOOSE and preserves(x.dtype, n.dtype)):
        return x if x.dtype == n.dtype else s.cast(x, n.dtype)
    return None


def cast_of_const(s: Simplifier, n: Node) -> Node | None:
    c = _const(n.args[0])
    if c is None:
        return None
    if n.args[0].dtype.is_float:
        c = _rounded(float(c), n.args[0].dtype)
        if c is None or not n.dtype.is_float:
            return None
        return const(c, n.dtype)
    if n.dtype.is_float:
        return const(float(c), n.dtype) if abs(c) <= 1 << 53 else None
    if n.dtype == b1:
        return const(bool(c), b1)
    low = -(1 << (n.dtype.nbytes * 8 - 1)) if n.dtype.kind == "i" else 0
    high = (1 << (n.dtype.nbytes * 8 - (n.dtype.kind == "i"))) - 1
    return const(int(c), n.dtype) if low <= c <= high else None


def _rounded(c: float, dtype: DType) -> float | None:
    """c as dtype holds it; None where that is not simple."""
    if dtype == f64:
        return c
    if dtype == f32:
        try:
            return float(struct.unpack("f", struct.pack("f", c))[0])
        except OverflowError:
            return None
    return c if abs(c) <= 128 and Fraction(c).denominator <= 64 else None


# --------------------------------------------------------------------------------------- arithmetic
def times_one(s: Simplifier, n: Node) -> Node | None:
    a, b = n.args
    if _is(b, 1):
        return a
    if n.op == "mul" and _is(a, 1):
        return b
    return None


def plus_nothing(s: Simplifier, n: Node) -> Node | None:
    """i + 0, and on floats x - 0.0 and x + -0.0."""
    a, b = n.args
    none = 0 if n.dtype.is_int else 0.0 if n.op == "sub" else -0.0
    if _is(b, none):
        return a
    return b if n.op == "add" and _is(a, none) else None


def divided_by_power(s: Simplifier, n: Node) -> Node | None:
    """x / 2^k -> x * 2^-k where both are normal numbers."""
    a, b = n.args
    c = _const(b)
    if c is None or c == 0 or math.isinf(c) or math.isnan(c) or n.dtype not in (f32, f64):
        return None
    mantissa, exponent = math.frexp(abs(c))
    if mantissa != 0.5 or not -100 < exponent < 100:
        return None
    return s.make("mul", a, const(1 / float(c), n.dtype))


def same_twice(s: Simplifier, n: Node) -> Node | None:
    return n.args[0] if n.args[0] == n.args[1] else None


RULES: list[tuple[str, tuple[str, ...], Rule]] = [
    ("e1 op e2 -> one expression", ("add", "sub", "mul"), index_arithmetic),
    ("e1 // e2, e1 % e2 -> one expression", ("floordiv", "truncdiv", "mod", "rem"), index_division),
    ("-e -> one expression", ("neg",), index_negated),
    ("e1 < e2 decided by ranges", tuple(_COMPARE), index_comparison),
    ("i < j decided by the values that both can have", ("lt", "le"), value_comparison),
    ("min, max decided by ranges", ("min", "max"), index_extreme),
    ("bounded(e) in range -> e", ("bounded",), bounded_for_sure),
    ("nonzero(e) for e > 0 -> e", ("nonzero",), nonzero_for_sure),
    ("load[$k](e) -> load[e]", ("load", "index"), known_arguments),
    ("a masked load whose mask is known", ("load",), mask_known),
    ("b and true -> b, and the like", ("and", "or", "xor"), logic),
    ("not not b -> b, - -x -> x", ("not", "neg"), negation),
    ("where(known, a, b), where(c, a, a)", ("where",), where_decided),
    ("where(c, where(c, a, _), b) -> where(c, a, b)", ("where",), where_nested),
    ("where(c, a, where(not c, b, _)) -> where(c, a, b)", ("where",), where_opposite),
    ("a > b -> b < a, a >= b -> b <= a", ("gt", "ge"), turned_comparison),
    ("not (a < b) -> b <= a, and the like", ("not",), not_of_comparison),
    ("where(not c, a, b) -> where(c, b, a)", ("where",), where_not),
    ("cast of a cast that kept the value", ("cast",), cast_of_cast),
    ("cast of a constant", ("cast",), cast_of_const),
    ("x * 1 -> x, x / 1 -> x", ("mul", "truediv", "floordiv", "truncdiv"), times_one),
    ("i + 0 -> i, x - 0.0 -> x", ("add", "sub"), plus_nothing),
    ("x / 2^k -> x * 2^-k", ("truediv",), divided_by_power),
    ("min(x, x) -> x", ("min", "max", "fmin", "fmax"), same_twice),
]

_BY_OP: dict[str, list[Rule]] = {}
for _name, _ops, _rule in RULES:
    for _op in _ops:
        _BY_OP.setdefault(_op, []).append(_rule)


class Simplifier:
    """Applies the rules. One serves a whole program: bodies that share nodes are simplified once.
    kept: nodes that stay as they are."""

    def __init__(self, kept: Iterable[Node] = ()) -> None:
        self._done: dict[Node, Node] = {n: n for n in kept}

    def __call__(self, root: Node) -> Node:
        """root simplified."""
        done = self._done
        stack = [root]
        while stack:
            n = stack[-1]
            if n in done:
                stack.pop()
                continue
            if n.args and (missing := [a for a in n.args if a not in done]):
                stack.extend(reversed(missing))
                continue
            stack.pop()
            out = self._at(with_args(n, tuple([done[a] for a in n.args])))
            done[n] = out
            done[out] = out
        return done[root]

    def make(self, op: str, *args: Node, attr: Attr = None) -> Node:
        """A simplified node on simplified arguments."""
        return self._at(node(op, args, attr))

    def cast(self, x: Node, dtype: DType) -> Node:
        """A simplified cast of a simplified node."""
        return self._at(node("cast", (x,), None, dtype))

    def _at(self, n: Node) -> Node:
        """n, whose arguments are simplified, to a fixed point."""
        while True:
            for rule in _BY_OP.get(n.op, ()):
                found = rule(self, n)
                if found is not None and found != n:
                    n = found
                    break
            else:
                return n
