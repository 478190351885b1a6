"""Arithmetic: every function builds an expression and simplifies it at once.

Division and remainder are Python's (towards minus infinity); divisors are positive. The operators
of expressions are set at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd

from plait.ir.expr.core import INF, Bound, Expr, Mono, Size, Terms, function, intern, memo
from plait.ir.expr.ranges import bounds, known_le, known_lt, known_nonneg
from plait.runtime.functions import FUNCTIONS


def _mono_key(mono: Mono) -> tuple[str, ...]:
    return (mono[0].key,) if len(mono) == 1 else tuple([a.key for a in mono])


def from_terms(const: int, acc: Mapping[Mono, int]) -> Size:
    """The sum of const and coefficient * monomial, in order, without terms that are 0."""
    items = [(m, c) for m, c in acc.items() if c]
    if len(items) > 1:
        items.sort(key=lambda t: _mono_key(t[0]))
    return _ordered_terms(const, tuple(items))


def _ordered_terms(const: int, terms: Terms) -> Size:
    """The same of terms in order."""
    if len(terms) > 1:
        for mono, _ in terms:
            for atom in mono:
                if atom.kind == "mod":
                    joined = _join_div_mod(const, terms)
                    return intern(const, terms) if joined is None else joined
    return intern(const, terms)


def _join_div_mod(const: int, terms: Terms) -> Size | None:
    """c*(x % b) + c*b*(x // b) -> c*x, and c*(x % b) + c*b*((x // b) % a) -> c*(x % (a*b)); or
    None."""
    for i, (mono, c) in enumerate(terms):
        for k, atom in enumerate(mono):
            if atom.kind != "mod":
                continue
            x, b = atom.a, atom.b
            rest = mono[:k] + mono[k + 1 :]
            outer = intern(0, ((rest, c),)) if rest else c
            quotient = x // b
            want = outer * b * quotient
            others = intern(const, terms[:i] + terms[i + 1 :])
            if isinstance(want, Expr) and _has_terms(others, want):
                return others - want + outer * x
            for m2, _ in terms:
                for a2 in m2:
                    if a2.kind != "mod" or a2.a != quotient:
                        continue
                    want = outer * b * function("mod", a2.a, a2.b)
                    if isinstance(want, Expr) and _has_terms(others, want):
                        whole = x % (a2.b * b)
                        return others - want + outer * whole
    return None


def _has_terms(e: Size, part: Expr) -> bool:
    if not isinstance(e, Expr):
        return False
    have = dict(e.terms)
    return all(have.get(m) == c for m, c in part.terms)


def add(a: Size, b: Size) -> Size:
    """a + b."""
    if isinstance(a, int):
        if isinstance(b, int):
            return a + b
        return b if a == 0 else intern(b.const + a, b.terms)
    if isinstance(b, int):
        return a if b == 0 else intern(a.const + b, a.terms)
    return _sum(a, b, 1)


def _sum(a: Expr, b: Expr, times: int) -> Size:
    """a + times * b."""
    acc = dict(a.terms)
    for m, c in b.terms:
        acc[m] = acc.get(m, 0) + c * times
    const = a.const + b.const * times
    if len(acc) > len(a.terms):
        return from_terms(const, acc)
    return _ordered_terms(const, tuple([(m, c) for m, c in acc.items() if c]))


def mul(a: Size, b: Size) -> Size:
    """a * b."""
    if isinstance(a, int):
        a, b = b, a
    if isinstance(a, int):
        assert isinstance(b, int), b
        return a * b
    if isinstance(b, int):
        if b == 1:
            return a
        if b == 0:
            return 0
        return intern(a.const * b, tuple([(m, c * b) for m, c in a.terms]))
    if not a.const and not b.const and len(a.terms) == len(b.terms) == 1:
        ((m1, c1),), ((m2, c2),) = a.terms, b.terms
        return intern(0, ((tuple(sorted(m1 + m2, key=lambda t: t.key)), c1 * c2),))
    acc: dict[Mono, int] = {}
    for m1, c1 in (((), a.const), *a.terms):
        for m2, c2 in (((), b.const), *b.terms):
            if c1 and c2:
                m = tuple(sorted(m1 + m2, key=lambda t: t.key)) if m1 and m2 else m1 + m2
                acc[m] = acc.get(m, 0) + c1 * c2
    const = acc.pop((), 0)
    return from_terms(const, acc)


def _divide_mono(mono: Mono, c: int, by: Mono, by_c: int) -> tuple[Mono, int] | None:
    """(c * mono) / (by_c * by) if exact."""
    if c % by_c:
        return None
    rest = list(mono)
    for a in by:
        if a not in rest:
            return None
        rest.remove(a)
    return tuple(rest), c // by_c


def split(a: Expr, b: Size) -> tuple[Size, Size]:
    """(q, r) with a == b*q + r, where q takes every term that b divides exactly."""
    if isinstance(b, int):
        q_terms = tuple((m, c // b) for m, c in a.terms if c % b == 0)
        r_terms = tuple((m, c) for m, c in a.terms if c % b)
        return intern(a.const // b, q_terms), intern(a.const % b, r_terms)
    if b.const == 0 and len(b.terms) == 1:
        by, by_c = b.terms[0]
        q: dict[Mono, int] = {}
        r: dict[Mono, int] = {}
        for m, c in a.terms:
            d = _divide_mono(m, c, by, by_c)
            if d is None:
                r[m] = c
            else:
                q[d[0]] = q.get(d[0], 0) + d[1]
        return from_terms(q.pop((), 0), q), from_terms(a.const, r)
    # A divisor with several terms: try the multiple suggested by its leading term.
    lead, lead_c = max(b.terms, key=lambda t: (len(t[0]), _mono_key(t[0])))
    quotient: Size = 0
    rest: Size = a
    for m, c in a.terms:
        d = _divide_mono(m, c, lead, lead_c)
        if d is None:
            continue
        step = from_terms(0, {d[0]: d[1]}) if d[0] else d[1]
        after = rest - step * b
        if _n_terms(after) < _n_terms(rest):
            quotient, rest = quotient + step, after
    return quotient, rest


def _n_terms(e: Size) -> int:
    return int(e != 0) if isinstance(e, int) else len(e.terms) + int(e.const != 0)


def floordiv(a: Size, b: Size) -> Size:
    """a // b for b > 0. Raises ZeroDivisionError for b == 0."""
    if isinstance(b, int):
        if isinstance(a, int):
            return a // b
        if b == 1:
            return a
        if b <= 0:
            raise ZeroDivisionError(f"({a}) // {b}: divisors must be positive")
    if a == 0:
        return 0
    if a == b:
        return 1
    key = ("div", a, b)
    found = memo.get(key)
    if found is None:
        found = memo[key] = _floordiv(a, b)
    return found


def _floordiv(a: Size, b: Size) -> Size:
    if isinstance(a, int):
        return 0 if 0 <= a and known_lt(a, b) else function("div", a, b)
    q, r = split(a, b)
    if r == 0 or (known_nonneg(r) and known_lt(r, b)):
        return q
    if q != 0:
        return q + r // b
    if isinstance(b, int):
        lo, hi = bounds(a)
        if -INF < lo and hi < INF and lo // b == hi // b:
            return int(lo // b)
        g = gcd(b, *(c for _, c in a.terms))
        if g > 1:  # floor(x / (g*m)) == floor(floor(x / g) / m)
            return intern(a.const // g, tuple((m, c // g) for m, c in a.terms)) // (b // g)
        if (coarse := _coarse(a, b)) is not None:
            return coarse[1] // (b // coarse[0])
    else:
        common = _common_factor(a, b)
        if common is not None:
            return common[0] // common[1]
    if a.const == 0 and len(a.terms) == 1 and a.terms[0][1] == 1 and len(a.terms[0][0]) == 1:
        inner = a.terms[0][0][0]
        if inner.kind == "div":
            return inner.a // (inner.b * b)
        if inner.kind == "mod":  # (x % (m*b)) // b == (x // b) % m
            m, rest = (
                (inner.b // b, inner.b % b)
                if isinstance(inner.b, int) and isinstance(b, int)
                else (split(inner.b, b) if isinstance(inner.b, Expr) else (0, 1))
            )
            if rest == 0 and m != 0:
                return inner.a // b % m
    return function("div", a, b)


def _coarse(a: Expr, b: int) -> tuple[int, Size, Size] | None:
    """(g, y, low) with a == g*y + low, 0 <= low < g and g a divisor of b: a // b == y // (b //
    g)."""
    steps = sorted({gcd(b, c) for _, c in a.terms} - {1}, reverse=True)
    parts = ((g, *split(a, g)) for g in steps)
    return next((p for p in parts if known_nonneg(p[2]) and known_lt(p[2], p[0])), None)


def _common_factor(a: Expr, b: Expr) -> tuple[Size, Size, Size, Size] | None:
    """(q, b', f, low) with a == f*q + low, b == f*b' and 0 <= low < f, where f is a symbol of b:
    a // b == q // b'."""
    if b.const or len(b.terms) != 1:
        return None
    for atom in b.terms[0][0]:
        f = atom.expr
        q, low = split(a, f)
        if q != 0 and known_nonneg(low) and known_lt(low, f):
            return q, split(b, f)[0], f, low
    return None


def mod(a: Size, b: Size) -> Size:
    """a % b for b > 0. Raises ZeroDivisionError for b == 0."""
    if isinstance(b, int):
        if isinstance(a, int):
            return a % b
        if b == 1:
            return 0
        if b <= 0:
            raise ZeroDivisionError(f"({a}) % {b}: divisors must be positive")
    if a == 0 or a == b:
        return 0
    key = ("mod", a, b)
    found = memo.get(key)
    if found is None:
        found = memo[key] = _mod(a, b)
    return found


def _mod(a: Size, b: Size) -> Size:
    if isinstance(a, int):
        return a if 0 <= a and known_lt(a, b) else function("mod", a, b)
    _, r = split(a, b)
    if r == 0:
        return 0
    if known_nonneg(r) and (known_lt(r, b) or r // b == 0):
        return r
    if isinstance(r, int):
        return r % b
    inner = _drop_inner_mod(r, b)
    if inner is not None:
        return inner % b
    if isinstance(b, int):
        g = gcd(b, *(c for _, c in r.terms))
        if g > 1:  # x == g*y + c, 0 <= c < g: x % (g*m) == g*(y % m) + c
            y = intern(r.const // g, tuple((m, c // g) for m, c in r.terms))
            return y % (b // g) * g + r.const % g
        if (coarse := _coarse(r, b)) is not None:
            g, high, low = coarse
            return high % (b // g) * g + low
    elif (common := _common_factor(r, b)) is not None:
        q, rest, f, low = common
        return q % rest * f + low
    return function("mod", r, b)


def _drop_inner_mod(r: Expr, b: Size) -> Size | None:
    """r with one c*(x % m) replaced by c*x where b divides c*m (which changes nothing modulo b)."""
    for i, (mono, c) in enumerate(r.terms):
        if len(mono) == 1 and mono[0].kind == "mod":
            step = mono[0].b * c
            rest = step % b if isinstance(step, int) and isinstance(b, int) else (
                split(step, b)[1] if isinstance(step, Expr) else 1)  # fmt: skip
            if rest == 0:
                return intern(r.const, r.terms[:i] + r.terms[i + 1 :]) + mono[0].a * c
    return None


def _ordered(kind: str, a: Size, b: Size) -> Size:
    return function(kind, *sorted((a, b), key=str))


def smin(a: Size, b: Size) -> Size:
    """min(a, b)."""
    return a if known_le(a, b) else b if known_le(b, a) else _ordered("min", a, b)


def smax(a: Size, b: Size) -> Size:
    """max(a, b)."""
    return b if known_le(a, b) else a if known_le(b, a) else _ordered("max", a, b)


def call(name: str, a: Size, b: Size = 0) -> Size:
    """A function of FUNCTIONS. Raises as it does, for constants."""
    if isinstance(a, int) and isinstance(b, int):
        return FUNCTIONS[name](a, b)
    return function(name, a, b)


def ceildiv(a: Size, b: Size) -> Size:
    """-(-a // b)."""
    return (a + (b - 1)) // b


def _values(e: Size) -> tuple[Bound, Bound]:
    """What e may be at run time: a constant any integer (torch asserts n <= 2 ** 64 - 4), all else
    64 bits."""
    lo, hi = bounds(e)
    return (lo, hi) if isinstance(e, int) else (max(lo, -(2**63)), min(hi, 2**63 - 1))


def compare(op: str, a: Size, b: Size) -> Size:
    """1 where `a op b`, else 0; op: 'eq', 'ne', 'lt', 'le'. Decided at once where ranges allow."""
    d = a - b
    (lo, hi), (alo, ahi), (blo, bhi) = bounds(d), _values(a), _values(b)
    lo, hi = max(lo, alo - bhi), min(hi, ahi - blo)
    same, differ = d == 0, lo > 0 or hi < 0
    if op == "le":
        yes, no = hi <= 0 or known_nonneg(-d), lo > 0
    elif op == "lt":
        yes, no = hi < 0 or known_nonneg(-d - 1), lo >= 0 or known_nonneg(d)
    else:
        yes, no = (same, differ) if op == "eq" else (differ, same)
    return 1 if yes else 0 if no else function(op, a, b)


def exact_div(a: Size, b: Size) -> Size | None:
    """q with a == b*q, where that is certain; else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if isinstance(a, int):
        return 0 if a == 0 else None
    q, r = split(a, b) if b != 0 else (0, 1)
    return q if r == 0 else None


def total(items: Iterable[Size]) -> Size:
    """The sum of items."""
    const, acc = 0, dict[Mono, int]()
    for i in items:
        if isinstance(i, int):
            const += i
            continue
        const += i.const
        for m, c in i.terms:
            acc[m] = acc.get(m, 0) + c
    return from_terms(const, acc)


def product(items: Iterable[Size]) -> Size:
    """The product of items (1 for none)."""
    out: Size = 1
    for i in items:
        out *= i
    return out


def numel(shape: Iterable[Size]) -> Size:
    """The number of elements of a shape."""
    return product(shape)


def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides, in elements. A dimension of size 0 counts as 1, as in PyTorch."""
    out: list[Size] = []
    step: Size = 1
    for s in reversed(shape):
        out.append(step)
        step *= (s or 1) if isinstance(s, int) else smax(s, 1)
    return tuple(reversed(out))


def _sub(a: Size, b: Size) -> Size:
    return _sum(a, b, -1) if isinstance(a, Expr) and isinstance(b, Expr) else add(a, mul(b, -1))


Expr.__add__ = Expr.__radd__ = add
Expr.__sub__ = _sub
Expr.__rsub__ = lambda a, b: _sub(b, a)
Expr.__mul__ = Expr.__rmul__ = mul
Expr.__neg__ = lambda a: mul(a, -1)
Expr.__floordiv__ = floordiv
Expr.__rfloordiv__ = lambda a, b: floordiv(b, a)
Expr.__mod__ = mod
Expr.__rmod__ = lambda a, b: mod(b, a)
