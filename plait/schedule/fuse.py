"""Fusion: groups that share data become one kernel.

Each group, in program order, is offered to the groups that made what it reads and to those that
read the same; the pair that saves most bytes goes first. Two groups fuse when `align` finds one
space for both, every dependence between them is at the same point (or on a reduction's result at
its outer point), no step outside lies between them, and the kernel stays within limits. Each
refusal is a Reason.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from plait.config import Config
from plait.devices import Rates, facts_of
from plait.ir.effects import loop_outs
from plait.ir.expr import Atom, Expr, Size, atom_of, free_symbols, is_contiguous, substitute, symbol
from plait.ir.layouts import flat_index
from plait.ir.loops import Node, Pointwise, Reduction, Scan, Scatter
from plait.schedule.align import Alignment, Env, Index, IterationSpace, align
from plait.schedule.cost import buffer_nbytes, hint_numel
from plait.schedule.deps import extent, load_of, roots
from plait.schedule.group import (
    Group,
    Member,
    is_ordered,
    is_settled,
    moved,
    place_in_segment,
    store_index,
)
from plait.schedule.grouping import Grouping
from plait.schedule.limits import Limits
from plait.schedule.plan import Fused, Reason, Refusal
from plait.schedule.segments import segments_of

# Bounds keep compile time linear (tests/test_growth.py) and arguments few; they are no results of
# measuring. Distances are chosen for the peak of memory (tests/test_memory.py).
MAX_NODES = 1500  # of a kernel's statements
MAX_WRITES = 16
MAX_TINY = 64  # buffers that a kernel may read, and that it may write, where all of them are tiny
MAX_SHARERS = 8  # earlier readers of one buffer that are looked at
MAX_DISTANCE = (
    128  # ops between two readers of one buffer: far apart, fusing them would keep other data alive
)
TINY_NBYTES = 4096  # whatever moves no more keeps nothing alive that matters
NEAR = 24  # ops between groups that are joined though they are not as tiny
LARGE_NUMEL = 1 << 16
# Places: depthwise convolutions in the reductions behind them took 1.4 of a MobileNetV3's 2.2 ms on
# an H100; apart, the whole takes 0.83 (benchmarks/results/gpu-conv.md).
WINDOW = 8


class _Write(NamedTuple):
    """How a group writes a buffer. kind: 'point' (every element once, at index), 'piece', 'update'
    or 'sum' (over outer variables, so it is known at the end). full: at full level."""

    kind: str
    index: Index  # type: ignore[assignment]  # hides the method
    full: bool


class _Node:
    """A group and what fusion needs to know of it. bits: its ops; before: all ops that must run
    before it (bit k is op k)."""

    def __init__(self, grouping: Grouping, group: Group) -> None:
        self.group = group
        self.members = {m.op: m for m in group.members}
        self.reads: dict[str, list[tuple[int, Node]]] = {}
        self.places: dict[str, set[tuple[int, ...]]] = {}  # of each, told apart by constants
        self.indices: dict[str, dict[Index, None]] = {}  # what `read_at` has found
        self.writes: dict[str, _Write] = {}
        self.size = 0
        self.moved_nbytes = 0  # of all buffers that its loops read or write
        self.ordered = False  # the order of the reduced axes matters
        self.settled = False  # they are not taken apart
        self.running = False  # there is a scan, which wants one reduced axis
        self.across = any(m.parts for m in group.members)  # sums run over outer variables
        for m in group.members:
            facts = grouping.bodies.of(roots(m.loop))
            self.size += facts.size
            for n in facts.loads:
                load = load_of(n)
                self.reads.setdefault(load.buf, []).append((m.op, n))
                place = tuple([e if isinstance(e, int) else e.const for e in load.index])
                self.places.setdefault(load.buf, set()).add(place)
            self.ordered = self.ordered or is_ordered(m)
            self.settled = self.settled or is_settled(m.loop)
            self.running = self.running or isinstance(m.loop, Scan)
            self.writes.update(_writes(m))

    def external(self) -> list[str]:
        """The buffers that it reads and does not make."""
        return [b for b in self.reads if b not in self.writes]

    def read_at(self, name: str) -> list[Index]:
        """The different indices at which it loads a buffer, over its variables."""
        indices = self.indices.get(name)
        if indices is None:
            found = self.reads.get(name, ())
            indices = dict.fromkeys(self.members[op].at(load_of(n).index) for op, n in found)
            self.indices[name] = indices
        return list(indices)

    def drop_unit_axes(self) -> None:
        """Takes away axes of one point."""
        g = self.group
        unit: Env = {atom_of(v): 0 for v in g.vars + g.rvars if extent(v) == 1}
        if not unit:
            return
        g.vars = tuple(v for v in g.vars if v.symbol not in unit)
        g.rvars = tuple(v for v in g.rvars if v.symbol not in unit)
        self.rebase(unit, False)

    def rebase(self, env: Env, full: bool) -> None:
        """Moves a group's members to new variables. full: pointwise ones are at full level from now
        on."""
        if not (env or full):
            return
        members = [moved(m, env, full) for m in self.group.members]
        if env:
            self.indices.clear()
        self.group.members = members
        self.members = {m.op: m for m in members}
        for m in members:
            self.writes.update(_writes(m))

    def weigh(self, nbytes: Mapping[str, int]) -> None:
        """Counts the bytes of the buffers that it touches."""
        self.moved_nbytes = sum(nbytes[n] for n in self.reads.keys() | self.writes.keys())


def _writes(m: Member) -> dict[str, _Write]:
    loop = m.loop
    if isinstance(loop, Pointwise):
        kind = "point" if loop.index is None else "piece"
        return {loop.out: _Write(kind, m.at(store_index(loop)), m.full)}
    if isinstance(loop, Scatter):
        return {loop.out: _Write("update", m.at(loop.index), m.full)}
    kind = "sum" if m.parts else "point"
    full = isinstance(loop, Scan) or m.segment > 0
    return {o: _Write(kind, index, full) for o, index in m.stored}


class _Fuser:
    def __init__(self, grouping: Grouping, cfg: Config, limits: Limits) -> None:
        self.grouping, self.cfg, self.limits = grouping, cfg, limits
        self.buffers, self.hints = grouping.program.buffers, grouping.program.hints
        n = len(grouping.program.ops)
        self.leader = list(range(n))
        self.nodes = {g.members[0].op: _Node(grouping, g) for g in grouping.groups}
        self.bits = [1 << k for k in range(n)]
        self.before: list[int] = []
        self.preds = [set(p) for p in grouping.preds]
        self.users: list[list[int]] = [[] for _ in range(n)]
        for k in range(n):
            bits = 0
            for p in self.preds[k]:
                bits |= self.before[p] | 1 << p
                self.users[p].append(k)
            self.before.append(bits)
        self.readers: dict[str, list[int]] = {}
        self.writers: dict[str, list[int]] = {}
        self.nbytes = {n: buffer_nbytes(b, self.hints) for n, b in self.buffers.items()}
        self.kept = set(grouping.program.returned)
        self.n_fresh = 0
        self.refusals: dict[tuple[str, str], Refusal] = {}
        # Sums that rows may take along wait for them, before they join each other.
        self.waiting = {
            k for k, node in self.nodes.items() if node.group.name in grouping.column_sums
        }

    def fresh(self, size: Size) -> Expr:
        """A new axis."""
        self.n_fresh += 1
        return symbol(f"x{self.n_fresh}", extent=size)

    # ---- the pass
    def run(self) -> Grouping:
        for k in sorted(self.nodes):
            node = self.nodes[k]
            node.drop_unit_axes()
            node.weigh(self.nbytes)
            for name in node.reads:
                self.readers.setdefault(name, []).append(k)
            for name in node.writes:
                self.writers.setdefault(name, []).append(k)
        # A value joins those that need it before others may take it away for what they both read.
        for sharing in (False, True):
            for k in sorted(self.nodes):
                if k in self.nodes:
                    self._grow(k, sharing)
        waiting, self.waiting = self.waiting, set()
        for k in sorted(waiting & self.nodes.keys()):
            self._grow(k, True)
        self._join_tiny()
        groups = [self.nodes[k].group for k in sorted(self.nodes)]
        refusals = tuple(self.refusals.values())
        return replace(self.grouping, groups=groups, refusals=refusals)

    def _join_tiny(self) -> None:
        """Fuses groups of one shape that are not worth a launch each, whatever they read (also
        where one reduces and the other runs at its outer points)."""
        last: dict[tuple[Size, ...], int] = {}
        for k in sorted(self.nodes):
            node = self.nodes[k]
            if not self._is_tiny(node) and not self._ends_sums(node):
                continue
            shape = tuple(extent(v) for v in node.group.vars)
            other = last.get(shape)
            if other is not None and node.moved_nbytes > TINY_NBYTES and k - other > NEAR:
                other = None
            joined = other is not None and isinstance(self._fuse(other, k), Fused)
            last[shape] = self._find(k) if joined else k

    def _is_tiny(self, node: _Node) -> bool:
        """Whether a group moves so little that others may join it, whatever they read: of a large
        buffer it may touch a slice, or rows that data chooses."""
        rates = self._kind(node)
        if node.moved_nbytes <= rates.tiny_nbytes:
            return True
        results = hint_numel(map(extent, node.group.vars), self.hints)
        fills = results >= rates.min_units * rates.neighbours  # it need not run beside others
        most = rates.tiny_nbytes * (2 if fills else 1)
        axes = {v.symbol: extent(v) for v in node.group.vars + node.group.rvars}
        inside = set(node.members)
        touched = [(name, node.read_at(name)) for name in node.external()]
        touched += [
            (name, [w.index]) for name, w in node.writes.items() if self._leaves(name, inside)
        ]
        moved = 0
        for name, places in touched:
            points = 0
            for index in places:
                over = frozenset[Atom]().union(*map(free_symbols, index))
                known = over <= axes.keys()  # if not, data says where
                sizes = [size for a, size in axes.items() if a in over or not known]
                points += hint_numel(sizes, self.hints)
            moved += min(points * self.buffers[name].dtype.nbytes, self.nbytes[name])
        return moved <= most

    def _ends_sums(self, node: _Node) -> bool:
        """Whether all that it reads are sums of columns, each made by a program for its rows."""
        kinds = [
            {self.nodes[self._find(w)].writes[name].kind for w in self.writers.get(name, ())}
            for name in node.external()
        ]
        return bool(kinds) and all("sum" in k for k in kinds)

    def _grow(self, k: int, sharing: bool) -> None:
        """Fuses group k with the best of its candidates until none is left. sharing: also with
        those that only read the same."""
        tried: set[int] = set()
        fused = True
        while fused:
            fused = False
            for c in self._candidates(k, sharing):
                if c in tried:
                    continue
                tried.add(c)
                outcome = self._fuse(c, k)
                if isinstance(outcome, Fused):  # it has other candidates now
                    k, fused = self._find(k), True
                    break
                a, b = self.nodes[c].group.name, self.nodes[k].group.name
                self.refusals.setdefault((a, b), Refusal(a, b, outcome))

    def _find(self, k: int) -> int:
        while self.leader[k] != k:
            k = self.leader[k]
        return k

    def _candidates(self, k: int, sharing: bool) -> list[int]:
        """Groups before k worth fusing with it, best first."""
        node = self.nodes[k]
        gain: dict[int, int] = {}
        waiting = self.waiting if k in self.waiting else frozenset[int]()
        for name in node.reads:
            for w in self.writers.get(name, ()):
                c = self._find(w)
                if c != k and c not in waiting:
                    gain[c] = gain.get(c, 0) + 2 * self.nbytes[name]
        if sharing:
            shared: dict[int, int] = {}
            for name in node.reads:
                users = self.readers[name]
                at = bisect_left(users, k)
                near = (r for r in users[max(at - MAX_SHARERS, 0) : at] if k - r <= MAX_DISTANCE)
                for c in {self._find(r) for r in near} - {k} - waiting:
                    shared[c] = shared.get(c, 0) + self.nbytes[name]
            for c, nbytes in shared.items():
                if nbytes * 4 >= min(node.moved_nbytes, self.nodes[c].moved_nbytes):
                    gain[c] = gain.get(c, 0) + nbytes
        return sorted(gain, key=lambda c: (-gain[c], -c))

    def _written(self, x: _Node, y: _Node) -> int:
        """How many buffers both would write as one kernel: what others read, or is returned."""
        names = x.writes.keys() | y.writes.keys()
        inside = x.members.keys() | y.members.keys()
        return sum(self._leaves(name, inside) for name in names)

    def _leaves(self, name: str, inside: set[int]) -> bool:
        """Whether a buffer that these ops make is read by others, or returned."""
        return name in self.kept or not inside.issuperset(self.readers.get(name, ()))

    # ---- one pair
    def _fuse(self, a: int, b: int) -> Fused | Reason:
        """Fuses groups a and b if that is legal and sane."""
        x, y = self.nodes[a], self.nodes[b]
        if self._device(x) != self._device(y):
            return Reason("they run on different devices")
        why = _limits(x, y, self.cfg, self._written(x, y), self._kind(x)) or self._between(a, b)
        if why is not None:
            return why
        if self.cfg.batch_invariant and not _reduce_the_same(x, y):
            return Reason("a reduction would be walked as another asks, which it may stand beside")
        host, guest = (x, y) if x.group.rvars or not y.group.rvars else (y, x)
        if host.group.rvars and not guest.group.rvars and self._reads_windows(guest):
            return Reason("a reduction would read a window a point")
        found = self._align(host, guest)
        other: dict[int, _Node] = {}  # what takes the place of a or b
        if isinstance(found, Reason):
            for k, rows in ((b, x), (a, y)):
                columns = _across(self.grouping, rows, self.nodes[k])
                if columns is not None and isinstance(
                    across := self._align(rows, columns), Alignment
                ):
                    other[k] = columns
                    columns.weigh(self.nbytes)
                    host, guest, found = rows, columns, across
                    break
        if isinstance(found, Reason):
            for k, rows, results in ((b, x, y), (a, y, x)):
                cut = self._cut_segments(rows, results)
                if cut is not None:
                    host, (guest, found) = rows, cut
                    other[k] = guest
                    break
        if isinstance(found, Reason):
            return found
        if (why := self.limits.refuses("fuse", x.group.name, y.group.name)) is not None:
            return why
        self.nodes.update(other)
        self._join(a, b, host, guest, found)
        return Fused(x.group.name)

    def _cut_segments(self, host: _Node, guest: _Node) -> tuple[_Node, Alignment] | None:
        """The guest as what gives results of segments of the host's rows, and one space for
        both."""
        if facts_of(self._device(host)).is_host or not host.group.rvars:
            return None
        if host.across:
            return None
        found = segments_of(guest.group, host.group, self.grouping.bodies, self.fresh)
        if found is None:
            return None
        node = _Node(self.grouping, found.group)
        node.weigh(self.nbytes)
        aligned = self._align(host, node, found.ties)
        if isinstance(aligned, Reason) or not found.fit(aligned):
            return None
        return node, aligned

    def _reads_windows(self, x: _Node) -> bool:
        """Whether each point of a group on a GPU reads one buffer at many places, which loops that
        walk do far slower than a kernel with a point for each thread."""
        if facts_of(self._device(x)).is_host:
            return False
        return any(len(x.reads[b]) >= WINDOW and len(x.read_at(b)) >= WINDOW for b in x.external())

    def _device(self, x: _Node) -> str:
        return self.grouping.program.buffers[next(iter(x.writes))].device

    def _kind(self, x: _Node) -> Rates:
        return facts_of(self.grouping.program.buffers[next(iter(x.writes))].device).rates

    def _between(self, a: int, b: int) -> Reason | None:
        """A Reason if something outside both must run after the one and before the other."""
        for first, last in ((a, b), (b, a)):
            if not self.before[last] & self.bits[first]:
                continue
            for p in {self._find(q) for q in self.preds[last]}:
                if p not in (a, b) and (self.before[p] | self.bits[p]) & self.bits[first]:
                    return Reason(f"{self._label(p)} must run between them")
        return None

    def _label(self, k: int) -> str:
        if k in self.nodes:
            return self.nodes[k].group.name
        op = self.grouping.program.ops[k]
        return str(getattr(op, "op", type(op).__name__))

    def _align(
        self, host: _Node, guest: _Node, known: Sequence[tuple[Index, Index]] = ()
    ) -> Alignment | Reason:
        """One space for both. known: indices of one point, besides those that both have."""
        hs = IterationSpace(host.group.vars, host.group.rvars)
        gs = IterationSpace(guest.group.vars, guest.group.rvars)
        if any(extent(v) == 0 for v in hs.vars + hs.rvars + gs.vars + gs.rvars):
            return Reason("an axis is empty")
        outer = hint_numel(map(extent, hs.vars), self.hints)
        rates = self._kind(host)
        few = outer < rates.min_outer and not self.cfg.batch_invariant
        if hs.rvars and not gs.rvars and few:
            points = hint_numel(map(extent, gs.vars), self.hints)
            if points > max(LARGE_NUMEL, outer * rates.short_row) and points != outer:
                return Reason(f"{points} points would run over {outer} outer points")
        found = align(hs, gs, [*known, *_ties(host, guest)], self.fresh, guest.across)
        if found is None:
            return Reason(f"spaces {_shape(hs)} and {_shape(gs)} cannot be made one")
        if (host.running or guest.running) and len(found.space.rvars) != 1:
            return Reason("a running reduction needs one axis")
        if (host.ordered or guest.ordered) and not _same_order(gs, found):
            return Reason("the order of the reduced axes matters")
        cut = [*map(extent, found.space.rvars)] != [*map(extent, hs.rvars)]
        if host.settled and cut and facts_of(self._device(host)).is_host:
            return Reason("a sum walks the axes that it has")
        new_host = host.members
        if found.host:
            new_host = {m.op: moved(m, found.host, False) for m in host.group.members}
        new_guest = {m.op: moved(m, found.guest, found.full) for m in guest.group.members}
        if host.across or guest.across:
            why = _column_sums_fit(self.grouping, found.space, {**new_host, **new_guest})
            if why is not None:
                return why
        for w, r, makers, users in (
            (host, guest, new_host, new_guest),
            (guest, host, new_guest, new_host),
        ):
            why = _dependences(w, r, makers, users)
            if why is not None:
                return why
        return found

    # ---- bookkeeping
    def _join(self, a: int, b: int, host: _Node, guest: _Node, found: Alignment) -> None:
        host.group.vars, host.group.rvars = found.space.vars, found.space.rvars
        host.rebase(found.host, False)
        guest.rebase(found.guest, found.full)
        keep, gone = (a, b) if a < b else (b, a)
        x, y = self.nodes[keep], self.nodes.pop(gone)
        x.group.vars, x.group.rvars = found.space.vars, found.space.rvars
        x.members.update(y.members)
        x.members = dict(sorted(x.members.items()))
        x.group.members = list(x.members.values())
        for name, sites in y.reads.items():
            if name in x.indices:
                x.indices[name].update(dict.fromkeys(y.read_at(name)))
            x.reads.setdefault(name, []).extend(sites)
            x.places.setdefault(name, set()).update(y.places[name])
        x.writes.update(y.writes)
        x.size += y.size
        x.weigh(self.nbytes)
        x.ordered, x.settled = x.ordered or y.ordered, x.settled or y.settled
        x.running = x.running or y.running
        x.across = x.across or y.across
        self.leader[gone] = keep
        self.waiting -= {keep, gone}
        self._merge_order(keep, gone)

    def _merge_order(self, keep: int, gone: int) -> None:
        bits = self.bits[keep] | self.bits[gone]
        before = (self.before[keep] | self.before[gone]) & ~bits
        self.bits[keep], self.before[keep] = bits, before
        self.preds[keep] |= self.preds[gone]
        self.users[keep] += self.users[gone]
        more = bits | before
        todo = list(self.users[keep])
        while todo:
            u = self._find(todo.pop())
            # What has all of it before it passed it on to its users, too.
            if u != keep and self.before[u] | more != self.before[u]:
                self.before[u] |= more
                todo += self.users[u]


def _reduce_the_same(x: _Node, y: _Node) -> bool:
    """Whether one of two reductions reads nothing that the other one does not: then both want the
    same axes in the same order. Whether a kernel has two is a matter of how long they are."""
    if not (x.group.rvars and y.group.rvars):
        return True
    loops = [m.loop for m in (*x.group.members, *y.group.members)]
    if len({loop.down for loop in loops if isinstance(loop, (Reduction, Scan))}) > 1:
        return False
    a, b = {*x.external()} - y.writes.keys(), {*y.external()} - x.writes.keys()
    return a <= b or b <= a


def _limits(x: _Node, y: _Node, cfg: Config, n_writes: int, rates: Rates) -> Reason | None:
    """A Reason if both together are too much for a kernel, or one changes what the other reads.
    n_writes: the buffers that both would write."""
    for n, other in ((x, y), (y, x)):
        for name, w in n.writes.items():
            touched = name in other.reads or name in other.writes
            if w.kind == "sum" and name in other.reads:
                return Reason(f"{name} is known once all rows are")
            if w.kind == "update" or (w.kind == "piece" and name in other.reads):
                return Reason(f"{name} is written in pieces or updated in place")
            if touched and w.kind == "point" and name in other.writes:
                return Reason(f"both write {name}")
    tiny = x.moved_nbytes + y.moved_nbytes <= TINY_NBYTES
    n_reads = len({*x.external(), *y.external()} - x.writes.keys() - y.writes.keys())
    most = MAX_TINY if tiny else cfg.max_fusion_reads
    if n_reads > most:
        return Reason(f"would read {n_reads} buffers, limit {most}")
    most = MAX_TINY if tiny else MAX_WRITES
    if n_writes > most:
        return Reason(f"would write {n_writes} buffers, limit {most}")
    size, limit = x.size + y.size, MAX_NODES
    if len(x.writes.keys() | y.writes.keys()) > most:  # steps
        size, limit = size + rates.read_nodes * _n_places(x, y), rates.step_nodes
    if size > limit:
        return Reason(f"would hold {size} operations, limit {limit}")
    return None


def _n_places(x: _Node, y: _Node) -> int:
    """How many places both would read of what they do not make."""
    names = (x.places.keys() | y.places.keys()) - x.writes.keys() - y.writes.keys()
    none: set[tuple[int, ...]] = set()
    return sum(len(x.places.get(name, none) | y.places.get(name, none)) for name in names)


def _column_sums_fit(
    grouping: Grouping, space: IterationSpace, members: Mapping[int, Member]
) -> Reason | None:
    """A Reason if rows cannot be dealt out to programs for members that sum columns."""
    sums = [(m, m.loop) for m in members.values() if isinstance(m.loop, Reduction) and m.parts]
    outer = {v.symbol for v in space.vars}
    rows = {frozenset[Atom]().union(*map(free_symbols, m.at(loop.rvars))) for m, loop in sums}
    if len({m.parts for m, _ in sums}) > 1 or any(
        {a for a in r if a.extent is not None} != outer for r in rows
    ):
        return Reason("sums run over different rows")
    sites = [(m, load_of(n)) for m, loop in sums for n in grouping.bodies.of(roots(loop)).loads]
    buffers = grouping.program.buffers
    m, load = max(sites, key=lambda s: buffer_nbytes(buffers[s[1].buf], grouping.program.hints))
    flat = flat_index(buffers[load.buf], m.at(load.index))
    if not any(is_contiguous(flat, atom_of(v)) for v in space.rvars):
        return Reason("rows do not lie along memory")
    return None


def _ties(host: _Node, guest: _Node) -> Iterator[tuple[Index, Index]]:
    """Indices with which both touch one buffer: dependences first, then shared reads."""
    for name, w in host.writes.items():
        for at in guest.read_at(name):
            yield w.index, at
    for name, w in guest.writes.items():
        for at in host.read_at(name):
            yield at, w.index
    for name in host.reads:
        if name in guest.reads and name not in host.writes and name not in guest.writes:
            ones, others = host.read_at(name), guest.read_at(name)
            if len(ones) == 1 and len(others) == 1:
                yield ones[0], others[0]


def _dependences(
    maker: _Node, user: _Node, makers: dict[int, Member], users: dict[int, Member]
) -> Reason | None:
    """A Reason if user loads something at another point than maker stores it."""
    for name in maker.writes:
        if name not in user.reads:
            continue
        op = next(k for k, m in makers.items() if name in loop_outs(m.loop))
        w = _writes(makers[op])[name]
        for k, n in user.reads[name]:
            m = users[k]
            at = m.at(load_of(n).index)
            if k < op or (at != w.index and place_in_segment(m, at, w.index) is None):
                return Reason(f"{name} is stored at {_text(w.index)}, loaded at {_text(at)}")
            if w.full and not (m.full or isinstance(m.loop, Reduction)):
                return Reason(f"{name} is made in the reduced range and needed outside of it")
    return None


def _across(grouping: Grouping, rows: _Node, columns: _Node) -> _Node | None:
    """A group of one sum as what runs across rows, if it may."""
    whole = grouping.column_sums.get(columns.group.name)
    if (
        whole is None
        or len(columns.members) > 1
        or rows.running
        or rows.ordered
        or not rows.group.rvars
    ):
        return None
    if any(w.kind == "update" for w in rows.writes.values()):
        return None
    parts = grouping.program.buffers[columns.group.name].shape[0]
    member = Member(columns.group.members[0].op, whole, full=True, parts=parts)
    node = _Node(grouping, Group(columns.group.name, whole.vars, whole.rvars, [member]))
    node.drop_unit_axes()
    return node


def _same_order(guest: IterationSpace, found: Alignment) -> bool:
    """Whether the guest's reduced axes count in the order of the host's."""
    if not guest.rvars:
        return True
    mine = _position(guest.rvars)
    return substitute(mine, found.guest) == _position(found.space.rvars)


def _position(vars_: tuple[Expr, ...]) -> Size:
    out: Size = 0
    for v in vars_:
        out = out * extent(v) + v
    return out


def _shape(s: IterationSpace) -> str:
    outer = "x".join(str(extent(v)) for v in s.vars) or "1"
    inner = "x".join(str(extent(v)) for v in s.rvars)
    return f"({outer}; {inner})" if inner else f"({outer})"


def _text(index: Index) -> str:
    return f"[{', '.join(map(str, index))}]"


def fuse(grouping: Grouping, cfg: Config, limits: Limits) -> Grouping:
    """The grouping with groups fused, and the refusals."""
    return _Fuser(grouping, cfg, limits).run() if cfg.fusion else grouping
