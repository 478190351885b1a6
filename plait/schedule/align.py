"""Making two iteration spaces one: which axis of the one is which axis of the other.

Two loops that touch one buffer say through their indices how their axes belong together. Axes are
split where their cuts differ (an axis of 64*16 against axes of 64 and of 16): a variable becomes an
affine combination of finer ones, so no division appears. Axes that no buffer ties are matched in
order where their sizes agree. What comes out is a proposal: the caller checks every dependence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from plait.ir.expr import Atom, Expr, Size, atom_of, free_symbols, numel, product, substitute
from plait.ir.loops import is_arg
from plait.schedule.deps import extent

Index = tuple[Size, ...]
Env = dict[Atom, Size]
Fresh = Callable[[Size], Expr]
# A bound on compile time (tests/test_growth.py), not a result of measuring.
MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class IterationSpace:
    """An iteration space: outer variables and reduced ones. All extents differ from 1."""

    vars: tuple[Expr, ...]
    rvars: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alignment:
    """One space for a host and a guest. host, guest: their variables in terms of the new ones
    (those that stay are left out). full: a guest without reduced axes runs at every point of vars x
    rvars."""

    space: IterationSpace
    host: Env
    guest: Env
    full: bool


def divided(a: Size, b: Size) -> Size | None:
    """a / b where b divides a and both are positive, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b > 0 and a % b == 0 else None
    q = a // b
    if any(x.kind in ("div", "mod") for x in _atoms(q)):
        return None
    return q if q * b == a else None


def _atoms(e: Size) -> Iterable[Atom]:
    if not isinstance(e, int):
        for mono, _ in e.terms:
            yield from mono


class _Conflict(Exception):
    """Two indices cannot be those of one point."""


class _Matcher:
    """Axes of host and guest, and what is known of how they correspond."""

    def __init__(self, host: IterationSpace, guest: IterationSpace, fresh: Fresh) -> None:
        self.fresh = fresh
        self.host_vars, self.guest_vars = host.vars + host.rvars, guest.vars + guest.rvars
        self.pieces: dict[Atom, tuple[Expr, ...]] = {}
        # The guest's variables are renamed first: they may have the host's names.
        self.env: Env = {}
        self.rename: Env = {}
        self.free_host: set[Atom] = {atom_of(v) for v in self.host_vars}
        self.free_guest: set[Atom] = set()
        for v in self.guest_vars:
            own = fresh(extent(v))
            self.rename[atom_of(v)] = own
            self.free_guest.add(atom_of(own))
        self.splits = 0

    # ---- state
    def save(self) -> tuple[Env, set[Atom], set[Atom], dict[Atom, tuple[Expr, ...]], int]:
        return (
            dict(self.env),
            set(self.free_host),
            set(self.free_guest),
            dict(self.pieces),
            self.splits,
        )

    def restore(
        self, saved: tuple[Env, set[Atom], set[Atom], dict[Atom, tuple[Expr, ...]], int]
    ) -> None:
        self.env, self.free_host, self.free_guest, self.pieces, self.splits = saved

    def host_at(self, e: Size) -> Size:
        return substitute(e, self.env)

    def guest_at(self, e: Size) -> Size:
        return substitute(substitute(e, self.rename), self.env)

    def parts(self, v: Expr) -> tuple[Expr, ...]:
        """The axes that a variable was split into, outermost first."""
        found = self.pieces.get(atom_of(v))
        if found is None:
            return (v,)
        return tuple(p for part in found for p in self.parts(part))

    # ---- changes
    def bind(self, a: Atom, value: Size) -> None:
        for k, e in self.env.items():
            self.env[k] = substitute(e, {a: value})
        self.env[a] = value

    def split(self, a: Atom, inner: Size) -> tuple[Atom, Atom]:
        """Cuts an axis into an outer and an inner one. Raises _Conflict where inner does not divide
        it."""
        assert a.extent is not None, a
        outer = divided(a.extent, inner)
        if outer is None or self.splits >= MAX_SPLITS:
            raise _Conflict
        self.splits += 1
        hi, lo = self.fresh(outer), self.fresh(inner)
        self.pieces[a] = (hi, lo)
        for free in (self.free_host, self.free_guest):
            if a in free:
                free.remove(a)
                free.update((atom_of(hi), atom_of(lo)))
        self.bind(a, hi * inner + lo)
        return atom_of(hi), atom_of(lo)

    def pair(self, h: Atom, g: Atom) -> None:
        if h == g:
            return
        if h not in self.free_host or g not in self.free_guest:
            raise _Conflict
        self.free_host.remove(h)
        self.free_guest.remove(g)
        self.bind(g, h.expr)

    # ---- evidence
    def relate(self, host_index: Index, guest_index: Index) -> bool:
        """Learns from the indices with which both touch one buffer at one point. False (and nothing
        learnt) where they contradict."""
        saved = self.save()
        try:
            for x, y in zip(host_index, guest_index, strict=True):
                self._relate_dim(x, y)
        except _Conflict:
            self.restore(saved)
            return False
        return True

    def _relate_dim(self, x: Size, y: Size) -> None:
        h = self._plain(x, self.host_at)
        g = self._plain(y, self.guest_at)
        if h == g:
            return
        hs, gs = radix(h), radix(g)
        if hs is None or gs is None:
            raise _Conflict
        self.zip(hs, gs)

    def _plain(self, e: Size, at: Callable[[Size], Size]) -> Size:
        """e over axes cut so that no division is left. Raises _Conflict where that cannot be."""
        for _ in range(MAX_SPLITS):
            now = at(e)
            cut = _first_cut(now)
            if cut is None:
                return now
            self.split(*cut)
        raise _Conflict

    def zip(self, hs: list[Atom], gs: list[Atom]) -> None:
        """Pairs two lists of axes, innermost first, that count through the same range."""
        hs, gs = hs[::-1], gs[::-1]
        while hs and gs:
            h, g = hs.pop(), gs.pop()
            assert h.extent is not None and g.extent is not None, h
            if h.extent == g.extent:
                self.pair(h, g)
            elif divided(g.extent, h.extent) is not None:
                outer, inner = self.split(g, h.extent)
                gs.append(outer)
                self.pair(h, inner)
            else:
                outer, inner = self.split(h, g.extent)
                hs.append(outer)
                self.pair(inner, g)
        if hs or gs:
            raise _Conflict

    def match_rest(self, host: Sequence[Expr], guest: Sequence[Expr]) -> bool:
        """Pairs the axes of host and guest variables that are still free, in order."""
        hs = [atom_of(p) for v in host for p in self.parts(v) if atom_of(p) in self.free_host]
        renamed = [self.rename[atom_of(v)] for v in guest]
        gs = [
            atom_of(p)
            for v in renamed
            if isinstance(v, Expr)
            for p in self.parts(v)
            if atom_of(p) in self.free_guest
        ]
        if not gs and not hs:
            return True
        saved = self.save()
        try:
            self.zip(hs[::-1], gs[::-1])
        except _Conflict:
            self.restore(saved)
            return False
        return True


def radix(e: Size) -> list[Atom] | None:
    """The variables of an index that counts through a range without gaps (8*a + b with b < 8),
    innermost first; None for any other."""
    if isinstance(e, int):
        return [] if e == 0 else None
    if e.const != 0:
        return None
    by_stride: dict[Size, Atom] = {}
    for mono, c in e.terms:
        stride: Size = c
        var: Atom | None = None
        for a in mono:
            if a.kind != "sym" or is_arg(a):
                return None
            if a.extent is None:
                stride = stride * a.expr
            elif var is None:
                var = a
            else:
                return None
        if var is None or stride in by_stride:
            return None
        by_stride[stride] = var
    out: list[Atom] = []
    step: Size = 1
    while by_stride:
        found = by_stride.pop(step, None)
        if found is None or found.extent is None:
            return None
        out.append(found)
        step = step * found.extent
    return out


def _first_cut(e: Size) -> tuple[Atom, Size] | None:
    """(variable, inner extent) of a split that removes a division or remainder from e; None where
    there is none."""
    for a in _atoms(e):
        if a.kind not in ("div", "mod"):
            continue
        inner = _first_cut(a.a)
        if inner is not None:
            return inner
        found = _variable_under(a.a, a.b)
        if found is None:
            raise _Conflict
        return found
    return None


def _variable_under(e: Size, by: Size) -> tuple[Atom, Size] | None:
    """The variable of e (an index without gaps) that has to be cut so that e splits at `by`."""
    order = radix(e)
    if order is None:
        return None
    step: Size = 1
    for a in order:
        assert a.extent is not None, a
        if step == by:
            return None
        after = step * a.extent
        inner = divided(by, step)
        if inner is not None and divided(a.extent, inner) is not None and after != by:
            return a, inner
        step = after
    return None


def align(
    host: IterationSpace,
    guest: IterationSpace,
    ties: Sequence[tuple[Index, Index]],
    fresh: Fresh,
    across: bool = False,
) -> Alignment | None:
    """One space for both, or None. A guest without reduced axes may have the host's outer space or
    its full one; with them, it reduces what the host does, or (across) outer axes of it, as the
    ties say.

    ties: indices with which host and guest touch a common buffer, the most binding first."""
    full = False
    targets: list[tuple[tuple[Expr, ...], tuple[Expr, ...]]]
    if across:
        targets = [(host.vars + host.rvars, ())]
    elif guest.rvars:
        if not host.rvars:
            return None
        targets = [(host.vars, guest.vars), (host.rvars, guest.rvars)]
        differ = [numel(map(extent, h)) - numel(map(extent, g)) for h, g in targets]
        if any(isinstance(d, int) and d for d in differ):
            return None
    else:
        n = numel(extent(v) for v in guest.vars)
        outer = numel(extent(v) for v in host.vars)
        whole = product((outer, *(extent(v) for v in host.rvars)))
        full = bool(host.rvars) and n == whole
        if n not in (whole, outer):
            return None
        targets = [(host.vars + host.rvars if full else host.vars, guest.vars)]
    same = [(h, g) for h, g in targets if h != g]
    if not across and not same and all(x == y for x, y in ties):
        return Alignment(host, {}, {}, full)
    m = _Matcher(host, guest, fresh)
    for x, y in ties:
        m.relate(x, y)
    if not all(m.match_rest(h, g) for h, g in targets):
        return None
    if m.free_guest or any(_free(m, h) for h, _ in targets):
        return None
    vars_ = tuple(p for v in host.vars for p in m.parts(v))
    rvars = tuple(p for v in host.rvars for p in m.parts(v))
    if not _levels_agree(m, vars_, guest, across):
        return None
    host_env = {atom_of(v): m.host_at(v) for v in host.vars + host.rvars if m.parts(v) != (v,)}
    guest_env = {atom_of(v): e for v in m.guest_vars if (e := m.guest_at(v)) != v}
    return Alignment(IterationSpace(vars_, rvars), host_env, guest_env, full)


def _free(m: _Matcher, vars_: Sequence[Expr]) -> bool:
    return any(atom_of(p) in m.free_host for v in vars_ for p in m.parts(v))


def _levels_agree(m: _Matcher, vars_: Sequence[Expr], guest: IterationSpace, across: bool) -> bool:
    """Whether outer axes of the guest are outer axes of the host and reduced ones reduced ones, or
    (across) outer ones."""
    if not guest.rvars:  # it has one level, which align chose
        return True
    outer = {atom_of(v) for v in vars_}
    for vs, want in (
        ((guest.rvars, True),) if across else ((guest.vars, True), (guest.rvars, False))
    ):
        for v in vs:
            used = free_symbols(m.guest_at(v))
            if any((a in outer) != want for a in used if a.extent is not None):
                return False
    return True
