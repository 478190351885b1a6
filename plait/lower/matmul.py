"""Rules for matrix products: calls of ATen, which writes straight into given memory, or loops where
the call itself would dominate.

Small products are reductions over k with the products accumulated in f32 (f64 for f64), so that
bias and activation fuse with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from plait.devices import facts_of
from plait.graph.edit import is_view, output_of, value_of
from plait.ir.dtypes import DType, b1, bf16, f16, f32
from plait.ir.expr import Expr, Size, contiguous_strides, numel, product
from plait.ir.loops import Buffer, Node
from plait.ir.record import Recorder
from plait.lower.core import Index, Lowering, NoRule, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import broadcast, scalar
from plait.lower.extern import call_extern, call_op
from plait.lower.memory import copied_once
from plait.lower.product import cut, is_vector, launch

aten = torch.ops.aten

_LANES = 16  # of a vector of f32
_FEWER = 32  # times as many flops in float32 on a GPU: benchmarks/products_gpu.py single
_ROW_NBYTES = 16  # what rows start at multiples of for the fastest kernels
# Where a copy pays on a GPU; no record of the measurement. benchmarks/gpu.py shows models with
# odd rows (GPT-2's head of 50257).
_MANY = 1 << 17  # elements of a matrix that is worth it
_LONG = 64  # elements of a row that grows by an eighth at most
_FLOPS = 512  # an element, that pay for one more copy of the matrix
_MANY_ROWS = (
    1024  # from here on that copy costs more than writing the product in parts: native/core/parts.h
)


def is_small(ctx: Lowering, flops: Size, k: Size) -> bool:
    """Whether a product over k costs so little that a loop of ours beats a call. A short k fills no
    vector; a k of 1 is no sum, whatever its size: it takes as long as writing it does."""
    if k == 1:
        return True
    if not isinstance(flops, int) or not isinstance(k, int):
        return False
    limit = ctx.cfg.small_matmul_flops
    if ctx.facts().streams and ctx.node.meta["val"].dtype == torch.float32:
        limit *= _FEWER
    return flops * max(_LANES, k) <= limit * max(k, 1)


def _flops(batch: tuple[Size, ...], m: Size, n: Size, k: Size) -> Size:
    return product((2, *batch, m, n, k))


def _by_aten(ctx: Lowering, flops: Size, *args: Any, **kwargs: Any) -> Any:
    args = tuple(_aligned(ctx, x, flops) if isinstance(x, View) else x for x in args)
    out = call_extern(ctx, args, kwargs, any_strides=True, flops=flops)
    _align_result(ctx, out.buf, flops)
    return out


def _aligned(ctx: Lowering, x: View, flops: Size) -> View:
    """An operand with aligned rows where that pays: what lies fixed is copied, once for all who
    read it."""
    b = ctx.buffers[x.buf]
    strides = _aligned_strides(b)
    if strides is None:
        return x
    pays = _pays_a_copy(b, flops)
    if b.fixed:
        return (
            replace(x, buf=copied_once(ctx, ctx.whole(x.buf), strides).buf)
            if pays and ctx.cfg.kernels
            else x
        )
    if pays or not _leaves(
        ctx, lambda n: isinstance(made := ctx.env.get(n), View) and made.buf == x.buf
    ):
        ctx.buffers[x.buf] = replace(b, strides=strides)
    return x


def _align_result(ctx: Lowering, buf: str, flops: Size) -> None:
    """Aligns the rows of the product that is being lowered. What leaves the graph is copied to the
    strides that eager gives it, so there the product must be long."""
    node, b = ctx.node, ctx.buffers[buf]
    strides = _aligned_strides(b)
    if strides is None:
        return
    if (_pays_a_copy(b, flops) and not _fits_in_parts(node)) or not _leaves(
        ctx, lambda n: n is node
    ):
        ctx.buffers[buf] = replace(b, strides=strides)


def _aligned_strides(b: Buffer) -> tuple[Size, ...] | None:
    """On a GPU, those with which every row of a large matrix of half precision starts at a multiple
    of 16 bytes: otherwise tensor cores get their operands, and give back their result, at a
    fraction of their speed. None where rows are fine or the matrix is another."""
    each = _ROW_NBYTES // b.dtype.nbytes
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
    if node.target is not aten.mm.default:
        return False
    a, b = (value_of(x) for x in node.args)  # type: ignore[arg-type]
    (m, k), each = a.shape, _ROW_NBYTES // a.dtype.itemsize
    fits = a.stride() == (k, 1) and b.stride() == (1, k)
    return isinstance(m, int) and m > _MANY_ROWS and isinstance(k, int) and k % each == 0 and fits


def _leaves(ctx: Lowering, is_it: Callable[[torch.fx.Node], bool]) -> bool:
    """Whether the graph gives out a node that is the one asked for, or a view of it."""
    for node in output_of(ctx.node.graph).all_input_nodes:
        while not is_it(node):
            if not is_view(node) or not isinstance(node.args[0], torch.fx.Node):
                break
            node = node.args[0]
        else:
            return True
    return False


def _multiplied_as(x: View) -> DType:
    """The dtype in which elements of a matrix are multiplied and summed."""
    if x.dtype == b1:
        raise NoRule("a product of bools")  # eager takes empty ones
    return compute_dtype(x.dtype)


def _product(ctx: Lowering, a: View, b: View) -> View:
    """a @ b of (..., m, k) and (..., k, n) as a reduction, in the compute dtype of a."""
    compute = _multiplied_as(a)

    def body(ops: Recorder, i: tuple[Expr, ...], r: Index) -> Node:
        x, y = a.load(ops, (*i[:-1], r[0])), b.load(ops, (*i[:-2], r[0], i[-1]))
        return ops.cast(x, compute) * ops.cast(y, compute)

    shape = (*a.shape[:-1], b.shape[-1])
    if a.shape[-1] != 1:
        return ctx.reduce(shape, (a.shape[-1],), "sum", body)
    # Of one product each, eager's matrices begin at no 0, but for those of 16 bits.
    bare = len(shape) == 2 and compute == a.dtype

    def single(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        value = body(ops, i, (0,))
        return value if bare else ops.const(0, compute) + value

    return ctx.pointwise(shape, compute, single)


def _made_here(ctx: Lowering, flops: Size, a: View, b: View) -> View | None:
    """a @ b by loops or a kernel of ours, in the compute dtype of a; None where ATen is better."""
    if is_small(ctx, flops, a.shape[-1]) or is_vector(ctx, a, b):
        return _product(ctx, a, b)
    how = cut(ctx, a, b)
    return None if how is None else launch(ctx, a, b, how)


def _finished(ctx: Lowering, product: View, bias: View | None, beta: Any, alpha: Any) -> View:
    """beta * bias + alpha * product, rounded once to the result's dtype. A beta of 0 ignores the
    bias, NaNs included."""
    out, shape, compute = ctx.out_dtype(), product.shape, product.dtype
    added = None if bias is None or beta == 0 else broadcast(bias, shape)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        value = product.load(ops, i)
        if alpha != 1:
            value = value * scalar(ctx, ops, alpha, compute)
        if added is not None:
            more = ops.cast(added.load(ops, i), compute)
            if beta != 1:
                more = more * scalar(ctx, ops, beta, compute)
            value = value + more
        return ops.cast(value, out)

    return ctx.pointwise(shape, out, body)


def _is_unread(x: View, alpha: Any) -> bool:
    """Whether BLAS reads no factor of a product that is multiplied by alpha: NaNs in x do not
    count."""
    return x.dtype.is_float and bool(alpha == 0)


def _without_product(ctx: Lowering, shape: tuple[Size, ...], bias: View, beta: Any) -> View:
    """beta * bias of this shape."""
    compute = compute_dtype(ctx.out_dtype())
    zeros = ctx.pointwise(shape, compute, lambda ops, i: ops.const(0, compute))
    return _finished(ctx, zeros, bias, beta, 1)


@lower(aten.mm.default)
def mm(ctx: Lowering, a: View, b: View) -> Any:
    flops = _flops((), a.shape[0], b.shape[1], a.shape[1])
    made = _made_here(ctx, flops, a, b)
    return _by_aten(ctx, flops, a, b) if made is None else _finished(ctx, made, None, 1, 1)


@lower(aten.bmm.default)
def bmm(ctx: Lowering, a: View, b: View) -> Any:
    flops = _flops(a.shape[:1], a.shape[1], b.shape[2], a.shape[2])
    made = _made_here(ctx, flops, a, b)
    return _by_aten(ctx, flops, a, b) if made is None else _finished(ctx, made, None, 1, 1)


@lower(aten.addmm.default)
def addmm(ctx: Lowering, bias: View, a: View, b: View, *, beta: Any = 1, alpha: Any = 1) -> Any:
    flops = _flops((), a.shape[0], b.shape[1], a.shape[1])
    if _is_unread(a, alpha) and is_small(ctx, flops, a.shape[-1]):
        return _without_product(ctx, (a.shape[0], b.shape[1]), bias, beta)
    made = None if _is_unread(a, alpha) else _made_here(ctx, flops, a, b)
    if made is not None:
        return _finished(ctx, made, bias, beta, alpha)
    if beta == alpha == 1 and _is_added_apart(ctx, bias, a):
        val = ctx.node.meta["val"]
        product = call_op(ctx, aten.mm.default, (a, b), {}, val, flops=flops)
        return _finished(ctx, product, bias, 1, 1)
    return _by_aten(ctx, flops, bias, a, b, beta=beta, alpha=alpha)


def _is_added_apart(ctx: Lowering, bias: View, a: View) -> bool:
    """Whether a row of numbers is better added by a kernel of ours, which fuses with what follows:
    on a GPU in full float32, where vendors' kernels that add a bias are the slow ones."""
    if not (ctx.facts().streams and ctx.cfg.kernels) or a.dtype != f32:
        return False
    # Says what the older switches chose, too.
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return False
    return len(bias.shape) == 1 or bias.shape[0] == 1


@lower(aten.baddbmm.default)
def baddbmm(ctx: Lowering, bias: View, a: View, b: View, *, beta: Any = 1, alpha: Any = 1) -> Any:
    flops = _flops(a.shape[:1], a.shape[1], b.shape[2], a.shape[2])
    made = None if _is_unread(a, alpha) else _made_here(ctx, flops, a, b)
    if made is None and is_small(ctx, flops, a.shape[-1]):
        made = _product(ctx, a, b)
    if made is None:
        return _by_aten(ctx, flops, bias, a, b, beta=beta, alpha=alpha)
    return _finished(ctx, made, bias, beta, alpha)


@lower(aten.addmv.default)
def addmv(ctx: Lowering, bias: View, a: View, x: View, *, beta: Any = 1, alpha: Any = 1) -> Any:
    flops = _flops((), a.shape[0], 1, a.shape[1])
    if not is_small(ctx, flops, a.shape[-1]):
        return _by_aten(ctx, flops, bias, a, x, beta=beta, alpha=alpha)
    if _is_unread(a, alpha):
        return _without_product(ctx, a.shape[:1], bias, beta)
    compute = _multiplied_as(a)

    def body(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        p, q = a.load(ops, (i[0], r[0])), x.load(ops, r)
        return ops.cast(p, compute) * ops.cast(q, compute)

    return _finished(ctx, ctx.reduce(a.shape[:1], a.shape[1:], "sum", body), bias, beta, alpha)
