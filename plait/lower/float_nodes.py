"""Floats and conditions that tracing computes of sizes, as nodes of loop bodies.

Comes in: SymFloats and SymPy expressions. Goes out: nodes of f64 (`to_scalar_node`) or b1
(`to_truth`). Raises Unsupported for what loop bodies cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as sf

from plait.errors import Unsupported
from plait.ir.dtypes import b1, f64
from plait.ir.expr import Size
from plait.ir.loops import Node, apply
from plait.ir.record import Recorder
from plait.lower.size_rules import OPAQUE, Word, is_whole
from plait.lower.symbols import SymScalar, inexpressible, to_size

Floats = Mapping[str, Callable[[Recorder], Node]]
"""How a body reads float symbols that are values of tensors (`x.item()`), by name."""

_FLOAT_UNARY = {**OPAQUE, sf.TruncToFloat: "trunc", sympy.Abs: "abs"}
_FLOAT_BINARY = {
    sympy.Add: "add", sympy.Mul: "mul", sf.IntTrueDiv: "truediv", sf.FloatTrueDiv: "truediv",
    sf.FloatPow: "pow", sympy.Pow: "pow", sf.Max: "max", sf.Min: "min", sympy.Max: "max",
    sympy.Min: "min",
}  # fmt: skip


def to_scalar_node(ops: Recorder, value: SymScalar, floats: Floats | None = None) -> Node:
    """value as an f64 node.

    Raises InexpressibleSize for what loop bodies cannot express."""
    if isinstance(value, (bool, int, float)):
        return ops.const(float(value), f64)
    if isinstance(value, (torch.SymInt, torch.SymBool)):
        return ops.cast(ops.index(to_size(value)), f64)
    node = value.node
    try:
        return _float_node(ops, node.expr, node.shape_env, floats or {})
    except Unsupported as error:
        raise inexpressible(error, node.expr) from None


def _float_node(ops: Recorder, e: Any, env: Any, floats: Floats) -> Node:
    if isinstance(e, sympy.Number):
        return ops.const(float(e), f64)
    if isinstance(e, sympy.Symbol) and e.name in floats:
        return ops.cast(floats[e.name](ops), f64)
    if isinstance(e, sf.ToFloat):
        return _float_node(ops, e.args[0], env, floats)
    if is_whole(e) and all(s.name not in floats for s in e.free_symbols):
        return ops.cast(ops.index(to_size(e, env)), f64)
    if not any(s.name in floats for s in e.free_symbols) and e.has(sf.RoundDecimal):
        return ops.bitcast(ops.index(to_word(e, env)), f64)
    if type(e) in _FLOAT_UNARY:
        return apply(_FLOAT_UNARY[type(e)], _float_node(ops, e.args[0], env, floats))
    if type(e) in _FLOAT_BINARY:
        args = [_float_node(ops, a, env, floats) for a in e.args]
        return reduce(lambda a, b: apply(_FLOAT_BINARY[type(e)], a, b), args)
    raise Unsupported(
        f"the float {e} ({type(e).__name__})", hint="compute it outside of the compiled function"
    )


def to_word(e: Any, env: Any) -> Size:
    """The word of a float that sizes make, as a symbol."""
    return to_size(Word(e), env)


_COMPARED = {
    sympy.Eq: "eq", sympy.Ne: "ne", sympy.StrictLessThan: "lt", sympy.LessThan: "le",
    sympy.StrictGreaterThan: "gt", sympy.GreaterThan: "ge",
}  # fmt: skip
_JOINED = {sympy.And: "and", sympy.Or: "or"}


def to_truth(ops: Recorder, e: Any, env: Any, floats: Floats) -> Node:
    """A condition of floats and sizes as a b1 node.

    Raises Unsupported for what loop bodies cannot express."""
    if isinstance(e, sympy.Not):
        return ~to_truth(ops, e.args[0], env, floats)
    if type(e) in _JOINED:
        return reduce(
            partial(apply, _JOINED[type(e)]), (to_truth(ops, a, env, floats) for a in e.args)
        )
    if type(e) in _COMPARED:
        return apply(_COMPARED[type(e)], *(_float_node(ops, a, env, floats) for a in e.args))
    return ops.cast(ops.index(to_size(e, env)), b1)
