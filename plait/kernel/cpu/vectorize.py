"""Decides what differs between the lanes of a vector and how lanes reach memory.

Comes in: a `Nest`. Goes out: `Vectors`, with a row for every load, store and reduction, which
`faults_of_vectors` checks. Printers ask it, and decide nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from plait.ir.checks import Bound
from plait.ir.dtypes import b1, f32
from plait.ir.expr import Atom, Expr, Size, bounds, coefficient, free_symbols, product, total
from plait.ir.loops import Load, Node, walk
from plait.kernel.cpu.passes import Nest
from plait.kernel.stores import How, how_to_store
from plait.schedule.legalize.linear import extent, offset_of
from plait.schedule.plan import Reduce, Store

# benchmarks/results/constants-cpu.md: less is slower, more rounds more.
CHUNK = 32
"""Additions to one accumulator before it is emptied into the second level."""
_ORDER = {"lt": (True, False), "le": (False, False), "gt": (True, True), "ge": (False, True)}


class Walk(Enum):
    """How a vector's elements lie in memory, and so how they are loaded or stored."""

    ONE = "one element, once"
    REPEAT = "one element, updated as often as there are lanes"
    COPY = "one element for all lanes"
    ROW = "neighbours"
    BACK = "neighbours, backwards"
    SECOND = "every second element"
    TILE = "neighbours in a tile that was turned around"
    GATHER = "at 32-bit indices"
    EACH = "one lane after the other"


STEPS = {Walk.COPY: 0, Walk.ROW: 1, Walk.BACK: -1, Walk.SECOND: 2}
"""Elements from one lane to the next."""


@dataclass(frozen=True, slots=True)
class Sum:
    """How a reduction accumulates.

    vector: the accumulator has lanes.
    long: a second accumulator, of f64, takes the sums of chunks."""

    vector: bool
    long: bool


@dataclass(frozen=True)
class Vectors:
    """A nest with its vectors decided.

    roots: loop variables and accumulators that differ between lanes.
    loads: by node and whether lanes are left out (the tail of a loop).
    stores: by statement.
    sums: by name of the reduction."""

    nest: Nest
    roots: frozenset[object]
    loads: Mapping[tuple[Node, bool], Walk] = field(default_factory=dict)
    stores: Mapping[Store, Walk] = field(default_factory=dict)
    sums: Mapping[str, Sum] = field(default_factory=dict)

    @property
    def axis(self) -> Atom:
        """The vectorised loop variable."""
        assert self.nest.axis is not None, "scalar code has no vector axis"
        return self.nest.axis

    def differs(self, n: Node) -> bool:
        """Whether a node differs between lanes."""
        return not self.roots.isdisjoint(self.nest.deps(n))

    def varies(self, e: Size) -> bool:
        """Whether a data-dependent index in e differs between lanes."""
        where = self.nest.linear.indirect
        return any(a in where and self.differs(where[a]) for a in free_symbols(e))

    def moves(self, e: Size) -> bool:
        """Whether e differs between lanes."""
        return self.axis in free_symbols(e) or self.varies(e)

    def step(self, e: Size) -> Size | None:
        """How much e grows from one lane to the next; None if that is no constant."""
        return None if self.varies(e) else coefficient(e, self.axis)

    def parted(self, offset: Size) -> tuple[Size, Size]:
        """What of an offset is the same for all lanes, and the rest."""
        if isinstance(offset, int):
            return offset, 0
        terms = [Expr(0, ((mono, c),)) for mono, c in offset.terms]
        moving = total(t for t in terms if self.moves(t))
        return offset.const + total(t for t in terms if not self.moves(t)), moving

    def is_short(self, n: Node) -> bool:
        """Whether the lanes of a checked index are known in 32 bits."""
        size = n.attr.size if isinstance(n.attr, Bound) else None
        return n.op == "bounded" and isinstance(size, int) and size >> 30 == 0 and self.differs(n)

    def source(self, n: Node) -> Node | None:
        """The load that has the lanes of a value in memory, as they are: lanes leave a register
        slower than they come from there."""
        x = n.args[0] if n.op == "bounded" and len(n.args) == 1 else n
        if x.op != "load" or x.dtype == b1 or x in self.nest.tiled or not self.differs(x):
            return None
        assert isinstance(x.attr, Load), x
        return None if x.attr.masked or self.step(offset_of(x)) != 1 else x

    def first_lanes(self, n: Node) -> tuple[Size, int] | None:
        """A comparison of positions as an expression and its step: it is true for the first lanes
        in which the expression is above 0 (step -1), or for the last ones (step 1)."""
        if n.op not in _ORDER or not self.differs(n):
            return None
        strict, swapped = _ORDER[n.op]
        low, high = (_affine(a) for a in (n.args[::-1] if swapped else n.args))
        if low is None or high is None:
            return None
        room = high - low  # true where this is > 0, or >= 0
        step = self.step(room)
        if not isinstance(step, int) or step not in (1, -1):
            return None
        return room + (0 if strict else 1), step

    def chunk(self, reduces: Sequence[Reduce]) -> int:
        """Points of the innermost loop in one chunk; 0 to leave the loop whole."""
        if not any(self.sums[s.name].long for s in reduces):
            return 0
        n, step = extent(self.nest.order[-1]), _points_an_addition(self.nest)
        return 0 if isinstance(n, int) and n <= 2 * CHUNK * step else CHUNK * step


def vectorize(nest: Nest) -> Vectors:
    """Decides every load, store and reduction of a nest."""
    roots: set[object] = set() if nest.lanes == 1 else {nest.axis}
    sums: dict[str, Sum] = {}
    for s in nest.reduces():
        # Lanes that run over the reduced axis hold a part each.
        vector = nest.lanes > 1 and (nest.inner or not roots.isdisjoint(nest.deps(s.value)))
        sums[s.name] = Sum(vector, _is_long(s, nest))
        if vector and (s.running or not nest.inner):
            roots.add(s.name)
    found = Vectors(nest, frozenset(roots), sums=sums)
    stmts = nest.linear.stmts
    nodes = [n for n in walk(nest.linear.roots()) if n.op == "load"]
    loads = {(n, tail): _load(found, n, tail) for n in nodes for tail in (False, True)}
    return replace(
        found, loads=loads, stores={s: _store(found, s) for s in stmts if isinstance(s, Store)}
    )


def _points_an_addition(nest: Nest) -> int:
    return nest.lanes * nest.unroll if nest.inner else 1


def _is_long(s: Reduce, nest: Nest) -> bool:
    if s.kind != "sum" or s.value.dtype != f32 or s.running:
        return False
    n = product(extent(a) for a in nest.linear.rvars)
    return not isinstance(n, int) or n > CHUNK * _points_an_addition(nest)


def _load(v: Vectors, n: Node, tail: bool) -> Walk:
    assert isinstance(n.attr, Load), n
    if not v.differs(n):
        return Walk.ONE
    if n in v.nest.tiled:
        return Walk.TILE
    offset, whole = offset_of(n), not n.attr.masked and not tail
    match v.step(offset):
        case 1:
            return Walk.ROW
        case 0:
            return Walk.COPY
        case -1 if whole:
            return Walk.BACK
        case 2 if whole:
            return Walk.SECOND
    if n.dtype.nbytes == 4 and not n.attr.masked and _gathers(v, v.parted(offset)[1], tail):
        return Walk.GATHER
    return Walk.EACH


def _gathers(v: Vectors, moving: Size, tail: bool) -> bool:
    """Whether lanes have 32-bit indices, and these are in registers: where memory holds them, an
    element at a time is faster."""
    indices = map(v.nest.linear.indirect.get, free_symbols(moving))
    if any(n is not None and v.source(n) for n in indices):
        return False
    low, high = bounds(moving)
    if not isinstance(moving, Expr) or low < -(1 << 31) or high >= 1 << 31:
        return False
    atoms = [a for mono, _ in moving.terms for a in mono]
    if tail and any(a.kind != "sym" for a in atoms):
        return False  # positions past the end; indices are in range in every lane
    return len(atoms) == len(moving.terms) and all(_is_short_factor(v, a) for a in atoms)


def _is_short_factor(v: Vectors, a: Atom) -> bool:
    """An index, or quotient or remainder of a position by a number so large that it changes once in
    a vector."""
    if a.kind == "sym":
        n = v.nest.linear.indirect.get(a)
        return n is not None and v.is_short(n)
    if a.kind not in ("div", "mod") or not isinstance(a.b, int):
        return False
    step = v.step(a.a)
    return isinstance(step, int) and 0 < step * (v.nest.lanes - 1) < a.b and bounds(a.a)[0] >= 0


def _store(v: Vectors, s: Store) -> Walk:
    nest, offset = v.nest, s.index[0]
    if nest.lanes == 1 or (nest.inner and s in nest.last):  # one point
        return Walk.ONE
    values = (s.value, *(() if s.mask is None else (s.mask,)))
    match how_to_store(s.mode, any(map(v.differs, values)), v.moves(offset)):
        case How.ONCE:
            return Walk.ONE
        case How.REPEAT:
            return Walk.REPEAT
        case How.ROW if v.step(offset) == 1 and not s.atomic:
            return Walk.ROW
    return Walk.EACH


def _affine(n: Node) -> Size | None:
    """The integer expression that an i64 node is known to be."""
    if n.op == "index" and isinstance(n.attr, (int, Expr)):
        return n.attr
    return n.attr if n.op == "const" and isinstance(n.attr, int) else None


def faults_of_vectors(v: Vectors) -> list[str]:
    """What a nest's vectors break: every load, store and reduction has a row, a row's elements lie
    as it says, rows that are read backwards or by two have neither tail nor mask, and what may
    collide is not stored as a row. Scalar code reaches one element at a time."""
    faults = []
    for n in walk(v.nest.linear.roots()):
        for tail in (False, True) if n.op == "load" else ():
            how = v.loads.get((n, tail), Walk.REPEAT)
            if not _can_load(v, n, tail, how):
                faults.append(f"cannot load {n} as {how.value}")
    for r in v.nest.reduces():  # a scan that nothing uses is in no pass
        faults += [] if r.name in v.sums else [f"does not say how {r.name} accumulates"]
    for s in v.nest.linear.stmts:
        if isinstance(s, Store) and not (s in v.stores and _can_store(v, s, v.stores[s])):
            faults.append(f"cannot store {s.buf} as it says")
    return faults


def _can_load(v: Vectors, n: Node, tail: bool, how: Walk) -> bool:
    if v.nest.lanes == 1 or how == Walk.ONE:
        return how == Walk.ONE and not v.differs(n)
    if how in STEPS and STEPS[how] != v.step(offset_of(n)):
        return False
    whole = not (tail or getattr(n.attr, "masked", False))
    return v.differs(n) and how != Walk.REPEAT and (whole or how not in (Walk.BACK, Walk.SECOND))


def _can_store(v: Vectors, s: Store, how: Walk) -> bool:
    if v.nest.lanes == 1:
        return how == Walk.ONE
    return how != Walk.ROW or (not s.atomic and v.step(s.index[0]) == 1)
