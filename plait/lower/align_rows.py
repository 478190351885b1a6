"""Operands and results of the vendor's products, laid out as its fastest kernels want them: rows of
half precision start at multiples of 16 bytes, and sums are of no odd length.
"""

from __future__ import annotations

from collections.abc import Callable
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
# Where a copy pays on a GPU; no record of the measurement. benchmarks/gpu.py shows models with
# odd rows (GPT-2's head of 50257).
_MANY = 1 << 17  # elements of a matrix that is worth it
_LONG = 64  # elements of a row that grows by an eighth at most
_FLOPS = 512  # an element, that pay for one more copy of the matrix
_MANY_ROWS = (
    1024  # from here on that copy costs more than writing the product in parts: native/core/parts.h
)


def with_even_depth(ctx: Lowering, a: View, b: View, flops: Size) -> tuple[View, View]:
    """The factors of a product, with zeros at the end of its sums where these are of odd length and
    that pays: the vendor's kernels for odd ones take 4 to 6 times as long, whatever rows start at
    (H100, bf16: 2048 x 1024 x 479, 2048 x 768 x 50257)."""
    each, k = ROW_NBYTES // a.dtype.nbytes, a.shape[-1]
    sizes = (numel(a.shape), numel(b.shape), flops)
    if a.dtype not in (f16, bf16) or len(a.shape) != len(b.shape) or not isinstance(k, int):
        return a, b
    if not (ctx.facts().streams and ctx.cfg.kernels) or k < _LONG or k % each == 0:
        return a, b
    known = [n for n in sizes if isinstance(n, int)]
    if len(known) < len(sizes) or known[2] < _FLOPS * (known[0] + known[1]):
        return a, b
    return _with_zeros(ctx, a, len(a.shape) - 1), _with_zeros(ctx, b, len(b.shape) - 2)


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
    strides = _aligned_strides(b)
    if strides is None:
        return x
    pays = _pays_a_copy(b, flops)
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
    strides = _aligned_strides(b)
    if strides is None:
        return
    if (_pays_a_copy(b, flops) and not _fits_in_parts(node)) or not leaves(
        ctx, lambda n: n is node
    ):
        ctx.buffers[buf] = replace(b, strides=strides)


def _aligned_strides(b: Buffer) -> tuple[Size, ...] | None:
    """On a GPU, those with which every row of a large matrix of half precision starts at a multiple
    of 16 bytes: otherwise tensor cores get their operands, and give back their result, at a
    fraction of their speed. None where rows are fine or the matrix is another."""
    each = ROW_NBYTES // b.dtype.nbytes
    n = numel(b.shape)
    if not facts_of(b.device).streams or b.dtype not in (f16, bf16) or len(b.shape) < 2:
        return None
    if not isinstance(n, int) or n < _MANY or b.strides != contiguous_strides(b.shape):
        return None
    length = b.shape[-1]
    if not isinstance(length, int) or length < _LONG or length % each == 0:
        return None
    row = -(-length // each) * each
    return (*(s * row for s in contiguous_strides(b.shape[:-1])), 1)


def _pays_a_copy(b: Buffer, flops: Size) -> bool:
    n = numel(b.shape)
    return isinstance(flops, int) and isinstance(n, int) and flops >= _FLOPS * n


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
