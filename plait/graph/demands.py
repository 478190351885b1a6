"""What a rule of fits.py demands of operands before an operator is traced.

What a size decides that is a number in the example becomes a guard; what only a run tells becomes a
check when the program runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false, sym_or

from plait.errors import refusal
from plait.graph.refuse import users_line


def demand(holds: Any, says: str, kind: type[Exception] = RuntimeError) -> None:
    """Raises an OperandError that is caught as `kind` unless a condition holds; what nobody knows
    yet is looked at when the program runs."""
    if isinstance(holds, torch.SymBool) and free_unbacked_symbols(holds):
        when_run: Any = torch._check
        when_run(holds, lambda: says)
    elif not holds:
        raise refusal(kind())(says, where=users_line())


def demand_equal(x: Sequence[Any], y: Sequence[Any], says: str) -> None:
    """Two sequences of sizes are equal."""
    demand(len(x) == len(y), says)
    for a, b in zip(x, y, strict=True):
        demand(a == b, says)


def is_sure(holds: Any) -> bool:
    """Whether a condition holds, False where only a run tells."""
    return bool(guard_or_false(holds))


def demand_room(shape: Sequence[Any], x: Tensor | None) -> None:
    """x may be broadcast to a shape that is not changed by it."""
    if x is None:
        return
    says = f"output with shape {list(shape)} doesn't match the broadcast shape with {list(x.shape)}"
    demand(x.dim() <= len(shape), says)
    for have, got in zip(reversed(shape), reversed(x.shape), strict=False):
        demand(sym_or(have == got, got == 1), says)
