"""PyTorch's operators behind the names that instructions have: 'namespace::name.overload'."""

from __future__ import annotations

from typing import Any

import torch


def operator_of(op: str) -> Any:
    """The operator of a name; None if torch does not know it by now."""
    name, _, overload = op.partition(".")
    namespace, _, packet = name.partition("::")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return getattr(found, overload or "default", None)


def known_operator(op: str) -> Any:
    """The operator of a name. Raises LookupError for one that torch does not know."""
    found = operator_of(op)
    if found is None:
        raise LookupError(f"torch knows no operator {op}")
    return found


def lists_of(op: Any) -> list[bool]:
    """Of each result of an operator, whether it is a list."""
    return [isinstance(r.type, torch.ListType) for r in op._schema.returns]
