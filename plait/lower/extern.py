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

from plait.errors import Unsupported
from plait.ir.dtypes import LOOP_DTYPES, DType, opaque
from plait.ir.loops import Extern, ExternArg, ListArg, Scalar, TensorArg
from plait.ir.sizes import Expr, Size
from plait.lower.core import Lowering, View
from plait.lower.dtypes import FROM_TORCH, from_torch
from plait.lower.symbols import to_size

NO = Scalar("none")

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


# ATen ops that count from the start of an argument's storage, which in an arena is not the tensor's own.
_READS_STORAGE = frozenset(("aten::as_strided_scatter", "aten::as_strided_copy"))


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What an operator may do, read off its schema and tags.

    effectful: it must run even if unused. aliases: argument names that a result may share memory
    with. mutates: argument names that it writes. may_keep: it may hold on to (or hand back) an
    argument. exact: arguments must have eager's strides. out_op, out_names: an overload that
    computes straight into given memory, or ''."""

    effectful: bool
    aliases: tuple[str, ...]
    mutates: tuple[str, ...]
    may_keep: bool
    exact: bool
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
    shared = tuple(a.name for a in schema.arguments if a.alias_info is not None)
    random = torch.Tag.nondeterministic_seeded in op.tags
    aten = schema.name.startswith(("aten::", "prims::"))
    out_op, out_names = ("", ()) if random or written else _out_variant(op)
    return OpFacts(
        effectful=random or schema.is_mutable or not schema.returns or op in _side_effects(),
        aliases=tuple(n for n in shared if n not in written) if _returns_alias(op) else (),
        mutates=written,
        may_keep=not aten
        or bool(shared)
        or schema.name in _RETURNS_ARGUMENT
        or schema.name in _READS_STORAGE,
        exact=_wants_exact_strides(op, aten),
        out_op=out_op,
        out_names=out_names,
    )


def _side_effects() -> set[Any]:
    return torch.fx.node._side_effectful_functions


def _returns_alias(op: OpOverload) -> bool:
    return (
        any(r.alias_info is not None for r in op._schema.returns)
        or op._schema.name in _RETURNS_ARGUMENT
    )


def _wants_exact_strides(op: OpOverload, aten: bool) -> bool:
    if torch.Tag.flexible_layout in op.tags:
        return False
    return (
        not aten
        or torch.Tag.needs_exact_strides in op.tags
        or torch.Tag.needs_fixed_stride_order in op.tags
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


# ---------------------------------------------------------------------------------------------- the
# call
def call_extern(
    ctx: Lowering,
    node: torch.fx.Node,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    fallback: bool,
    reason: str = "",
    exact: bool | None = None,
    flops: Size = 0,
) -> Any:
    """Records the call of node's own op on these arguments and returns its results as a rule would.

    fallback: no rule exists or it declined, for `reason`: counted. exact: whether operands must
    have the strides of the fake tensors (default: for fallbacks and for ops that ask for it).
    flops: its cost. Raises Unsupported for results that no program can hold (Python floats and bools).
    """
    op = node.target
    assert isinstance(op, OpOverload), f"{op} is no operator"
    if fallback:
        ctx.fallback_reasons.setdefault(op_name(op), reason or "no lowering rule")
    want = (fallback or op_facts(op).exact) if exact is None else exact
    given = node.args, node.kwargs
    return call_op(
        ctx,
        op,
        args,
        kwargs,
        node.meta["val"],
        fallback=fallback,
        given=given if want else None,
        flops=flops,
        used=_used(node),
    )


def call_op(
    ctx: Lowering,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    val: Any,
    *,
    fallback: bool,
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
            ctx, value, fake, is_float=_is_float(formal.type), in_place=formal.name in facts.mutates
        )
    positional, named = _split_operands(op, operands)
    outs, symbols, result = results(ctx, val, used)
    direct = facts.out_op and all(o is not None for o in outs) and not symbols
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
            fallback=fallback,
            out_op=facts.out_op if direct else "",
            out_names=facts.out_names if direct else (),
            flops=flops,
            origin=ctx.origin,
        )
    )
    return result


def _used(node: torch.fx.Node) -> frozenset[int] | None:
    """Which results of a node with several are read, or None where that cannot be told."""
    val = node.meta["val"]
    if not isinstance(val, (tuple, list)):
        return None
    picked = set()
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


# ----------------------------------------------------------------------------------------------
# operands
def operand(
    ctx: Lowering, value: Any, fake: Any = None, *, is_float: bool = False, in_place: bool = False
) -> ExternArg:
    """A rule's value as an operand. fake: the FX argument whose fake strides it must have (None:
    any strides will do).

    Raises Unsupported for a value that no instruction can carry, such as a generator."""
    if isinstance(value, View):
        return _tensor_operand(ctx, value, None if in_place else _fake_strides(fake), in_place)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        fakes = (
            fake
            if isinstance(fake, (list, tuple)) and len(fake) == len(value)
            else [None] * len(value)
        )
        items = zip(value, fakes, strict=True)
        return ListArg(
            tuple(operand(ctx, v, f, is_float=is_float, in_place=in_place) for v, f in items)
        )
    if isinstance(value, torch.Size):
        return ListArg(tuple(int(v) for v in value))
    return _scalar_operand(value, is_float)


def _scalar_operand(value: Any, is_float: bool) -> ExternArg:
    if value is None:
        return NO
    if isinstance(value, bool):
        return Scalar("bool", str(value))
    if isinstance(value, int):
        return Scalar("float", float(value).hex()) if is_float else value
    if isinstance(value, Expr):
        return value
    if isinstance(value, float):
        return Scalar("float", value.hex())
    if isinstance(value, complex):
        return Scalar("complex", f"{value.real.hex()} {value.imag.hex()}")
    if isinstance(value, str):
        return Scalar("str", value)
    if isinstance(value, torch.dtype):
        return Scalar("dtype", _dtype_text(value))
    if isinstance(value, torch.device):
        return Scalar("device", str(value))
    if isinstance(value, torch.layout):
        return Scalar("layout", str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return Scalar("memory_format", str(value).removeprefix("torch."))
    raise Unsupported(
        f"an operand of type {type(value).__name__} cannot be part of a compiled program"
    )


def _dtype_text(dtype: torch.dtype) -> str:
    """The IR's name of a dtype; torch's own for those that the IR does not know."""
    return FROM_TORCH[dtype].name if dtype in FROM_TORCH else str(dtype).removeprefix("torch.")


def _fake_strides(fake: Any) -> tuple[Size, ...] | None:
    val = fake.meta.get("val") if isinstance(fake, torch.fx.Node) else None
    if not isinstance(val, torch.Tensor) or val.layout != torch.strided:
        return None
    return tuple(to_size(s) for s in val.stride())


def _tensor_operand(
    ctx: Lowering, x: View, strides: tuple[Size, ...] | None, in_place: bool
) -> ExternArg:
    if x.dtype == opaque or ctx.buffers[x.buf].dtype == opaque:
        return TensorArg(x.buf, x.shape, ctx.buffers[x.buf].strides, 0)
    if in_place or x.dtype not in LOOP_DTYPES:
        found = ctx.strided(x)
        if found is None:
            raise Unsupported(
                f"an operator needs the memory of a view of {x.buf} that no strides describe"
            )
        return found
    return ctx.tensor_arg(x, strides)


# ----------------------------------------------------------------------------------------------
# results
def results(
    ctx: Lowering, val: Any, used: frozenset[int] | None = None
) -> tuple[tuple[str | None, ...], tuple[tuple[int, str], ...], Any]:
    """Buffers and symbols for the results of a call with fake value `val`: (Extern.outs,
    Extern.symbols, what a rule returns).

    Results are numbered from left to right with lists laid open."""
    outs: list[str | None] = []
    symbols: list[tuple[int, str]] = []

    def one(v: Any, wanted: bool) -> Any:
        if isinstance(v, (tuple, list)):
            return tuple(one(x, wanted) for x in v)
        if isinstance(v, torch.Tensor):
            out = _result_buffer(ctx, v) if wanted else None
            outs.append(None if out is None else out.buf)
            return out
        outs.append(None)
        if isinstance(v, (int, torch.SymInt)) and not isinstance(v, bool):
            size = to_size(v)
            if (
                isinstance(size, Expr)
                and size.symbol is not None
                and size.symbol.name not in ctx.symbols
            ):
                symbols.append((len(outs) - 1, size.symbol.name))
                ctx.symbols[size.symbol.name] = None
            return size
        if v is None:
            return None
        raise Unsupported(
            f"an operator returns a Python {type(v).__name__}, which a compiled program cannot hold"
        )

    if isinstance(val, (tuple, list)):
        result: Any = tuple(one(v, used is None or k in used) for k, v in enumerate(val))
    elif val is None:
        result = None
    else:
        result = one(val, True)
    return tuple(outs), tuple(symbols), result


def _result_buffer(ctx: Lowering, val: torch.Tensor) -> View:
    """A buffer with exactly the strides of a fake result; symbols that first appear in its sizes
    are read from it."""
    dtype: DType = from_torch(val.dtype)
    if val.layout != torch.strided:
        return ctx.whole(ctx.new_buffer(opaque, tuple(to_size(s) for s in val.shape), fixed=True))
    shape = tuple(to_size(s) for s in val.shape)
    strides = tuple(to_size(s) for s in val.stride())
    buf = ctx.new_buffer(dtype, shape, strides, fixed=True)
    _bind_symbols(ctx, buf, shape)
    return ctx.whole(buf)


def _bind_symbols(ctx: Lowering, buf: str, shape: tuple[Size, ...]) -> None:
    """Defines the symbols that the op made: the size of a result in some dimension."""
    for d, s in enumerate(shape):
        atom = s.symbol if isinstance(s, Expr) else None
        if atom is not None and atom.name not in ctx.symbols:
            ctx.symbols[atom.name] = (buf, "size", d)
