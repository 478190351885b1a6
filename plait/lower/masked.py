"""masked_scatter and its gradient: a running count of the mask says which element of the source
goes where.

Tensors are seen row-major and flat. A mask that is broadcast along its last dimensions (one bit a
token) is counted once for all of them. The count is a Scan; the rest are loops that fuse with what
is around.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plait.ir.checks import Check
from plait.ir.dtypes import b1, i64
from plait.ir.expr import Expr, Size, contiguous_strides, free_symbols, numel, total
from plait.ir.loops import Node, Scan, Scatter, loop_vars
from plait.ir.maths import where
from plait.ir.record import Recorder
from plait.lower.core import Index, Lowering, NoRule, View, lower
from plait.lower.elementwise import broadcast, result
from plait.lower.index import unflatten

aten = torch.ops.aten

_TOO_FEW = Check("RuntimeError", "masked_scatter: the source has too few elements for the mask")


@dataclass(frozen=True, slots=True)
class Hits:
    """The ones of a mask, numbered. rows: the part of the shape along which the mask differs;
    counts: per row, how many rows of ones there are up to and including it."""

    mask: View
    rows: tuple[Size, ...]
    counts: View

    def hit(self, ops: Recorder, i: Index) -> Node:
        """Whether the mask is set at point i."""
        return ops.cast(self.mask.load(ops, i), b1)

    def number(self, ops: Recorder, i: Index) -> Node:
        """Which one of the ones point i is, counted from 0 (where it is one)."""
        k, inner = len(self.rows), self.mask.shape[len(self.rows) :]
        row = self.counts.load(ops, (_flat(i[:k], self.rows),))
        before = (row - ops.const(1, i64)) * ops.index(numel(inner))
        return before + ops.index(_flat(i[k:], inner))


def _hits(ctx: Lowering, mask: View) -> Hits:
    k = len(mask.shape)
    used = {a for e in mask.index for a in free_symbols(e)}
    while k and mask.vars[k - 1].symbol not in used:
        k -= 1
    rows = mask.shape[:k]
    ops, vars_ = Recorder(), loop_vars("i", (numel(rows),))
    point = (*unflatten(vars_[0], rows), *(0 for _ in mask.shape[k:]))
    body = ops.cast(ops.cast(mask.load(ops, point), b1), i64)
    name = ctx.new_buffer(i64, (numel(rows),))
    ctx.ops.append(Scan((name,), vars_, 0, "sum", body, origin=ctx.origin))
    return Hits(mask, rows, ctx.whole(name))


def _flat(point: Index, shape: tuple[Size, ...]) -> Size:
    """The row-major number of a point."""
    return total(p * s for p, s in zip(point, contiguous_strides(shape), strict=True))


@lower(aten.masked_scatter.default)
def masked_scatter(ctx: Lowering, x: View, mask: View, source: View) -> View:
    shape = ctx.out_shape()
    if 0 in shape or 0 in source.shape:
        raise NoRule("nothing to put")
    x, hits = broadcast(x, shape), _hits(ctx, broadcast(mask, shape))

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        hit = hits.hit(ops, i)

        def new() -> Node:
            number = hits.number(ops, i)
            at = ops.checked(number, numel(source.shape), wrap=False, check=_TOO_FEW)
            return ops.cast(source.load(ops, unflatten(at, source.shape)), x.dtype)

        return where(hit, ops.masked(hit, new, 0), x.load(ops, i))

    return result(ctx, body)


@lower(aten.masked_scatter_backward.default)
def masked_scatter_backward(ctx: Lowering, grad: View, mask: View, sizes: Sequence[Size]) -> View:
    """The gradients under the mask, one after the other; zeros behind them."""
    shape = ctx.out_shape()
    n = numel(shape)
    if 0 in shape or 0 in grad.shape:
        raise NoRule("nothing to take")
    hits = _hits(ctx, broadcast(mask, grad.shape))
    zeros = ctx.pointwise((n,), grad.dtype, lambda ops, i: ops.const(0, grad.dtype))
    ops, vars_ = Recorder(), loop_vars("i", grad.shape)
    number = hits.number(ops, vars_)
    taken = hits.hit(ops, vars_) & (number < ops.index(n))
    safe = where(taken, number, ops.const(0, i64))
    index, args = ops.take_args((ops.indirect(safe, n),))
    name = ctx.new_buffer(grad.dtype, (n,))
    value = grad.load(ops, vars_)
    ctx.ops.append(Scatter(name, zeros.buf, vars_, index, args, value, "store", taken, ctx.origin))
    flat = ctx.whole(name)
    return flat.remap(shape, lambda v: (_flat(v, shape),))
