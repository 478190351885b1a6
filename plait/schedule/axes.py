"""The axes of a finished kernel: in memory order, as few and as long as can be, under canonical
names.

Two axes that lie side by side become one where every access, linearised with its buffer's strides,
sees them as one range; so a contiguous pointwise loop of any rank ends in one axis. The last axis
is the one with the smallest strides for most bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.ir.expr import (
    Atom,
    Expr,
    Size,
    atom_of,
    coefficient,
    free_symbols,
    n_functions,
    substitute,
    symbol,
)
from plait.schedule.cost import Hints, hint, hint_numel
from plait.schedule.deps import extent

Env = dict[Atom, Size]
_ANYWHERE = 1 << 60  # a stride larger than any


class AxisUse(NamedTuple):
    """Something that depends on the variables: the linear address of a load or store, or an integer
    that a body computes (nbytes 0). nbytes: of an element; a store counts twice. scattered: the
    variables on which positions in it depend that are data."""

    flat: Size
    nbytes: int
    scattered: tuple[Atom, ...] = ()


@dataclass(frozen=True, slots=True)
class Axes:
    """New variables, and the old ones in terms of them."""

    vars: tuple[Expr, ...]
    rvars: tuple[Expr, ...]
    env: Env


class _Table:
    """Accesses and how they depend on the current variables."""

    def __init__(self, vars_: Sequence[Expr], accesses: Sequence[AxisUse], hints: Hints) -> None:
        self.hints = hints
        unique = dict.fromkeys(accesses)
        self.flats = [a.flat for a in unique]
        self.weights: list[int] = []
        self.strides: list[dict[Atom, Size | None]] = []
        self.far: list[frozenset[Atom]] = []  # variables along which elements lie anywhere
        atoms = {atom_of(v): v for v in vars_}
        for a in unique:
            used = (
                [x for x in free_symbols(a.flat) if x in atoms]
                if not isinstance(a.flat, int)
                else []
            )
            far = [x for x in a.scattered if x in atoms and x not in used]
            self.strides.append({x: coefficient(a.flat, x) for x in used})
            self.far.append(frozenset(far))
            self.weights.append(
                a.nbytes * hint_numel((extent(atoms[x]) for x in (*used, *far)), hints)
            )

    def before(self, a: Atom, b: Atom) -> int:
        """Positive if a belongs outside of b: bytes for which a has the larger stride, less those
        for which b has it."""
        votes = 0
        for strides, far, weight in zip(self.strides, self.far, self.weights, strict=True):
            x, y = (_ANYWHERE if v in far else strides.get(v) for v in (a, b))
            if x is None or y is None or not weight:
                continue
            m, n = abs(hint(x, self.hints)), abs(hint(y, self.hints))
            votes += weight * ((m > n) - (m < n))
        return votes

    def joined(self, outer: Atom, inner: Atom, whole: Expr) -> bool:
        """Replaces two axes by one if no access objects."""
        n = inner.extent
        assert n is not None, inner
        new: list[Size] = []
        for flat, strides in zip(self.flats, self.strides, strict=True):
            if outer not in strides and inner not in strides:
                new.append(flat)
                continue
            s, t = strides.get(outer, 0), strides.get(inner, 0)
            if s is None or t is None:
                merged = substitute(flat, {outer: whole // n, inner: whole % n})
                if n_functions(merged) > n_functions(flat):
                    return False
                new.append(merged)
            elif s == t * n:
                rest = flat + (outer.expr * -s + inner.expr * -t)
                new.append(rest + whole * t)
            else:
                return False
        w = atom_of(whole)
        self.far = [f | {w} if outer in f or inner in f else f for f in self.far]
        for k, (flat, strides) in enumerate(zip(new, self.strides, strict=True)):
            if outer in strides or inner in strides:
                kept = {x: s for x, s in strides.items() if x not in (outer, inner)}
                self.strides[k] = {**kept, w: coefficient(flat, w)}
        self.flats = new
        return True


def _sorted(table: _Table, vars_: Sequence[Expr]) -> list[Expr]:
    """Variables from the largest strides to the smallest, by insertion so that ties keep their
    order."""
    out: list[Expr] = []
    for v in vars_:
        k = len(out)
        while k > 0 and table.before(atom_of(out[k - 1]), atom_of(v)) < 0:
            k -= 1
        out.insert(k, v)
    return out


def choose_axes(
    vars_: Sequence[Expr],
    rvars: Sequence[Expr],
    accesses: Sequence[AxisUse],
    fixed: tuple[bool, bool],
    hints: Hints,
) -> Axes:
    """The axes of a kernel. fixed: reduced axes must keep their order, and stay apart."""
    table = _Table((*vars_, *rvars), accesses, hints)
    env: Env = {}
    groups: list[list[Expr]] = []
    ordered, apart = fixed
    for prefix, level in (("i", vars_), ("r", rvars)):
        axes = list(level) if ordered and level is rvars else _sorted(table, level)
        if not (apart and level is rvars):
            _collapse(table, axes, env)
        names: Env = {}
        renamed = []
        for k, v in enumerate(axes):
            new = symbol(f"{prefix}{k}", extent=extent(v))
            renamed.append(new)
            names[atom_of(v)] = new
        for v in level:
            env[atom_of(v)] = substitute(env.get(atom_of(v), v), names)
        groups.append(renamed)
    old = {atom_of(v): v for v in (*vars_, *rvars)}
    changed = {a: e for a, e in env.items() if a in old and e != old[a]}
    return Axes(tuple(groups[0]), tuple(groups[1]), changed)


def _collapse(table: _Table, axes: list[Expr], env: Env) -> None:
    """Joins neighbours in axes, innermost first; env gets every variable that is gone."""
    k = len(axes) - 2
    if any(extent(v) == 0 for v in axes):
        return
    while k >= 0:
        outer, inner = atom_of(axes[k]), atom_of(axes[k + 1])
        assert outer.extent is not None and inner.extent is not None, outer
        whole = symbol(f"{outer.name}.{inner.name}", extent=outer.extent * inner.extent)
        if table.joined(outer, inner, whole):
            parts: Env = {outer: whole // inner.extent, inner: whole % inner.extent}
            for a, e in env.items():
                env[a] = substitute(e, parts)
            env.update(parts)
            axes[k : k + 2] = [whole]
        k -= 1
