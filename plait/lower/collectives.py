"""Collectives: operators in which every rank of a process group takes part.

`_c10d_functional` has each in two halves: one starts it and gives a result that is not there yet,
`wait_tensor` waits for it. Both are calls by choice, in program order on every rank. A wait is
recorded as what fills the result, and as the last reader of what the collective was given: so no
schedule moves a read of the one, or a write to the other, in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from plait.ir.calls import WAIT, Extern
from plait.ir.effects import in_flight
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.extern import call_extern, call_op
from plait.lower.inplace import may_write
from plait.lower.memory import strided
from plait.lower.operands import results
from plait.lower.symbols import to_sizes

functional: Any = torch.ops._c10d_functional

_STARTS = (
    "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce_coalesced",
    "all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
)  # fmt: skip
_IN_PLACE = {"all_reduce": "all_reduce_", "broadcast": "broadcast_"}
"""Those whose result may take the place of what they are given."""


def _known(name: str) -> OpOverload | None:
    """An operator of this torch, or None: it may be built without them."""
    return getattr(getattr(functional, name, None), "default", None)


def _start(ctx: Lowering, *args: Any, **kwargs: Any) -> Any:
    return call_extern(ctx, args, kwargs)


def _start_in_place(op: OpOverload, other: OpOverload) -> Any:
    """The rule of an operator with a variant that works in place."""

    def rule(ctx: Lowering, x: View, *args: Any, **kwargs: Any) -> View:
        val = ctx.node.meta["val"].clone(memory_format=torch.contiguous_format)
        if may_write(ctx, x, to_sizes(val.stride())):
            ctx.fix_layout(x.buf)
            call_op(ctx, other, (x, *args), kwargs, None)
            return x
        # Tracing may think that the result has the strides of x.
        return call_op(ctx, op, (x, *args), kwargs, val)  # type: ignore[no-any-return]

    return rule


def wait(ctx: Lowering, x: View) -> View:
    """x once it is there. What this program started is filled in place; of anything else the result
    is another tensor of that memory."""
    given = strided(ctx, x)
    if given is None:
        raise NoRule("it waits for a view that no strides describe")
    held = in_flight(ctx.ops).get(x.buf)
    mine = held is not None
    outs, _, out = ((None,), (), x) if mine else results(ctx, ctx.node.meta["val"])
    ctx.ops.append(
        Extern(
            outs,
            WAIT,
            (given,),
            aliases=() if mine else (x.buf,),
            mutates=(x.buf,) if mine else (),
            held=tuple(held or ()),
            effectful=True,
            fallback=False,
            origin=ctx.origin,
        )
    )
    return out


for _name in _STARTS:
    if op := _known(_name):
        lower(op, any_dtype=True, no_loops=True)(_start)
for _name, _other in _IN_PLACE.items():
    if (op := _known(_name)) and (other := _known(_other)):
        lower(op, any_dtype=True, no_loops=True)(_start_in_place(op, other))
if op := _known("wait_tensor"):
    lower(op, any_dtype=True, no_loops=True)(wait)
