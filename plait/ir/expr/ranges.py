"""Ranges: what an expression may be, from the ranges that its symbols carry."""

from __future__ import annotations

from plait.ir.expr.core import INF, Atom, Bound, Expr, Size, declare
from plait.runtime.functions import FUNCTIONS


def symbol(name: str, lo: Bound = 0, hi: Bound = INF, extent: Size | None = None) -> Expr:
    """A symbol with lo <= value <= hi. extent: also value < extent (and lo is 0): a loop
    variable."""
    if isinstance(extent, int):
        hi = min(hi, extent - 1)
    elif extent is not None:
        hi = min(hi, bounds(extent)[1] - 1)
    return declare(name, lo, hi, extent)


def _times(x: tuple[Bound, Bound], y: tuple[Bound, Bound]) -> tuple[Bound, Bound]:
    ends = [0 if p == 0 or q == 0 else p * q for p in x for q in y]
    return min(ends), max(ends)


def atom_bounds(a: Atom) -> tuple[Bound, Bound]:
    """(lo, hi) with lo <= a <= hi."""
    if a._bounds is None:
        a._bounds = _compute_bounds(a)
    return a._bounds


def _compute_bounds(a: Atom) -> tuple[Bound, Bound]:
    if a.kind == "sym":
        return a.lo, a.hi
    if a.kind in FUNCTIONS:
        return -INF, INF
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
        if alo < 0 and alo != -INF
        else (-INF if alo < 0 else 0 if bhi == INF else alo // bhi)
    )
    hi = INF if ahi == INF else (ahi // blo if ahi >= 0 else (-1 if bhi == INF else ahi // bhi))
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
                r = _times(r, atom_bounds(a))
            if len(mono) == 2 and mono[0] == mono[1]:
                r = (max(r[0], 0), r[1]) if c > 0 else (r[0], min(r[1], 0))
            lo, hi = lo + r[0], hi + r[1]
        e._bounds = (lo, hi)
    return e._bounds


def may_be_zero(e: Size) -> bool:
    """Whether a size may be 0. One that varies from 1 on may, see `capture/least_sizes.py`."""
    return bounds(e)[0] < (1 if isinstance(e, int) else 2)


def known_nonneg(e: Size) -> bool:
    """True only if e >= 0 for every value of its symbols within their ranges."""
    if isinstance(e, int):
        return e >= 0
    if e._nonneg is None:
        e._nonneg = bounds(e)[0] >= 0 or (
            (low := _lower(e)) is not None and _nonneg_polynomial(low)
        )
    return e._nonneg


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
            others_nonneg = all(atom_bounds(x)[0] >= 0 for x in mono)
            if ext is not None and others_nonneg:
                changed = True
                last = int(min(ext - 1, atom_bounds(a)[1])) if isinstance(ext, int) else ext - 1
                term = term * (0 if c > 0 else last)
            else:
                term = term * a.expr
        out = out + term
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
            lo = atom_bounds(a)[0]
            if lo == -INF:
                return False
            term = term * (symbol(f"{a.key}'") + int(lo))
        moved = moved + term
    if isinstance(moved, int):
        return moved >= 0
    return moved.const >= 0 and all(c >= 0 for _, c in moved.terms)


def known_le(a: Size, b: Size) -> bool:
    """True only if a <= b always."""
    return known_nonneg(b - a)


def known_lt(a: Size, b: Size) -> bool:
    """True only if a < b always."""
    return known_nonneg(b - a - 1)


def known_eq(a: Size, b: Size) -> bool:
    """True only if a == b always."""
    return a == b or a - b == 0
