"""From ordered nodes to a Plan: kernels are made, and buffers get the step after which nobody needs
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from plait.ir.calls import Extern
from plait.ir.effects import loop_outs
from plait.ir.expr import Atom, Expr, free_symbols
from plait.ir.layouts import flat_index
from plait.ir.loops import LoopProgram, Mutate, Node, Scan, Scatter, index_exprs, walk
from plait.schedule.axes import Axes, AxisUse, choose_axes
from plait.schedule.batch import batch
from plait.schedule.deps import load_of, memory_roots, read_for_symbols, roots
from plait.schedule.group import Group, Member, is_ordered, is_settled, moved, statements
from plait.schedule.grouping import Grouping, HorizontalGroup, ScheduleNode
from plait.schedule.kernels import Names, content_text, make_kernel, origin_words
from plait.schedule.plan import Kernel, MemoryPlan, Plan, Reduce, Step, Stmt, Store, stmt_roots


def make_plan(grouping: Grouping, ordered: Sequence[ScheduleNode], names: Names) -> Plan:
    """The plan, with every buffer in memory of its own. names: gives its kernels theirs."""
    program = grouping.program
    needed = {*program.returned, *(b for u in ordered for b in u.reads), *program.given}
    needed.update(*read_for_symbols(program).values())
    launched = [op for op in program.ops if isinstance(op, Extern) and op.kernel is not None]
    needed.update(name for op in launched for name in op.made)
    ordered = [_without_unneeded(u, needed) for u in ordered]
    targets = {op.source: op.target for op in program.ops if isinstance(op, Mutate)}
    made: list[list[Step]] = []
    maker = partial(_KernelMaker, grouping=grouping, targets=targets, chosen={})
    for node in ordered:
        if isinstance(node.item, Group):
            made.append([maker(node).kernel(names)])
        elif isinstance(node.item, HorizontalGroup):
            made.append([maker(u).kernel(names) for u in node.item.nodes])
        else:
            step = node.item
            assert isinstance(step, Step), step
            made.append([step])
    steps, access = batch(program, made, [(u.reads, u.writes) for u in ordered], names)
    frees = last_uses(program, access)
    alive = _alive(program, access)
    kept = {name: b for name, b in program.buffers.items() if name in alive}
    return Plan(program, tuple(steps), frees, kept, MemoryPlan(), grouping.refusals)


def _without_unneeded(node: ScheduleNode, needed: set[str]) -> ScheduleNode:
    """A node that writes only what somebody reads."""
    item = node.item
    if isinstance(item, HorizontalGroup):
        item = HorizontalGroup(tuple(_without_unneeded(u, needed) for u in item.nodes))
    writes = tuple([w for w in node.writes if w in needed])
    if item is node.item and writes == node.writes:
        return node
    return replace(node, item=item, writes=writes)


class _KernelMaker:
    """Turns one group into a kernel. targets: the inputs whose new values buffers are. chosen: the
    axes of kernels before it, by what they were chosen for: many are alike."""

    def __init__(
        self,
        node: ScheduleNode,
        grouping: Grouping,
        targets: Mapping[str, str],
        chosen: dict[object, Axes],
    ) -> None:
        assert isinstance(node.item, Group), node.item
        self.targets, self.chosen = targets, chosen
        self.node, self.group = node, node.item
        self.buffers, self.hints = grouping.program.buffers, grouping.program.hints
        self.facts = [grouping.bodies.of(roots(m.loop)) for m in self.group.members]
        made = {o for m in self.group.members for o in loop_outs(m.loop)}
        self.loads = [
            (
                load_of(n).buf,
                m.at(load_of(n).index),
                _found_by(m, n.args[: len(n.args) - load_of(n).masked]),
            )
            for m, facts in zip(self.group.members, self.facts, strict=True)
            for n in facts.loads
            if load_of(n).buf not in made or isinstance(m.loop, Scatter)
        ]
        self.stores = [
            (name, index, _found_by(m, getattr(m.loop, "index_args", ())))
            for m in self.group.members
            for name, index in m.stored
            if name in node.writes
        ]

    def kernel(self, names: Names) -> Kernel:
        """The kernel, on the best axes."""
        g = self.group
        fixed = any(map(is_ordered, g.members)), any(is_settled(m.loop) for m in g.members)
        asked = g.vars, g.rvars, tuple(self._accesses()), fixed
        axes = self.chosen.get(asked)
        if axes is None:
            axes = self.chosen[asked] = choose_axes(*asked, self.hints)
        members = [moved(m, axes.env, False) for m in g.members]
        final = Group(g.name, axes.vars, axes.rvars, members)
        stmts = [s for s in statements(final) if isinstance(s, Reduce) or s.buf in self.node.writes]
        stmts = _writing_over(stmts, self.targets)
        origins = [m.loop.origin for m in members]
        origin = tuple(dict.fromkeys(text for o in origins for text in o))
        grouping = make_kernel("", final.vars, final.rvars, stmts, self.buffers, origin, self.hints)
        words = origin_words(origins) or _kinds(grouping)
        content = content_text(final.vars, final.rvars, stmts, grouping.args)
        return replace(grouping, name=names.new(words, content))

    def _accesses(self) -> list[AxisUse]:
        out = []
        for weight, touched in ((1, self.loads), (2, self.stores)):
            for name, index, scattered in touched:
                b = self.buffers[name]
                out.append(AxisUse(flat_index(b, index), weight * b.dtype.nbytes, scattered))
        for m, facts in zip(self.group.members, self.facts, strict=True):
            for n in facts.indices:
                out += (AxisUse(e, 0) for e in m.at(index_exprs(n)))
            if m.segment:  # its results keep the axes of segments apart
                out.append(AxisUse(flat_index(self.buffers[m.stored[0][0]], m.stored[0][1]), 0))
            if isinstance(m.loop, Scan):
                out.append(AxisUse(m.at(m.loop.vars)[m.loop.axis], 0))
        return out


def _found_by(m: Member, args: Sequence[Node]) -> tuple[Atom, ...]:
    """The variables of a group on which the values of these nodes of a member depend."""
    if not args:
        return ()
    exprs = (e for n in walk(tuple(args)) for e in m.at(index_exprs(n)))
    return tuple(dict.fromkeys(a for e in exprs if isinstance(e, Expr) for a in free_symbols(e)))


def _writing_over(stmts: Sequence[Stmt], targets: Mapping[str, str]) -> list[Stmt]:
    """The statements of a loop nest without reductions, in an order in which what reads the old
    value of an input comes before what stores the new one, if there is such an order: then the new
    one may take the memory of the old (`overwrite.py`)."""
    left = list(stmts)
    moves = [s for s in left if isinstance(s, Store) and s.buf in targets]
    if len(left) == 1 or not moves or any(isinstance(s, Reduce) for s in left):
        return left
    loads = [{load_of(n).buf for n in walk(stmt_roots(s)) if n.op == "load"} for s in left]
    read = dict(zip(map(id, left), loads, strict=True))

    def is_free(s: Stmt) -> bool:
        old = targets.get(s.buf) if isinstance(s, Store) else None
        return all(old not in read[id(other)] for other in left if other is not s)

    out: list[Stmt] = []
    while left:
        out.append(next(filter(is_free, left), left[0]))
        left = [s for s in left if s is not out[-1]]
    return out


def _kinds(kernel: Kernel) -> list[str]:
    """Words for a kernel whose origin is unknown."""
    kinds = dict.fromkeys(s.kind for s in kernel.stmts if isinstance(s, Reduce))
    scatters = any(isinstance(s, Store) and s.mode not in ("store", "sum") for s in kernel.stmts)
    return list(kinds) or (["scatter"] if scatters else ["pointwise"])


Touched = tuple[tuple[str, ...], tuple[str, ...]]


def _alive(program: LoopProgram, access: Sequence[Touched]) -> set[str]:
    """The buffers that still occur."""
    used = {name for both in access for names in both for name in names}
    return {*used, *program.given, *program.returned}


def last_uses(program: LoopProgram, access: Sequence[Touched]) -> tuple[tuple[str, ...], ...]:
    """For every step the buffers that nobody uses after it. Inputs are among them only if they are
    donated; outputs and constants never are.

    Buffers that share memory are freed together."""
    memory = memory_roots(program.ops)
    kept = {*program.returned, *(program.given - {*program.donated})}
    last: dict[str, int] = {}
    names: dict[str, dict[str, None]] = {}
    for k, (read, written) in enumerate(access):
        for name in (*read, *written):
            root = memory.get(name, name)
            last[root] = k
            names.setdefault(root, {})[name] = None
    out: list[list[str]] = [[] for _ in access]
    for root, k in last.items():
        out[k] += (n for n in names[root] if n not in kept)
    return tuple(tuple(o) for o in out)
