"""What things cost: bytes and cycles from loop bodies, as numbers to decide with.

Sizes may be symbolic: `hint` puts what the program's hints say, or else a plausible number, in
place of every symbol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from plait.ir.expr import Atom, Expr, Size, evaluate, free_symbols
from plait.ir.loops import Buffer, Node, index_exprs
from plait.schedule.deps import extent

Hints: TypeAlias = Mapping[str, int]  # LoopProgram.hints

HINT = 64  # what a size without a hint is taken to be


def hint(e: Size, hints: Hints) -> int:
    """A plausible value of a size."""
    if isinstance(e, int):
        return e
    try:
        return evaluate(e, {a.name: _hint_of(a, hints) for a in free_symbols(e)})
    except ArithmeticError:  # a quotient by what is 0 at these values
        return HINT


def _hint_of(a: Atom, hints: Hints) -> int:
    if a.extent is not None:
        return max(hint(a.extent, hints) - 1, 0)
    low = a.lo if a.lo > float("-inf") else 0
    return int(min(max(low, hints.get(a.name, HINT)), a.hi))


def hint_numel(shape: Iterable[Size], hints: Hints) -> int:
    """A plausible number of elements of a shape."""
    out = 1
    for s in shape:
        out *= s if type(s) is int else max(hint(s, hints), 0)
    return out


def buffer_nbytes(b: Buffer, hints: Hints) -> int:
    """A plausible size in bytes of what a buffer holds."""
    return hint_numel(b.shape, hints) * b.dtype.nbytes


def evaluations(vars_: Sequence[Expr], load: Node, hints: Hints) -> int:
    """How often the value behind a load is needed in a loop over vars: values that do not depend on
    inner variables are made once outside."""
    if load.args:
        return hint_numel(map(extent, vars_), hints)
    if index_exprs(load) == vars_:  # most often
        return hint_numel(map(extent, vars_), hints)
    used = {a for e in index_exprs(load) for a in free_symbols(e)}
    last = max((k for k, v in enumerate(vars_) if v.symbol in used), default=-1)
    return hint_numel(map(extent, vars_[: last + 1]), hints)
