"""Results of a graph: tensors with eager's strides, which share memory with inputs and with each
other as they do in eager.

Comes in: the output node, and the values of all others. Goes out: what the program returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from plait import compat
from plait.errors import Unsupported
from plait.graph.captured import Captured, InputView
from plait.graph.edit import begins_anywhere, is_view, memory_of
from plait.ir import expr
from plait.ir.calls import Extern, Number, Scalar, TensorArg
from plait.ir.dtypes import DType, b1, f64
from plait.ir.expr import Expr, Size
from plait.lower.calls import value_of
from plait.lower.core import Lowering, NoRule, Value, View
from plait.lower.dtypes import from_torch
from plait.lower.float_nodes import to_scalar_node
from plait.lower.inputs import Inputs
from plait.lower.memory import alias, copy, lay_out, owner_of, seen_as, tensor_arg
from plait.lower.operands import is_object_input, scalar_operand
from plait.lower.symbols import is_ragged, to_size, to_sizes
from plait.lower.view import bytes_behind

Result = TensorArg | Scalar | Size


@dataclass
class _Results:
    """The results so far.

    owners: the fake storage that each buffer given out stands for.
    tensors: node -> the tensor that is returned for it.
    given: the values of tensors.
    roots: node -> the value that it is a view of.
    """

    ctx: Lowering
    captured: Captured
    inputs: Inputs
    placeholders: Sequence[torch.fx.Node]
    owners: dict[str, int]
    tensors: dict[torch.fx.Node, TensorArg] = field(default_factory=dict)
    given: set[TensorArg] = field(default_factory=set)
    roots: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)

    def root(self, node: torch.fx.Node) -> torch.fx.Node:
        """See `_root`: found once."""
        found = self.roots.get(node)
        if found is None:
            found = self.roots[node] = _root(node)
        return found


def lower_results(
    ctx: Lowering,
    captured: Captured,
    inputs: Inputs,
    placeholders: Sequence[torch.fx.Node],
    output: torch.fx.Node,
) -> tuple[Result, ...]:
    """What a program returns. Results that are views of one value share its memory, which it has
    for itself."""
    (found,) = output.args
    items = found if isinstance(found, (tuple, list)) else (found,)
    r = _Results(ctx, captured, inputs, placeholders, dict(inputs.storages))
    ctx.origin = ("output",)
    first = items[: captured.n_results]  # what a backward graph reads may lie anywhere
    if captured.kind == "subprogram":
        first = ()
    own = [a for k, a in enumerate(first) if _is_strided(a) and k not in captured.input_views]
    roots = {a: r.root(a) for a in own}
    views = {root for a, root in roots.items() if root is not a}
    for root in roots.values():
        _own_memory(r, root, seen=root in views)
    return tuple(_result(r, k, a) for k, a in enumerate(items))


def _result(r: _Results, k: int, a: Any) -> Result:
    """The output at position k."""
    value = value_of(r.ctx, a)
    val = a.meta.get("val") if isinstance(a, torch.fx.Node) else None
    holds_numbers = r.ctx.cfg.kernels and r.captured.kind != "subprogram"
    if holds_numbers and isinstance(val, (torch.SymFloat, torch.SymBool)):
        return _number(r.ctx, val, value)
    if isinstance(value, View):
        assert isinstance(a, torch.fx.Node), a
        if r.captured.kind == "subprogram":
            return _lone_result(r, value, a)
        if k in r.captured.input_views:
            return _input_view(r, a, r.captured.input_views[k])
        if a not in r.tensors:  # one node returned twice is one tensor
            kept = r.captured.n_results is not None and k >= r.captured.n_results
            found = None if kept else _in_root(r, value, a)
            out = _tensor_result(r, value, a) if found is None else found
            r.tensors[a] = _distinct(r, a, out)
            r.given.add(r.tensors[a])
        return r.tensors[a]
    if value is None or isinstance(value, (bool, int, Expr, float)) or is_object_input(value):
        return scalar_operand(value)
    if is_ragged(value):
        return to_size(value)  # says why it cannot be
    raise Unsupported(f"a graph output of type {type(value).__name__}")


def _own_memory(r: _Results, root: torch.fx.Node, seen: bool) -> None:
    """Copies a value that is a result, or that results are views of, where a rule left it in
    memory of another tensor or in a part of memory: in eager it has its own, which the results
    that are views of it share. seen: there are such results, so the memory must be laid out as
    eager's."""
    view, like = r.ctx.env[root], root.meta["val"]
    if root.op != "call_function" or not isinstance(view, View) or not r.ctx.cfg.kernels:
        return
    storage = compat.tracing.storage_of(like)
    memory = owner_of(r.ctx, view.buf)
    part = _is_part(r.ctx, memory, view)
    if not part and not seen:
        return
    shape, strides = (to_sizes(s) for s in (like.shape, like.stride()))
    taken = not part and r.owners.setdefault(memory, storage) != storage
    if _repeats(shape, strides) or not (taken or part or not lay_out(r.ctx, view, strides)):
        return
    r.ctx.env[root] = copy(r.ctx, view, strides, fixed=True)
    r.owners[r.ctx.env[root].buf] = storage


def _lone_result(r: _Results, x: View, node: torch.fx.Node) -> TensorArg:
    """A result of a subprogram: it shares memory with no input and no other result, so whoever runs
    the program need not ask. Raises NoRule where an operator may have made a view of it."""
    if any(isinstance(o, Extern) and o.aliases and x.buf in o.outs for o in r.ctx.ops):
        raise NoRule("a graph that returns a view that an operator made")
    val = node.meta["val"]
    if not _is_strided(node):
        return TensorArg(x.buf, x.shape, r.ctx.buffers[x.buf].strides, 0)
    strides = to_sizes(val.stride())
    out = tensor_arg(r.ctx, x, strides)
    memory = owner_of(r.ctx, out.buf)
    part = r.root(node) is node and _is_part(r.ctx, memory, x)  # a copy in eager
    if memory in r.ctx.constants or memory in r.owners or part:
        out = tensor_arg(r.ctx, copy(r.ctx, x), strides)
    r.owners[owner_of(r.ctx, out.buf)] = compat.tracing.storage_of(val)
    return out


def _tensor_result(r: _Results, x: View, node: torch.fx.Node) -> TensorArg:
    """x with the fake value's strides. Results share memory with inputs and with each other
    only where the fake values do: what is a copy in eager is one here."""
    val = node.meta["val"]
    if val.layout != torch.strided:
        return TensorArg(x.buf, x.shape, r.ctx.buffers[x.buf].strides, 0)
    strides = to_sizes(val.stride())
    storage = compat.tracing.storage_of(r.root(node).meta["val"])
    out = tensor_arg(r.ctx, x, strides, shared=True)
    memory = owner_of(r.ctx, out.buf)
    if memory in r.ctx.constants or r.owners.get(memory, storage) != storage:
        out = tensor_arg(r.ctx, copy(r.ctx, x), strides)
    r.owners.setdefault(owner_of(r.ctx, out.buf), storage)
    return out


def _input_view(r: _Results, node: torch.fx.Node, view: InputView) -> TensorArg:
    """A result that eager makes as a view of an input, which holds its new value by then."""
    name = r.inputs.names[view.input]
    assert isinstance(name, str), name
    base, val = r.ctx.buffers[name], node.meta["val"]
    if view.whole:
        return TensorArg(name, base.shape, base.strides, 0)
    dtype, found = from_torch(val.dtype), None
    at: tuple[Any, ...] = (view.shape, view.strides, view.offset)
    if not _knows(r.ctx, at):  # numbers found while the function was traced the first time
        at = (val.shape, val.stride(), val.storage_offset())
        found = _place_in_input(r, node, view.input)
    shape, strides = to_sizes(at[0]), to_sizes(at[1])
    if begins_anywhere(node):
        x = alias(r.ctx, r.ctx.whole(name), dtype, shape, strides, to_size(at[2]), relative=False)
        return TensorArg(x.buf, shape, strides, 0)
    if found is None:
        first = bytes_behind(r.placeholders[view.input].meta["val"], at[2], val)
    else:
        strides, first = found
    return _aliased(r, TensorArg(name, shape, strides, 0), dtype, first)


def _place_in_input(
    r: _Results, node: torch.fx.Node, k: int
) -> tuple[tuple[Size, ...], Size] | None:
    """The strides of a view of input k, and how many bytes it begins behind that, where a graph has
    it as a view of the input's new value: that is of the same shape, but may lie otherwise. None
    where the fake value of node tells."""
    root, base = r.root(node), r.placeholders[k].meta["val"]
    if root.op == "placeholder" or begins_anywhere(node):
        return None
    val, new = node.meta["val"], root.meta["val"]
    same_shape, strides = to_sizes(new.shape) == to_sizes(base.shape), to_sizes(base.stride())
    if same_shape and to_sizes(new.stride()) == strides:
        return to_sizes(val.stride()), bytes_behind(new, val.storage_offset(), val)
    x, whole = r.ctx.env[node], r.ctx.env[root]
    if (
        not same_shape
        or not (isinstance(x, View) and isinstance(whole, View))
        or x.buf != whole.buf
        or not r.ctx.is_whole(whole)
    ):
        raise Unsupported(
            "a view of an input that is written, at a place that is found at run time",
            hint="return result.clone()",
        )
    n = len(x.shape)
    first, *others = (
        expr.total(i * s for i, s in zip(x.at(at), strides, strict=True))
        for at in ((0,) * n, *(tuple(int(d == e) for e in range(n)) for d in range(n)))
    )
    return tuple(other - first for other in others), first * x.dtype.nbytes


def _is_part(ctx: Lowering, buf: str, x: View) -> bool:
    """Whether x may be less than all of this memory."""
    return not expr.known_eq(_nbytes(ctx, buf), expr.numel(x.shape) * x.dtype.nbytes)


def _nbytes(ctx: Lowering, buf: str) -> Size:
    b = ctx.buffers[buf]
    return expr.numel(b.shape) * b.dtype.nbytes


def _number(ctx: Lowering, val: torch.SymFloat | torch.SymBool, value: Value) -> Number:
    """A Python float or bool that depends on sizes or on values of tensors. value: a bool as an
    integer."""
    floats = ctx.float_readers()
    if isinstance(val, torch.SymFloat):
        found = ctx.pointwise((), f64, lambda ops, i: to_scalar_node(ops, val, floats))
    else:
        found = ctx.pointwise((), b1, lambda ops, i: ops.cast(ops.index(value), b1))
    return Number(found.buf, (), (), 0)


def _in_root(r: _Results, x: View, node: torch.fx.Node) -> TensorArg | None:
    """A result in the memory of the value at the root of the views that lead to it, which it is
    a view of in eager: rules may compute a view anew, or see memory that is laid out in another
    way. None where there is no such root, or its memory is not known to be as eager's."""
    root = r.root(node)
    if root is node:
        return None
    val, view, like = node.meta["val"], r.ctx.env[root], root.meta["val"]
    if not isinstance(view, View) or not r.ctx.cfg.kernels:
        return None
    if root.op == "placeholder" and begins_anywhere(node):
        return None
    if (like.is_conj(), like.is_neg()) != (val.is_conj(), val.is_neg()):
        return None
    strides = to_sizes(like.stride())
    if root.op != "call_function" and view.buf == x.buf:
        return None
    if root.op != "placeholder" and _repeats(to_sizes(like.shape), strides):
        return None
    memory = tensor_arg(r.ctx, view, strides)
    within = memory.offset * view.dtype.nbytes
    first = within + bytes_behind(like, val.storage_offset(), val)
    dtype = from_torch(val.dtype)
    shape, strides = to_sizes(val.shape), to_sizes(val.stride())
    found = TensorArg(memory.buf, shape, strides, first // dtype.nbytes)
    if dtype == r.ctx.buffers[memory.buf].dtype:
        return found
    return _aliased(r, found, dtype, first)


def _aliased(r: _Results, like: TensorArg, dtype: DType, first: Size) -> TensorArg:
    """Memory of like's buffer, from its byte `first` on, as a new tensor of this element type and
    with like's sizes and strides."""
    shape, strides = like.shape, like.strides
    view = seen_as(r.ctx, r.ctx.whole(like.buf), dtype, shape, strides, first)
    return TensorArg(view.buf, shape, strides, 0)


def _distinct(r: _Results, node: torch.fx.Node, out: TensorArg) -> TensorArg:
    """out as a tensor of its own where another node's result, or an input, is the same memory
    seen alike: eager makes a new object for every view."""
    b = r.ctx.buffers[out.buf]
    is_input = node.op != "placeholder" and b.name in r.inputs.storages
    is_input = is_input and out == TensorArg(b.name, b.shape, b.strides, 0)
    if not is_input and out not in r.given:
        return out
    dtype = out.dtype or b.dtype
    return _aliased(r, out, dtype, out.offset * dtype.nbytes)


def _knows(ctx: Lowering, layout: tuple[Any, ...]) -> bool:
    """Whether every symbol of a shape, strides and offset has a source in this graph."""
    exprs = [to_size(n) for part in layout[:2] for n in part] + [to_size(layout[2])]
    return all(
        a.name in ctx.symbols for e in exprs if isinstance(e, Expr) for a in expr.free_symbols(e)
    )


def _is_strided(node: Any) -> bool:
    """Whether an output is a tensor with strides."""
    val = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return isinstance(val, torch.Tensor) and val.layout == torch.strided


def _root(node: torch.fx.Node) -> torch.fx.Node:
    """The value that a result is a view of: as far up as views share one storage."""
    root = node
    while (
        node.op == "call_function"
        and is_view(node)
        and isinstance(source := node.args[0], torch.fx.Node)
    ):
        if _is_strided(source):
            if compat.tracing.storage_of(root.meta["val"]) not in map(
                compat.tracing.storage_of, memory_of(source)
            ):
                break
            root = source
        node = source
    return root


def _repeats(shape: tuple[Size, ...], strides: tuple[Size, ...]) -> bool:
    """Whether elements of a tensor are known to share memory."""
    return any(stride == 0 and size != 1 for size, stride in zip(shape, strides, strict=True))
