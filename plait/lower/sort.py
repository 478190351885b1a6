"""Rules for sorting on a GPU: a few thousand numbers are put where their ranks say, by loops that
cost less than the launches of a sort. Choices of experts are sorted so, whose numbers are few.

A rank is how many come before: of equal ones, those that stand before. It is counted by looking at
all pairs, or, where keys are known to be few, by a running count of each.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from plait.ir.dtypes import i32, i64
from plait.ir.expr import Expr, numel
from plait.ir.loops import Node, Scan, loop_vars
from plait.ir.maths import eq, isnan, where
from plait.ir.record import Recorder
from plait.lower.core import Index, Lowering, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.library import by_library
from plait.lower.scatter import scatter_loop
from plait.lower.view import wrap_dim

aten = torch.ops.aten

_PAIRS = 1 << 24  # that are looked at sooner than a sort is launched
_COUNTS = 1 << 23  # running counts, the same
_MOVED = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default,
    aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.expand.default, aten.slice.Tensor, aten.alias.default, aten._to_copy.default,
    aten.flatten.using_ints, aten.t.default, aten.squeeze.dims,
}  # fmt: skip
"""Operators whose elements are those of their first operand."""
_PLACES = {aten.argmax.default, aten.argmin.default}
_DIMENSION: dict[object, int] = {
    aten.topk.default: 2, aten.sort.default: 1, aten.sort.stable: 1, aten.max.dim: 1,
    aten.min.dim: 1, **dict.fromkeys(_PLACES, 1),
}  # fmt: skip
"""Operators that give positions along a dimension, and which of their operands it is."""


@lower(aten.sort.default, aten.sort.stable)
def sort(
    ctx: Lowering, x: View, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> Any:
    ranks, d = None, 0
    if x.shape and ctx.facts().streams and ctx.cfg.kernels:
        d = wrap_dim(dim, len(x.shape))
        ranks = _ranks(ctx, x, d, descending)
    if ranks is not None:
        return _by_rank(ctx, x, ranks, d)
    if ctx.node.target is aten.sort.default:
        return by_library(ctx, x, dim, descending)
    return by_library(ctx, x, stable=stable, dim=dim, descending=descending)


def _ranks(ctx: Lowering, x: View, d: int, descending: bool) -> View | None:
    """The place of each element among those along d; None where a sort is better."""
    n = x.shape[d]
    if not all(isinstance(s, int) for s in x.shape) or n == 0:
        return None
    size = numel(x.shape)
    assert isinstance(size, int) and isinstance(n, int), x
    few = _few(ctx.node.args[0])
    if size * n <= _PAIRS:
        return _by_pairs(ctx, x, d, descending)
    if few is not None and size * few <= _COUNTS and len(x.shape) == 1 and not descending:
        return _by_counts(ctx, x, few)
    return None


def _by_pairs(ctx: Lowering, x: View, d: int, descending: bool) -> View:
    def before(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        there = (*i[:d], r[0], *i[d + 1 :])
        own, other = (ops.cast(x.load(ops, at), compute_dtype(x.dtype)) for at in (i, there))
        first, second = (own, other) if descending else (other, own)
        less, same = first < second, eq(first, second)
        if x.dtype.is_float:  # NaN is the greatest
            less = less | (isnan(second) & ~isnan(first))
            same = same | (isnan(first) & isnan(second))
        earlier = ops.cast(ops.index(r[0]), i32) < ops.cast(ops.index(i[d]), i32)
        return where(less | (same & earlier), ops.const(1, i32), ops.const(0, i32))

    return ctx.reduce(x.shape, (x.shape[d],), "sum", before)


def _by_counts(ctx: Lowering, x: View, few: int) -> View:
    """Ranks of keys from 0 to few."""
    (n,) = x.shape
    ops, vars_ = Recorder(), loop_vars("i", (few, n))
    found = eq(ops.cast(x.load(ops, vars_[1:]), i64), ops.index(vars_[0]))
    one = where(found, ops.const(1, i32), ops.const(0, i32))
    buf = ctx.new_buffer(i32, (few, n))
    ctx.ops.append(Scan((buf,), vars_, 1, "sum", one, origin=ctx.origin))
    counts = ctx.whole(buf)

    def less(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        key = ops.cast(x.load(ops, i), i64)
        return where(ops.index(r[0]) < key, counts.load(ops, (r[0], n - 1)), ops.const(0, i32))

    smaller = ctx.reduce((n,), (few,), "sum", less)

    def rank(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        own = ops.indirect(x.load(ops, i), few)
        return smaller.load(ops, i) + counts.load(ops, (own, i[0])) - ops.const(1, i32)

    return ctx.pointwise((n,), i32, rank)


def _by_rank(ctx: Lowering, x: View, ranks: View, d: int) -> tuple[View, View]:
    """Values in order, and where they were."""

    def place(ops: Recorder, i: tuple[Expr, ...]) -> tuple[Index, Node]:
        at = ops.indirect(ranks.load(ops, i), x.shape[d])
        return (*i[:d], at, *i[d + 1 :]), ops.index(i[d])

    zeros = ctx.pointwise(x.shape, i64, lambda ops, i: ops.const(0, i64), like=x.buf)
    order = scatter_loop(ctx, zeros, x.shape, "store", place)

    def value(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        at = ops.indirect(order.load(ops, i), x.shape[d])
        return x.load(ops, (*i[:d], at, *i[d + 1 :]))

    return ctx.pointwise(x.shape, x.dtype, value, ctx.out_strides(0)), order


def _few(node: object) -> int | None:
    """One more than the greatest value of a tensor of positions; None where it is no such, or not
    known."""
    while isinstance(node, torch.fx.Node) and node.target in _MOVED:
        if node.meta["val"].dtype not in (torch.int32, torch.int64):
            return None
        node = node.args[0]
    if not isinstance(node, torch.fx.Node):
        return None
    maker = node
    if node.target is operator.getitem:
        if node.args[1] != 1 or not isinstance(node.args[0], torch.fx.Node):
            return None
        maker = node.args[0]
    at = _DIMENSION.get(maker.target)
    if at is None or (maker is node) != (maker.target in _PLACES):
        return None
    usual = None if maker.target in _PLACES else -1
    dim = maker.args[at] if len(maker.args) > at else maker.kwargs.get("dim", usual)
    source = maker.args[0]
    if not isinstance(dim, int) or not isinstance(source, torch.fx.Node):
        return None
    shape = source.meta["val"].shape
    n = shape[dim] if shape else 1
    return n if isinstance(n, int) else None
