"""Cuts the statements of a kernel into passes over its reduced axes."""

from __future__ import annotations

from collections.abc import Callable

from plait.ir.loops import Node
from plait.schedule.legalize.linear import LinearKernel, stmt_nodes
from plait.schedule.plan import Reduce, Stmt, Store


def cut_passes(
    linear: LinearKernel, deps: Callable[[Node], frozenset[object]]
) -> tuple[tuple[tuple[Stmt, ...], ...], tuple[Store, ...]]:
    """Cuts the full-level statements into passes by their dependence on finished reductions.

    Full stores go into the last pass and outer stores after all passes: an output may share memory
    with an input. A reduction with results at full level is part of every pass that uses it."""
    full = [s for s in linear.stmts if isinstance(s, Reduce) or (s.full and linear.rvars)]
    used = [{d for n in stmt_nodes(s) for d in deps(n) if isinstance(d, str)} for s in full]
    scans = {s.name: k for k, s in enumerate(full) if isinstance(s, Reduce) and s.inner}
    ready: dict[str, int] = {}  # reduction -> the first pass whose statements may use it
    level: list[int] = []
    for s, names in zip(full, used, strict=True):
        level.append(max((ready[d] for d in names), default=0))
        if isinstance(s, Reduce):
            ready[s.name] = level[-1] + (not s.inner)
    end = max(level, default=0)
    members: list[set[int]] = [set() for _ in range(end + 1)]
    for k, s in enumerate(full):
        if not (isinstance(s, Reduce) and s.inner):
            members[end if isinstance(s, Store) else level[k]].add(k)
    for group in members:
        todo = sorted(group)
        while todo:
            found = {scans[d] for d in used[todo.pop()] if d in scans} - group
            group |= found
            todo.extend(sorted(found))
    passes = tuple(tuple(full[k] for k in sorted(group)) for group in members if group)
    last = tuple(s for s in linear.stmts if isinstance(s, Store) and not (s.full and linear.rvars))
    return passes, last
