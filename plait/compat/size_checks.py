"""Conditions on the sizes of arguments: as text, as a Python function, and as tokens for packages.

Comes in: a sympy condition and where its symbols stand among the arguments. Goes out: a `Check`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.printers import PythonPrinter

from plait.errors import InternalError

Place = tuple[int, int | None]
"""An argument and its dimension; None: the argument is an int."""


@dataclass(frozen=True)
class Check:
    """A condition on sizes and ints. text: in which these arguments are args[0], args[1] and so on.
    holds: for these. tokens: the same as a package has it (wrapper/package.py); nothing if it is
    beyond that."""

    text: str
    holds: Callable[..., bool]
    tokens: tuple[str, ...]


def condition(
    expr: Any, where: Mapping[Any, Place], strides: Mapping[Any, str] | None = None
) -> Check:
    """A sympy condition on sizes, and on strides, as text and as a Python function of the
    arguments."""
    own = {s: f"int {a}" if d is None else f"size {a} {d}" for s, (a, d) in where.items()}
    names = {**(strides or {}), **own}
    if missing := [s for s in expr.free_symbols if s not in names]:
        raise InternalError(f"size condition {expr} has a symbol {missing[0]} of no input")
    texts = {
        s: sympy.Symbol(_spelled(*token.split()), **s.assumptions0) for s, token in names.items()
    }
    source = PythonPrinter().doprint(expr.xreplace(texts))
    holds = eval(f"lambda *args: {source}", {"math": math, "torch": torch})
    return Check(source, holds, _postfix(expr, names) or ())


def _spelled(kind: str, arg: str, dim: str = "") -> str:
    """What a token stands for, in Python."""
    ends = {
        "int": "",
        "size": f".shape[{dim}]",
        "stride": f".stride({dim})",
        "offset": ".storage_offset()",
    }
    return f"args[{arg}]{ends[kind]}"


_TOKENS = {
    sympy.Add: "add", sympy.Mul: "mul", FloorDiv: "div", CleanDiv: "div", Mod: "mod",
    PythonMod: "mod", sympy.Min: "min", Min: "min", sympy.Max: "max", Max: "max", sympy.Eq: "eq",
    sympy.Ne: "ne", sympy.Lt: "lt", sympy.Le: "le", sympy.And: "mul", sympy.Or: "max",
}  # fmt: skip


def _postfix(expr: Any, names: dict[Any, str]) -> tuple[str, ...] | None:
    """Operands, each followed by what it is combined by; None for one beyond these operators. What
    is true is 1."""
    if expr.is_Symbol:
        return (names[expr],)
    if expr.is_Integer or expr in (sympy.true, sympy.false):
        return (f"const {int(bool(expr)) if expr.is_Boolean else int(expr)}",)
    if isinstance(expr, sympy.Gt | sympy.Ge):
        return _postfix(expr.reversed, names)
    if expr.is_Pow and expr.exp.is_Integer and 0 < expr.exp <= 8:
        return _joined([expr.base] * int(expr.exp), "mul", names)
    if isinstance(expr, sympy.Not):
        inner = _postfix(expr.args[0], names)
        return None if inner is None else (*inner, "const 0", "eq")
    kind = _TOKENS.get(expr.func)
    return None if kind is None else _joined(expr.args, kind, names)


def _joined(args: Sequence[Any], kind: str, names: dict[Any, str]) -> tuple[str, ...] | None:
    inner = [_postfix(arg, names) for arg in args]
    rest = [(*i, kind) for i in inner[1:] if i is not None]
    return None if None in inner else sum(rest, inner[0] or ())
