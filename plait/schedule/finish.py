"""From ordered units to a Plan: kernels are made, and buffers get the step after which nobody needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.ir.loops import Buffer, LoopProgram
from plait.schedule.deps import memory_roots, output_buffers
from plait.schedule.form import Draft, Unit
from plait.schedule.group import Group, statements
from plait.schedule.kernels import Names, content_text, make_kernel, origin_words
from plait.schedule.plan import Kernel, MemoryPlan, Plan, Reduce, Step, Store


def finish(draft: Draft, ordered: Sequence[Unit]) -> Plan:
    """The plan, with every buffer in memory of its own."""
    program = draft.program
    names = Names()
    steps: list[Step] = []
    needed = {*output_buffers(program), *(b for u in ordered for b in u.reads)}
    needed.update(i for i in program.inputs if isinstance(i, str))
    ordered = [replace(u, writes=tuple(w for w in u.writes if w in needed)) for u in ordered]
    for unit in ordered:
        if isinstance(unit.item, Group):
            steps.append(_kernel(unit.item, unit.writes, program.buffers, names))
        else:
            step = unit.item
            assert isinstance(step, Step), step
            steps.append(step)
    access = [(u.reads, u.writes) for u in ordered]
    frees = last_uses(program, access)
    alive = _alive(program, access)
    buffers = {name: b for name, b in program.buffers.items() if name in alive}
    return Plan(program, tuple(steps), frees, buffers, MemoryPlan(), draft.refusals)


def _kernel(
    group: Group, writes: Sequence[str], buffers: Mapping[str, Buffer], names: Names
) -> Kernel:
    """The kernel of a group. writes: the buffers that somebody else needs; other stores are left out."""
    stmts = [s for s in statements(group) if isinstance(s, Reduce) or s.buf in writes]
    origins = [m.loop.origin for m in group.members]
    origin = tuple(dict.fromkeys(text for o in origins for text in o))
    draft = make_kernel("", group.vars, group.rvars, stmts, buffers, origin, 0)
    words = origin_words(origins) or _kinds(draft)
    name = names.new(words, content_text(group.vars, group.rvars, stmts, draft.args))
    return make_kernel(name, group.vars, group.rvars, stmts, buffers, origin, 0)


def _kinds(kernel: Kernel) -> list[str]:
    """Words for a kernel whose origin is unknown."""
    kinds = dict.fromkeys(s.kind for s in kernel.stmts if isinstance(s, Reduce))
    scatters = any(isinstance(s, Store) and s.mode != "store" for s in kernel.stmts)
    return list(kinds) or (["scatter"] if scatters else ["pointwise"])


Access = tuple[tuple[str, ...], tuple[str, ...]]


def _alive(program: LoopProgram, access: Sequence[Access]) -> set[str]:
    """The buffers that still occur."""
    used = {name for both in access for names in both for name in names}
    inputs = (i for i in program.inputs if isinstance(i, str))
    return {*used, *inputs, *program.constants, *output_buffers(program)}


def last_uses(program: LoopProgram, access: Sequence[Access]) -> tuple[tuple[str, ...], ...]:
    """For every step the buffers that nobody uses after it. Inputs are among them only if they are donated; outputs and constants never are.

    Buffers that share memory are freed together."""
    memory = memory_roots(program.ops)
    kept = {*output_buffers(program), *program.constants}
    kept.update(i for i in program.inputs if isinstance(i, str) and i not in program.donated)
    last: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for k, (read, written) in enumerate(access):
        for name in (*read, *written):
            root = memory.get(name, name)
            last[root] = k
            known = names.setdefault(root, [])
            if name not in known:
                known.append(name)
    out: list[list[str]] = [[] for _ in access]
    for root, k in last.items():
        out[k] += (n for n in names[root] if n not in kept)
    return tuple(tuple(o) for o in out)
