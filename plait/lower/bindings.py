"""Numbers that graph nodes make when they run (unbacked symbols), as tracing describes them.

Comes in: FX nodes and a ShapeEnv. Goes out: where in a node's result each number is found
(`bindings`), and what tracing takes for granted of such numbers (`deferred_asserts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch.fx
from torch.fx.experimental.symbolic_shapes import CallMethodKey, DivideByKey
from torch.utils._pytree import SequenceKey
from torch.utils._sympy.symbol import SymT, symbol_is_type

from plait.graph.edit import shape_env_of
from plait.ir import expr
from plait.ir.expr import INF, Expr, Size
from plait.lower.symbols import to_size


@dataclass(frozen=True)
class Binding:
    """A number that a graph node makes when it runs.

    names: what tracing calls it.
    path: where in the node's result it is found: steps ('item', k), ('size', dim),
        ('stride', dim), ('offset', 0), ('divided', by), or none for a result that is the number
        itself.
    found: a symbol for what is found there, which may be any number.
    traced: what tracing takes it for: a symbol with a range, a constant or another expression.
    """

    names: tuple[str, ...]
    path: tuple[tuple[str, int], ...]
    found: Expr
    traced: Size


def bindings(node: torch.fx.Node) -> tuple[Binding, ...]:
    """The numbers that a graph node makes when it runs."""
    given = node.meta.get("unbacked_bindings")
    if not given:
        return ()
    env = shape_env_of(node.meta["val"])
    return tuple(_binding(raw, _steps(path), env) for raw, path in given.items())


def _binding(raw: sympy.Symbol, path: tuple[tuple[str, int], ...], env: Any) -> Binding:
    known = env.unbacked_renamings.get(raw, raw)  # made again when the graph was traced again
    if not raw.is_integer:
        found = expr.symbol(known.name)
        return Binding((known.name,), path, found, found)
    traced = to_size(env.replace(known), env)
    atom = traced.symbol if isinstance(traced, Expr) else None
    name = known.name if atom is not None and atom.name == known.name else f"{raw.name}_found"
    return Binding((raw.name, known.name), path, expr.symbol(name, lo=-INF), traced)


def _steps(path: Any) -> tuple[tuple[str, int], ...]:
    out: list[tuple[str, int]] = []
    method = ""
    for key in path:
        if isinstance(key, CallMethodKey):
            method = key.name
            if method == "storage_offset":
                out.append(("offset", 0))
        elif isinstance(key, SequenceKey):
            out.append((method or "item", key.idx))
            method = ""
        elif isinstance(key, DivideByKey):
            out.append(("divided", int(key.divisor)))
    return tuple(out)


def deferred_asserts(env: Any) -> list[sympy.Basic]:
    """The conditions that tracing takes for granted of numbers found at run time."""
    return [a.expr for found in env.deferred_runtime_asserts.values() for a in found]


def is_found(symbol: sympy.Basic) -> bool:
    """Whether a symbol stands for an integer that is found at run time."""
    return isinstance(symbol, sympy.Symbol) and symbol_is_type(symbol, SymT.UNBACKED_INT)


def is_found_float(symbol: sympy.Basic) -> bool:
    """Whether a symbol stands for a float that is found at run time."""
    return isinstance(symbol, sympy.Symbol) and symbol_is_type(symbol, SymT.UNBACKED_FLOAT)
