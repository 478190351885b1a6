"""The order of the steps: topological, with low peak memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from plait.errors import InternalError
from plait.schedule.form import Draft, Unit, units


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


def order(draft: Draft) -> list[Unit]:
    """The units in the order in which they will run."""
    all_units = units(draft)
    return [all_units[k] for k in program_order(all_units)]
