"""Operands and results of calls: values of rules become operands, fake results become buffers with
exactly their strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx

from plait.errors import Unsupported
from plait.ir.calls import ExternArg, ListArg, Scalar, TensorArg
from plait.ir.dtypes import LOOP_DTYPES, opaque
from plait.ir.expr import Expr, Size
from plait.lower.bindings import bindings
from plait.lower.core import Lowering, View
from plait.lower.dtypes import FROM_TORCH, device_name, from_torch
from plait.lower.memory import strided, tensor_arg
from plait.lower.symbols import to_size, to_sizes

NO = Scalar("none")


def object_input(k: int) -> Scalar:
    """Input number k of the program, which is neither tensor nor number, as a value and an operand:
    it is handed on."""
    return Scalar("object", str(k))


def is_object_input(value: object) -> bool:
    """Whether value came from `object_input`."""
    return isinstance(value, Scalar) and value.kind == "object"


def _named(value: torch.layout | torch.memory_format) -> Scalar:
    return Scalar(type(value).__name__, str(value).removeprefix("torch."))


# How instructions carry what is no tensor, by its type.
_SPELLED: dict[type, Callable[[Any], Scalar | Size]] = {
    type(None): lambda _: NO,
    bool: lambda v: Scalar("bool", str(v)),  # before int, whose subclass it is
    int: lambda v: v,
    Expr: lambda v: v,
    float: lambda v: Scalar("float", v.hex()),
    complex: lambda v: Scalar("complex", f"{v.real.hex()} {v.imag.hex()}"),
    str: lambda v: Scalar("str", v),
    torch.dtype: lambda v: Scalar("dtype", FROM_TORCH[v].name),
    torch.device: lambda v: Scalar("device", str(v)),
    torch.layout: _named,
    torch.memory_format: _named,
}


def is_plain(values: Any) -> bool:
    """Whether instructions can carry every value in nested lists, tuples and dicts (a generator or
    an exotic dtype they cannot)."""
    if isinstance(values, Mapping):
        return all(map(is_plain, values.values()))
    if isinstance(values, (list, tuple)):
        return all(map(is_plain, values))
    if isinstance(values, torch.dtype):
        return values in FROM_TORCH
    return isinstance(values, (View, *_SPELLED))


def operand(
    ctx: Lowering,
    value: Any,
    fake: Any = None,
    *,
    is_float: bool = False,
    in_place: bool = False,
    shared: bool = False,
) -> ExternArg:
    """A rule's value as an operand. fake: the FX argument whose fake strides it must have (None:
    any strides will do). shared: a copy of it may be one that others read too.

    Raises Unsupported for a value that no instruction can carry, such as a generator."""
    if isinstance(value, View):
        return _tensor_operand(
            ctx, value, None if in_place else fake_strides(fake), in_place, shared
        )
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        fakes = (
            fake
            if isinstance(fake, (list, tuple)) and len(fake) == len(value)
            else [None] * len(value)
        )
        items = zip(value, fakes, strict=True)
        return ListArg(
            tuple(
                operand(ctx, v, f, is_float=is_float, in_place=in_place, shared=shared)
                for v, f in items
            )
        )
    if isinstance(value, torch.Size):
        return ListArg(tuple(int(v) for v in value))
    return scalar_operand(value, is_float)


def scalar_operand(value: Any, is_float: bool = False) -> Scalar | Size:
    """A value that is no tensor as an operand. is_float: a float is wanted.

    Raises Unsupported for one that no instruction can carry."""
    if isinstance(value, Scalar):
        return value
    if is_float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    for kind, spell in _SPELLED.items():
        if isinstance(value, kind) and is_plain(value):
            return spell(value)
    raise Unsupported(
        f"an operand of type {type(value).__name__} cannot be part of a compiled program"
    )


def fake_strides(fake: Any) -> tuple[Size, ...] | None:
    """The strides of a node's tensor, as traced; None for what has none."""
    val = fake.meta.get("val") if isinstance(fake, torch.fx.Node) else None
    if not isinstance(val, torch.Tensor) or val.layout != torch.strided:
        return None
    return to_sizes(val.stride())


def _tensor_operand(
    ctx: Lowering, x: View, strides: tuple[Size, ...] | None, in_place: bool, shared: bool
) -> ExternArg:
    if x.dtype == opaque or ctx.buffers[x.buf].dtype == opaque:
        return TensorArg(x.buf, x.shape, ctx.buffers[x.buf].strides, 0)
    if in_place or x.dtype not in LOOP_DTYPES:
        found = strided(ctx, x)
        if found is None:
            raise Unsupported(
                f"an operator needs the memory of a view of {x.buf} that no strides describe"
            )
        return found
    return tensor_arg(ctx, x, strides, shared)


# ------------------------------------------------------------------------------------------ results
def results(
    ctx: Lowering, val: Any, used: frozenset[int] | None = None
) -> tuple[tuple[str | None, ...], tuple[tuple[int, str], ...], Any]:
    """Buffers and symbols for the results of a call with fake value `val`: (Extern.outs,
    Extern.symbols, what a rule returns).

    Results are numbered as `runtime.generated.flat` has them."""
    outs: list[str | None] = []
    symbols: list[tuple[int, str]] = []

    made = () if ctx.current is None else bindings(ctx.current)

    def one(v: Any, wanted: bool, path: tuple[tuple[str, int], ...] = ()) -> Any:
        if isinstance(v, torch.Tensor):
            out = _result_buffer(ctx, v) if wanted else None
            outs.append(None if out is None else out.buf)
            return out
        if isinstance(v, (tuple, list)):
            return tuple(one(x, wanted, (*path, ("item", k))) for k, x in enumerate(v))
        if isinstance(v, Mapping):
            return {name: one(v[name], wanted) for name in sorted(v)}
        outs.append(None)
        if isinstance(v, (int, torch.SymInt)) and not isinstance(v, bool):
            for b in made:
                atom = b.found.symbol
                if atom is not None and b.path == path:
                    symbols.append((len(outs) - 1, atom.name))
                    ctx.symbols[atom.name] = None
            return to_size(v)
        if v is None:
            return None
        raise Unsupported(
            f"an operator returns a Python {type(v).__name__}, which a compiled program cannot hold"
        )

    if isinstance(val, (tuple, list)):
        result: Any = tuple(
            one(v, used is None or k in used, (("item", k),)) for k, v in enumerate(val)
        )
    elif val is None:
        result = None
    else:
        result = one(val, True)
    return tuple(outs), tuple(symbols), result


def _result_buffer(ctx: Lowering, val: torch.Tensor) -> View:
    """A buffer with exactly the strides of a fake result."""
    dtype, where = from_torch(val.dtype), device_name(val.device)
    if val.layout != torch.strided:
        return ctx.whole(ctx.new_buffer(opaque, to_sizes(val.shape), None, True, where))
    shape = to_sizes(val.shape)
    strides = to_sizes(val.stride())
    return ctx.whole(ctx.new_buffer(dtype, shape, strides, True, where))
