"""Horizontal fusion: loops that need nothing of each other run in one launch, one nest after the
other.

Comes in: nodes in the order in which they will run. Goes out: the same nodes, some groups joined
to HorizontalGroups. A group moves up to an earlier one, or an earlier one down to it, where every
dependence and the peak of memory allow it; past a call only if what it touches stays in a cache.
Each answer is Fused or a Reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plait.config import Config
from plait.devices import facts_of
from plait.ir.calls import Extern
from plait.ir.loops import Scatter
from plait.schedule.cost import buffer_nbytes
from plait.schedule.deps import memory_roots
from plait.schedule.group import Group
from plait.schedule.grouping import Grouping, HorizontalGroup, ScheduleNode
from plait.schedule.limits import Limits
from plait.schedule.order import traffic, users_of
from plait.schedule.plan import Fused, Reason
from plait.schedule.work import CPU

# Bounds keep compile time linear (tests/test_growth.py); they are no results of measuring.
MAX_PARTS = 8
MAX_HOSTS = 4  # earlier launches that are looked at
FAR = 24  # steps back that are looked at

Life = tuple[int, int]


def fuse_horizontally(
    grouping: Grouping, ordered: Sequence[ScheduleNode], cfg: Config, limits: Limits
) -> list[ScheduleNode]:
    """The nodes in their order, some joined. A node's preds are places in `ordered`."""
    if not cfg.fusion:
        return list(ordered)
    may_join = [_may_join(grouping, u) for u in ordered]
    if sum(may_join) < 2:
        return list(ordered)
    fusion = _HorizontalFusion(grouping, ordered, may_join, limits)
    for k in range(len(ordered)):
        if may_join[k]:
            fusion.settle(k)
    return fusion.result()


def _may_join(grouping: Grouping, u: ScheduleNode) -> bool:
    """Whether a node may share a launch: loops on the CPU whose points may run on any thread."""
    if not isinstance(u.item, Group) or any(isinstance(m.loop, Scatter) for m in u.item.members):
        return False
    buffers = grouping.program.buffers
    return all(facts_of(buffers[b].device).is_host for b in (*u.reads, *u.writes))


class _HorizontalFusion:
    """Nodes in slots. A slot holds what runs in one step; slot k starts with node k alone.
    may_join: by node."""

    def __init__(
        self,
        grouping: Grouping,
        ordered: Sequence[ScheduleNode],
        may_join: Sequence[bool],
        limits: Limits,
    ) -> None:
        self.grouping, self.nodes, self.may_join = grouping, ordered, may_join
        self.limits = limits
        n = len(ordered)
        self.slot = list(range(n))
        self.members = [[k] for k in range(n)]
        self.users = users_of(ordered)
        self.weighed = False

    def _weigh(self) -> None:
        """What is alive in which slot."""
        self.weighed = True
        program, n = self.grouping.program, len(self.nodes)
        memory = memory_roots(program.ops)
        t = traffic(self.grouping, self.nodes)
        self.nbytes = t.nbytes
        self.given = set(program.donated)
        self.kept = {memory.get(b, b) for b in program.returned}
        self.writers: dict[str, list[int]] = {}
        self.readers: dict[str, list[int]] = {}
        self.made: list[set[str]] = []
        self.used: list[set[str]] = []
        for k, u in enumerate(self.nodes):
            roots = {memory.get(w, w) for w in u.writes}
            made = {r for r in roots if r in self.nbytes and r not in self.given}
            for root in made:
                self.writers.setdefault(root, []).append(k)
            for root in t.used[k]:
                self.readers.setdefault(root, []).append(k)
            self.made.append(made)
            self.used.append(set(t.used[k]))
        self.lives = {root: self._life(root, (), 0) for root in self.nbytes}
        change = [0] * (n + 1)
        for root, nbytes in self.nbytes.items():
            start, end = self.lives[root]
            change[start] += nbytes
            change[min(end, n - 1) + 1] -= nbytes
        self.alive: list[int] = []
        now = 0
        for c in change[:n]:
            now += c
            self.alive.append(now)
        peak = max(self.alive, default=0)
        # A convolution may hold its operands once more: nothing is added there.
        self.limit = [
            a if isinstance(u.item, Extern) and "convolution" in u.item.op else peak
            for a, u in zip(self.alive, self.nodes, strict=True)
        ]

    def _life(self, root: str, moving: Sequence[int], to: int) -> Life:
        """The slots in which memory is held once some nodes are in slot `to`."""

        def slot(k: int) -> int:
            return to if k in moving else self.slot[k]

        start = 0 if root in self.given else min(map(slot, self.writers[root]))
        end = max(map(slot, self.readers.get(root, ())), default=start)
        return start, len(self.slot) if root in self.kept else end

    def _new_life(self, root: str, moving: Sequence[int], to: int) -> Life:
        """The same, where the nodes are all of one slot."""
        start, end = self.lives[root]
        if self.slot[moving[0]] in (start, end):
            return self._life(root, moving, to)
        # Others hold the memory for at least as long as they did.
        if any(root in self.made[k] for k in moving):
            start = min(start, to)
        if any(root in self.used[k] for k in moving):
            end = max(end, to)
        return start, end

    # ---- one node
    def settle(self, k: int) -> Fused | Reason:
        """Finds a launch for node k, which is the last one so far that may be joined."""
        found: Fused | Reason = Reason("no launch is near")
        for host in self._hosts(k):
            found = self._join(host, k)
            if isinstance(found, Fused):
                break
        return found

    def _hosts(self, k: int) -> Iterator[int]:
        n = 0
        for i in range(k - 1, max(k - FAR, 0) - 1, -1):
            if self.members[i] and self.may_join[self.members[i][0]]:
                yield i
                n += 1
                if n == MAX_HOSTS:
                    return

    def _join(self, i: int, k: int) -> Fused | Reason:
        """Joins the launch in slot i and node k, in either place."""
        if len(self.members[i]) >= MAX_PARTS:
            return Reason(f"a launch holds {MAX_PARTS} parts")
        between = self.nodes[i + 1 : k]
        calls = any(isinstance(u.item, Extern) for u in between)
        found: Fused | Reason = Reason("one needs the other, or what runs between them")
        for moving, to in (([k], i), (self.members[i], k)):
            if not self._legal(moving, to):
                continue
            if calls and (nbytes := self._touched(moving)) > CPU.cache_nbytes:
                found = Reason(f"{nbytes} bytes would leave the cache")
                continue
            why = self._move(moving, to, i, k)
            if why is None:
                return Fused(str(to))
            found = why
        return found

    def _legal(self, moving: Sequence[int], to: int) -> bool:
        if to < self.slot[moving[0]]:
            return all(self.slot[p] < to for k in moving for p in self.nodes[k].preds)
        return all(self.slot[u] > to for k in moving for u in self.users[k])

    def _touched(self, moving: Sequence[int]) -> int:
        program = self.grouping.program
        names = {b for k in moving for b in (*self.nodes[k].reads, *self.nodes[k].writes)}
        return sum(buffer_nbytes(program.buffers[b], program.hints) for b in names)

    def _move(self, moving: list[int], to: int, i: int, k: int) -> Reason | None:
        """Moves nodes to a slot; a Reason, and nothing done, where memory is against it. Slots i to
        k are all that can change."""
        if not self.weighed:  # of programs whose loops need each other nobody asks
            self._weigh()
        now = self.alive[i : k + 1]
        roots = {r for m in moving for r in (*self.made[m], *self.used[m])}
        new = {root: self._new_life(root, moving, to) for root in roots}
        for root, life in new.items():
            for sign, (start, end) in ((-1, self.lives[root]), (1, life)):
                for s in range(max(start, i), min(end, k) + 1):
                    now[s - i] += sign * self.nbytes[root]
        for s, nbytes in enumerate(now, i):
            if nbytes > self.limit[s] and nbytes > self.alive[s]:
                return Reason(f"{nbytes} bytes would be alive at once, {self.limit[s]} are now")
        a, b = (self.nodes[m].writes[0] for m in (self.members[i][0], k))
        if (why := self.limits.refuses("fuse horizontally", a, b)) is not None:
            return why
        self.alive[i : k + 1] = now
        self.lives |= new
        self.members[to] = sorted((*self.members[to], *moving))
        self.members[self.slot[moving[0]]] = []
        for m in moving:
            self.slot[m] = to
        return None

    # ---- the outcome
    def result(self) -> list[ScheduleNode]:
        """The nodes slot by slot. Their preds mean nothing any more."""
        out = []
        for found in self.members:
            some = [self.nodes[k] for k in found]
            if len(some) == 1:
                out += some
            elif some:
                out.append(_together(some))
        return out


def _together(some: Sequence[ScheduleNode]) -> ScheduleNode:
    def each(of: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(b for u in some for b in getattr(u, of)))

    ops = tuple(sorted(k for u in some for k in u.ops))
    return ScheduleNode(
        HorizontalGroup(tuple(some)), ops, frozenset(), each("reads"), each("writes")
    )
