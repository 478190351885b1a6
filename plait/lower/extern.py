"""Calls of ATen and custom operators that no loop stands for.

Comes in: an OpOverload with Views, Sizes and constants as arguments. Goes out: one `Extern` in the
program and the Views of its results, whose buffers have exactly the strides that the fake tensors
promise. What the op may do to memory (alias, keep, mutate, write into given memory) is read off its
schema and tags here and nowhere else.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload

from plait.graph.edit import has_effect
from plait.ir.calls import Extern, ExternArg, ListArg, TensorArg
from plait.ir.expr import Expr, Size
from plait.lower.bindings import bindings
from plait.lower.core import Lowering, View
from plait.lower.operands import is_plain, operand, results
from plait.lower.pycall import call_python

# ATen ops that may hand back an argument (or its memory) although their schema does not say so.
_RETURNS_ARGUMENT = frozenset(
    f"aten::{name}"
    for name in (
        "_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "conj_physical",
        "native_dropout", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout",
        "lift", "sum_to_size", "type_as", "atleast_1d", "atleast_2d", "atleast_3d",
        "broadcast_tensors", "meshgrid",
    )
)  # fmt: skip


# ATen ops that count from the start of an argument's storage, or copy all of it to make a result
# that begins where the argument does: in an arena that is not the tensor's own.
_READS_STORAGE = frozenset((
    "aten::as_strided_scatter", "aten::as_strided_copy", "aten::slice_scatter",
    "aten::select_scatter", "aten::diagonal_scatter",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What an operator may do, read off its schema and tags.

    effectful: it must run even if unused.
    aliases: names of arguments that a result may share memory with.
    mutates: names of arguments that it writes.
    may_keep: it may hold on to an argument, or return it.
    out_op, out_names: an overload that computes straight into given memory, or "".
    """

    effectful: bool
    aliases: tuple[str, ...]
    mutates: tuple[str, ...]
    may_keep: bool
    out_op: str
    out_names: tuple[str, ...]


def op_name(op: OpOverload) -> str:
    """'namespace::name.overload', without the dot for the unnamed overload."""
    schema = op._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


@lru_cache(maxsize=1024)
def op_facts(op: OpOverload) -> OpFacts:
    """The facts of an operator; they do not depend on its arguments."""
    schema = op._schema
    written = tuple(
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    )
    silent = schema.name in _RETURNS_ARGUMENT
    shared = tuple(
        a.name
        for a in schema.arguments
        if a.alias_info is not None or (silent and "Tensor" in str(a.type))
    )
    random = torch.Tag.nondeterministic_seeded in op.tags
    aten = schema.name.startswith(("aten::", "prims::"))
    out_op, out_names = ("", ()) if random or written else _out_variant(op)
    return OpFacts(
        effectful=random or schema.is_mutable or not schema.returns or has_effect(op),
        aliases=tuple(n for n in shared if n not in written) if _returns_alias(op) else (),
        mutates=written,
        may_keep=not aten or bool(shared) or schema.name in _READS_STORAGE,
        out_op=out_op,
        out_names=out_names,
    )


def _returns_alias(op: OpOverload) -> bool:
    return (
        any(r.alias_info is not None for r in op._schema.returns)
        or op._schema.name in _RETURNS_ARGUMENT
    )


def _out_variant(op: OpOverload) -> tuple[str, tuple[str, ...]]:
    """The out= overload with the same other arguments, unless it is a generated one (which computes
    elsewhere and copies)."""
    schema = op._schema
    if not schema.name.startswith("aten::") or torch.Tag.dynamic_output_shape in op.tags:
        return "", ()
    if any(str(r.type) != "Tensor" for r in schema.returns) or _returns_alias(op):
        return "", ()
    want = [(a.name, str(a.type)) for a in schema.arguments]
    for overload in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, overload)
        outs = tuple(a.name for a in other._schema.arguments if a.is_out)
        if len(outs) != len(schema.returns) or not outs or torch.Tag.generated in other.tags:
            continue
        if [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out] == want:
            return op_name(other), outs
    return "", ()


# ----------------------------------------------------------------------------------------- the call
def call_extern(
    ctx: Lowering,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reason: str = "",
    *,
    any_strides: bool = False,
    flops: Size = 0,
) -> Any:
    """Records the call of the current node's own op on these arguments and returns its results as
    a rule would.

    reason: why no loops stand for it, which is counted; "" where a rule chose the call.
    any_strides: operands need not have eager's strides. Products read operands of any strides.
    Others do not: the median of elements that share memory is wrong in torch 2.13.
    flops: its cost.

    Raises Unsupported for results that no program can hold (Python floats and bools).
    """
    node, op = ctx.node, ctx.node.target
    assert isinstance(op, OpOverload), f"{op} is no operator"
    plain = is_plain((args, kwargs)) and not _is_number_for_tensor(op, args)
    fallback = bool(reason)
    if fallback:
        ctx.fell_back("aten" if plain else "python", op_name(op), reason)
    if not plain:
        effectful = op_facts(op).effectful
        return call_python(ctx, op, op_name(op), args, kwargs, reason=reason, effectful=effectful)
    given = None if any_strides else (node.args, node.kwargs)
    val, used = node.meta.get("val"), _used(node)
    return call_op(
        ctx, op, args, kwargs, val, fallback=fallback, given=given, flops=flops, used=used
    )


def call_op(
    ctx: Lowering,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    val: Any,
    *,
    fallback: bool = False,
    given: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    flops: Size = 0,
    used: frozenset[int] | None = None,
    effectful: bool = False,
) -> Any:
    """Records a call of any op whose result has the fake value `val`.

    given: the FX arguments, whose fake strides the operands must have. used: positions of results
    that somebody reads (None: all).
    effectful: it must run, in program order, whatever its schema says."""
    facts = op_facts(op)
    fake_args, fake_kwargs = given if given is not None else ((), {})
    operands: dict[str, ExternArg] = {}
    for k, formal in enumerate(op._schema.arguments):
        if k < len(args):
            value, fake = args[k], fake_args[k] if k < len(fake_args) else None
        elif formal.name in kwargs:
            value, fake = kwargs[formal.name], fake_kwargs.get(formal.name)
        else:
            continue
        if formal.has_default_value() and _is_default(value, formal.default_value):
            continue
        operands[formal.name] = operand(
            ctx,
            value,
            fake,
            is_float=_is_float(formal.type),
            in_place=formal.name in facts.mutates,
            shared=not facts.may_keep,
        )
    positional, named = _split_operands(op, operands)
    outs, symbols, result = results(ctx, val, used)
    as_eager = ctx.cfg.keeps_bits  # given memory, libraries may take other algorithms
    direct = facts.out_op and all(o is not None for o in outs) and not symbols and not as_eager
    ctx.ops.append(
        Extern(
            outs,
            op_name(op),
            positional,
            named,
            symbols=symbols,
            aliases=_bufs(operands, facts.aliases),
            mutates=_bufs(operands, facts.mutates),
            effectful=facts.effectful or effectful,
            may_keep=facts.may_keep,
            as_eager=as_eager,
            fallback=fallback,
            out_op=facts.out_op if direct else "",
            out_names=facts.out_names if direct else (),
            flops=flops,
            origin=ctx.origin,
        )
    )
    return result


def _is_number_for_tensor(op: OpOverload, args: Sequence[Any]) -> bool:
    """Whether a primitive gets a number for a tensor. Its kernel is Python and only a call from
    Python hands it on."""
    if op.namespace != "prims":
        return False
    pairs = zip(op._schema.arguments, args, strict=False)
    return any(str(a.type) == "Tensor" and not isinstance(v, View) for a, v in pairs)


def _used(node: torch.fx.Node) -> frozenset[int] | None:
    """Which results of a node with several are read, or None where that cannot be told."""
    val = node.meta.get("val")
    if not isinstance(val, (tuple, list)):
        return None
    picked = {k for b in bindings(node) for kind, k in b.path[:1] if kind == "item"}
    for user in node.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            return None
        if user.users:
            picked.add(user.args[1] % len(val))
    return frozenset(picked)


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(value, (View, Expr)):
        return False
    if isinstance(value, (list, tuple)):
        same = isinstance(default, (list, tuple)) and len(value) == len(default)
        return same and all(_is_default(a, b) for a, b in zip(value, default, strict=True))
    return bool(type(value) is type(default) and value == default)


def _is_float(kind: Any) -> bool:
    return str(kind) in ("float", "Optional[float]", "List[float]", "Optional[List[float]]")


def _split_operands(
    op: OpOverload, operands: Mapping[str, ExternArg]
) -> tuple[tuple[ExternArg, ...], tuple[tuple[str, ExternArg], ...]]:
    """Leading arguments by position, as far as none was left out; the rest by name."""
    positional: list[ExternArg] = []
    named: list[tuple[str, ExternArg]] = []
    leading = True
    for formal in op._schema.arguments:
        if formal.name not in operands:
            leading = False
        elif leading and not formal.kwarg_only:
            positional.append(operands[formal.name])
        else:
            named.append((formal.name, operands[formal.name]))
    return tuple(positional), tuple(named)


def _bufs(operands: Mapping[str, ExternArg], names: Sequence[str]) -> tuple[str, ...]:
    """Buffers behind the named operands, each once."""
    found: list[str] = []

    def add(x: ExternArg) -> None:
        if isinstance(x, TensorArg):
            found.append(x.buf)
        elif isinstance(x, ListArg):
            for item in x.items:
                add(item)

    for n in names:
        if n in operands:
            add(operands[n])
    return tuple(dict.fromkeys(found))
