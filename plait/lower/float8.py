"""Floats of 8 bits in fused loops, bit for bit as eager has them.

A float8 tensor is memory of bytes: a rule sees its buffer as u8. Casts take the codes apart or put
them together with integer operations, which every kernel target has. Operators that only move
elements move bytes; the few that compute do so with the f32 values of the codes. Whatever else is
done with float8 tensors is a view or a call of ATen, which mostly refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from plait import compat
from plait.devices import facts_of
from plait.ir.calls import Extern
from plait.ir.dtypes import DType, f8e4m3fn, f8e8m0fnu, f32, u8
from plait.ir.expr import Size
from plait.ir.float8 import FORMATS, Format, decoded, encoded
from plait.ir.loops import Alias, Node
from plait.ir.record import Recorder
from plait.lower.core import RULES, Lowering, NoRule, Rule, Value, View
from plait.lower.dtypes import TO_TORCH
from plait.lower.elementwise import broadcast
from plait.lower.memory import alias, copy, strided

aten = torch.ops.aten


@cache
def _saturating() -> bool:
    """Whether the installed torch gives numbers beyond the largest of float8_e4m3fn that one, and
    not NaN."""
    with compat.tracing.untraced_operators():
        return bool(torch.full((), 1000.0).to(torch.float8_e4m3fn).float() == 448.0)


def _format(dtype: DType) -> Format | None:
    form = FORMATS.get(dtype)
    if dtype == f8e4m3fn and form is not None and _saturating():
        return form.saturating
    return form


def convert_float8(ctx: Lowering, x: View, want: DType) -> View:
    """x as dtype `want`, one of which is a float of 8 bits. Raises NoRule for complex numbers."""
    if "c" in x.dtype.kind + want.kind:
        raise NoRule(f"{x.dtype} to {want}")
    return converted(ctx, x, want, ctx.out_strides())


def converted(ctx: Lowering, x: View, want: DType, strides: tuple[Size, ...] | None = None) -> View:
    """x as dtype `want`, one of which is a float of 8 bits."""
    given, codes = x.dtype.kind == "8", want.kind == "8"
    source = _seen(ctx, x, u8) if given else x

    def value(ops: Recorder, i: tuple[object, ...]) -> Node:
        number = source.load(ops, i)  # type: ignore[arg-type]
        number = decoded(ops, number, _format(x.dtype)) if given else ops.cast(number, f32)
        return encoded(ops, number, _format(want)) if codes else ops.cast(number, want)

    made = ctx.pointwise(x.shape, u8 if codes else want, value, strides)
    return _seen(ctx, made, want) if codes else made


def _seen(ctx: Lowering, x: View, dtype: DType) -> View:
    """x with its buffer seen as bytes, or its bytes as float8 elements: as what it was before, if
    it is memory of such a buffer."""
    b = ctx.buffers[x.buf]
    for op in ctx.ops:
        if isinstance(op, Alias) and x.buf in (op.out, op.base) and op.offset == 0 and op.relative:
            other = ctx.buffers[op.base if op.out == x.buf else op.out]
            if (other.dtype, other.shape, other.strides) == (dtype, b.shape, b.strides):
                return View(other.name, dtype, x.shape, x.vars, x.index)
    seen = alias(ctx, ctx.whole(x.buf), dtype, b.shape, b.strides, 0)
    return View(seen.buf, dtype, x.shape, x.vars, x.index)


# ------------------------------------------------------------------------------- other operators
_MOVED: dict[object, tuple[int, ...]] = {
    aten.cat.default: (0,), aten.stack.default: (0,), aten.where.self: (1, 2),
    aten.index.Tensor: (0,), aten.index_select.default: (0,), aten.embedding.default: (0,),
    aten.index_put.default: (0, 2), aten.slice_scatter.default: (0, 1),
    aten.select_scatter.default: (0, 1), aten.clone.default: (0,), aten.contiguous.default: (0,),
    aten.repeat.default: (0,), aten.roll.default: (0,),
    aten.constant_pad_nd.default: (0,), aten.full.default: (), aten.full_like.default: (),
    aten.new_full.default: (),
}  # fmt: skip
"""Operators that move elements, and where among their arguments the tensors of these are."""
_FILLED: dict[object, int] = {
    aten.constant_pad_nd.default: 2, aten.full.default: 1, aten.full_like.default: 1,
    aten.new_full.default: 2,
}  # fmt: skip
"""Those that put in a number, and where it is."""
_COMPUTED = {
    aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar, aten.isnan.default,
    aten.mul.Tensor, aten.abs.default,
}  # fmt: skip
"""Operators that compute with the values of their operands."""


def float8_rule(target: object) -> Rule | None:
    """The rule of an operator whose operands or result are floats of 8 bits, if there is one."""
    if target is aten.copy.default:
        return _copied
    makers: Sequence[tuple[Any, Any]] = ((_MOVED, _moved), (_COMPUTED, _computed))
    return next((partial(make, target) for table, make in makers if target in table), None)


def _copied(ctx: Lowering, x: View, src: View, non_blocking: bool = False) -> View:
    return convert_float8(ctx, broadcast(src, ctx.out_shape()), x.dtype)


def _moved(target: object, ctx: Lowering, *args: Value, **kwargs: Value) -> View:
    """The rule run on bytes. Raises NoRule where operands are not all of one dtype, or the rule
    calls ATen."""
    dtype, given, start = ctx.out_dtype(), list(args), len(ctx.ops)
    adds = target is aten.index_put.default and args[3:] not in ((), (False,))
    rolls = target is aten.roll.default and not facts_of(ctx.device()).is_host
    if dtype.kind != "8" or adds or rolls:  # of these eager has no kernel
        raise NoRule(f"{dtype} elements")
    for k in _MOVED[target]:
        given[k] = _all_bytes(ctx, given[k], dtype)
    at = _FILLED.get(target)
    if at is not None and "fill_value" in kwargs:
        kwargs["fill_value"] = _code(kwargs["fill_value"], dtype)
    elif at is not None:
        given[at:] = [_code(given[at] if at < len(given) else kwargs.pop("value", 0), dtype)]
    made = ctx.making(u8, lambda: RULES[target](ctx, *given, **kwargs))
    if any(isinstance(op, Extern) for op in ctx.ops[start:]):
        raise NoRule(f"{dtype} elements")
    return _seen(ctx, made if strided(ctx, made) else copy(ctx, made, ctx.out_strides()), dtype)


def _all_bytes(ctx: Lowering, x: Value, dtype: DType) -> Value:
    if isinstance(x, (list, tuple)):
        return [_all_bytes(ctx, v, dtype) for v in x]
    if not isinstance(x, View) or x.dtype != dtype:
        raise NoRule(f"{getattr(x, 'dtype', x)} beside {dtype}")
    return _seen(ctx, x, u8)


def _code(value: Value, dtype: DType) -> int:
    if not isinstance(value, (bool, int, float)):
        raise NoRule(f"{value} as {dtype}")
    with compat.tracing.untraced_operators():
        return int(torch.full((), value, dtype=TO_TORCH[dtype]).view(torch.uint8))


def _computed(target: object, ctx: Lowering, *args: Value) -> View:
    """The rule run on f32 values; what is not bool is rounded again. A number, or a tensor that
    holds one, takes the type of the other operand first, as in eager."""
    kinds = {x.dtype for x in args if isinstance(x, View) and (x.shape or x.dtype.kind == "8")}
    if len(kinds) != 1 or (dtype := kinds.pop()).kind != "8":
        raise NoRule(f"operands of {len(kinds) + 1} dtypes")
    wide = ctx.out_dtype().kind == "8"
    if wide and (
        not facts_of(ctx.device()).is_host
        or dtype == f8e8m0fnu
        or not all(isinstance(x, View) and x.shape for x in args)
    ):
        raise NoRule(f"{dtype} elements")  # eager has no kernel

    def value(x: Value) -> Value:
        if isinstance(x, View):
            return converted(ctx, x if x.dtype == dtype else converted(ctx, x, dtype), f32)
        code = torch.tensor(_code(x, dtype), dtype=torch.uint8)
        return float(code.view(TO_TORCH[dtype]).float())

    def run() -> View:
        made: View = RULES[target](ctx, *map(value, args))
        return made

    return converted(ctx, ctx.making(f32, run), dtype, ctx.out_strides()) if wide else run()
