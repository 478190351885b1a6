"""Rules for convolution and attention: calls of ATen with eager's memory formats, and what they
cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from plait.compat import precision
from plait.graph.conv_cost import most_taps
from plait.graph.edit import results_read
from plait.ir.dtypes import bf16, f16, f32
from plait.ir.expr import Expr, Size, bounds, compare, contiguous_strides, product
from plait.ir.loops import Node
from plait.ir.record import Recorder
from plait.lower.attention import row_attention, row_attention_backward
from plait.lower.core import Lowering, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import inside, load_if, result
from plait.lower.extern import call_extern, call_op
from plait.lower.host_attention import host_attention
from plait.lower.memory import aligned
from plait.lower.operands import fake_strides

aten = torch.ops.aten
_ALIGNED = 64  # bytes up to which cuDNN asks


@lower(aten.convolution.default)
def convolution(
    ctx: Lowering, x: View, weight: View, bias: View | None, stride: Sequence[Size],
    padding: Sequence[Size], dilation: Sequence[Size], transposed: bool,
    output_padding: Sequence[Size], groups: Size,
) -> Any:  # fmt: skip
    if not transposed and _is_loop(ctx, x, weight, stride):
        return _depthwise(ctx, x, weight, bias, stride, padding, dilation)
    # Each element of the result (of the input, if transposed) takes a product with one filter.
    points = x.shape if transposed else ctx.out_shape()
    flops = product((2, *points, *weight.shape[1:]))
    # On a GPU a bias takes a kernel of its own, which may as well be one of ours: it fuses with
    # what follows.
    kernels = ctx.cfg.kernels and ctx.facts().streams
    apart = bias if kernels and x.dtype in (f16, bf16, f32) else None
    inside = None if apart is not None else bias
    args = (x, weight, inside, stride, padding, dilation, transposed, output_padding, groups)
    if ctx.cfg.batch_invariant and ctx.facts().streams:
        out = _repeatable(ctx, args, flops)
    else:
        out = call_extern(ctx, args, {}, flops=flops)
    return out if apart is None else _biased(ctx, out, apart)


def _repeatable(ctx: Lowering, args: Sequence[Any], flops: Size) -> Any:
    """A call whose bits are the same each time and at any place of a batch: cuDNN chooses its
    kernels by where an image starts, and some of them add in any order."""
    image, *rest = ctx.node.args
    given = (aligned(ctx, args[0], fake_strides(image), _ALIGNED), *args[1:])
    rounds = args[0].dtype == f32 and precision.asked("cuda conv") == "tf32"
    flags = (False, True, torch.backends.cudnn.enabled, rounds)
    op, val = aten._convolution.default, ctx.node.meta["val"]
    return call_op(ctx, op, (*given, *flags), {}, val, given=((image, *rest), {}), flops=flops)


def _is_loop(ctx: Lowering, x: View, weight: View, stride: Sequence[Size]) -> bool:
    """Whether each filter has one channel and so few elements that they are written out, and
    neighbours in memory read neighbours: channels, or points of a sequence."""
    if not (ctx.cfg.kernels and ctx.facts().streams and x.dtype in (f16, bf16, f32)):
        return False
    filters, one, *window = (n if isinstance(n, int) else 0 for n in weight.shape)
    small = 0 < prod(window) <= most_taps(window)
    if not (isinstance(x.shape[1], int) and filters > 1 and one == 1 and small):
        return False
    return _are_channels_innermost(ctx) or (prod(window[:-1]) == 1 and stride[-1] == 1)


def _are_channels_innermost(ctx: Lowering) -> bool:
    strides = ctx.out_strides()
    return strides is not None and strides[1] == 1


def _by_taps(ctx: Lowering, weight: View) -> View:
    """A copy of filters, whose elements at one place lie side by side."""
    filters, window = weight.shape[0], weight.shape[2:]
    strides = (1, 1, *(n * filters for n in contiguous_strides(window)))
    copy = ctx.pointwise(weight.shape, weight.dtype, weight.load, strides)
    ctx.fix_layout(copy.buf)
    return copy


def _depthwise(
    ctx: Lowering, x: View, weight: View, bias: View | None, stride: Sequence[Size],
    padding: Sequence[Size], dilation: Sequence[Size],
) -> View:  # fmt: skip
    """Each element of the result is a sum over a window of one channel, in float32."""
    if _are_channels_innermost(ctx):
        weight = _by_taps(ctx, weight)
    several = weight.shape[0] // x.shape[1]  # filters a channel
    window = [range(k) for k in weight.shape[2:] if isinstance(k, int)]

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        lead, c = (i[0], i[1] // several), i[1]

        def term(tap: tuple[int, ...]) -> Node:
            steps = zip(i[2:], stride, padding, dilation, tap, strict=True)
            at = tuple(e * s - p + k * d for e, s, p, d, k in steps)
            inner = inside(ops, at, [(0, size) for size in x.shape[2:]])
            value = load_if(ops, inner, lambda: ops.cast(x.load(ops, (*lead, *at)), f32))
            return value * ops.cast(weight.load(ops, (c, 0, *tap)), f32)

        terms = map(term, itertools.product(*window))
        first = ops.cast(bias.load(ops, (c,)), f32) if bias is not None else next(terms)
        return ops.cast(sum(terms, first), x.dtype)

    return result(ctx, body)


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
    if ctx.cfg.batch_invariant:
        v = _for_keys(ctx, k, v)
    if ctx.facts().is_host:
        made = host_attention(ctx, q, k, v, *rest, flops=flops, **kwargs)
        if made is None:
            made = _attention_of_some(ctx, q, k, v, *rest, flops=flops, **kwargs)
        if made is not None:
            return (made, *_sums(ctx, (q, k, v, *rest), kwargs, flops))
    elif ctx.cfg.batch_invariant and (rows := row_attention(ctx, (q, k, v, *rest), kwargs)):
        return tuple(rows)
    return call_extern(ctx, (q, k, v, *rest), kwargs, flops=flops)


def _sums(
    ctx: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], flops: Size
) -> Sequence[View | None]:
    """What the library's backward pass reads, which its own forward pass makes, beside a result of
    ours."""
    node: Any = ctx.node
    val, used = node.meta["val"], frozenset(results_read(node) - {0})
    if not used:
        return [None] * (len(val) - 1)
    found: Sequence[View | None] = call_op(
        ctx, node.target, args, kwargs, val, given=(node.args, node.kwargs), flops=flops, used=used
    )
    return found[1:]


def _for_keys(ctx: Lowering, k: View, v: View) -> View:
    """The values of the keys. Of a cache that grows tracing takes their numbers for two."""
    n, m = k.shape[2], v.shape[2]
    if n == m or (isinstance(n, int) and isinstance(m, int)):
        return v
    ctx.assert_true(compare("le", n, m), "attention has fewer values than keys")
    return v.remap((*v.shape[:2], n, *v.shape[3:]), lambda i: i)


def _attention_of_some(
    ctx: Lowering, q: View, k: View, v: View, dropout: float = 0.0, causal: bool = False, *,
    attn_mask: View | None = None, scale: float | None = None, flops: Size,
) -> View | None:  # fmt: skip
    """The result by the operator that chooses a kernel, where there may be no heads, rows or keys:
    the kernel that was chosen for the example divides by their numbers."""
    node = ctx.node
    varying = [n for n in (q.shape[1], q.shape[2], k.shape[2]) if isinstance(n, Expr)]
    if results_read(node) - {0} or all(bounds(n)[0] > 1 for n in varying):
        return None
    args = (q, k, v, attn_mask, dropout, causal)
    given = (*node.args[:3], node.kwargs.get("attn_mask"))
    op = aten.scaled_dot_product_attention.default
    val = node.meta["val"][0]
    made: View = call_op(ctx, op, args, {"scale": scale}, val, given=(given, {}), flops=flops)
    return made


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
    if ctx.cfg.batch_invariant and (made := row_attention_backward(ctx, args, kwargs)):
        return tuple(made)
    return call_extern(ctx, args, kwargs, flops=flops)
