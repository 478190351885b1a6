"""Rules for convolution and attention: calls of ATen with eager's memory formats, and what they
cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.ir.dtypes import bf16, f16, f32
from plait.ir.expr import Expr, Size, product
from plait.ir.loops import Node
from plait.ir.record import Recorder
from plait.lower.core import Lowering, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.extern import call_extern

aten = torch.ops.aten


@lower(aten.convolution.default)
def convolution(
    ctx: Lowering, x: View, weight: View, bias: View | None, stride: Sequence[Size],
    padding: Sequence[Size], dilation: Sequence[Size], transposed: bool,
    output_padding: Sequence[Size], groups: Size,
) -> Any:  # fmt: skip
    # Each element of the result (of the input, if transposed) takes a product with one filter.
    points = x.shape if transposed else ctx.out_shape()
    flops = product((2, *points, *weight.shape[1:]))
    # On a GPU a bias takes a kernel of its own, which may as well be one of ours: it fuses with
    # what follows.
    kernels = ctx.cfg.kernels and ctx.facts().streams
    apart = bias if kernels and x.dtype in (f16, bf16, f32) else None
    inside = None if apart is not None else bias
    args = (x, weight, inside, stride, padding, dilation, transposed, output_padding, groups)
    out = call_extern(ctx, args, {}, flops=flops)
    return out if apart is None else _biased(ctx, out, apart)


def _biased(ctx: Lowering, x: View, bias: View) -> View:
    """x with a number a channel added."""
    compute = compute_dtype(x.dtype)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        value, more = ops.cast(x.load(ops, i), compute), ops.cast(bias.load(ops, (i[1],)), compute)
        return ops.cast(value + more, x.dtype)

    return ctx.pointwise(x.shape, x.dtype, body, ctx.out_strides())


@lower(aten.convolution_backward.default)
def convolution_backward(ctx: Lowering, grad: View, x: View, weight: View, *rest: Any) -> Any:
    transposed, wanted = rest[4], rest[7]
    one = product((2, *(x.shape if transposed else grad.shape), *weight.shape[1:]))
    flops = one * sum(map(bool, wanted[:2]))
    return call_extern(ctx, (grad, x, weight, *rest), {}, flops=flops)


@lower(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
def attention(ctx: Lowering, q: View, k: View, v: View, *rest: Any, **kwargs: Any) -> Any:
    flops = product((4, *q.shape, k.shape[-2]))
    return call_extern(ctx, (q, k, v, *rest), kwargs, flops=flops)


@lower(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
def attention_backward(
    ctx: Lowering, grad: View, q: View, k: View, v: View, *rest: Any, **kwargs: Any
) -> Any:
    flops = product((10, *q.shape, k.shape[-2]))
    args = (grad, q, k, v, *rest)
    return call_extern(ctx, args, kwargs, flops=flops)
