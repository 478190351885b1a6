"""The order of the steps: topological, with low peak memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from plait.errors import InternalError
from plait.ir.loops import Mutate
from plait.schedule.form import Draft, Unit, units
from plait.schedule.group import Group


def program_order(all_units: Sequence[Unit]) -> list[int]:
    """A topological order that stays as near to the program's as it can. Raises InternalError on a cycle."""
    waiting = [len(u.preds) for u in all_units]
    users: list[list[int]] = [[] for _ in all_units]
    for k, u in enumerate(all_units):
        for p in u.preds:
            users[p].append(k)
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
    if len(out) != len(all_units):
        stuck = [all_units[k].ops for k, n in enumerate(waiting) if n > 0]
        raise InternalError(f"schedule: these groups of ops depend on each other: {stuck[:4]}")
    return out


def readers_first(all_units: Sequence[Unit]) -> list[Unit]:
    """The units with the readers of an input's old value before the group that makes its new one, where that is possible: then
    the new value can be written over the old one."""
    out = list(all_units)
    maker = {name: k for k, u in enumerate(out) if isinstance(u.item, Group) for name in u.writes}
    for u in all_units:
        if not isinstance(u.item, Mutate) or u.item.source not in maker:
            continue
        w = maker[u.item.source]
        readers = {k for k, r in enumerate(out) if u.item.target in r.reads} - {w}
        readers -= {k for k, r in enumerate(out) if r.item is u.item}
        if readers and not readers & _after(out, w):
            out[w] = replace(out[w], preds=out[w].preds | readers)
    return out


def _after(all_units: Sequence[Unit], start: int) -> set[int]:
    """The units that must run after one."""
    users: list[list[int]] = [[] for _ in all_units]
    for k, u in enumerate(all_units):
        for p in u.preds:
            users[p].append(k)
    seen: set[int] = set()
    todo = [start]
    while todo:
        for k in users[todo.pop()]:
            if k not in seen:
                seen.add(k)
                todo.append(k)
    return seen


def order(draft: Draft) -> list[Unit]:
    """The units in the order in which they will run."""
    all_units = readers_first(units(draft))
    return [all_units[k] for k in program_order(all_units)]
