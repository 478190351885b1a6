"""Operands and results of the vendor's products, laid out as its fastest kernels want them: rows of
half precision start at multiples of 16 bytes, and sums are of no odd length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.fx

from plait.devices import facts_of
from plait.graph.edit import is_view, output_of, value_of
from plait.ir.dtypes import bf16, f16
from plait.ir.expr import Expr, Size, contiguous_strides, numel
from plait.ir.loops import Buffer, Node, Pointwise, loop_vars
from plait.ir.record import Recorder
from plait.lower.core import Lowering, View
from plait.lower.elementwise import inside, load_if
from plait.lower.memory import copies_of, step_along

aten = torch.ops.aten

ROW_NBYTES = 16  # what rows start at multiples of for the fastest kernels
_MANY = 1 << 17  # elements of a matrix whose rows are aligned where that costs nothing
_GROWTH = 8  # a row grows by one such part at most
# What is known of an H200 (native/core/parts.cpp): the vendor's fast kernels do 6e8 operations a
# microsecond, those for rows that start anywhere 0.95e8.
_SAVED_FLOPS_A_US = 1.13e8
_COPY_US, _COPIED_NBYTES_A_US = 2.0, 1e6
_EDGES_US = 20.0  # of what the executor computes apart: native/core/parts.h
_MANY_ROWS = (
    1024  # from here on that copy costs more than writing the product in parts: native/core/parts.h
)


def with_even_depth(ctx: Lowering, a: View, b: View, flops: Size) -> tuple[View, View]:
    """The factors of a product, with zeros at the end of its sums where these are of odd length and
    that pays: the vendor's kernels for odd ones take 4 to 6 times as long, whatever rows start at
    (H100, bf16: 2048 x 1024 x 479, 2048 x 768 x 50257)."""
    k = a.shape[-1]
    if a.dtype not in (f16, bf16) or len(a.shape) != len(b.shape):
        return a, b
    if not (ctx.facts().streams and ctx.cfg.kernels and _is_odd(k, a.dtype.nbytes)):
        return a, b
    if not _saves(flops, a.dtype.nbytes, a.shape, b.shape):
        return a, b
    return _with_zeros(ctx, a, len(a.shape) - 1), _with_zeros(ctx, b, len(b.shape) - 2)


def with_even_edges(ctx: Lowering, a: View, b: View, flops: Size) -> tuple[View, View]:
    """The factors of a product of matrices, with zeros as further rows of the result, or columns,
    where these lie side by side in a factor, are of odd number, and that pays: kernels for odd ones
    are slow, whatever rows start at."""
    if a.dtype not in (f16, bf16) or not (ctx.facts().streams and ctx.cfg.kernels):
        return a, b
    nbytes, out = a.dtype.nbytes, (a.shape[0], b.shape[1])
    if leaves(ctx, lambda n: n is ctx.node) and not _copy_us(nbytes, out) < _EDGES_US:
        return a, b
    for x, d in ((a, 0), (b, 1)):
        if step_along(ctx, x, d) != 1 or not _is_odd(x.shape[d], nbytes):
            continue
        if _saves(flops, nbytes, x.shape, out):
            made = _with_zeros(ctx, x, d)
            a, b = (made, b) if d == 0 else (a, made)
    return a, b


def _is_odd(length: Size, nbytes: int) -> bool:
    """Whether a row of so many elements, of so many bytes, is no multiple of 16 bytes, and hardly
    grows by becoming one."""
    each = ROW_NBYTES // nbytes
    return isinstance(length, int) and 0 < -length % each * _GROWTH <= length


def _copy_us(nbytes: int, shape: Sequence[Size]) -> float:
    """What a copy of a matrix costs; infinitely much where its size is not known."""
    n = numel(shape)
    return _COPY_US + n * nbytes / _COPIED_NBYTES_A_US if isinstance(n, int) else math.inf


def _saves(flops: Size, nbytes: int, *shapes: Sequence[Size]) -> bool:
    """Whether a product on a GPU gains more by aligned rows than copies of such matrices cost."""
    cost = sum(_copy_us(nbytes, shape) for shape in shapes)
    return isinstance(flops, int) and flops / _SAVED_FLOPS_A_US > cost


def _with_zeros(ctx: Lowering, x: View, d: int) -> View:
    """x, longer along a dimension: up to a multiple of 16 bytes, by zeros."""
    found = _in_even_rows(ctx, x, d)
    shape = (*x.shape[:d], _longer(x, d), *x.shape[d + 1 :])
    vars_ = loop_vars("v", shape)
    return View(found.buf, x.dtype, shape, vars_, found.at(vars_))


def _longer(x: View, d: int) -> Size:
    each = ROW_NBYTES // x.dtype.nbytes
    return -(-x.shape[d] // each) * each


def _in_even_rows(ctx: Lowering, x: View, d: int) -> View:
    """x in a copy in which a dimension is longer, and innermost if it is in x; what is beyond x is
    0. Operands share it."""
    for y in copies_of(ctx, x):
        b = ctx.buffers[y.buf]
        at = y.index.index(y.vars[d]) if y.vars[d] in y.index else -1
        if b.shape[at] == _longer(x, d) != x.shape[d]:
            return y
    others = [k for k in range(len(x.shape)) if k != d]
    order = [*others, d] if step_along(ctx, x, d) == 1 else [*others[:-1], d, others[-1]]
    shape = tuple(_longer(x, d) if k == d else x.shape[k] for k in order)
    place = [order.index(k) for k in range(len(order))]

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        point = tuple(i[k] for k in place)
        within = inside(ops, (point[d],), ((0, x.shape[d]),))
        return load_if(ops, within, lambda: x.load(ops, point), 0.0)

    made = ctx.pointwise(shape, x.dtype, body)
    ctx.fix_layout(made.buf)
    seen = View(made.buf, x.dtype, x.shape, x.vars, tuple(x.vars[k] for k in order))
    ctx.copies.setdefault(x.buf, []).append((x, seen, len(ctx.ops)))
    return seen


def aligned(ctx: Lowering, x: View, flops: Size) -> View:
    """An operand with aligned rows where that pays: what lies fixed is copied, once for all who
    read it; so is what a loop makes, which then goes into the copy, and may end in zeros too."""
    b = ctx.buffers[x.buf]
    pays = _saves(flops, b.dtype.nbytes, b.shape)
    strides = _aligned_strides(b, pays)
    if strides is None:
        return x
    if b.fixed and not (pays and ctx.cfg.kernels):
        return x
    if b.fixed or (pays and any(isinstance(op, Pointwise) and op.out == x.buf for op in ctx.ops)):
        row = next((d for d in range(len(x.shape)) if step_along(ctx, x, d) == 1), None)
        return x if row is None else _in_even_rows(ctx, x, row)
    if pays or not leaves(
        ctx, lambda n: isinstance(made := ctx.env.get(n), View) and made.buf == x.buf
    ):
        ctx.buffers[x.buf] = replace(b, strides=strides)
    return x


def align_result(ctx: Lowering, buf: str, flops: Size) -> None:
    """Aligns the rows of the product that is being lowered. What leaves the graph is copied to the
    strides that eager gives it, so there the product must be long."""
    node, b = ctx.node, ctx.buffers[buf]
    pays = _saves(flops, b.dtype.nbytes, b.shape)
    strides = _aligned_strides(b, pays)
    if strides is None:
        return
    if (pays and not _fits_in_parts(node)) or not leaves(ctx, lambda n: n is node):
        ctx.buffers[buf] = replace(b, strides=strides)


def _aligned_strides(b: Buffer, pays: bool) -> tuple[Size, ...] | None:
    """On a GPU, those with which every row of a matrix of half precision starts at a multiple of 16
    bytes: otherwise tensor cores get their operands, and give back their result, at a fraction of
    their speed. None where rows are fine, or the matrix is another. pays: even where it is
    small."""
    n = numel(b.shape)
    if not facts_of(b.device).streams or b.dtype not in (f16, bf16) or len(b.shape) < 2:
        return None
    if not isinstance(n, int) or not (pays or n >= _MANY):
        return None
    length = b.shape[-1]
    if b.strides != contiguous_strides(b.shape) or not _is_odd(length, b.dtype.nbytes):
        return None
    assert isinstance(length, int), "an odd length is known"
    each = ROW_NBYTES // b.dtype.nbytes
    row = -(-length // each) * each
    return (*(s * row for s in contiguous_strides(b.shape[:-1])), 1)


def _fits_in_parts(node: torch.fx.Node) -> bool:
    """Whether the executor computes a product with odd rows in parts, each with rows that are
    aligned."""
    if node.target is not aten.mm.default:  # biases that start anywhere fault in some kernels
        return False
    a, b = (value_of(x) for x in node.args)  # type: ignore[arg-type]
    (m, k), each = a.shape, ROW_NBYTES // a.dtype.itemsize
    fits = a.stride() == (k, 1) and b.stride() == (1, k)
    return isinstance(m, int) and m > _MANY_ROWS and isinstance(k, int) and k % each == 0 and fits


def leaves(ctx: Lowering, is_it: Callable[[torch.fx.Node], bool]) -> bool:
    """Whether the graph gives out a node that is the one asked for, or a view of it."""
    for node in output_of(ctx.node.graph).all_input_nodes:
        while not is_it(node):
            if not is_view(node) or not isinstance(node.args[0], torch.fx.Node):
                break
            node = node.args[0]
        else:
            return True
    return False
