"""Integer expressions for sizes, strides and indices: interned, immutable, in an affine normal
form.

An expression is a constant plus a sum of coefficient * monomial; a monomial is a product of atoms:
symbols, floor divisions, remainders, minima, maxima and comparisons. A constant expression is
always a plain `int`, so `Size = int | Expr` and every function here takes and returns Sizes.
Building an expression simplifies it at once, from the ranges that symbols carry with them. Division
and remainder are Python's (towards minus infinity); divisors are positive.

Nothing here knows SymPy or torch: the border to ShapeEnv is `plait/lower/symbols.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import gcd
from typing import Any, TypeAlias, Union

from plait.runtime.functions import FUNCTIONS

Size: TypeAlias = Union[int, "Expr"]

_INF = float("inf")
RUN = 16  # elements side by side that count as contiguous
Bound: TypeAlias = float  # an int, or +-inf


class Atom:
    """A factor of a monomial. kind: 'sym', 'div', 'mod', 'min', 'max', 'eq', 'ne', 'lt', 'le', a
    name of FUNCTIONS.

    For 'sym', name/lo/hi/extent hold: lo <= value <= hi, and value < extent where extent is known
    (loop variables). For the others, a and b are the operands. key orders atoms and names them in
    text.
    """

    __slots__ = ("kind", "name", "lo", "hi", "extent", "a", "b", "key", "_hash", "_bounds")

    def __init__(
        self, kind: str, key: str, name: str = "", lo: Bound = -_INF, hi: Bound = _INF,
        extent: Size | None = None, a: Size = 0, b: Size = 0,
    ) -> None:  # fmt: skip
        self.kind, self.key, self.name = kind, key, name
        self.lo, self.hi, self.extent = lo, hi, extent
        self.a, self.b = a, b
        self._hash = hash((kind, key, lo, hi))
        self._bounds: tuple[Bound, Bound] | None = None

    @property
    def expr(self) -> Expr:
        """The expression that is this atom."""
        found = _intern(0, (((self,), 1),))
        assert isinstance(found, Expr), "it has a term"
        return found

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
    """An integer expression that is no constant: const + sum(coefficient * product of atoms)."""

    __slots__ = ("const", "terms", "_hash", "_key", "_bounds", "_free")

    def __init__(self, const: int, terms: Terms) -> None:
        self.const, self.terms = const, terms
        self._hash = hash((const, terms))
        self._key: str | None = None
        self._bounds: tuple[Bound, Bound] | None = None
        self._free: frozenset[Atom] | None = None

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

    def __add__(self, other: Size) -> Size:
        return add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Size) -> Size:
        return add(self, mul(other, -1))

    def __rsub__(self, other: Size) -> Size:
        return add(other, mul(self, -1))

    def __mul__(self, other: Size) -> Size:
        return mul(self, other)

    __rmul__ = __mul__

    def __neg__(self) -> Size:
        return mul(self, -1)

    def __floordiv__(self, other: Size) -> Size:
        return floordiv(self, other)

    def __rfloordiv__(self, other: Size) -> Size:
        return floordiv(other, self)

    def __mod__(self, other: Size) -> Size:
        return mod(self, other)

    def __rmod__(self, other: Size) -> Size:
        return mod(other, self)

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of {self} is not known at compile time; use known_* functions")

    def __repr__(self) -> str:
        if self._key is None:
            self._key = expr_text(self, lambda a: a.key)
        return self._key

    @property
    def symbol(self) -> Atom | None:
        """The symbol that this expression is, or None if it is anything else."""
        if self.const == 0 and len(self.terms) == 1:
            (mono, c) = self.terms[0]
            if c == 1 and len(mono) == 1 and mono[0].kind == "sym":
                return mono[0]
        return None


def expr_text(e: Size, atom: Callable[[Atom], str]) -> str:
    """An expression as text. atom: the text of an atom."""
    if isinstance(e, int):
        return str(e)
    parts = []
    for mono, c in e.terms:
        factors = [atom(a) for a in mono]
        if c == -1:
            factors[0] = "-" + factors[0]
        elif c != 1:
            factors.insert(0, str(c))
        parts.append("*".join(factors))
    if e.const:
        parts.append(str(e.const))
    return " + ".join(parts).replace("+ -", "- ")


# ---------------------------------------------------------------------------------------- interning
_atoms: dict[object, Atom] = {}
_exprs: dict[tuple[int, Terms], Expr] = {}
_memo: dict[tuple[str, Size, Size], Size] = {}


def interned() -> int:
    """How many expressions the intern table holds."""
    return len(_exprs)


def forget() -> None:
    """Drops the intern tables. Expressions made before stay valid and compare equal to later
    ones."""
    _atoms.clear()
    _exprs.clear()
    _memo.clear()


def _intern(const: int, terms: Terms) -> Size:
    if not terms:
        return const
    key = (const, terms)
    found = _exprs.get(key)
    if found is None:
        found = _exprs[key] = Expr(const, terms)
    return found


def symbol(name: str, lo: Bound = 0, hi: Bound = _INF, extent: Size | None = None) -> Expr:
    """A symbol with lo <= value <= hi. extent: also value < extent (and lo is 0): a loop
    variable."""
    if isinstance(extent, int):
        hi = min(hi, extent - 1)
    elif extent is not None:
        hi = min(hi, bounds(extent)[1] - 1)
    key = ("sym", name, lo, hi, extent)
    found = _atoms.get(key)
    if found is None:
        found = _atoms[key] = Atom("sym", name, name, lo, hi, extent)
    e = _intern(0, (((found,), 1),))
    assert isinstance(e, Expr)
    return e


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


def _atom(kind: str, a: Size, b: Size) -> Expr:
    key = (kind, a, b)
    found = _atoms.get(key)
    if found is None:
        wrap = _paren if kind in ("div", "mod", "eq", "ne", "lt", "le") else str
        found = _atoms[key] = Atom(kind, _TEXT[kind].format(wrap(a), wrap(b)), a=a, b=b)
    e = _intern(0, (((found,), 1),))
    assert isinstance(e, Expr)
    return e


# --------------------------------------------------------------------------------------- arithmetic
def _mono_key(mono: Mono) -> tuple[str, ...]:
    return tuple(a.key for a in mono)


def _from_terms(const: int, acc: Mapping[Mono, int]) -> Size:
    items = [(m, c) for m, c in acc.items() if c]
    if len(items) > 1:
        items.sort(key=lambda t: _mono_key(t[0]))
    terms = tuple(items)
    if len(terms) > 1 and any(a.kind == "mod" for m, _ in terms for a in m):
        joined = _join_div_mod(const, terms)
        if joined is not None:
            return joined
    return _intern(const, terms)


def _join_div_mod(const: int, terms: Terms) -> Size | None:
    """c*(x % b) + c*b*(x // b) -> c*x, and c*(x % b) + c*b*((x // b) % a) -> c*(x % (a*b)); or
    None."""
    for i, (mono, c) in enumerate(terms):
        for k, atom in enumerate(mono):
            if atom.kind != "mod":
                continue
            x, b = atom.a, atom.b
            rest = mono[:k] + mono[k + 1 :]
            outer = mul(_intern(0, ((rest, c),)) if rest else c, 1)
            quotient = floordiv(x, b)
            want = mul(mul(outer, b), quotient)
            others = _intern(const, terms[:i] + terms[i + 1 :])
            if isinstance(want, Expr) and _has_terms(others, want):
                return add(add(others, mul(want, -1)), mul(outer, x))
            for m2, _ in terms:
                for a2 in m2:
                    if a2.kind != "mod" or a2.a != quotient:
                        continue
                    want = mul(mul(outer, b), _atom("mod", a2.a, a2.b))
                    if isinstance(want, Expr) and _has_terms(others, want):
                        whole = mod(x, mul(a2.b, b))
                        return add(add(others, mul(want, -1)), mul(outer, whole))
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
        return b if a == 0 else _intern(b.const + a, b.terms)
    if isinstance(b, int):
        return a if b == 0 else _intern(a.const + b, a.terms)
    acc = dict(a.terms)
    for m, c in b.terms:
        acc[m] = acc.get(m, 0) + c
    return _from_terms(a.const + b.const, acc)


def total(items: Iterable[Size]) -> Size:
    """The sum of items."""
    out: Size = 0
    for i in items:
        out = add(out, i)
    return out


def product(items: Iterable[Size]) -> Size:
    """The product of items (1 for none)."""
    out: Size = 1
    for i in items:
        out = mul(out, i)
    return out


def mul(a: Size, b: Size) -> Size:
    """a * b."""
    if isinstance(a, int):
        a, b = b, a
    if isinstance(a, int):
        assert isinstance(b, int)
        return a * b
    if isinstance(b, int):
        if b == 1:
            return a
        if b == 0:
            return 0
        return _intern(a.const * b, tuple((m, c * b) for m, c in a.terms))
    acc: dict[Mono, int] = {}
    for m1, c1 in (((), a.const), *a.terms):
        for m2, c2 in (((), b.const), *b.terms):
            if c1 and c2:
                m = tuple(sorted(m1 + m2, key=lambda t: t.key)) if m1 and m2 else m1 + m2
                acc[m] = acc.get(m, 0) + c1 * c2
    const = acc.pop((), 0)
    return _from_terms(const, acc)


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


def _split(a: Expr, b: Size) -> tuple[Size, Size]:
    """(q, r) with a == b*q + r, where q takes every term that b divides exactly."""
    if isinstance(b, int):
        q_terms = tuple((m, c // b) for m, c in a.terms if c % b == 0)
        r_terms = tuple((m, c) for m, c in a.terms if c % b)
        return _intern(a.const // b, q_terms), _intern(a.const % b, r_terms)
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
        return _from_terms(q.pop((), 0), q), _from_terms(a.const, r)
    # A divisor with several terms: try the multiple suggested by its leading term.
    lead, lead_c = max(b.terms, key=lambda t: (len(t[0]), _mono_key(t[0])))
    quotient: Size = 0
    rest: Size = a
    for m, c in a.terms:
        d = _divide_mono(m, c, lead, lead_c)
        if d is None:
            continue
        step = _from_terms(0, {d[0]: d[1]}) if d[0] else d[1]
        after = add(rest, mul(mul(step, b), -1))
        if _n_terms(after) < _n_terms(rest):
            quotient, rest = add(quotient, step), after
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
    found = _memo.get(key)
    if found is None:
        found = _memo[key] = _floordiv(a, b)
    return found


def _floordiv(a: Size, b: Size) -> Size:
    if isinstance(a, int):
        return 0 if 0 <= a and known_lt(a, b) else _atom("div", a, b)
    q, r = _split(a, b)
    if r == 0 or (known_nonneg(r) and known_lt(r, b)):
        return q
    if q != 0:
        return add(q, floordiv(r, b))
    if isinstance(b, int):
        lo, hi = bounds(a)
        if -_INF < lo and hi < _INF and lo // b == hi // b:
            return int(lo // b)
        g = gcd(b, *(c for _, c in a.terms))
        if g > 1:  # floor(x / (g*m)) == floor(floor(x / g) / m)
            return floordiv(_intern(a.const // g, tuple((m, c // g) for m, c in a.terms)), b // g)
        if (coarse := _coarse(a, b)) is not None:
            return floordiv(coarse[1], b // coarse[0])
    else:
        common = _common_factor(a, b)
        if common is not None:
            return floordiv(*common)
    if a.const == 0 and len(a.terms) == 1 and a.terms[0][1] == 1 and len(a.terms[0][0]) == 1:
        inner = a.terms[0][0][0]
        if inner.kind == "div":
            return floordiv(inner.a, mul(inner.b, b))
        if inner.kind == "mod":  # (x % (m*b)) // b == (x // b) % m
            m, rest = (
                (inner.b // b, inner.b % b)
                if isinstance(inner.b, int) and isinstance(b, int)
                else (_split(inner.b, b) if isinstance(inner.b, Expr) else (0, 1))
            )
            if rest == 0 and m != 0:
                return mod(floordiv(inner.a, b), m)
    return _atom("div", a, b)


def _coarse(a: Expr, b: int) -> tuple[int, Size, Size] | None:
    """(g, y, low) with a == g*y + low, 0 <= low < g and g a divisor of b: a // b == y // (b //
    g)."""
    steps = sorted({gcd(b, c) for _, c in a.terms} - {1}, reverse=True)
    parts = ((g, *_split(a, g)) for g in steps)
    return next((p for p in parts if known_nonneg(p[2]) and known_lt(p[2], p[0])), None)


def _common_factor(a: Expr, b: Expr) -> tuple[Size, Size] | None:
    """(a', b') with a // b == a' // b', dividing both by one symbol of b that divides part of a and
    bounds the rest."""
    if b.const or len(b.terms) != 1:
        return None
    for atom in b.terms[0][0]:
        f = _intern(0, (((atom,), 1),))
        q, r = _split(a, f)
        if q != 0 and known_nonneg(r) and known_lt(r, f):
            b2, _ = _split(b, f)
            return q, b2
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
    found = _memo.get(key)
    if found is None:
        found = _memo[key] = _mod(a, b)
    return found


def _mod(a: Size, b: Size) -> Size:
    if isinstance(a, int):
        return a if 0 <= a and known_lt(a, b) else _atom("mod", a, b)
    _, r = _split(a, b)
    if r == 0:
        return 0
    if known_nonneg(r) and (known_lt(r, b) or floordiv(r, b) == 0):
        return r
    if isinstance(r, int):
        return mod(r, b)
    inner = _drop_inner_mod(r, b)
    if inner is not None:
        return mod(inner, b)
    if isinstance(b, int):
        g = gcd(b, *(c for _, c in r.terms))
        if g > 1:  # x == g*y + c, 0 <= c < g: x % (g*m) == g*(y % m) + c
            y = _intern(r.const // g, tuple((m, c // g) for m, c in r.terms))
            return add(mul(mod(y, b // g), g), r.const % g)
        if (coarse := _coarse(r, b)) is not None:
            g, high, low = coarse
            return add(mul(mod(high, b // g), g), low)
    elif b.const == 0 and len(b.terms) == 1:
        for atom in b.terms[0][0]:
            f = _intern(0, (((atom,), 1),))
            q, low = _split(r, f)
            if q != 0 and known_nonneg(low) and known_lt(low, f):
                b2, _ = _split(b, f)
                return add(mul(mod(q, b2), f), low)
    return _atom("mod", r, b)


def _drop_inner_mod(r: Expr, b: Size) -> Size | None:
    """r with one c*(x % m) replaced by c*x where b divides c*m (which changes nothing modulo b)."""
    for i, (mono, c) in enumerate(r.terms):
        if len(mono) == 1 and mono[0].kind == "mod":
            step = mul(mono[0].b, c)
            rest = step % b if isinstance(step, int) and isinstance(b, int) else (
                _split(step, b)[1] if isinstance(step, Expr) else 1)  # fmt: skip
            if rest == 0:
                return add(_intern(r.const, r.terms[:i] + r.terms[i + 1 :]), mul(mono[0].a, c))
    return None


def smin(a: Size, b: Size) -> Size:
    """min(a, b)."""
    return a if known_le(a, b) else b if known_le(b, a) else _atom("min", *sorted((a, b), key=str))


def smax(a: Size, b: Size) -> Size:
    """max(a, b)."""
    return b if known_le(a, b) else a if known_le(b, a) else _atom("max", *sorted((a, b), key=str))


def call(name: str, a: Size, b: Size = 0) -> Size:
    """A function of FUNCTIONS. Raises as it does, for constants."""
    return FUNCTIONS[name](a, b) if isinstance(a, int) and isinstance(b, int) else _atom(name, a, b)


def ceildiv(a: Size, b: Size) -> Size:
    """-(-a // b)."""
    return floordiv(add(a, add(b, -1)), b)


def compare(op: str, a: Size, b: Size) -> Size:
    """1 where `a op b`, else 0; op: 'eq', 'ne', 'lt', 'le'. Decided at once where ranges allow."""
    d = add(a, mul(b, -1))
    (lo, hi), (alo, ahi), (blo, bhi) = bounds(d), _values(a), _values(b)
    lo, hi = max(lo, alo - bhi), min(hi, ahi - blo)
    same, differ = d == 0, lo > 0 or hi < 0
    if op == "le":
        yes, no = hi <= 0 or known_nonneg(mul(d, -1)), lo > 0
    elif op == "lt":
        yes, no = hi < 0 or known_nonneg(add(mul(d, -1), -1)), lo >= 0 or known_nonneg(d)
    else:
        yes, no = (same, differ) if op == "eq" else (differ, same)
    return 1 if yes else 0 if no else _atom(op, a, b)


# ------------------------------------------------------------------------------------------- ranges
def _values(e: Size) -> tuple[Bound, Bound]:
    """What e may be at run time: a constant any integer (torch asserts n <= 2 ** 64 - 4), all else
    64 bits."""
    lo, hi = bounds(e)
    return (lo, hi) if isinstance(e, int) else (max(lo, -(2**63)), min(hi, 2**63 - 1))


def _times(x: tuple[Bound, Bound], y: tuple[Bound, Bound]) -> tuple[Bound, Bound]:
    ends = [0 if p == 0 or q == 0 else p * q for p in x for q in y]
    return min(ends), max(ends)


def _atom_bounds(a: Atom) -> tuple[Bound, Bound]:
    if a._bounds is None:
        a._bounds = _compute_atom_bounds(a)
    return a._bounds


def _compute_atom_bounds(a: Atom) -> tuple[Bound, Bound]:
    if a.kind == "sym":
        return a.lo, a.hi
    if a.kind in FUNCTIONS:
        return -_INF, _INF
    if a.kind in ("eq", "ne", "lt", "le"):
        return 0, 1
    (alo, ahi), (blo, bhi) = bounds(a.a), bounds(a.b)
    if a.kind == "min":
        return min(alo, blo), min(ahi, bhi)
    if a.kind == "max":
        return max(alo, blo), max(ahi, bhi)
    if a.kind == "mod":
        return 0, min(bhi - 1, ahi) if alo >= 0 else bhi - 1
    blo = max(blo, 1)
    lo = (
        alo // blo
        if alo < 0 and alo != -_INF
        else (-_INF if alo < 0 else 0 if bhi == _INF else alo // bhi)
    )
    hi = _INF if ahi == _INF else (ahi // blo if ahi >= 0 else (-1 if bhi == _INF else ahi // bhi))
    return lo, hi


def bounds(e: Size) -> tuple[Bound, Bound]:
    """(lo, hi) with lo <= e <= hi, from the ranges of symbols."""
    if isinstance(e, int):
        return e, e
    if e._bounds is None:
        lo: Bound = e.const
        hi: Bound = e.const
        for mono, c in e.terms:
            r: tuple[Bound, Bound] = (c, c)
            for a in mono:
                r = _times(r, _atom_bounds(a))
            if len(mono) == 2 and mono[0] == mono[1]:
                r = (max(r[0], 0), r[1]) if c > 0 else (r[0], min(r[1], 0))
            lo, hi = lo + r[0], hi + r[1]
        e._bounds = (lo, hi)
    return e._bounds


def may_be_zero(e: Size) -> bool:
    """Whether a size may be 0. One that varies from 1 on may, see `capture/least.py`."""
    return bounds(e)[0] < (1 if isinstance(e, int) else 2)


def known_nonneg(e: Size) -> bool:
    """True only if e >= 0 for every value of its symbols within their ranges."""
    if isinstance(e, int) or bounds(e)[0] >= 0:
        return bounds(e)[0] >= 0
    low = _lower(e)
    return low is not None and _nonneg_polynomial(low)


def _extent(a: Atom) -> Size | None:
    return a.extent if a.kind == "sym" else a.b if a.kind == "mod" else None


def _lower(e: Expr) -> Size | None:
    """A lower bound of e: each bounded index at its least or greatest value."""
    out: Size = e.const
    changed = False
    for mono, c in e.terms:
        term: Size = c
        for a in mono:
            ext = _extent(a)
            others_nonneg = all(_atom_bounds(x)[0] >= 0 for x in mono)
            if ext is not None and others_nonneg and not isinstance(ext, int):
                changed = True
                term = mul(term, 0 if c > 0 else add(ext, -1))
            elif ext is not None and others_nonneg and isinstance(ext, int):
                changed = True
                term = mul(term, 0 if c > 0 else int(min(ext - 1, _atom_bounds(a)[1])))
            elif a.kind == "div" and others_nonneg and c > 0 and _atom_bounds(a)[0] >= 0:
                changed = True
                term = mul(term, int(_atom_bounds(a)[0]))
            else:
                term = mul(term, a.expr)
        out = add(out, term)
    return out if changed or isinstance(out, Expr) else None


def _nonneg_polynomial(e: Size) -> bool:
    """Sufficient: after moving every symbol to its lower end, no coefficient is negative."""
    if isinstance(e, int):
        return e >= 0
    if bounds(e)[0] >= 0:
        return True
    moved: Size = e.const
    for mono, c in e.terms:
        term: Size = c
        for a in mono:
            lo = _atom_bounds(a)[0]
            if lo == -_INF:
                return False
            term = mul(term, add(symbol(f"{a.key}'"), int(lo)))
        moved = add(moved, term)
    if isinstance(moved, int):
        return moved >= 0
    return moved.const >= 0 and all(c >= 0 for _, c in moved.terms)


def known_le(a: Size, b: Size) -> bool:
    """True only if a <= b always."""
    return known_nonneg(add(b, mul(a, -1)))


def known_lt(a: Size, b: Size) -> bool:
    """True only if a < b always."""
    return known_nonneg(add(add(b, mul(a, -1)), -1))


def known_eq(a: Size, b: Size) -> bool:
    """True only if a == b always."""
    return a == b or add(a, mul(b, -1)) == 0


def exact_div(a: Size, b: Size) -> Size | None:
    """q with a == b*q, where that is certain; else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if isinstance(a, int):
        return 0 if a == 0 else None
    q, r = _split(a, b) if b != 0 else (0, 1)
    return q if r == 0 else None


# ------------------------------------------------------------------------------------------ walking
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


def fold(e: Size, atom: Callable[[Atom], Any]) -> Any:
    """The value of an expression: a sum of products of what atom gives, by + and *."""
    if isinstance(e, int):
        return e
    out: Any = e.const
    for mono, c in e.terms:
        term: Any = c
        for a in mono:
            term = term * atom(a)
        out = out + term
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

    def value(a: Atom) -> int:
        if a.kind == "sym":
            return env[a.name]
        return _EVAL[a.kind](evaluate(a.a, env), evaluate(a.b, env))

    out: int = fold(e, value)
    return out


def coefficient(e: Size, var: Atom) -> Size | None:
    """k where e == k*var + rest and rest does not hold var; None if var occurs in another way."""
    if isinstance(e, int):
        return 0
    out: Size = 0
    for mono, c in e.terms:
        n = mono.count(var)
        if n == 0:
            if any(
                var in free_symbols(a.a) or var in free_symbols(a.b)
                for a in mono
                if a.kind != "sym"
            ):
                return None
        elif n == 1:
            rest = tuple(a for a in mono if a != var)
            if any(
                a.kind != "sym" and (var in free_symbols(a.a) or var in free_symbols(a.b))
                for a in rest
            ):
                return None
            out = add(out, _from_terms(0, {rest: c}) if rest else c)
        else:
            return None
    return out


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
    return (
        last > 0 and add(substitute(e, {**start, var: last}), mul(substitute(e, start), -1)) == last
    )


def numel(shape: Iterable[Size]) -> Size:
    """The number of elements of a shape."""
    return product(shape)


def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides, in elements. A dimension of size 0 counts as 1, as in PyTorch."""
    out: list[Size] = []
    step: Size = 1
    for s in reversed(shape):
        out.append(step)
        step = mul(step, smax(s, 1))
    return tuple(reversed(out))
