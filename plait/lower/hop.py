"""Rules for higher-order operators: their subgraphs run as Python on real tensors, counted as fallback.

Tensors and symbolic sizes among the arguments become operands; everything else (subgraphs, operators, names,
numbers) is kept in a `HigherOrderCall`, which goes to the program's table of callables. A functionalised mutable
operator becomes a copy of what it mutates and a call in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
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
from plait.ir.loops import Extern, ExternArg
from plait.ir.sizes import Expr
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.extern import call_op, operand, results
from plait.lower.symbols import to_size

hop = torch.ops.higher_order


class HigherOrderCall:
    """A callable of real tensors and ints: fills them into the arguments of a higher-order operator and calls it.

    holes: which leaves of the argument tree are filled at run time. strides: of each flat result that is a tensor
    of known sizes, else None; a result that came out with others is copied."""

    def __init__(
        self,
        op: Callable[..., Any],
        leaves: Sequence[Any],
        holes: Sequence[int],
        tree: pytree.TreeSpec,
        strides: Sequence[tuple[int, ...] | None],
    ) -> None:
        self.op, self.leaves, self.holes = op, tuple(leaves), tuple(holes)
        self.tree, self.strides = tree, tuple(strides)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        """The flat results. Raises what the operator raises."""
        leaves = list(self.leaves)
        for k, value in zip(self.holes, operands, strict=True):
            leaves[k] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return tuple(map(_with_strides, _flat(self.op(*args, **kwargs)), self.strides))

    def __repr__(self) -> str:
        return f"HigherOrderCall({getattr(self.op, '__name__', self.op)})"


def _flat(value: Any) -> list[Any]:
    return [x for v in value for x in _flat(v)] if isinstance(value, (tuple, list)) else [value]


def _with_strides(value: Any, strides: tuple[int, ...] | None) -> Any:
    if strides is None or not isinstance(value, torch.Tensor) or value.stride() == strides:
        return value
    out = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return out.copy_(value)


def _static_strides(val: Any) -> tuple[int, ...] | None:
    if not isinstance(val, torch.Tensor) or val.layout != torch.strided:
        return None
    strides = val.stride()
    return strides if all(isinstance(s, int) for s in (*val.shape, *strides)) else None


def call_python(
    ctx: Lowering, op: HigherOrderOperator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Records the call of a higher-order operator as the current node and returns its results as a rule would.

    Raises Unsupported for an argument that only exists at run time and is neither tensor nor int."""
    assert ctx.node is not None
    node, val = ctx.node, ctx.node.meta["val"]
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    fakes = pytree.tree_leaves((node.args, {k: node.kwargs[k] for k in kwargs}))
    holes = [k for k, v in enumerate(leaves) if isinstance(v, (View, Expr))]
    if any(isinstance(v, (torch.fx.Node, torch.SymFloat)) for v in leaves):
        raise Unsupported(f"an argument of {op} that is neither tensor nor int")
    operands: tuple[ExternArg, ...] = tuple(operand(ctx, leaves[k], fakes[k]) for k in holes)
    kept = [None if isinstance(v, (View, Expr)) else v for v in leaves]
    outs, symbols, result = results(ctx, val)
    number = len(ctx.callables)
    ctx.callables.append(
        HigherOrderCall(op, kept, holes, tree, [_static_strides(v) for v in _flat(val)])
    )
    given = tuple(dict.fromkeys(leaves[k].buf for k in holes if isinstance(leaves[k], View)))
    name = f"{op.namespace}::{op.__name__}"
    ctx.fallback_reasons.setdefault(name, "a higher-order operator runs as Python")
    ctx.ops.append(
        Extern(
            outs, name, operands, symbols=symbols, aliases=given, effectful=True,
            callable_index=number, fallback=True, origin=ctx.origin,
        )
    )  # fmt: skip
    return result


_NAMES = (
    "cond", "while_loop", "while_loop_stack_output", "scan", "associative_scan", "map_impl", "invoke_subgraph",
    "auto_functionalized", "run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state",
    "out_dtype", "wrap", "wrap_activation_checkpoint", "tag_activation_checkpoint", "wrap_with_autocast",
    "wrap_with_set_grad_enabled", "strict_mode", "hints_wrapper", "flex_attention", "flex_attention_backward",
    "foreach_map", "local_map_hop",
    "invoke_quant", "invoke_quant_packed", "invoke_leaf_function", "call_torchbind", "print",
)  # fmt: skip


def _rule_for(op: HigherOrderOperator) -> Callable[..., Any]:
    def rule(ctx: Lowering, *args: Any, **kwargs: Any) -> Any:
        return call_python(ctx, op, args, kwargs)

    return rule


def _known(name: str) -> HigherOrderOperator | None:
    """A higher-order operator of this torch, or None (they come and go with versions)."""
    found = getattr(hop, name, None)
    return found if isinstance(found, HigherOrderOperator) else None


for _op in filter(None, map(_known, _NAMES)):
    lower(_op, any_dtype=True)(_rule_for(_op))


# ------------------------------------------------------------------------------------------- mutable operators
@lower(hop.auto_functionalized_v2, any_dtype=True)
def auto_functionalized(
    ctx: Lowering, op: Any, *, _all_bases: Sequence[View], **kwargs: Any
) -> Any:
    try:
        return _copy_and_mutate(ctx, op, _all_bases, kwargs)
    except NoRule:
        return call_python(
            ctx, hop.auto_functionalized_v2, (op,), {**kwargs, "_all_bases": _all_bases}
        )


def _copy_and_mutate(
    ctx: Lowering, op: Any, bases: Sequence[View], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """(results of op, bases as it leaves them): op runs in place on copies of its bases.

    Raises NoRule, before anything is recorded, if op or the views of bases that it takes are unusual."""
    if not isinstance(op, OpOverload) or any(b.dtype not in LOOP_DTYPES for b in bases):
        raise NoRule("an unusual mutable operator")
    assert ctx.node is not None
    names, types = get_mutable_args(op)
    rest = dict(kwargs)
    tensors: list[Any] = list(bases)
    views = read_view_information_from_args(names, types, rest, tensors)
    if not all(_is_plain(v) for v in views.values()):
        raise NoRule("a mutated view of an unusual kind")
    fakes = ctx.node.kwargs["_all_bases"]
    assert isinstance(fakes, (list, tuple))
    copies = [
        ctx.copy(b, tuple(to_size(s) for s in f.meta["val"].stride()), fixed=True)
        for b, f in zip(bases, fakes, strict=True)
    ]
    for name, view in views.items():
        rest[name] = _view_of(view, copies)
    val = ctx.node.meta["val"]
    made = tuple(val[: len(val) - len(bases)])
    given = (), {k: v for k, v in ctx.node.kwargs.items() if k in rest and k not in views}
    single = len(op._schema.returns) <= 1
    out = call_op(ctx, op, (), rest, made[0] if single else made, fallback=False, given=given)
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


# ------------------------------------------------------------------------------------------- ordered effects
@lower(hop.with_effects, any_dtype=True)
def with_effects(ctx: Lowering, token: Any, op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Calls keep their program order, so the token carries nothing."""
    assert ctx.node is not None
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
        fallback=False,
        given=given,
        effectful=True,
    )
    return (token, *((out,) if single else out))
