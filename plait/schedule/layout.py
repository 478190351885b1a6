"""Layouts of intermediates: a buffer whose strides are free follows the memory order of what it is
computed from.

So a chain on a channels-last tensor stays channels-last. Buffers that leave the program or go to
extern calls are fixed before. Chosen before anything is decided that depends on which axis is
contiguous.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from plait.ir.layouts import follow
from plait.ir.loops import Alias, Loop, LoopProgram, Mutate
from plait.schedule import cost
from plait.schedule.deps import Bodies, load_of, roots
from plait.schedule.group import stored
from plait.schedule.plan import Plan


def settle_layouts(program: LoopProgram, bodies: Bodies, by_row: bool = False) -> LoopProgram:
    """The program with the layouts of all its buffers chosen, producers before consumers. by_row:
    they stay as eager has them. Which source is largest depends on how many rows there are, and of
    one row what all rows share looks like a source, too."""
    buffers = dict(program.buffers)
    for op in program.ops:
        # What an input is overwritten with is computed in its layout, so that it can be there.
        if isinstance(op, Mutate):
            new, old = buffers[op.source], buffers[op.target]
            if not new.fixed and new.shape == old.shape:
                buffers[op.source] = replace(new, strides=old.strides, fixed=True)
    if by_row:
        return replace(program, buffers=buffers)
    hint = partial(cost.hint, hints=program.hints)
    settled: set[str] = set()  # by the first piece of them
    for loop in program.ops:
        if not isinstance(loop, Loop):
            continue
        sources = [
            (buffers[load_of(n).buf], load_of(n).index) for n in bodies.of(roots(loop)).loads
        ]
        for out, index in stored(loop):
            if out not in settled:
                settled.add(out)
                buffers[out] = follow(buffers[out], index, sources, hint)
    return replace(program, buffers=buffers)


def unaligned(plan: Plan) -> frozenset[str]:
    """Buffers that may start at any multiple of their element, since they are seen through a view
    with an offset. All others start at multiples of 16 bytes."""
    found: set[str] = set()
    for step in plan.steps:
        if isinstance(step, Alias):
            nbytes = step.offset * plan.buffers[step.out].dtype.nbytes
            if step.base in found or not step.relative or nbytes % 16 != 0:
                found.add(step.out)
    return frozenset(found)
