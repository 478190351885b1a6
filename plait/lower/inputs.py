"""Inputs and constants of a graph become buffers and symbols; each symbol gets a source.

Comes in: placeholders and attributes of an FX graph. Goes out: their values, in `Lowering.symbols`
a source for each symbol that some input tells, and what symbols were in the example.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from plait import compat
from plait.devices import facts_of
from plait.errors import Unsupported
from plait.ir import expr
from plait.ir.dtypes import LOOP_DTYPES, opaque
from plait.ir.expr import Atom, Expr, Size
from plait.ir.loops import Buffer
from plait.lower.core import Lowering, Value, View
from plait.lower.dtypes import device_name, from_torch
from plait.lower.operands import object_input
from plait.lower.symbols import is_ragged, is_symbolic, to_size, to_sizes

Source = tuple[str, str, int] | str
"""Where a number stands: (buffer, 'size', 'stride' or 'offset', dimension), or an input that is an
integer."""


@dataclass
class Inputs:
    """The inputs and constants of a graph so far.

    names: of each input, its buffer, ('sym', its symbol), or None where the program does not read
        it.
    storages: the fake storage that an input's buffer is.
    facts: expressions whose values inputs tell, and where.
    constants: the value of each attribute that is a tensor.
    expands: whether inputs may be expanded tensors. Those of a subprogram may not: what it is
        given in another round is not expanded, and nothing can be copied into such memory.
    """

    names: list[str | tuple[str, str] | None] = field(default_factory=list)
    storages: dict[str, int] = field(default_factory=dict)
    facts: list[tuple[Size, Source]] = field(default_factory=list)
    constants: dict[str, View] = field(default_factory=dict)
    expands: bool = True


def add_input(ctx: Lowering, inputs: Inputs, node: torch.fx.Node) -> Value:
    """Declares a graph input; gives what stands for it. Raises Unsupported for one that is
    symbolic and no size."""
    val = node.meta.get("val")
    if _is_token(node):
        inputs.names.append(None)
        return None
    if isinstance(val, torch.Tensor):
        return _add_tensor(ctx, inputs, val)
    if isinstance(val, torch.SymInt) and not is_ragged(val):
        return _add_int(ctx, inputs, to_size(val))
    if isinstance(val, torch.SymBool):
        bit = _bit(to_size(val))
        bit = expr.symbol(f"t{len(inputs.names)}", 0, 1) if bit is None else bit
        return _add_int(ctx, inputs, bit)
    if is_symbolic(val) and not is_ragged(val):
        raise Unsupported(
            f"a graph input that is a {type(val).__name__}", hint="pass it as a tensor"
        )
    inputs.names.append(None)
    if val is None and not node.users or isinstance(val, (bool, int, float, str, torch.SymInt)):
        return val
    return object_input(len(inputs.names) - 1)


def _add_tensor(ctx: Lowering, inputs: Inputs, val: torch.Tensor) -> View:
    name = f"arg{len(inputs.names)}"
    shape = to_sizes(val.shape)
    dense = val.layout == torch.strided
    strides = to_sizes(val.stride()) if dense else ()
    if not dense or not inputs.expands and 0 in strides:
        strides = expr.contiguous_strides(shape)
    dtype = from_torch(val.dtype) if dense else opaque
    ctx.buffers[name] = Buffer(
        name, dtype, shape, strides, device=device_name(val.device), fixed=True
    )
    ctx.input_buffers.add(name)
    inputs.names.append(name)
    if dense:
        inputs.storages[name] = compat.tracing.storage_of(val)
    offset = (to_size(val.storage_offset()),) if dense else ()
    if {*map(type, (*shape, *strides, *offset))} != {int}:
        for what, exprs in (("size", shape), ("stride", strides), ("offset", offset)):
            told = [(e, (name, what, d)) for d, e in enumerate(exprs) if isinstance(e, Expr)]
            inputs.facts += told
    return ctx.whole(name)


def _add_int(ctx: Lowering, inputs: Inputs, size: Size) -> Size:
    if isinstance(size, int):
        inputs.names.append(None)
        return size
    atom = size.symbol
    if atom is not None and atom.name not in ctx.symbols:
        inputs.names.append(("sym", atom.name))
        ctx.symbols[atom.name] = None
    else:
        name = f"t{len(inputs.names)}"
        inputs.names.append(("sym", name))
        ctx.symbols[name] = None
        inputs.facts.append((size, name))
    return size


def _bit(condition: Size) -> Expr | None:
    """The symbol of a bool that is found, 0 or 1: tracing has it as a condition, that the symbol is
    1."""
    for a in expr.free_symbols(condition):
        if (a.lo, a.hi) == (0, 1) and [expr.substitute(condition, {a: k}) for k in (0, 1)] == [
            0,
            1,
        ]:
            return expr.symbol(a.name, 0, 1)
    return None


def _is_token(node: torch.fx.Node) -> bool:
    """Whether a placeholder only orders effects: AOTAutograd passes None for it."""
    effects = torch.ops.higher_order.with_effects
    first = next(iter(node.users), None)
    if first is None or first.target is not effects:
        return False
    return all(u.target is effects and u.args[0] is node for u in node.users)


def define_symbols(ctx: Lowering, inputs: Inputs) -> None:
    """Finds a source for every symbol of the inputs: first those that are a size by themselves,
    then those that an expression with one unknown determines, in sweeps, since each may make
    another one known."""
    symbols = ctx.symbols
    for e, source in inputs.facts:
        atom = e.symbol if isinstance(e, Expr) else None
        if atom is not None and atom.name not in symbols:
            symbols[atom.name] = _value_of(source)
    progress = True
    while progress:
        progress = False
        for e, source in inputs.facts:
            unknown = [a for a in expr.free_symbols(e) if a.name not in symbols]
            if len(unknown) == 1:
                progress |= _solve(ctx, e, source, unknown[0])


def _value_of(source: tuple[str, str, int] | str) -> tuple[str, str, int] | Size:
    return expr.symbol(source) if isinstance(source, str) else source


def _solve(ctx: Lowering, e: Size, source: tuple[str, str, int] | str, unknown: Atom) -> bool:
    k = expr.coefficient(e, unknown)
    if k is None or expr.bounds(k)[0] <= 0:
        return False
    if isinstance(source, str):
        given: Size = expr.symbol(source)
    else:
        name = f"t{source[0]}_{source[1]}{source[2]}"
        ctx.symbols[name] = source
        given = expr.symbol(name)
    known = expr.substitute(e, {unknown: 0})
    ctx.symbols[unknown.name] = (given - known) // k
    return True


def example_sizes(
    ctx: Lowering, inputs: Inputs, shape_env: object, wide: Mapping[str, Expr]
) -> dict[str, int]:
    """What symbols are in the example, as far as that is known. wide: those that were taken out
    of loops."""
    known = {} if shape_env is None else compat.tracing.size_hints(shape_env)
    hints = {name: known[name] for name in ctx.symbols if name in known}
    given = [(e, source) for e, source in inputs.facts if isinstance(source, str)]
    functions = {name: e for name, (_, e) in ctx.functions.items()}
    for e, name in (*given, *((e, name) for name, e in (*functions.items(), *wide.items()))):
        if name in ctx.symbols and all(a.name in hints for a in expr.free_symbols(e)):
            with suppress(ArithmeticError, ValueError):  # a function that has no value there
                hints[name] = expr.evaluate(e, hints)
    return hints


# ---------------------------------------------------------------------------------------- constants
def add_constant(
    ctx: Lowering, inputs: Inputs, module: torch.nn.Module, node: torch.fx.Node
) -> Value:
    """Declares what an attribute of the graph holds; gives what stands for it."""
    assert isinstance(node.target, str), node.target
    if node.target in inputs.constants:
        return inputs.constants[node.target]
    value: Any = module
    for part in node.target.split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor):
        return value
    fake = node.meta.get("val")  # its device counts: this machine may lack it
    device = fake.device if isinstance(fake, torch.Tensor) else value.device
    view = _add_tensor_constant(ctx, value, device)
    inputs.constants[node.target] = view
    return view


def _add_tensor_constant(ctx: Lowering, value: torch.Tensor, device: torch.device) -> View:
    name = f"const{len(ctx.constants)}"
    dense = value.layout == torch.strided
    shape = tuple(int(s) for s in value.shape)
    strides = tuple(int(s) for s in value.stride()) if dense else expr.contiguous_strides(shape)
    dtype = from_torch(value.dtype) if dense else opaque
    if (
        not shape
        and ctx.cfg.kernels
        and dtype in LOOP_DTYPES
        and type(value) is torch.Tensor
        and facts_of(device).is_host
    ):
        with torch.utils._python_dispatch._disable_current_modes():  # value is no fake tensor
            number = value.item()  # a literal: fused like any number
        return ctx.pointwise((), dtype, lambda ops, i: ops.const(number, dtype))
    ctx.buffers[name] = Buffer(name, dtype, shape, strides, device=device_name(device), fixed=True)
    ctx.constants[name] = len(ctx.tables.constants)
    ctx.tables.constants.append(value.detach() if isinstance(value, torch.nn.Parameter) else value)
    return ctx.whole(name)
