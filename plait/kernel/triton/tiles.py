"""Decisions about a Triton kernel's tile, made on data: which axes a program's block spans, how
large it is, and whether a reduction fits one block.

Comes in: a `LinearKernel`. Goes out: a `Tile`. Every choice is a function of extents, strides
and element sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from plait.devices import DEVICES
from plait.ir import expr
from plait.ir.dtypes import DType
from plait.ir.expr import Atom, Size
from plait.ir.loops import Node, index_exprs, walk
from plait.ir.reductions import REDUCTIONS
from plait.kernel.triton.passes import plan_passes
from plait.schedule.legalize.linear import LinearKernel, extent, offset_of, stmt_nodes, trip_count
from plait.schedule.plan import Reduce, Store, column_programs

# Points and warps were chosen on a Hopper device by benchmarks/kernels_gpu.py (its table
# is results/gpu-kernels.md); what another tile would gain is measured by benchmarks/tuning_gpu.py.
PERSISTENT_POINTS = 32768
"""The longest row that one block holds as a whole, for each value of a point that it holds."""
ONE_PASS_POINTS = 8192
"""The same where a row is needed once only, so that holding it saves nothing."""
COMPUTED_POINTS = 128
"""The same where nothing is loaded along rows: there Triton may lay a block out by the column
of its results, so that each thread holds whole rows; in a loop it does not."""
BLOCK_POINTS = 1024
"""Points of a block of a pointwise kernel."""
REDUCE_POINTS = 4096
"""Points of a block of a reduction."""
AGAIN_POINTS = 8192
"""The same where rows are read again: more threads a row, so that the rows in flight fit the cache.
And where rows are too few for a device."""
WALK_POINTS = 1024
"""Points of a block that walks along rows shorter than that."""
WALK_EACH = 16
"""Points of a thread of such a block: it holds sums of columns besides."""
WALK_AHEAD = 1 << 14
"""Bytes of rows that are on their way to such a block while it works on others: at least two blocks
of rows."""
ROW_LANES, COLUMN_LANES = 8192, 128
"""Of kernels whose rows keep their bits: points of a block that walks along rows, or columns. What
is shorter is held. Sums of lanes are trees, in which points that are not there change nothing: so
how many results a block has, and how many points it holds, are free."""
MAX_WARPS = 32
"""Warps that a block may have."""
BUSY = DEVICES["cuda"].busy(DEVICES["cuda"].multiprocessors)
"""Programs that fill the device that kernels are for where it is not at hand."""
TILE = 64
"""Edge of a square tile: both directions move whole 128-byte lines of 16-bit elements."""


@dataclass(frozen=True)
class Group:
    """Axes that one dimension of a block walks as a single index, the last one fastest. block: a
    power of two. column_programs: so many programs share it, each takes every n-th point (0:
    programs have a block each)."""

    name: str
    axes: tuple[Atom, ...]
    block: int
    column_programs: int = 0

    @property
    def points(self) -> Size:
        """Points of the whole dimension."""
        return trip_count(self.axes)

    @property
    def full(self) -> bool:
        """Whether blocks cover the dimension without a rest."""
        if self.column_programs and self.block == 1:
            return True  # each program knows how many are its own
        n = self.points
        return isinstance(n, int) and n > 0 and n % (self.block * max(self.column_programs, 1)) == 0


@dataclass(frozen=True)
class Tile:
    """groups: the dimensions of a block, outermost first: (x), (y, x) or, for a reduction, (x, r).
    looped: the block walks along r; otherwise it holds whole rows. programs: axes of which a
    program has one point. spread: neighbouring points are those of neighbouring threads, not of
    one. unit: the size that tells how long rows are is a multiple of it. Where programs walk along
    x, their blocks hold whole rows."""

    groups: tuple[Group, ...]
    looped: bool
    num_warps: int
    num_stages: int = 1
    programs: Group | None = None
    spread: bool = False
    unit: int = 1

    @property
    def column_programs(self) -> int:
        """How many programs walk along x, or 0."""
        return self.groups[0].column_programs if self.groups else 0

    @property
    def block(self) -> int:
        """How many points a block has."""
        return math.prod(g.block for g in self.groups)

    @property
    def outer(self) -> tuple[Group, ...]:
        """The dimensions that are spread over programs."""
        return tuple(g for g in self.groups if g.name != "r")

    @property
    def grid(self) -> Size:
        """The number of programs."""
        count = trip_count(self.programs.axes) if self.programs else 1
        return self.column_programs or expr.product(
            (count, *(expr.ceildiv(g.points, g.block) for g in self.outer))
        )


def plan_tile(linear: LinearKernel, busy: int = BUSY) -> Tile:
    """Chooses the tile of a kernel. busy: programs that fill the device."""
    votes = _unit_strides(linear)
    if n := column_programs(linear.stmts):
        return _walk(linear, _known(n), votes)
    if linear.rvars:
        return _reduction(linear, votes, busy)
    axes = _fastest_last(linear.vars, votes)
    if axes:
        across = _across(axes, votes)
        if across is not None:
            return _square(axes, across)
    points = _known(trip_count(axes))
    block = min(power(points), BLOCK_POINTS)
    # A small tensor is cut finer, so that more than a handful of multiprocessors work on it.
    while block > 128 and points // block < 256:
        block //= 2
    narrow = max((d.nbytes for _, d in _accesses(linear)), default=4) <= 2
    # A thread has one or two vectors of 16 bytes; one is sooner where the device is hardly filled.
    each = 8 if narrow or points >= 1 << 24 else 4
    if most := _most_each(linear, axes):
        each = min(each, most)
    return Tile((Group("x", axes, max(block, 1)),), False, _warps(block, each))


def _most_each(linear: LinearKernel, axes: tuple[Atom, ...]) -> int | None:
    """Points of a thread, beside each other, with which its loads of single elements take no longer
    than what is read or written in vectors: of what rows share that begin in the middle of vectors.
    Each such load of a warp takes as many lines of 128 bytes of the first cache as the points of
    its threads span; of all that moves, a multiprocessor has 16 bytes a cycle (H200). None: there
    are no such loads."""
    in_vectors = single = 0
    unit = vector_unit(linear)
    for offset, dtype in _accesses(linear):
        if _walks(offset, axes):
            in_vectors += dtype.nbytes
        elif expr.is_contiguous(offset, axes[-1]) and extent(axes[-1]) % unit != 0:
            single += dtype.nbytes
    if not (single and in_vectors):
        return None
    return 1 << max(8 * in_vectors // single, 2).bit_length() - 1


def _walks(offset: Size, axes: tuple[Atom, ...]) -> bool:
    """Whether neighbouring points are neighbours in memory, from row to row too."""
    step: Size = 1
    for a in reversed(axes):
        if expr.coefficient(offset, a) != step:
            return False
        step = step * extent(a)
    return True


def held_tiles(
    linear: LinearKernel, lengths: Sequence[int], rows: int, busy: int
) -> dict[int, Tile]:
    """Lengths of rows -> the tile of a reduction whose blocks hold rows up to that as a whole,
    where that saves anything. rows: how many there are, about."""
    f = _rows_of(linear, _unit_strides(linear), busy)
    if not f.again or f.column:
        return {}
    found = (replace(f, length=n, known=True, rows=rows) for n in lengths)
    return {f.length: _held(f) for f in found if _is_held(f)}


def vector_unit(linear: LinearKernel) -> int:
    """Elements of a vector of 16 bytes, of the shortest type that is read or written."""
    return 16 // min((d.nbytes for _, d in _accesses(linear)), default=16)


def share_tile(linear: LinearKernel, points: int) -> Tile:
    """The tile of a pointwise kernel whose blocks have so many points."""
    ragged = trip_count(linear.vars) % 16 != 0  # a mask an element: there are no vectors
    return Tile((Group("x", linear.vars, points),), False, _warps(points, 8), spread=ragged)


def _square(axes: tuple[Atom, ...], across: Atom) -> Tile:
    """Two dimensions, each with its own contiguous axis."""
    fast = axes[-1]
    rest = (*(a for a in axes if a not in (fast, across)), across)
    x = min(power(_known(extent(fast))), TILE)
    y = min(power(_known(trip_count(rest))), max(TILE, BLOCK_POINTS // x))
    return Tile((Group("y", rest, y), Group("x", (fast,), x)), False, _warps(x * y, 16))


@dataclass(frozen=True)
class _Rows:
    """What the tile of a reduction depends on.

    outer, inner: the axes of a result and those it is reduced along, in the order in which a block
    walks them.
    programs: axes of results of which a program has one point. rows, length: how many results there
    are, and points a result; known: length is no guess. column: neighbours in memory belong to
    different results. again: a block that walks along a row reads some of it twice. vector:
    neighbouring results that a thread may load at once. held: dtypes of what is loaded at every
    point. computed: nothing is loaded along rows. stores: something is stored at every point. one:
    there is one reduction. positions: one gives positions. ragged: rows begin in the middle of
    vectors. busy: programs that fill the device. segment: points that a block holds at least.
    by_row: rows keep their bits, however many there are."""

    outer: tuple[Atom, ...]
    inner: tuple[Atom, ...]
    programs: Group | None
    rows: int
    length: int
    known: bool
    column: bool
    again: bool
    vector: int
    held: list[DType]
    computed: bool
    stores: bool
    one: bool
    positions: bool
    ragged: bool
    busy: int
    segment: int
    by_row: bool

    @property
    def lanes(self) -> int:
        """Points of a block that walks, where rows keep their bits."""
        return COLUMN_LANES if self.column else ROW_LANES

    @property
    def narrow(self) -> bool:
        """Whether all that is loaded at every point has 16 bits or less."""
        return bool(self.held) and max(d.nbytes for d in self.held) <= 2

    @property
    def widest(self) -> int:
        """Results that a block may have: those of a program."""
        return power(_known(trip_count(self.outer)))

    @property
    def width(self) -> int:
        """Results of a block that holds columns as a whole."""
        return _column_width(self, TILE if self.narrow else TILE // 2)

    def tile(self, x: int, r: int, looped: bool, num_warps: int) -> Tile:
        """The tile with blocks of x results and r points of each."""
        if looped and self.by_row:
            r = self.lanes
        elif looped and self.known and self.computed:
            r = min(r, power(self.length) // 2)  # Triton takes a loop of one turn as none
        r = max(r, self.segment)
        return Tile(
            (Group("x", self.outer, x), Group("r", self.inner, r)),
            looped,
            num_warps,
            programs=self.programs,
        )


def _reduction(linear: LinearKernel, votes: dict[Atom, int], busy: int) -> Tile:
    f = _rows_of(linear, votes, busy)
    if _is_held(f):
        return _held(f)
    return _columns(f) if f.column else _long_rows(f)


def _rows_of(linear: LinearKernel, votes: dict[Atom, int], busy: int) -> _Rows:
    outer = _fastest_last(linear.vars, votes)
    reductions = [s for s in linear.stmts if isinstance(s, Reduce)]
    ordered = any(s.inner or REDUCTIONS[s.kind].extreme for s in reductions)
    settled = linear.by_row or ordered
    inner = linear.rvars if settled else _fastest_last(linear.rvars, votes)
    rows = _known(trip_count(outer))
    column = sum(votes.get(v, 0) for v in outer) > sum(votes.get(r, 0) for r in inner)
    column = any(s.down for s in reductions) if linear.by_row else column and rows >= 16
    programs = None
    if column and len(outer) > 1 and isinstance(size := extent(outer[-1]), int) and size >= TILE:
        # What is the same for neighbouring results is then one value for a program, or one a row.
        programs, outer = Group("y", outer[:-1], 1), outer[-1:]
    return _Rows(
        outer, inner, programs, rows, _known(trip_count(inner)),
        known=isinstance(trip_count(inner), int), column=column, again=_reads_again(linear),
        vector=column_vector(linear),
        held=held_dtypes(linear, outer), computed=_is_computed(linear),
        stores=any(isinstance(s, Store) and s.full for s in linear.stmts), one=len(reductions) == 1,
        positions=any(REDUCTIONS[s.kind].extreme for s in reductions),
        ragged=_is_ragged(linear), busy=busy, segment=longest_segment(linear),
        by_row=linear.by_row,
    )  # fmt: skip


def longest_segment(linear: LinearKernel) -> int:
    """Points of the longest segments of a kernel's rows, 1 where there are none."""
    return max((s.segment for s in linear.stmts), default=0) or 1


def _is_held(f: _Rows) -> bool:
    """Whether a block holds its rows, or columns, as a whole."""
    if not f.known:
        return False
    if f.by_row:
        return f.length <= f.lanes
    if f.computed:
        return f.length <= COMPUTED_POINTS
    if not f.column:
        longest = PERSISTENT_POINTS // max(len(f.held), 1) if f.again else 0
        return f.length <= max(longest, ONE_PASS_POINTS)
    if f.narrow and _is_wasteful(f.length, power(f.length)):
        return False
    return f.length <= PERSISTENT_POINTS // (4 if f.narrow else 1) // f.width


def _held(f: _Rows) -> Tile:
    """Whole rows or columns."""
    r = power(f.length)
    x = _block_rows(f, r, f.width if f.column else 1)
    each = 16 if f.narrow else 8
    if not f.stores:
        each *= 4
    elif f.narrow and f.one:
        each *= 2
    return f.tile(x, r, False, _row_warps(f, x, r, each if f.column else 0))


def _columns(f: _Rows) -> Tile:
    """Pieces of columns, several columns side by side."""
    several = f.stores or not f.one
    if f.by_row:
        x = min(f.width, REDUCE_POINTS // COLUMN_LANES)
        return f.tile(x, COLUMN_LANES, True, _warps(x * COLUMN_LANES, 16))
    if f.vector == 1:
        return _scattered_columns(f)
    x = min(f.widest, _column_width(f, TILE))
    r = _column_points(f, x, several)
    return f.tile(
        x, r, True, _warps(x * r, 8 if f.stores and f.narrow and f.one else 16 if several else 32)
    )


def _scattered_columns(f: _Rows) -> Tile:
    """The same of columns that begin anywhere, so that an element is a load: more threads, each of
    which loads as many; fewer where the positions of short elements cost more than these."""
    light = not (f.narrow and f.positions)
    x = min(f.widest, _column_width(f, 2 * TILE if light else TILE))
    r = max(1, (2 * REDUCE_POINTS if light else REDUCE_POINTS // 2) // x)
    if f.known and _is_wasteful(f.length, r) and not _is_wasteful(f.length, r // 2):
        r //= 2
    return f.tile(x, r, True, _warps(x * r, 16 if light else 8))


def _column_points(f: _Rows, x: int, several: bool) -> int:
    """Points of each of x columns in a block. several: a point has other results than a sum."""
    many = f.rows // x >= 2 * f.busy
    points = REDUCE_POINTS
    if several and many:  # a thread holds as much for each
        points //= 2
    elif f.known and not several and not many:  # few programs need the more threads each
        points *= 2
    r = max(1, points // x)
    # Rows that are not there cost arithmetic, and time where programs wait for one another.
    crowded = f.known and f.rows // x >= 4 * f.busy
    return (
        r // 2
        if crowded and _is_wasteful(f.length, r) and not _is_wasteful(f.length, r // 2)
        else r
    )


def _long_rows(f: _Rows) -> Tile:
    """Pieces of a row."""
    few = f.rows < f.busy // 2
    if f.by_row:
        return f.tile(1, ROW_LANES, True, MAX_WARPS if few else MAX_WARPS // 2)
    if f.again and f.ragged and f.known and not few:
        # The two ends of a row have no vectors: they are shorter, and their elements more threads'.
        return f.tile(1, REDUCE_POINTS, True, MAX_WARPS)
    most = AGAIN_POINTS if f.again or few else REDUCE_POINTS
    r = min(power(f.length), most) if f.known or not few else most
    return f.tile(1, r, True, max(power(r // (32 * (16 if few and not f.again else 8))), 1))


def _walk(linear: LinearKernel, n: int, votes: dict[Atom, int]) -> Tile:
    """Whole rows, a few at a time, where a row is short."""
    inner = _fastest_last(linear.rvars, votes)
    r = power(_known(trip_count(inner)))
    x = max(1, min(power(_known(trip_count(linear.vars)) // n), WALK_POINTS // r))
    nbytes = x * r * sum(d.nbytes for d in held_dtypes(linear, linear.vars))
    stages = 1 + max(2 if nbytes <= 2 * WALK_AHEAD else 1, min(3, WALK_AHEAD // max(nbytes, 1)))
    warps = _warps(x * r, WALK_EACH)
    return Tile((Group("x", linear.vars, x, n), Group("r", inner, r)), False, warps, stages)


def _column_width(f: _Rows, most: int) -> int:
    """Neighbouring results of a block that reduces columns: fewer, down to what memory gives at
    once, where there would be too few programs."""
    nbytes = max((d.nbytes for d in f.held), default=4)
    while f.rows // most < f.busy // 2 and most * nbytes > 32:
        most //= 2
    return most


def _is_wasteful(length: int, block: int) -> bool:
    """Whether blocks along a row reach beyond its end by more than a seventh of it."""
    return 7 * (-(-length // block) * block) > 8 * length


def _reads_again(linear: LinearKernel) -> bool:
    """Whether a block that walks along rows reads some of them twice."""
    seen: set[Node] = set()
    for p in plan_passes(linear, True).loops:
        found = {
            n
            for n in walk([n for s in p for n in stmt_nodes(s)])
            if n.op == "load" and _along_rows(linear, linear.vars, n)
        }
        if found & seen:
            return True
        seen |= found
    return False


def _is_ragged(linear: LinearKernel) -> bool:
    """Whether rows that lie along memory begin in the middle of vectors of 16 bytes."""
    for offset, dtype in _accesses(linear):
        along = any(expr.is_contiguous(offset, r) for r in linear.rvars)
        begin = expr.substitute(offset, dict.fromkeys(linear.rvars, 0))
        if along and begin % (16 // dtype.nbytes) != 0:
            return True
    return False


def column_vector(linear: LinearKernel) -> int:
    """Neighbouring results that a thread may load at once, or 0 where neighbours in memory are of
    one result."""
    votes = _unit_strides(linear)
    if sum(votes.get(v, 0) for v in linear.vars) <= sum(votes.get(r, 0) for r in linear.rvars):
        return 0
    vectors = [1]
    for offset, dtype in _accesses(linear):
        along = [v for v in linear.vars if expr.is_contiguous(offset, v)]
        begin = expr.substitute(offset, dict.fromkeys(along, 0))
        if along and begin % (16 // dtype.nbytes) == 0:
            vectors.append(16 // dtype.nbytes)
    return max(vectors)


def _row_warps(f: _Rows, x: int, r: int, of_columns: int) -> int:
    """Warps of a block that holds x whole rows in r points each: a thread has four vectors of 16
    bytes in flight; fewer where the block is small or the device hardly filled. of_columns: points
    of a thread where columns are reduced (else 0): more, since threads give each other a result a
    column, but where it has other results at every point."""
    points = x * r
    if (
        f.by_row and x == 1 and not of_columns
    ):  # every level of a tree across warps waits for all of them
        few = f.rows // x < f.busy
        return _warps(points, (8 if few else 32) if f.narrow else (4 if few else 16))
    if f.rows // x < f.busy:
        return _warps(points, max(of_columns // 2, 16) if of_columns else 4)
    if of_columns:
        return _warps(points, of_columns)
    return max(_warps(points, 32 if f.narrow else 16), min(4, _warps(points, 8)))


def _block_rows(f: _Rows, length: int, least: int) -> int:
    """Rows of a block that holds whole rows: enough for its threads, few enough to occupy the
    device."""
    x = max(least, 1)
    while x * length < 1024 and f.rows // (2 * x) >= f.busy:
        x *= 2
    return min(x, f.widest)


# ------------------------------------------------------------------------------------ memory access
def _accesses(linear: LinearKernel) -> Iterator[tuple[Size, DType]]:
    for n in walk(linear.roots()):
        if n.op == "load" and not _indirect(n):
            yield offset_of(n), n.dtype
    for s in linear.stmts:
        if isinstance(s, Store) and not s.index_args:
            yield s.index[0], linear.buffers[s.buf].dtype


def held_dtypes(linear: LinearKernel, outer: tuple[Atom, ...]) -> list[DType]:
    """The dtypes of what a block loads at every point, and not only once a row or once a column.
    outer: the axes of its rows."""
    return [
        n.dtype for n in walk(linear.roots()) if n.op == "load" and _along_rows(linear, outer, n)
    ]


def _is_computed(linear: LinearKernel) -> bool:
    """Whether nothing is loaded along rows."""
    loads = [n for n in walk(linear.roots()) if n.op == "load"]
    along = (_indirect(n) or expr.free_symbols(offset_of(n)) & {*linear.rvars} for n in loads)
    return not any(along)


def _along_rows(linear: LinearKernel, outer: tuple[Atom, ...], n: Node) -> bool:
    used = expr.free_symbols(offset_of(n))
    return not used.isdisjoint(linear.rvars) and not (outer and used.isdisjoint(outer))


def _indirect(n: Node) -> bool:
    return len(n.args) > int(getattr(n.attr, "masked", False))


def _unit_strides(linear: LinearKernel) -> dict[Atom, int]:
    """Bytes of the accesses that are contiguous along each axis: what is one value a row counts
    once a row."""
    votes: dict[Atom, int] = {}
    axes = (*linear.vars, *linear.rvars)
    direct = ((offset, dtype, frozenset[Atom]()) for offset, dtype in _accesses(linear))
    for offset, dtype, found_by in (*direct, *_scattered(linear)):
        used = expr.free_symbols(offset) | found_by
        nbytes = dtype.nbytes * math.prod(_known(extent(a)) for a in axes if a in used)
        for a in axes:
            if expr.is_contiguous(offset, a) and a not in found_by and _known(extent(a)) > 1:
                votes[a] = votes.get(a, 0) + nbytes
    return votes


def _scattered(linear: LinearKernel) -> Iterator[tuple[Size, DType, frozenset[Atom]]]:
    """Accesses at positions that are data, with the axes that these depend on."""
    accesses = [(offset_of(n), n.dtype) for n in walk(linear.roots()) if n.op == "load"]
    accesses += (
        (s.index[0], linear.buffers[s.buf].dtype) for s in linear.stmts if isinstance(s, Store)
    )
    for offset, dtype in accesses:
        nodes = [linear.indirect[a] for a in expr.free_symbols(offset) if a in linear.indirect]
        if nodes:
            exprs = (e for n in walk(nodes) for e in index_exprs(n))
            yield offset, dtype, frozenset(a for e in exprs for a in expr.free_symbols(e))


def _fastest_last(axes: tuple[Atom, ...], votes: dict[Atom, int]) -> tuple[Atom, ...]:
    """The axes with the one that most bytes are contiguous along at the end."""
    if not axes:
        return axes
    best = max(range(len(axes)), key=lambda k: (votes.get(axes[k], 0), k))
    return (*axes[:best], *axes[best + 1 :], axes[best])


def _across(axes: tuple[Atom, ...], votes: dict[Atom, int]) -> Atom | None:
    """A second axis that accesses are contiguous along, long enough for a tile."""
    others = [a for a in axes[:-1] if votes.get(a, 0) and _known(extent(a)) >= 8]
    if not others or _known(extent(axes[-1])) < 8:
        return None
    return max(others, key=lambda a: votes[a])


def _known(n: Size) -> int:
    """A size, or a guess where it is known at run time only."""
    if isinstance(n, int):
        return n
    low = expr.bounds(n)[0]
    return max(1024, int(low)) if low > -1e18 else 1024


def power(n: int) -> int:
    """The least power of two that is no less than n, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def _warps(points: int, each: int) -> int:
    """Warps so that a thread has about `each` points."""
    return min(16, max(1, power(points // (32 * each))))
