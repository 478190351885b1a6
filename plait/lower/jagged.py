"""Rows of lengths of their own, one after the other, to and from a padded tensor.

Row b has elements offsets[b] to offsets[b + 1]. What does not fit between its first one and the
padded length is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.ir.checks import Check
from plait.ir.dtypes import i64
from plait.ir.expr import Expr, Size
from plait.ir.loops import Node, Scatter, loop_vars
from plait.ir.maths import where
from plait.ir.record import Recorder
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.elementwise import result

aten = torch.ops.aten

_OUTSIDE = Check("RuntimeError", "offsets of a jagged tensor go beyond its values")
_LAST = Check(
    "RuntimeError", "_padded_dense_to_jagged_forward(): final offset should match total_L value"
)


def _row(ops: Recorder, offsets: View, b: Size, j: Size) -> tuple[Node, Node]:
    """Where element j of row b is, and whether the row has one."""
    at = ops.cast(offsets.load(ops, (b,)), i64) + ops.index(j)
    return at, at < ops.cast(offsets.load(ops, (b + 1,)), i64)


def _only(offsets: Sequence[View]) -> View:
    if len(offsets) != 1:
        raise NoRule("rows of rows")
    return offsets[0]


@lower(aten._jagged_to_padded_dense_forward.default)
def to_padded(
    ctx: Lowering, x: View, offsets: Sequence[View], lengths: Sequence[Size], padding: Any = 0.0
) -> View:
    bounds = _only(offsets)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        at, there = _row(ops, bounds, i[0], i[1])

        def value() -> Node:
            row = ops.checked(at, x.shape[0], wrap=False, check=_OUTSIDE)
            return x.load(ops, (row, *i[2:]))

        return ops.masked(there, value, padding)

    return result(ctx, body)


@lower(aten._padded_dense_to_jagged_forward.default)
def to_jagged(ctx: Lowering, x: View, offsets: Sequence[View], n_rows: Size | None = None) -> View:
    bounds, shape = _only(offsets), ctx.out_shape()
    if 0 in shape or 0 in x.shape:
        raise NoRule("nothing to take")
    zeros = ctx.pointwise(shape, x.dtype, lambda ops, i: ops.const(0, x.dtype))
    ops, vars_ = Recorder(), loop_vars("i", x.shape)
    at, there = _row(ops, bounds, vars_[0], vars_[1])
    taken = there & (at >= 0) & (at < ops.index(shape[0]))
    safe = where(taken, at, ops.const(0, i64))
    n = ops.cast(bounds.load(ops, (bounds.shape[0] - 1,)), i64)
    right = ops.checked(n - ops.index(shape[0]), 1, wrap=False, check=_LAST)  # 0
    index, args = ops.take_args((ops.indirect(safe, shape[0]) + right, *vars_[2:]))
    name = ctx.new_buffer(x.dtype, shape)
    value = x.load(ops, vars_)
    ctx.ops.append(Scatter(name, zeros.buf, vars_, index, args, value, "store", taken, ctx.origin))
    return ctx.whole(name)
