"""Calls of a graph become loops or extern calls, by the ladder: a rule; where there is none, or it
declines or fails, a call of ATen with the reason; a higher-order operator is called as Python.

Comes in: a node whose arguments have values. Goes out: its value, of the dtype and the shape that
its fake value has. A rule declines with NoRule; what else it raises, but for PlaitError, is a bug,
which is warned of. Either way it leaves no trace. Integers that the graph computes
are not lowered: their value is the size expression that their fake value names.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload

from plait.devices import facts_of
from plait.errors import InternalError, PlaitError, Unsupported, raised_at, warn_once
from plait.graph.edit import last_frame
from plait.graph.streams import is_fence
from plait.ir import expr, loops
from plait.ir.calls import Extern, Scalar
from plait.ir.dtypes import LOOP_DTYPES, opaque
from plait.ir.expr import Size
from plait.lower.bindings import is_found_float
from plait.lower.control_flow import CONTROL_FLOW
from plait.lower.core import ANY_DTYPE, NO_LOOPS, RULES, Lowering, NoRule, Value, View
from plait.lower.dtypes import from_torch
from plait.lower.exact import is_exact
from plait.lower.extern import call_extern
from plait.lower.float8 import float8_rule
from plait.lower.found_numbers import FoundNumbers, truth
from plait.lower.hop import call_higher_order
from plait.lower.integers import define_functions
from plait.lower.memory import strided, tensor_arg
from plait.lower.symbols import to_size, to_sizes


@dataclass
class Calls:
    """What the calls of one graph share.

    ctx: what rules are given.
    found: what is known of numbers that are found at run time.
    host_copies: copies of numbers in the host's memory, by number and device.
    last_fences: fences of streams that wait until inputs have their new values.
    """

    ctx: Lowering
    found: FoundNumbers
    host_copies: dict[tuple[View, str], View] = field(default_factory=dict)
    last_fences: list[torch.fx.Node] = field(default_factory=list)


def lower_call(calls: Calls, node: torch.fx.Node) -> Value:
    """The value of a call, by the ladder. Errors name the user's line."""
    try:
        return _called(calls, node)
    except PlaitError as e:
        if e.where or not (where := where_of(node)):
            raise
        raise e.placed(f"{node.target}: {e.what}", where) from e


def _called(calls: Calls, node: torch.fx.Node) -> Value:
    ctx = calls.ctx
    target, val = node.target, node.meta.get("val")
    if target is operator.getitem:
        return value_of(ctx, node.args[0])[node.args[1]]
    bound = node.meta.get("unbacked_bindings")
    if not bound and isinstance(val, (bool, int, torch.SymInt, torch.SymBool)):
        return _size_of(ctx, val)
    if isinstance(val, float) or (isinstance(val, torch.SymFloat) and not bound):
        return val
    if is_fence(node):
        calls.host_copies.clear()
        if ctx.mutations and node not in calls.last_fences:
            calls.last_fences.append(node)
            return None
    ctx.current, ctx.origin = node, (origin_of(node),)
    args = tuple(value_of(ctx, a) for a in node.args)
    kwargs = {k: value_of(ctx, v) for k, v in node.kwargs.items()}
    define_functions(ctx)  # before the first that relies on their ranges
    value = _lower(calls, args, kwargs)
    if bound:
        calls.found.bind(node, value, where_of(node))
    return value


def value_of(ctx: Lowering, a: Any) -> Value:
    """What stands for an argument of a node."""
    if isinstance(a, torch.fx.Node):
        return ctx.env[a]
    if isinstance(a, list):
        return [value_of(ctx, x) for x in a]
    if isinstance(a, tuple):
        return tuple(value_of(ctx, x) for x in a)
    if isinstance(a, dict):
        return {name: value_of(ctx, x) for name, x in a.items()}
    if isinstance(a, (torch.SymInt, torch.SymBool)):
        return _size_of(ctx, a)
    return a


def _size_of(ctx: Lowering, value: int | torch.SymInt | torch.SymBool) -> Size:
    if isinstance(value, torch.SymBool) and any(map(is_found_float, value.node.expr.free_symbols)):
        return truth(ctx, value.node.expr, value.node.shape_env)
    return to_size(value)


def _lower(calls: Calls, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    ctx = calls.ctx
    node, target = ctx.node, ctx.node.target
    rule = RULES.get(target)
    if not ctx.cfg.kernels and isinstance(target, OpOverload) and target not in NO_LOOPS:
        return _call_extern(ctx, args, kwargs, "kernels are switched off")
    if (
        ctx.cfg.keeps_bits
        and isinstance(target, OpOverload)
        and target not in NO_LOOPS
        and not is_exact(ctx, target, args, kwargs)
    ):
        return _call_extern(ctx, args, kwargs, "" if rule else "no lowering rule")
    if rule is None and isinstance(target, HigherOrderOperator) and not ctx.cfg.strict:
        return call_higher_order(ctx, target, args, kwargs)
    if rule is None:
        return _call_extern(ctx, args, kwargs, "no lowering rule")
    if target not in ANY_DTYPE:
        foreign = _foreign_dtype((*args, *kwargs.values())) or _foreign_meta(node.meta.get("val"))
        if foreign:
            rule = float8_rule(target) if "float8" in foreign or foreign[:2] == "f8" else None
        if rule is None:
            return _call_extern(ctx, args, kwargs, f"{foreign} elements")
    # Others share these copies: they are made before what may be undone.
    near, named = (args, kwargs) if target in CONTROL_FLOW else _beside(calls, (args, kwargs))
    mark = ctx.mark()
    try:
        value = _settle(calls, rule(ctx, *near, **named), node.meta.get("val"))
        value = calls.found.in_own_memory(node, value)
        _check_devices(ctx, mark.ops)
        return value
    except PlaitError:  # a call would be refused, too
        raise
    except NoRule as declined:
        reason = str(declined)
    except Exception as error:
        said = f"{error!r} ({raised_at(error)})"
        bug = InternalError(f"the rule of {target} failed with {said}", where=ctx.where())
        if ctx.cfg.strict:
            raise bug from error
        warn_once(f"plait calls an operator for want of a rule: {bug.line}")
        reason = bug.what
    ctx.undo(mark)
    return _call_extern(ctx, args, kwargs, reason)


def _beside(calls: Calls, values: Any) -> Any:
    """Arguments of a rule: numbers that lie in the host's memory come to where the result is.
    Those of control flow stay, for its graphs were traced with them there."""
    buffers, where = calls.ctx.buffers, calls.ctx.device()

    def moved(a: Any) -> Any:
        if isinstance(a, dict):
            return {k: moved(v) for k, v in a.items()}
        if isinstance(a, (list, tuple)):
            return type(a)([moved(v) for v in a])
        if isinstance(a, View) and not a.shape and facts_of(buffers[a.buf].device).is_host:
            return _moved(calls, a, where)
        return a

    return values if facts_of(where).is_host else moved(values)


def _moved(calls: Calls, x: View, where: str) -> View:
    """A copy of a number on another device; all its readers share it."""
    ctx = calls.ctx
    found = calls.host_copies.get((x, where))
    if found is None:
        given = tensor_arg(ctx, x)
        out = ctx.new_buffer(x.dtype, (), device=where, fixed=True)
        device = (("device", Scalar("device", where)),)
        ctx.ops.append(
            Extern((out,), "aten::_to_copy", (given,), device, may_keep=False, fallback=False)
        )
        found = calls.host_copies[x, where] = ctx.whole(out)
        ctx.from_host.add(out)
    return found


def _check_devices(ctx: Lowering, start: int) -> None:
    """Raises NoRule where a loop recorded since `start` touches memory of two devices."""
    for op in ctx.ops[start:]:
        if not isinstance(op, loops.Loop):
            continue
        nodes = [op.body, *op.index_args] if isinstance(op, loops.Scatter) else [op.body]
        names = [n.attr.buf for n in loops.walk(nodes) if isinstance(n.attr, loops.Load)]
        names += (
            [op.out]
            if isinstance(op, (loops.Pointwise, loops.Scatter))
            else [o for o in op.outs if o]
        )
        touched = {ctx.buffers[b].device for b in names}
        if len(touched) > 1:
            raise NoRule(f"operands on {' and '.join(sorted(touched))}")


def _call_extern(
    ctx: Lowering, args: tuple[Value, ...], kwargs: dict[str, Value], reason: str
) -> Value:
    if not isinstance(ctx.node.target, OpOverload):
        raise Unsupported(f"no lowering for {ctx.node.target}: {reason}", where=ctx.where())
    return call_extern(ctx, args, kwargs, reason)


def _settle(calls: Calls, value: Value, val: Any) -> Value:
    """A rule's result, checked against the fake value: same dtype and shape (spelled as the
    fake value does)."""
    if isinstance(val, torch.Tensor):
        if not isinstance(value, View):
            raise TypeError(f"the rule gave {type(value).__name__}, not a tensor")
        shape = to_sizes(val.shape)
        dtype = from_torch(val.dtype)
        if value.dtype != dtype or len(value.shape) != len(shape):
            raise TypeError(
                f"the rule gave {value.dtype}{list(value.shape)}, not {dtype}{list(shape)}"
            )
        if value.shape != shape:
            if any(expr.compare("eq", a, b) == 0 for a, b in zip(value.shape, shape, strict=True)):
                raise TypeError(f"the rule gave shape {value.shape}, not {shape}")
            calls.found.check_shape(value.shape, shape)
            value = value.remap(shape, lambda v: v)
        if dtype not in LOOP_DTYPES and dtype != opaque and strided(calls.ctx, value) is None:
            raise NoRule(f"a view of {dtype} elements that no strides describe")
        return value
    if isinstance(val, (tuple, list)) and isinstance(value, (tuple, list)):
        if len(value) != len(val):
            raise TypeError(f"the rule gave {len(value)} results, not {len(val)}")
        return tuple(
            v if v is None else _settle(calls, v, m) for v, m in zip(value, val, strict=True)
        )
    return value


def _foreign_dtype(values: tuple[Value, ...] | list[Value]) -> str:
    """The name of a dtype that loops cannot hold, among tensors in values; or ''."""
    for v in values:
        if isinstance(v, View):
            if v.dtype not in LOOP_DTYPES:
                return v.dtype.name
        elif isinstance(v, complex):
            return "complex"
        elif isinstance(v, (tuple, list)) and v and (found := _foreign_dtype(v)):
            return found
    return ""


def _foreign_meta(val: Any) -> str:
    for v in val if isinstance(val, (tuple, list)) else (val,):
        if isinstance(v, torch.Tensor):
            if v.layout != torch.strided:
                return str(v.layout).removeprefix("torch.")
            if from_torch(v.dtype) not in LOOP_DTYPES:
                return str(v.dtype).removeprefix("torch.")
    return ""


def where_of(node: torch.fx.Node) -> str:
    return last_frame(node.meta.get("stack_trace") or "")


def origin_of(node: torch.fx.Node) -> str:
    """An operator with its source line."""
    where = where_of(node)
    return f"{where} {node.target}" if where else str(node.target)
