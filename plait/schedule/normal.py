"""Scatters become updates in place: the copy of the base is a Pointwise of its own, which can be inlined into and fused like any other."""

from __future__ import annotations

from dataclasses import replace

from plait.ir.loops import Load, LoopProgram, Op, Pointwise, Scatter, loop_vars, node


def split_scatters(program: LoopProgram) -> LoopProgram:
    """The program with every Scatter preceded by a copy of its base and then running on its own output."""
    ops: list[Op] = []
    for op in program.ops:
        if isinstance(op, Scatter) and op.base != op.out:
            base = program.buffers[op.base]
            vars_ = loop_vars("i", base.shape)
            value = node("load", (), Load(op.base, vars_), base.dtype)
            ops.append(Pointwise(op.out, vars_, value, origin=op.origin))
            op = replace(op, base=op.out)
        ops.append(op)
    return replace(program, ops=tuple(ops))
