"""Operators on lists of tensors (`_foreach_*`), which optimizers are made of: what the operator on
tensors is, for each element of the lists.

A list of numbers gives each its own; a number, or one tensor, is given to all. ATen means the same:
where its kernels for lists would differ, it calls the operators on tensors one by one. Lists are
long and their elements alike: what a rule made of one is written for the next with other buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from plait.ir.dtypes import f32, f64
from plait.ir.expr import Expr, Size, contiguous_strides
from plait.ir.loops import Load, Node, Pointwise, index_exprs, loop_vars, node, walk, with_args
from plait.ir.maths import isnan, where
from plait.ir.record import Recorder
from plait.lower.core import RULES, Lowering, NoRule, Rule, Value, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.inplace import strides_like

aten = torch.ops.aten


def _each(rule: Rule) -> Rule:
    """The rule of an operator on lists: `rule` for each element."""

    def on_lists(ctx: Lowering, *args: Value, **kwargs: Value) -> tuple[View, ...]:
        n = len(ctx.node.meta["val"])
        if any(len(a) != n for a in args if isinstance(a, (list, tuple))):
            raise NoRule("lists of different lengths")
        made: list[View] = []
        known: dict[object, _Mould] = {}
        try:
            for ctx.element in range(n):
                mine = [a[ctx.element] if isinstance(a, (list, tuple)) else a for a in args]
                bufs = [a.buf for a in mine if isinstance(a, View)]
                shape = ctx.out_shape()
                look = _look(ctx, shape, mine, bufs)
                if look is not None and (mould := known.get(look)) is not None:
                    made.append(mould.filled(ctx, shape, bufs))
                    continue
                start = len(ctx.ops), len(ctx.buffers)
                made.append(rule(ctx, *mine, **kwargs))
                loop = _only_loop(ctx, start, made[-1], bufs)
                if look is not None and loop is not None:
                    known[look] = _Mould(ctx, loop, bufs)
        finally:
            ctx.element = None
        return tuple(made)

    return on_lists


def _look(
    ctx: Lowering, shape: tuple[Size, ...], args: Sequence[Value], bufs: Sequence[str]
) -> object:
    """What the arguments of elements have in common whose loops are the same but for buffers and
    lengths; None where that is not to be told."""
    key: list[object] = [ctx.out_meta().dtype, shape == (), 0 in shape]
    for a in args:
        if isinstance(a, View):
            if not ctx.is_whole(a) or a.shape not in (shape, ()):
                return None
            hosts, device = ctx.is_hosts(a), ctx.buffers[a.buf].device
            key.append((a.dtype, device, a.shape == (), hosts, bufs.index(a.buf)))
        elif a is None or isinstance(a, (bool, int, float)):
            key.append(repr(a))  # -0.0 is not 0.0
        else:
            return None
    return tuple(key) if ctx.out_strides() is None else None


def _only_loop(
    ctx: Lowering, start: tuple[int, int], value: View, bufs: Sequence[str]
) -> Pointwise | None:
    """The loop that is all that a rule recorded, if each of its points reads the same one of some
    of bufs, or the only one, and it is laid out as eager does without a choice. start: how many
    operations and buffers there were before."""
    if (len(ctx.ops), len(ctx.buffers)) != (start[0] + 1, start[1] + 1):
        return None
    loop = ctx.ops[-1]
    if not isinstance(loop, Pointwise) or value != ctx.whole(loop.out):
        return None
    made = ctx.buffers[loop.out]
    plain = all(
        n.attr.buf in bufs and n.attr.index in (loop.vars, ()) and not n.args
        if isinstance(n.attr, Load)
        else not index_exprs(n)
        for n in walk((loop.body,))
    )
    laid_out = not made.fixed and made.strides == contiguous_strides(made.shape)
    return loop if plain and laid_out else None


class _Mould:
    """A loop over bufs from which those of other elements are made."""

    def __init__(self, ctx: Lowering, loop: Pointwise, bufs: Sequence[str]) -> None:
        self.made = ctx.buffers[loop.out]
        nodes = list(walk((loop.body,)))
        at = {n: k for k, n in enumerate(nodes)}
        # Of each node the places of its arguments, and of the buffer that it loads.
        self.parts = [
            (n, [at[a] for a in n.args], bufs.index(n.attr.buf) if isinstance(n.attr, Load) else 0)
            for n in nodes
        ]

    def filled(self, ctx: Lowering, shape: tuple[Size, ...], bufs: Sequence[str]) -> View:
        """The same loop over other buffers, for the current element."""
        vars_, done = loop_vars("i", shape), list[Node]()
        for n, args, buf in self.parts:
            if isinstance(n.attr, Load):
                load = Load(bufs[buf], vars_ if n.attr.index else ())
                done.append(node("load", (), load, n.dtype))
            else:
                done.append(with_args(n, tuple([done[k] for k in args])))
        out = ctx.new_buffer(self.made.dtype, shape, device=self.made.device)
        ctx.ops.append(Pointwise(out, vars_, done[-1], origin=ctx.origin))
        return ctx.whole(out)


def _register(name: str, which: Sequence[str], rule: Rule) -> None:
    """Rules for overloads of an operator on lists, if this torch has it."""
    packet = getattr(aten, f"_foreach_{name}", None)
    if packet is not None:
        lower(*(getattr(packet, w) for w in which))(_each(rule))


def _of(op: OpOverload) -> Rule:
    """The rule of an operator on tensors."""
    return lambda ctx, *args, **kwargs: RULES[op](ctx, *args, **kwargs)


for _name in (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor lgamma log log10 log1p log2 max neg "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
).split():
    _register(_name, ["default"], _of(getattr(aten, _name).default))

_NUMBERS = ["Scalar", "ScalarList"]
for _name in ("add", "sub", "mul", "div"):
    _kinds = [*_NUMBERS, "List", *(["Tensor"] if _name != "sub" else [])]
    _register(_name, _kinds, _of(getattr(aten, _name).Tensor))
_register("pow", _NUMBERS, _of(aten.pow.Tensor_Scalar))
_register("pow", ["List"], _of(aten.pow.Tensor_Tensor))
_register("pow", ["ScalarAndTensor"], lambda ctx, x, n: RULES[aten.pow.Scalar](ctx, x, n))
_register("lerp", [*_NUMBERS, "List"], _of(aten.lerp.Scalar))
_register("norm", ["Scalar"], lambda ctx, x, p=2, dtype=None: _norm(ctx, x, p, dtype))
_register("clone", ["default"], _of(aten.clone.default))
_register("copy", ["default"], _of(aten.copy.default))
_register("zero", ["default"], _of(aten.zeros_like.default))
_register("mm", ["default"], _of(aten.mm.default))


def _norm(ctx: Lowering, x: View, p: Value, dtype: torch.dtype | None) -> Value:
    return RULES[aten.linalg_vector_norm.default](ctx, x, p, None, False, dtype=dtype)


def _limited(end: str) -> Rule:
    return lambda ctx, x, limit: RULES[aten.clamp.default](ctx, x, **{end: limit})


for _name, _end in (
    ("clamp_min", "min"), ("maximum", "min"), ("clamp_max", "max"), ("minimum", "max"),
):  # fmt: skip
    _register(_name, [*_NUMBERS, "List"], _limited(_end))


def _scaled(op: OpOverload) -> Rule:
    """addcmul or addcdiv, whose last operand is the scale."""
    return lambda ctx, x, y, z, value=1: RULES[op](ctx, x, y, z, value=value)


def _scaled_by(op: OpOverload) -> Rule:
    """The same, with the scales in a tensor: ATen reads them as numbers."""

    def rule(ctx: Lowering, x: View, y: View, z: View, scales: View) -> Value:
        if x.dtype != compute_dtype(x.dtype) or scales.dtype not in (x.dtype, f64):
            raise NoRule("a scale that is rounded otherwise than a number")
        scale = scales.remap((), lambda _: (ctx.element or 0,))
        return RULES[op](ctx, x, y, z, value=scale)

    return rule


for _name in ("addcmul", "addcdiv"):
    _register(_name, _NUMBERS, _scaled(getattr(aten, _name).default))
    _register(_name, ["Tensor"], _scaled_by(getattr(aten, _name).default))


@lower(aten._amp_foreach_non_finite_check_and_unscale.default)
def _unscale(
    ctx: Lowering, xs: Sequence[View], found: View, by: View
) -> tuple[tuple[View, ...], View]:
    """Gradients times a number, and 1 where one of them is not finite (else what stood there)."""
    factor = by.remap((), lambda _: (0,) * len(by.shape))

    def scaled(x: View) -> View:
        def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
            compute = compute_dtype(x.dtype)
            value = ops.cast(x.load(ops, i), compute) * ops.cast(factor.load(ops, ()), compute)
            return ops.cast(value, x.dtype)

        return ctx.pointwise(
            x.shape, x.dtype, body, strides_like(ctx, x.buf) if ctx.is_whole(x) else None
        )

    def bad(x: View) -> View:
        def body(ops: Recorder, _: tuple[Expr, ...], i: tuple[Expr, ...]) -> Node:
            value = ops.cast(x.load(ops, i), compute_dtype(x.dtype))
            return ops.cast(isnan(value - value), f32)

        return ctx.reduce((), x.shape, "max", body)

    made, seen = tuple(map(scaled, xs)), [bad(x) for x in xs]

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        value = found.load(ops, i)
        for x in seen:
            value = where(x.load(ops, ()) > 0, 1.0, value)
        return value

    return made, ctx.pointwise(found.shape, found.dtype, body)
