"""Distances between all rows of two matrices, and their gradient: reductions over the coordinates.

Large Euclidean distances go to ATen, which makes them of a matrix product.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from plait.ir.expr import Expr, bounds, may_be_zero
from plait.ir.loops import Node, const
from plait.ir.maths import eq, ne, sign, sqrt, where
from plait.ir.record import Recorder
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import result
from plait.lower.extern import call_extern

aten = torch.ops.aten

Point = tuple[Expr, ...]
_ROWS = 25  # ATen multiplies matrices from this many rows on


@lower(aten._cdist_forward.default)
def cdist(ctx: Lowering, a: View, b: View, p: float, compute_mode: int | None) -> Any:
    """The p-norm of the difference of every row of a and every row of b. Batches were expanded."""
    rows = max(bounds(x.shape[-2])[1] for x in (a, b))
    if p == 2 and (compute_mode == 1 or (not compute_mode and rows > _ROWS)):
        return call_extern(ctx, (a, b, p, compute_mode), {})
    if may_be_zero(a.shape[-1]) or a.shape[:-2] != b.shape[:-2]:
        raise NoRule("rows without coordinates, or batches that differ")
    compute = compute_dtype(a.dtype)

    def term(ops: Recorder, i: Point, r: Point) -> Node:
        x = ops.cast(a.load(ops, (*i[:-1], r[0])), compute)
        y = ops.cast(b.load(ops, (*i[:-2], i[-1], r[0])), compute)
        d = abs(x - y)
        if p == 0:
            return where(ne(d, 0), const(1, compute), 0)
        return d * d if p == 2 else d if p in (1, math.inf) else d**p

    shape = (*a.shape[:-1], b.shape[-2])
    kind = "max" if p == math.inf else "sum"
    found = ctx.reduce(shape, a.shape[-1:], kind, term)

    def root(ops: Recorder, i: Point) -> Node:
        x = found.load(ops, i)
        if p == 2:
            x = sqrt(x)
        elif p not in (0, 1, math.inf):
            x = x ** (1 / p)
        return ops.cast(x, a.dtype)

    return result(ctx, root)


@lower(aten._cdist_backward.default)
def cdist_backward(ctx: Lowering, grad: View, a: View, b: View, p: float, dist: View) -> View:
    """The gradient of a's rows: a sum over the rows of b."""
    compute = compute_dtype(a.dtype)
    if p == 0:
        return result(ctx, lambda ops, i: ops.const(0, a.dtype))
    if a.shape[:-2] != b.shape[:-2] or may_be_zero(b.shape[-2]):
        raise NoRule("nothing to sum, or batches that differ")

    def term(ops: Recorder, i: Point, r: Point) -> Node:
        pair = (*i[:-1], r[0])
        g, far = (ops.cast(x.load(ops, pair), compute) for x in (grad, dist))
        x = ops.cast(a.load(ops, i), compute)
        y = ops.cast(b.load(ops, (*i[:-2], r[0], i[-1])), compute)
        return _slope(x - y, far, g, p)

    total = ctx.reduce(a.shape, b.shape[-2:-1], "sum", term)
    return result(ctx, lambda ops, i: ops.cast(total.load(ops, i), a.dtype))


def _slope(d: Node, far: Node, g: Node, p: float) -> Node:
    """g times the derivative of the distance `far` by the difference d of one coordinate."""
    if p == 1:
        return g * sign(d)
    if p == math.inf:
        return where(eq(abs(d), far), g * sign(d), 0.0)
    if p == 2:
        return where(eq(far, 0), 0.0, g * d / far)
    scaled = g / far ** (p - 1)
    if p > 2:
        inner = d * abs(d) ** (p - 2) * scaled
        return where(eq(far, 0), 0.0, inner)
    inner = sign(d) * abs(d) ** (p - 1) * scaled
    nothing = eq(far, 0)
    if p < 1:
        nothing = nothing | eq(d, 0)
    return where(nothing, 0.0, inner)
