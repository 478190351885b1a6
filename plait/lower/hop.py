"""Rules for higher-order operators. Control flow runs subprograms (`control_flow.py`); all else
runs as Python on real tensors, counted as fallback.

Tensors and symbolic sizes among the arguments become operands; everything else (subgraphs,
operators, names, numbers) is kept in a `PythonCall`, which goes to the program's table of
callables. A functionalised mutable operator becomes a call in place, on a copy of what it mutates
where somebody needs the old value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import (
    AliasViewInfo,
    NotView,
    SliceViewInfo,
    get_mutable_args,
    read_view_information_from_args,
)
from torch._ops import HigherOrderOperator, OpOverload

from plait.errors import Unsupported
from plait.ir.dtypes import LOOP_DTYPES
from plait.lower.control_flow import CONTROL_FLOW, call_control_flow
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.extern import call_op
from plait.lower.inplace import place_to_write
from plait.lower.pycall import call_python, rule_or_python
from plait.lower.symbols import to_sizes

hop = torch.ops.higher_order


_NAMES = (
    "cond", "while_loop", "while_loop_stack_output", "scan", "associative_scan", "map_impl",
    "invoke_subgraph", "auto_functionalized", "run_and_save_rng_state", "run_with_rng_state",
    "graphsafe_run_with_rng_state", "out_dtype", "wrap", "wrap_activation_checkpoint",
    "tag_activation_checkpoint", "wrap_with_autocast", "wrap_with_set_grad_enabled", "strict_mode",
    "hints_wrapper", "foreach_map", "local_map_hop", "invoke_quant", "invoke_quant_packed",
    "invoke_leaf_function", "call_torchbind", "print",
)  # fmt: skip


def call_higher_order(
    ctx: Lowering, op: HigherOrderOperator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Records the call of a higher-order operator as the current node."""
    if op in CONTROL_FLOW and not kwargs:
        return rule_or_python(ctx, op, partial(call_control_flow, ctx, op, args), args, kwargs)
    name = f"{op.namespace}::{op.__name__}"
    return call_python(ctx, op, name, args, kwargs, reason="runs as Python", effectful=True)


def _rule_for(op: HigherOrderOperator) -> Callable[..., Any]:
    def rule(ctx: Lowering, *args: Any, **kwargs: Any) -> Any:
        return call_higher_order(ctx, op, args, kwargs)

    return rule


def _known(name: str) -> HigherOrderOperator | None:
    """A higher-order operator of this torch, or None (they come and go with versions)."""
    found = getattr(hop, name, None)
    return found if isinstance(found, HigherOrderOperator) else None


for _op in filter(None, map(_known, _NAMES)):
    lower(_op, any_dtype=True)(_rule_for(_op))


# -------------------------------------------------------------------------------- mutable operators
@lower(hop.auto_functionalized_v2, any_dtype=True)
def auto_functionalized(
    ctx: Lowering, op: Any, *, _all_bases: Sequence[View], **kwargs: Any
) -> Any:
    try:
        return _copy_and_mutate(ctx, op, _all_bases, kwargs)
    except NoRule:
        rest = {**kwargs, "_all_bases": _all_bases}
        return call_higher_order(ctx, hop.auto_functionalized_v2, (op,), rest)


def _copy_and_mutate(
    ctx: Lowering, op: Any, bases: Sequence[View], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """(results of op, bases as it leaves them): op runs on its bases themselves or on copies of
    them.

    Raises NoRule, before anything is recorded, if op or the views of bases that it takes are
    unusual."""
    if not isinstance(op, OpOverload) or any(b.dtype not in LOOP_DTYPES for b in bases):
        raise NoRule("an unusual mutable operator")
    names, types = get_mutable_args(op)
    rest = dict(kwargs)
    tensors: list[Any] = list(bases)
    views = read_view_information_from_args(names, types, rest, tensors)
    if not all(_is_plain(v) for v in views.values()):
        raise NoRule("a mutated view of an unusual kind")
    fakes = ctx.node.kwargs["_all_bases"]
    assert isinstance(fakes, (list, tuple)), fakes
    read = [v for name, v in rest.items() if name not in views]
    copies = [
        place_to_write(ctx, b, to_sizes(f.meta["val"].stride()), (*bases, *read))
        for b, f in zip(bases, fakes, strict=True)
    ]
    for name, view in views.items():
        rest[name] = _view_of(view, copies)
    val = ctx.node.meta["val"]
    made = tuple(val[: len(val) - len(bases)])
    given = (), {k: v for k, v in ctx.node.kwargs.items() if k in rest and k not in views}
    single = len(op._schema.returns) <= 1
    out = call_op(ctx, op, (), rest, made[0] if single else made, given=given)
    return (*((out,) if single else out), *copies)


def _is_plain(view: Any) -> bool:
    if isinstance(view, list):
        return all(map(_is_plain, view))
    return view is None or isinstance(view, (NotView, AliasViewInfo, SliceViewInfo))


def _view_of(view: Any, copies: Sequence[View]) -> Any:
    if isinstance(view, list):
        return [_view_of(v, copies) for v in view]
    if view is None:
        return None
    base = copies[view.base_index]
    if not isinstance(view, SliceViewInfo):
        return base
    dim, start, end = view.dim, view.start, view.end
    shape = (*base.shape[:dim], end - start, *base.shape[dim + 1 :])
    return base.remap(shape, lambda v: (*v[:dim], v[dim] + start, *v[dim + 1 :]))


# ---------------------------------------------------------------------------------- ordered effects
@lower(hop.with_effects, any_dtype=True)
def with_effects(ctx: Lowering, token: Any, op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Calls keep their program order, so the token carries nothing."""
    made = tuple(ctx.node.meta["val"])[1:]
    if not isinstance(op, OpOverload):
        raise Unsupported(f"an ordered effect of {op}")
    single = len(op._schema.returns) <= 1
    given = ctx.node.args[2:], ctx.node.kwargs
    out = call_op(
        ctx,
        op,
        args,
        kwargs,
        (made[0] if made else None) if single else made,
        given=given,
        effectful=True,
    )
    return (token, *((out,) if single else out))
