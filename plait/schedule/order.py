"""The order of the steps: topological, with low peak memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from plait.errors import InternalError
from plait.ir.loops import Mutate
from plait.schedule.cost import buffer_nbytes
from plait.schedule.deps import memory_roots
from plait.schedule.group import Group
from plait.schedule.grouping import Grouping, ScheduleNode, nodes

# A bound on compile time (tests/test_growth.py), and a margin: neither is a result of measuring.
MAX_GREEDY = 4000  # nodes beyond which only the program's order is looked at
CLEARLY_LESS = 0.97  # of the peak of the program's order, which keeps data warmer


def program_order(all_nodes: Sequence[ScheduleNode]) -> list[int]:
    """A topological order that stays as near to the program's as it can. Raises InternalError on a
    cycle."""
    waiting = [len(u.preds) for u in all_nodes]
    users = users_of(all_nodes)
    ready = [k for k, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    out: list[int] = []
    while ready:
        k = heapq.heappop(ready)
        out.append(k)
        for user in users[k]:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, user)
    if len(out) != len(all_nodes):
        stuck = [all_nodes[k].ops for k, n in enumerate(waiting) if n > 0]
        raise InternalError(f"schedule: these groups of ops depend on each other: {stuck[:4]}")
    return out


def readers_first(all_nodes: Sequence[ScheduleNode]) -> list[ScheduleNode]:
    """The nodes with the readers of an input's old value before the group that makes its new one,
    where that is possible: then the new value can be written over the old one."""
    out = list(all_nodes)
    maker: dict[str, int] = {}  # the first group that writes
    for k, made in enumerate(out):
        for name in made.writes if isinstance(made.item, Group) else ():
            maker.setdefault(name, k)
    readers_of: dict[str, list[int]] = {}
    for k, u in enumerate(out):
        for name in u.reads:
            readers_of.setdefault(name, []).append(k)
    users = users_of(out)
    for at, u in enumerate(all_nodes):
        if not isinstance(u.item, Mutate) or u.item.source not in maker:
            continue
        w = maker[u.item.source]
        readers = set(readers_of.get(u.item.target, ())) - {w, at}
        if readers and not _reaches(users, w, readers):
            out[w] = replace(out[w], preds=out[w].preds | readers)
            for r in readers:
                users[r].append(w)
    return out


def _reaches(users: Sequence[Sequence[int]], start: int, ends: set[int]) -> bool:
    """Whether one of `ends` must run after a node."""
    seen: set[int] = set()
    todo = [start]
    while todo:
        for k in users[todo.pop()]:
            if k in ends:
                return True
            if k not in seen:
                seen.add(k)
                todo.append(k)
    return False


@dataclass(slots=True)
class Traffic:
    """What running nodes does to memory. made, used: memory roots by node; nbytes: of a root;
    users: the nodes that touch it."""

    made: list[list[str]]
    used: list[list[str]]
    nbytes: dict[str, int]
    users: dict[str, list[int]]
    at_start: int


def traffic(grouping: Grouping, all_nodes: Sequence[ScheduleNode]) -> Traffic:
    """What each node does to memory."""
    program = grouping.program
    memory = memory_roots(program.ops)
    kept = {memory.get(n, n) for n in (*program.returned, *program.constants)}
    given = program.given
    kept |= given - set(program.donated)
    read_by_others = {b for u in all_nodes for b in u.reads} | set(program.returned)
    t = Traffic([], [], {}, {}, 0)
    for name in program.donated:
        t.nbytes[name] = buffer_nbytes(program.buffers[name], program.hints)
        t.at_start += t.nbytes[name]
    for k, u in enumerate(all_nodes):
        made, used = [], []
        for name in u.writes:
            root = memory.get(name, name)
            if name in read_by_others and root not in given and root not in t.nbytes:
                t.nbytes[root] = buffer_nbytes(program.buffers[root], program.hints)
                made.append(root)
        for name in dict.fromkeys((*u.reads, *(w for w in u.writes if w in read_by_others))):
            root = memory.get(name, name)
            if root not in kept and root in t.nbytes and root not in used:
                used.append(root)
                t.users.setdefault(root, []).append(k)
        t.made.append(made)
        t.used.append(used)
    return t


def peak_nbytes(t: Traffic, sequence: Sequence[int]) -> int:
    """The most bytes alive at once when nodes run in a sequence and memory is freed after its last
    use. Inputs count only if donated."""
    left = {n: len(users) for n, users in t.users.items()}
    best = now = t.at_start
    for k in sequence:
        now += sum(t.nbytes[n] for n in t.made[k])
        best = max(best, now)
        for n in t.used[k]:
            left[n] -= 1
            if left[n] == 0:
                now -= t.nbytes[n]
    return best


def greedy_order(t: Traffic, all_nodes: Sequence[ScheduleNode]) -> list[int]:
    """A topological order that always takes the ready node which leaves the least memory alive; the
    program's order decides ties."""
    left = {n: set(users) for n, users in t.users.items()}
    waiting = [len(u.preds) for u in all_nodes]
    users = users_of(all_nodes)
    ready = [(_growth(t, left, k), k) for k, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    out: dict[int, None] = {}
    while ready:
        _, k = heapq.heappop(ready)
        if k in out:
            continue
        out[k] = None
        changed = []
        for n in t.used[k]:
            left[n].remove(k)
            if len(left[n]) == 1:  # its last user leaves less alive than was thought
                changed += [u for u in left[n] if waiting[u] == 0]
        for user in users[k]:
            waiting[user] -= 1
            if waiting[user] == 0:
                changed.append(user)
        for u in changed:
            heapq.heappush(ready, (_growth(t, left, u), u))
    return list(out)


def _growth(t: Traffic, left: dict[str, set[int]], k: int) -> int:
    """By how many bytes more are alive after a node ran."""
    return sum(t.nbytes[n] for n in t.made[k]) - sum(
        t.nbytes[n] for n in t.used[k] if len(left[n]) == 1
    )


def users_of(all_nodes: Sequence[ScheduleNode]) -> list[list[int]]:
    """The nodes that come after each one."""
    users: list[list[int]] = [[] for _ in all_nodes]
    for k, u in enumerate(all_nodes):
        for p in u.preds:
            users[p].append(k)
    return users


def order(grouping: Grouping) -> list[ScheduleNode]:
    """The nodes in the order in which they will run: the program's own, unless a greedy one needs
    clearly less memory. Their preds are places in that order."""
    all_nodes = readers_first(nodes(grouping))
    best = program_order(all_nodes)
    only = all(a in all_nodes[b].preds for a, b in pairwise(best))  # there is no other
    if len(all_nodes) <= MAX_GREEDY and not only:
        t = traffic(grouping, all_nodes)
        other = greedy_order(t, all_nodes)
        now, then = (peak_nbytes(t, s) for s in (best, other))
        if then < now * CLEARLY_LESS:
            best = other
    place = {k: at for at, k in enumerate(best)}
    moved = (all_nodes[k] for k in best)
    return [
        ScheduleNode(u.item, u.ops, frozenset([place[p] for p in u.preds]), u.reads, u.writes)
        for u in moved
    ]
