"""Layouts of intermediates: a buffer whose strides are free follows the memory order of what it is
computed from.

So a chain on a channels-last tensor stays channels-last. Buffers that leave the program or go to
extern calls are fixed before. Chosen before anything is decided that depends on which axis is
contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from plait.ir.expr import Atom, Expr, Size, coefficient, smax, total
from plait.ir.loops import Alias, Buffer, Loop, LoopProgram, Mutate
from plait.schedule.cost import Hints, buffer_nbytes, hint
from plait.schedule.deps import Bodies, load_of, roots
from plait.schedule.group import stored
from plait.schedule.plan import Plan

Index = tuple[Size, ...]


def flat_index(b: Buffer, index: Index) -> Size:
    """The linear position of an element, in elements."""
    return _position(index, b.strides)


@lru_cache(1 << 12)
def _position(index: Index, strides: Index) -> Size:
    return total(e * s for e, s in zip(index, strides, strict=True))


def dense_strides(shape: Sequence[Size], order: Iterable[int]) -> tuple[Size, ...]:
    """Strides without gaps; order: dimensions from outermost to innermost."""
    strides: list[Size] = [1] * len(shape)
    step: Size = 1
    for d in reversed(list(order)):
        strides[d] = step
        step = step * smax(shape[d], 1)
    return tuple(strides)


def settle_layouts(program: LoopProgram, bodies: Bodies) -> LoopProgram:
    """The program with the layouts of all its buffers chosen, producers before consumers."""
    buffers = dict(program.buffers)
    for op in program.ops:
        # What an input is overwritten with is computed in its layout, so that it can be there.
        if isinstance(op, Mutate):
            new, old = buffers[op.source], buffers[op.target]
            if not new.fixed and new.shape == old.shape:
                buffers[op.source] = replace(new, strides=old.strides, fixed=True)
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
                buffers[out] = follow(buffers[out], index, sources, program.hints)
    return replace(program, buffers=buffers)


def follow(
    out: Buffer, index: Index, sources: Sequence[tuple[Buffer, Index]], hints: Hints
) -> Buffer:
    """out with the memory order of the largest source that is read at every point of out's index,
    if there is one.

    index, sources: where out is stored and sources are loaded, over the same variables."""
    if out.fixed or len(out.shape) < 2:
        return out
    vars_ = [_only_var(e) for e in index]
    if any(v is None and e != 0 for v, e in zip(vars_, index, strict=True)):
        return out
    best: tuple[int, list[int]] | None = None
    for b, at in sources:
        strides = _strides_of(vars_, flat_index(b, at), hints)
        if strides is None:
            continue
        size = buffer_nbytes(b, hints)
        if best is None or size > best[0]:
            best = size, strides
    if best is None:
        return out
    keys = best[1]
    order = sorted(range(len(keys)), key=lambda d: (-keys[d], d))
    dense = dense_strides(out.shape, order)
    return out if dense == out.strides else replace(out, strides=dense)


def _only_var(e: Size) -> Atom | None:
    if isinstance(e, Expr):
        return e.symbol
    return None


def _strides_of(vars_: Sequence[Atom | None], flat: Size, hints: Hints) -> list[int] | None:
    """The strides of variables in an address; None where one of them (of more than one value) does
    not count."""
    out = []
    for v in vars_:
        if v is None:
            out.append(0)
            continue
        s = coefficient(flat, v)
        if s is None or s == 0:
            return None
        out.append(abs(hint(s, hints)))
    return out


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
