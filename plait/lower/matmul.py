"""Rules for matrix products: calls of ATen, which writes straight into given memory, or loops where
the call itself would dominate.

Small products are reductions over k with the products accumulated in f32 (f64 for f64), so that
bias and activation fuse with them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx

from plait.ir.calls import Operator
from plait.ir.dtypes import DType, b1, bf16, f16, f32
from plait.ir.expr import Expr, Size, product
from plait.ir.loops import Node, loop_vars
from plait.ir.record import Recorder
from plait.lower.align_rows import align_result, aligned, with_even_depth, with_even_edges
from plait.lower.core import Index, Lowering, NoRule, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import broadcast, elementwise, scalar
from plait.lower.extern import call_extern, call_op
from plait.lower.pointwise import relu
from plait.lower.pointwise_nn import gelu_tanh
from plait.lower.product import cut, is_vector, launch
from plait.lower.product_cost import is_followed
from plait.lower.row_products import by_rows

aten = torch.ops.aten

_LANES = 16  # of a vector of f32
_FEWER = 32  # times as many flops in float32 on a GPU: benchmarks/products_gpu.py single


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


def _keeps_rows(ctx: Lowering, a: View) -> bool:
    """Whether no row of a product may depend on how many there are. Sums of integers are the same
    in any order."""
    return ctx.cfg.batch_invariant and ctx.cfg.kernels and a.dtype.is_float


def _flops(batch: tuple[Size, ...], m: Size, n: Size, k: Size) -> Size:
    return product((2, *batch, m, n, k))


def _laid_out(ctx: Lowering, a: View, b: View, flops: Size) -> tuple[View, View]:
    """The factors as the vendor's fast kernels want them."""
    a, b = (aligned(ctx, x, flops) for x in with_even_depth(ctx, a, b, flops))
    return a, b


def _by_aten(ctx: Lowering, flops: Size, *args: Any, **kwargs: Any) -> Any:
    *bias, a, b = args
    a, b = _laid_out(ctx, a, b, flops)
    if ctx.node.target is aten.mm.default:
        left, right = with_even_edges(ctx, a, b, flops)
        if (left, right) != (a, b):
            return _cut_off(ctx, left, right, (a.shape[0], b.shape[1]), flops)
    args = (*(aligned(ctx, x, flops) if isinstance(x, View) else x for x in bias), a, b)
    out = call_extern(ctx, args, kwargs, any_strides=True, flops=flops)
    align_result(ctx, out.buf, flops)
    return out


def _cut_off(ctx: Lowering, a: View, b: View, shape: tuple[Size, Size], flops: Size) -> View:
    """The first rows and columns of a product."""
    rows, columns = a.shape[0], b.shape[1]
    assert isinstance(rows, int) and isinstance(columns, int), "its copies were worth their cost"
    val = ctx.out_meta().new_empty((rows, columns))
    whole: View = call_op(ctx, aten.mm.default, (a, b), {}, val, flops=flops)
    vars_ = loop_vars("v", shape)
    return View(whole.buf, whole.dtype, shape, vars_, whole.at(vars_))


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


def _made_here(
    ctx: Lowering, flops: Size, a: View, b: View, bias: View | None = None,
    gelu: bool | None = None, rounds: bool = False,
) -> View | None:  # fmt: skip
    """a @ b by loops or a kernel of ours, in the compute dtype of a; None where ATen is better.
    bias, gelu: what the operator that is lowered computes beside: gelu or relu, or nothing.
    rounds: it computes nothing beside, and a kernel may round to the dtype of a."""
    if _keeps_rows(ctx, a):
        return by_rows(ctx, a, b, rounds) or _product(ctx, a, b)
    if is_small(ctx, flops, a.shape[-1]) or is_vector(ctx, a, b):
        return _product(ctx, a, b)
    how = cut(ctx, a, b)
    if how is None and a.dtype in (f16, bf16):
        a, b = _laid_out(ctx, a, b, flops)
        how = cut(ctx, a, b)
    if how is None:
        return None
    operator = Operator(
        "mm",
        is_planned=ctx.cfg.autotune and cut(ctx, a, b, tunes=False) is None,
        is_followed=is_followed(ctx.node),
    )
    if bias is not None and len(a.shape) == 2:
        is_row = len(bias.shape) == 1 or bias.shape[0] == 1
        name = "addmm" if gelu is None else "_addmm_activation"
        operator = replace(operator, name=name, dims=1 if is_row else 2, gelu=bool(gelu))
    return launch(ctx, a, b, how, operator)


def _finished(ctx: Lowering, product: View, bias: View | None, beta: Any, alpha: Any) -> View:
    """beta * bias + alpha * product, rounded once to the result's dtype. A beta of 0 ignores the
    bias, NaNs included."""
    out, shape, compute = ctx.out_dtype(), product.shape, product.dtype
    added = None if bias is None or beta == 0 else broadcast(bias, shape)
    if compute == out != compute_dtype(out) and added is None and alpha == 1:
        return product  # it is rounded

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
    made = _made_here(ctx, flops, a, b, rounds=True)
    return _by_aten(ctx, flops, a, b) if made is None else _finished(ctx, made, None, 1, 1)


@lower(aten.bmm.default)
def bmm(ctx: Lowering, a: View, b: View) -> Any:
    flops = _flops(a.shape[:1], a.shape[1], b.shape[2], a.shape[2])
    made = _made_here(ctx, flops, a, b, rounds=True)
    return _by_aten(ctx, flops, a, b) if made is None else _finished(ctx, made, None, 1, 1)


@lower(aten.addmm.default)
def addmm(ctx: Lowering, bias: View, a: View, b: View, *, beta: Any = 1, alpha: Any = 1) -> Any:
    flops = _flops((), a.shape[0], b.shape[1], a.shape[1])
    small = is_small(ctx, flops, a.shape[-1]) or _keeps_rows(ctx, a)
    if _is_unread(a, alpha) and small:
        return _without_product(ctx, (a.shape[0], b.shape[1]), bias, beta)
    made = None if _is_unread(a, alpha) else _made_here(ctx, flops, a, b, bias)
    if made is not None:
        return _finished(ctx, made, bias, beta, alpha)
    if beta == alpha == 1 and _is_added_apart(ctx, bias, a):
        val = ctx.node.meta["val"]
        product = call_op(ctx, aten.mm.default, (a, b), {}, val, flops=flops)
        return _finished(ctx, product, bias, 1, 1)
    return _by_aten(ctx, flops, bias, a, b, beta=beta, alpha=alpha)


@lower(aten._addmm_activation.default)
def addmm_activation(
    ctx: Lowering, bias: View, a: View, b: View, *, beta: Any = 1, alpha: Any = 1,
    use_gelu: bool = False,
) -> Any:  # fmt: skip
    flops = _flops((), a.shape[0], b.shape[1], a.shape[1])
    # Some of cuBLASLt's kernels give 0 for relu of a NaN in float32.
    apart = a.dtype == f32 and not use_gelu and ctx.facts().streams and ctx.cfg.kernels
    joined = None if apart else use_gelu
    made = None if _is_unread(a, alpha) else _made_here(ctx, flops, a, b, bias, joined)
    how = {"beta": beta, "alpha": alpha}
    if made is not None:
        x = _finished(ctx, made, bias, beta, alpha)
    elif apart:
        val = ctx.node.meta["val"]
        x = call_op(ctx, aten.addmm.default, (bias, a, b), how, val, flops=flops)
    else:
        return _by_aten(ctx, flops, bias, a, b, **how, use_gelu=use_gelu)
    return gelu_tanh(ctx, x) if use_gelu else elementwise(ctx, relu, (x,))


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
    if made is None and (is_small(ctx, flops, a.shape[-1]) or _keeps_rows(ctx, a)):
        made = _product(ctx, a, b)
    if made is None:
        return _by_aten(ctx, flops, bias, a, b, beta=beta, alpha=alpha)
    return _finished(ctx, made, bias, beta, alpha)


@lower(aten.addmv.default)
def addmv(ctx: Lowering, bias: View, a: View, x: View, *, beta: Any = 1, alpha: Any = 1) -> Any:
    flops = _flops((), a.shape[0], 1, a.shape[1])
    if not (is_small(ctx, flops, a.shape[-1]) or _keeps_rows(ctx, a)):
        return _by_aten(ctx, flops, bias, a, x, beta=beta, alpha=alpha)
    if _is_unread(a, alpha):
        return _without_product(ctx, a.shape[:1], bias, beta)
    compute = _multiplied_as(a)

    def body(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
        p, q = a.load(ops, (i[0], r[0])), x.load(ops, r)
        return ops.cast(p, compute) * ops.cast(q, compute)

    return _finished(ctx, ctx.reduce(a.shape[:1], a.shape[1:], "sum", body), bias, beta, alpha)
