"""Whether an operator that writes its arguments may write a value itself instead of a copy of it.

Asked while a functionalised mutable operator is lowered. Views of a buffer are views of its memory
here, and so are buffers that are that memory seen as another type: nobody may read the old contents
later, and nobody outside may see the write, but for an input that the graph overwrites in the end
anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from plait.ir.calls import Extern
from plait.ir.effects import in_flight
from plait.ir.expr import Size
from plait.ir.loops import Alias, Pointwise, Reduction, Scan, Scatter
from plait.lower.core import Lowering, Value, View
from plait.lower.memory import copy, owner_of
from plait.lower.view import dense_order

aten = torch.ops.aten


def may_write(ctx: Lowering, x: View, strides: tuple[Size, ...]) -> bool:
    """Whether the current node may write the memory of x, one of its arguments, as a tensor of
    these strides."""
    if not ctx.is_whole(x) or ctx.buffers[x.buf].strides != strides:
        return False
    return _writable(ctx, x.buf)


def _writable(ctx: Lowering, buf: str, reader: torch.fx.Node | None = None) -> bool:
    """Whether nobody can tell that the current node writes a buffer. reader: a node that may read
    it later."""
    if buf in ctx.input_buffers:
        if buf not in ctx.donated and not _is_overwritten(ctx, buf):
            return False
    elif not _is_own(ctx, buf):
        return False
    if any(isinstance(op, Extern) and buf in op.aliases for op in ctx.ops):
        return False
    if any(buf == made or buf in given for made, given in in_flight(ctx.ops).items()):
        return False
    values = (*ctx.floats.values(), *(source for _, source in ctx.mutations))  # both are read later
    if count_uses(ctx, values, buf):
        return False
    return not any(_read_later(ctx, node, reader) for node in _holders(ctx, buf))


def place_to_write(
    ctx: Lowering, x: View, strides: tuple[Size, ...], args: Sequence[Value]
) -> View:
    """Where the current node does its work on x: in place if nobody can tell, else in a copy. args:
    all that it is given."""
    if count_uses(ctx, args, x.buf) == 1 and may_write(ctx, x, strides):
        ctx.fix_layout(x.buf)
        return x
    return copy(ctx, x, strides, fixed=True)


_PARTS: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
"""Operators that show a part of a tensor -> what puts such a part back."""


def may_write_part(
    ctx: Lowering, x: View, given: torch.fx.Node, changed: str, args: Sequence[Value]
) -> bool:
    """Whether the current node may write the memory of x, which is a part of a tensor: given, by
    one operator. changed: the name by which the node's result has what becomes of it. Nobody but
    the operator that puts the part back may read the tensor later. args: all that it is given."""
    put = _PARTS.get(given.target)
    if put is None or count_uses(ctx, args, x.buf) != 1:
        return False
    base = given.args[0]
    assert isinstance(base, torch.fx.Node), f"a part of {base}"
    whole = ctx.env.get(base)
    if not isinstance(whole, View) or not ctx.is_whole(whole) or whole.buf != x.buf:
        return False
    puts = [
        u for u in base.users
        if u.target is put and u.args[0] is base and u.args[2:] == given.args[1:]
        and not u.kwargs and not given.kwargs and _is_result(u.args[1], ctx.node, changed)
    ]  # fmt: skip
    return len(puts) == 1 and _writable(ctx, x.buf, puts[0])


def _is_result(value: object, node: torch.fx.Node, name: str) -> bool:
    return (
        isinstance(value, torch.fx.Node)
        and value.target is operator.getitem
        and value.args == (node, name)
    )


def strides_like(ctx: Lowering, buf: str) -> tuple[Size, ...] | None:
    """The strides of a changed copy of a buffer: those of the buffer where they are dense, or where
    the copy may take its place (an input that is overwritten, and what comes of it). Else None:
    elements may overlap or lie apart."""
    b = ctx.buffers[buf]
    kept = (
        dense_order(b.shape, b.strides) is not None
        or is_scattered(ctx, buf)
        or _is_overwritten(ctx, buf)
    )
    return b.strides if kept else None


def is_scattered(ctx: Lowering, buf: str) -> bool:
    """Whether a buffer is what a Scatter makes."""
    return any(isinstance(op, Scatter) and op.out == buf for op in ctx.ops)


def buffers_of(value: Value) -> Iterator[str]:
    """The buffers of the tensors in a value, laid open."""
    if isinstance(value, View):
        yield value.buf
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from buffers_of(item)


def count_uses(ctx: Lowering, values: Sequence[Value], buf: str) -> int:
    """How many tensors among the values lie in the memory of a buffer."""
    return sum(owner_of(ctx, name) == owner_of(ctx, buf) for v in values for name in buffers_of(v))


def _is_own(ctx: Lowering, buf: str) -> bool:
    """Whether exactly one op of the graph makes this memory and no other buffer shares it."""
    made = False
    for op in ctx.ops:
        match op:
            case Pointwise(out) | Scatter(out):
                made = made or out == buf
            case Reduction(outs) | Scan(outs):
                made = made or buf in outs
            case Extern():
                if buf in op.aliases or (buf in op.outs and op.aliases):
                    return False
                made = made or buf in op.outs
            case Alias(out, base):
                if buf in (out, base):
                    return False
            case _:
                pass
    return made


def _holders(ctx: Lowering, buf: str) -> Iterator[torch.fx.Node]:
    for node, value in ctx.env.items():
        if count_uses(ctx, [value], buf):
            yield node


def _read_later(ctx: Lowering, node: torch.fx.Node, reader: torch.fx.Node | None) -> bool:
    """Whether a node that is not lowered yet, besides the current one and reader, reads this one's
    value."""
    return any(
        user not in ctx.env
        and user is not ctx.node
        and user is not reader
        and not _overwrites(user, node, aten.copy_.default, aten.copy.default)
        for user in node.users
    )


def _overwrites(user: torch.fx.Node, node: torch.fx.Node, *copies: object) -> bool:
    """Whether one of these operators gives the place of a value to another one."""
    return user.target in copies and user.args[0] is node and user.args[1] is not node


def _is_overwritten(ctx: Lowering, buf: str) -> bool:
    """Whether the graph gives an input a new value later on."""
    return any(
        node.op == "placeholder"
        and any(u not in ctx.env and _overwrites(u, node, aten.copy_.default) for u in node.users)
        for node in _holders(ctx, buf)
    )
