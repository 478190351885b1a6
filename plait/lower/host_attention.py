"""Attention by a kernel of ours on a CPU: in a program with constant weights, whose products it
shares tiles with, where rows are short; and under `batch_invariant`, where rows are as long as they
like.

Comes in: queries, keys and values of `scaled_dot_product_attention`. Goes out: an `Extern` with a
`HostAttention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch

from plait.graph.edit import results_read
from plait.ir.attention import HostAttention
from plait.ir.calls import Extern, TensorArg
from plait.ir.dtypes import bf16, f16, f32
from plait.ir.expr import Expr, Size, bounds, contiguous_strides
from plait.ir.loops import Node
from plait.ir.record import Recorder
from plait.lower.convert import convert
from plait.lower.core import Lowering, View
from plait.lower.elementwise import inside, load_if
from plait.lower.memory import tensor_arg

aten = torch.ops.aten
_MOST_KEYS, _MOST_NUMBERS, _WIDEST = 512, 1 << 15, 16
"""Of keys, a copy of which has to stay near: in vectors of so many numbers, at most."""
_DEEPEST = 256


def host_attention(
    ctx: Lowering, q: View, k: View, v: View, dropout: float = 0.0, causal: bool = False, *_: Any,
    attn_mask: View | None = None, scale: float | None = None, flops: Size,
) -> View | None:  # fmt: skip
    """The result; None where the library's kernel is better, or computes more than ours."""
    node, mask = ctx.node, attn_mask
    if node.target is not aten._scaled_dot_product_flash_attention_for_cpu.default:
        return None
    if results_read(node) - {0} and not ctx.cfg.batch_invariant:
        return None
    heads, depth = q.shape[1], q.shape[3]
    if dropout or q.shape[0] != k.shape[0] or k.shape != v.shape or depth != k.shape[3]:
        return None
    if not (isinstance(heads, int) and isinstance(depth, int) and 0 < depth <= _DEEPEST):
        return None
    if (few := k.shape[1]) != heads:  # grouped: the library's kernel has no copy of them
        if not (ctx.cfg.batch_invariant and isinstance(few, int) and few and heads % few == 0):
            return None
        group, shape = heads // few, (*q.shape[:2], *k.shape[2:])
        k, v = (x.remap(shape, lambda i: (i[0], i[1] // group, *i[2:])) for x in (k, v))
    scores = (*q.shape[:3], k.shape[2])
    if mask is not None and not _is_added(mask, scores):
        return None
    by = depth**-0.5 if scale is None else float(scale)
    if not isfinite(by):
        return None
    if ctx.cfg.batch_invariant and ctx.cfg.kernels:
        if q.dtype not in (f32, bf16, f16) or bounds(k.shape[2])[0] < 1:
            return None
        mask = None if mask is None else convert(ctx, mask, f32)
        q, k, v = (_widened(ctx, convert(ctx, x, f32)) for x in (q, k, v))
    elif not _pays(ctx, q, k, mask):
        return None
    kernel = HostAttention(f"plait_attention.{ctx.name}.{node.name}", causal, by)
    out = _launched(ctx, kernel, (q, k, v) if mask is None else (q, k, v, mask), flops)
    if q.shape[3] != depth:
        out = out.remap((*q.shape[:3], depth), lambda i: i)
    return convert(ctx, out, ctx.out_dtype(0))


def _pays(ctx: Lowering, q: View, k: View, mask: View | None) -> bool:
    """Whether it is faster than the library's, of whose tiles it has a copy near."""
    packed = torch.ops.plait.packed_mm.default
    if not ctx.node.graph.find_nodes(op="call_function", target=packed):
        return False
    if q.dtype != f32 or (mask is not None and mask.dtype != f32):
        return False
    if q.shape[2] == 1:  # ATen's result may have other strides than its fake kernel says
        return False
    if not all(isinstance(n, int) and n > 0 for n in (*q.shape, *k.shape)):
        return False
    keys, depth = k.shape[-2:]
    assert isinstance(keys, int) and isinstance(depth, int), k
    copied = -(-keys // _WIDEST) * _WIDEST * depth
    return keys <= _MOST_KEYS and copied <= _MOST_NUMBERS and depth % _WIDEST == 0


def _widened(ctx: Lowering, x: View) -> View:
    """x with zeros behind its rows, so that these are whole vectors."""
    *outer, depth = x.shape
    assert isinstance(depth, int), x
    wide = -(-depth // _WIDEST) * _WIDEST
    if wide == depth:
        return x

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        within = inside(ops, i[3:], ((0, depth),))
        return load_if(ops, within, lambda: x.load(ops, i), 0.0)

    return ctx.pointwise((*outer, wide), x.dtype, body)


def _is_added(mask: View, scores: tuple[Size, ...]) -> bool:
    """Whether scores can have these numbers added."""
    if mask.dtype not in (f32, bf16, f16) or mask.shape[-1:] != scores[3:]:
        return False
    both = zip(reversed(mask.shape), reversed(scores), strict=False)
    return len(mask.shape) <= 4 and all(n in (1, m) for n, m in both)


def _launched(ctx: Lowering, kernel: HostAttention, operands: Sequence[View], flops: Size) -> View:
    q, k, *_ = operands
    same = q.shape == ctx.out_shape(0) and ctx.out_dtype(0) == f32
    out = ctx.new_buffer(f32, q.shape, ctx.out_strides(0) if same else None, fixed=True)
    args = []
    for x in operands:
        given = tensor_arg(ctx, x)
        lie = given.strides[-1] == 1
        args.append(given if lie else tensor_arg(ctx, x, contiguous_strides(x.shape)))
    b = ctx.buffers[out]
    strides = [n for a in args for n in _apart(a)] + [*b.strides[:3]]
    sizes = (q.shape[0], q.shape[2], k.shape[2], *strides)
    ctx.ops.append(
        Extern(
            (out,), "aten::_scaled_dot_product_flash_attention_for_cpu", (*args, *sizes),
            may_keep=False, kernel=kernel, fallback=False, flops=flops, origin=ctx.origin,
        )
    )  # fmt: skip
    return ctx.whole(out)


def _apart(a: TensorArg) -> list[Size]:
    """How far batches, heads and rows lie apart; 0 where there is one, which all others share."""
    steps: list[Size] = [0 if n == 1 else s for n, s in zip(a.shape, a.strides, strict=True)]
    return [*[0] * (4 - len(steps)), *steps][:3]
