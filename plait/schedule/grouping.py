"""Loops in groups, of which each becomes a kernel, and the nodes of the dependence graph.

A node is one group of loops, or one op that is no loop. `group_loops` starts with a group a loop.
Once the order is known, `fuse_horizontally` may join nodes to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.ir.effects import defines, updates
from plait.ir.loops import Loop, LoopProgram, Op, Reduction
from plait.schedule.deps import Bodies, preds, reads
from plait.schedule.group import Group, new_group
from plait.schedule.plan import Refusal


@dataclass(slots=True)
class Grouping:
    """A program cut into groups.

    preds: of every op.
    groups: in program order of their first loops.
    column_sums: buffers of partial sums -> the sums of columns that were cut into them.
    refusals: why loops stayed apart."""

    program: LoopProgram
    bodies: Bodies
    preds: list[set[int]]
    groups: list[Group]
    column_sums: Mapping[str, Reduction]
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduleNode:
    """A node of the dependence graph.

    item: a group, several that share a launch, or an op that is no loop.
    ops: places in the program.
    preds: nodes that come before it.
    reads, writes: buffers (an update is a write)."""

    item: Group | HorizontalGroup | Op
    ops: tuple[int, ...]
    preds: frozenset[int]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HorizontalGroup:
    """Nodes with groups that need nothing of each other and run in one launch."""

    nodes: tuple[ScheduleNode, ...]


def group_loops(split: tuple[LoopProgram, Mapping[str, Reduction]], bodies: Bodies) -> Grouping:
    """A group for every loop."""
    program, column_sums = split
    groups = [new_group(k, op) for k, op in enumerate(program.ops) if isinstance(op, Loop)]
    return Grouping(program, bodies, preds(program, bodies), groups, column_sums)


def nodes(grouping: Grouping) -> list[ScheduleNode]:
    """The nodes of a grouping in the order of their first ops, which need not be an order that
    works once groups are fused."""
    ops = grouping.program.ops
    items: list[tuple[int, Group | Op, tuple[int, ...]]] = [
        (g.members[0].op, g, tuple(g.ops)) for g in grouping.groups
    ]
    items += [(k, op, (k,)) for k, op in enumerate(ops) if not isinstance(op, Loop)]
    items.sort(key=lambda t: t[0])
    node_of = {k: u for u, (_, _, members) in enumerate(items) for k in members}
    out = []
    for u, (_, item, members) in enumerate(items):
        before = {node_of[p] for k in members for p in grouping.preds[k]} - {u}
        read, written = _access([ops[k] for k in members], grouping.bodies)
        out.append(ScheduleNode(item, members, frozenset(before), read, written))
    return out


def _access(ops: Sequence[Op], bodies: Bodies) -> tuple[tuple[str, ...], tuple[str, ...]]:
    read: dict[str, None] = {}
    written: dict[str, None] = {}
    for op in ops:
        for name in reads(op, bodies):
            if name not in written:
                read[name] = None
        written.update(dict.fromkeys((*defines(op), *updates(op))))
    return tuple(read), tuple(written)
