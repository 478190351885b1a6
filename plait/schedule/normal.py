"""Loops in normal form: scatters update in place, and reductions over nothing are pointwise.

A Scatter's copy of its base becomes a Pointwise of its own, which can be inlined into and fused like any other.
"""

from __future__ import annotations

from dataclasses import replace

from plait.ir.dtypes import i64
from plait.ir.loops import (
    Load,
    LoopProgram,
    Node,
    Op,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
    const,
    loop_vars,
    node,
    substitute_vars,
)
from plait.ir.sizes import Atom, Size
from plait.schedule.deps import extent


def normalise(program: LoopProgram) -> LoopProgram:
    """The program with every loop in normal form."""
    ops: list[Op] = []
    for op in program.ops:
        if isinstance(op, Scatter) and op.base != op.out:
            ops += _split(op, program)
        elif isinstance(op, Reduction) and all(extent(v) == 1 for v in op.rvars):
            ops += _single(op)
        elif isinstance(op, Scan) and extent(op.vars[op.axis]) == 1:
            zero = const(0, i64)
            values = (op.body, zero)
            ops += _pointwise(op, {}, values[: len(op.outs)])
        else:
            ops.append(op)
    return replace(program, ops=tuple(ops))


def _split(op: Scatter, program: LoopProgram) -> list[Op]:
    base = program.buffers[op.base]
    vars_ = loop_vars("i", base.shape)
    value = node("load", (), Load(op.base, vars_), base.dtype)
    return [Pointwise(op.out, vars_, value, origin=op.origin), replace(op, base=op.out)]


def _single(op: Reduction) -> list[Op]:
    """A reduction of one element a point."""
    env: dict[Atom, Size] = {v.symbol: 0 for v in op.rvars if v.symbol is not None}
    x = op.body
    if op.kind == "welford":
        # x - mean is 0 for numbers and NaN for NaN and infinities.
        off = node("sub", (x, x))
        return _pointwise(op, env, (x, node("mul", (off, off)), const(1, x.dtype)))
    if op.kind in ("argmax", "argmin"):
        return _pointwise(op, env, (const(0, i64),))
    return _pointwise(op, env, (x,))


def _pointwise(op: Reduction | Scan, env: dict[Atom, Size], values: tuple[Node, ...]) -> list[Op]:
    return [
        Pointwise(out, op.vars, substitute_vars(value, env), origin=op.origin)
        for out, value in zip(op.outs, values, strict=True)
        if out is not None
    ]
