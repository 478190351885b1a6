"""What rules of elementwise ops are written with: type promotion, broadcasting, operands, loops.

Each op is a row: what it computes on nodes of one compute dtype, and how its inputs are promoted.
Half types are computed in f32 and rounded where eager rounds: at the result of every op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from plait.ir import expr
from plait.ir.dtypes import DType, b1, i64
from plait.ir.expr import Expr, Size
from plait.ir.loops import Const, Node, apply
from plait.ir.record import Recorder
from plait.lower.core import Body, Lowering, NoRule, View, lower
from plait.lower.dtypes import TO_TORCH, compute_dtype, from_torch
from plait.lower.float_nodes import to_scalar_node

aten = torch.ops.aten

Scalar = bool | int | float | Expr | torch.SymFloat
Operand = View | Scalar
Formula = Callable[..., Node]  # of nodes

# ---------------------------------------------------------------------------------------- promotion
KEEP = "keep"  # the common dtype of the inputs
FLOAT = "float"  # integers and bools become the default float dtype


def default_float() -> DType:
    """torch's default dtype."""
    return from_torch(torch.get_default_dtype())


@lru_cache(maxsize=4096)
def _promote(parts: tuple[tuple[DType, int], ...]) -> DType:
    """PyTorch's result type of (dtype, rank) parts. rank: 2 a tensor with dimensions, 1 without, 0
    a Python number.

    A part of lower rank counts only if its kind (bool < int < float) is above those of higher
    rank."""
    result: torch.dtype | None = None
    for rank in (2, 1, 0):
        mine: torch.dtype | None = None
        for dtype, r in parts:
            if r == rank:
                mine = (
                    TO_TORCH[dtype] if mine is None else torch.promote_types(mine, TO_TORCH[dtype])
                )
        if result is None:
            result = mine
        elif (
            mine is not None
            and not result.is_floating_point
            and (result == torch.bool or mine.is_floating_point)
        ):
            result = torch.promote_types(result, mine)
    assert result is not None, "an operator without tensor operands has no dtype to promote"
    return from_torch(result)


def common_dtype(xs: Sequence[Operand], kind: str = KEEP) -> DType:
    """The dtype that eager brings all of xs to."""
    found = _promote(tuple(_part(x) for x in xs))
    return default_float() if kind == FLOAT and not found.is_float else found


def _part(x: Operand) -> tuple[DType, int]:
    if isinstance(x, View):
        return x.dtype, 2 if x.shape else 1
    if isinstance(x, bool):
        return b1, 0
    if isinstance(x, (int, Expr)):
        return i64, 0
    if isinstance(x, (float, torch.SymFloat)):
        return default_float(), 0
    raise NoRule(f"an operand of type {type(x).__name__}")


# ------------------------------------------------------------------------------------- broadcasting
def broadcast_index(x: View, point: Sequence[Expr], shape: tuple[Size, ...]) -> list[Size]:
    """The index into x for a point of `shape`, which x broadcasts to."""
    skip = len(shape) - len(x.shape)
    return [
        0 if s == 1 and n != 1 else p
        for p, s, n in zip(point[skip:], x.shape, shape[skip:], strict=True)
    ]


def broadcast(x: View, shape: tuple[Size, ...]) -> View:
    """x seen with a larger shape, by broadcasting."""
    if x.shape == shape:
        return x
    return x.remap(shape, lambda v: broadcast_index(x, v, shape))


def fit(ctx: Lowering, x: View, shape: tuple[Size, ...], said: str, ones: bool = False) -> View:
    """x, which is about to be read at all points of shape: tracing has not compared the two. ones:
    sizes of 1 are repeated, and missing ones. Raises NoRule where x does not fit, for ATen raises
    eager's error; what only the call tells is asserted, in the words said."""
    lead = len(shape) - len(x.shape)
    if lead < 0 or (lead and not ones):
        raise NoRule(said)
    for have, want in zip(x.shape, shape[lead:], strict=True):
        if have != want and not (ones and have == 1):
            same = expr.compare("eq", have, want)
            if same == 0:
                raise NoRule(said)
            ctx.assert_true(same, f"{said}: found {{}} where {{}} is wanted", (have, want))
    return broadcast(x, shape)


# ----------------------------------------------------------------------------------------- operands
def wrap(value: Const, dtype: DType) -> Const:
    """A Python integer as C converts it to an integer dtype."""
    if dtype.kind not in "iu" or isinstance(value, float):
        return value
    bits = 8 * dtype.nbytes
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value


Rounds = Callable[[Lowering, Sequence[Operand]], Sequence[bool]]
"""Which operands eager's kernel rounds to the common dtype before it computes."""


def rounds_tensors(ctx: Lowering, xs: Sequence[Operand]) -> Sequence[bool]:
    return [isinstance(x, View) for x in xs]


def rounds_all(ctx: Lowering, xs: Sequence[Operand]) -> Sequence[bool]:
    """Numbers too: `half_tensor == 0.1` is never true where they stay as they are."""
    return [True] * len(xs)


def rounds_factors(ctx: Lowering, xs: Sequence[Operand]) -> Sequence[bool]:
    """Of a product: neither numbers nor tensors in the CPU's memory that hold one."""
    return [isinstance(x, View) and (bool(x.shape) or not ctx.is_hosts(x)) for x in xs]


def rounded_number(value: bool | int | float, dtype: DType) -> float:
    """A Python number as eager has it in a half type."""
    return float(torch.tensor(value).double().to(TO_TORCH[dtype]))


def operand(
    ctx: Lowering,
    ops: Recorder,
    x: Operand,
    i: Sequence[Expr],
    shape: tuple[Size, ...],
    common: DType,
    rounded: bool | None = None,
) -> Node:
    """Element i of x, brought to the compute dtype of the dtype `common`. rounded: to `common`
    before that; None: if x is a tensor."""
    compute = compute_dtype(common)
    if rounded is None:
        rounded = isinstance(x, View)
    if isinstance(x, (bool, int, float)):
        if rounded and compute != common:
            return ops.const(rounded_number(x, common), compute)
        return ops.const(wrap(x, compute), compute)
    if isinstance(x, View):
        value = x.load(ops, broadcast_index(x, i, shape))
    elif isinstance(x, Expr):
        value = ops.index(x)
    else:
        value = to_scalar_node(ops, x, ctx.float_readers())
    return ops.cast(ops.cast(value, common) if rounded else value, compute)


def scalar(ctx: Lowering, ops: Recorder, value: Any, dtype: DType) -> Node:
    """A Python number, Size or SymFloat as a node of that dtype."""
    return ops.cast(operand(ctx, ops, value, (), (), dtype), dtype)


def all_of(ops: Recorder, conditions: Sequence[Node]) -> Node:
    """The conjunction of conditions (true for none)."""
    out = ops.const(True, b1)
    for k, c in enumerate(conditions):
        out = c if k == 0 else out & c
    return out


def inside(ops: Recorder, at: Sequence[Size], bounds: Sequence[tuple[Size, Size]]) -> list[Node]:
    """The conditions for first <= at < end, by dimension, that are not certain."""
    out = []
    for e, (first, end) in zip(at, bounds, strict=True):
        if not expr.known_le(first, e):
            out.append(compare(ops, "ge", e, first))
        if not expr.known_lt(e, end):
            out.append(compare(ops, "lt", e, end))
    return out


def load_if(
    ops: Recorder, conditions: Sequence[Node], load: Callable[[], Node], other: Const = 0
) -> Node:
    """load() where all conditions hold, else `other`."""
    return ops.masked(all_of(ops, conditions), load, other) if conditions else load()


def compare(ops: Recorder, op: str, a: Size, b: Size) -> Node:
    """An integer comparison of index expressions as a b1 node: 'lt', 'le', 'eq', 'ge'. Decided at
    once where ranges allow."""
    if op == "ge":
        return compare(ops, "le", b, a)
    known = expr.compare(op, a, b)
    if isinstance(known, int):
        return ops.const(bool(known), b1)
    return apply(op, ops.index(a), ops.index(b))


# -------------------------------------------------------------------------------------------- loops
def result(ctx: Lowering, body: Body, k: int | None = None) -> View:
    """The current node's (k-th) result, element by element, laid out as eager lays it out."""
    strides = ctx.out_strides(k)
    if strides is not None and 0 in strides:
        strides = None
    return ctx.pointwise(ctx.out_shape(k), ctx.out_dtype(k), body, strides)


def elementwise(
    ctx: Lowering,
    formula: Formula,
    xs: Sequence[Operand],
    kind: str = KEEP,
    common: DType | None = None,
    rounds: Rounds = rounds_tensors,
) -> View:
    """formula over xs, promoted and broadcast; its result is rounded to the common dtype, then cast
    to that of the fake result."""
    dtype = common or common_dtype(xs, kind)
    out, shape = ctx.out_dtype(), ctx.out_shape()
    compute, rounded = compute_dtype(dtype), rounds(ctx, xs)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        nodes = [operand(ctx, ops, x, i, shape, dtype, r) for x, r in zip(xs, rounded, strict=True)]
        value = formula(*nodes)
        if value.dtype == compute:
            value = ops.cast(value, dtype)
        return ops.cast(value, out)

    return ctx.pointwise(shape, out, body, ctx.out_strides())


def register(
    ops: Sequence[object], formula: Formula, kind: str = KEEP, rounds: Rounds = rounds_tensors
) -> None:
    """A rule for ops whose arguments are all tensors or numbers and take part in promotion."""

    def rule(ctx: Lowering, *xs: Operand) -> View:
        return elementwise(ctx, formula, xs, kind, rounds=rounds)

    lower(*ops)(rule)


def overloads(name: str, *which: str) -> list[object]:
    """Overloads of an aten op: those named, or the functional ones whose tensors and numbers are
    all that they take."""
    packet = getattr(aten, name)
    return [getattr(packet, w) for w in which or ("default",)]


def row(op: str) -> Formula:
    """The formula that is one row of the op table."""
    return lambda *nodes: apply(op, *nodes)
