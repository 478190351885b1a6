"""Copies and conversions: to another dtype, device or tensor."""

from __future__ import annotations

from typing import Any

import torch

from plait.errors import Unsupported
from plait.graph.refuse import CLONE, SHARED, repeats
from plait.ir.dtypes import LOOP_DTYPES, DType
from plait.ir.expr import Size
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.creation import fill
from plait.lower.elementwise import broadcast_index
from plait.lower.extern import call_extern
from plait.lower.float8 import convert_float8

aten = torch.ops.aten


def convert(ctx: Lowering, x: View, dtype: DType, shape: tuple[Size, ...] | None = None) -> View:
    """x (broadcast to `shape`) as another dtype; x itself where nothing changes."""
    to = x.shape if shape is None else shape
    if x.dtype == dtype and to == x.shape:
        return x
    return ctx.pointwise(
        to, dtype, lambda ops, i: ops.cast(x.load(ops, broadcast_index(x, i, to)), dtype)
    )


@lower(aten._to_copy.default, torch.ops.prims.convert_element_type.default, any_dtype=True)
def _to_copy(
    ctx: Lowering, x: View | Size, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Any:
    want = ctx.out_dtype()
    if not isinstance(x, View):  # a number, which tracing under vmap puts for a tensor
        return fill(ctx, x)
    if ctx.device() != ctx.buffers[x.buf].device:
        return call_extern(ctx, (x,), ctx.node.kwargs, any_strides=True)
    if x.dtype == want:
        return x
    if "8" in (x.dtype.kind, want.kind):
        return convert_float8(ctx, x, want)
    if x.dtype.kind in "co" or want.kind in "co":
        raise NoRule(f"{x.dtype} to {want}")
    return convert(ctx, x, want)


@lower(
    aten.clone.default, aten.lift_fresh_copy.default, aten.lift_fresh.default,
    aten.contiguous.default, aten.alias_copy.default,
)  # fmt: skip
def _clone(ctx: Lowering, x: View, **_: Any) -> View:
    return x  # values do not change, so sharing them shows only in outputs, which are copied there


@lower(aten.copy.default)
def _copy(ctx: Lowering, x: View, src: View, non_blocking: bool = False) -> View:
    return convert(ctx, src, x.dtype, ctx.out_shape())


@lower(aten.copy_.default, any_dtype=True)
def _copy_(ctx: Lowering, x: View, src: View, non_blocking: bool = False) -> View:
    if not (ctx.is_whole(x) and x.buf in ctx.input_buffers):
        raise NoRule("a copy into something that is no input")
    if (x.dtype, x.shape) != (src.dtype, src.shape) and not {x.dtype, src.dtype} <= LOOP_DTYPES:
        raise NoRule(f"{src.dtype} to {x.dtype}")
    target = ctx.node.args[0]
    assert isinstance(target, torch.fx.Node), f"{target} is no node"
    if repeats(target.meta["val"]):  # which elements were written is lost
        raise Unsupported(SHARED, where=ctx.where(), hint=CLONE)
    value = convert(ctx, src, x.dtype, x.shape)
    ctx.mutations.append((x.buf, value))  # views of it see what it held before
    return x if any(user.op == "output" for user in ctx.node.users) else value
