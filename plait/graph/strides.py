"""Operators whose fake results lie otherwise than eager's do.

PyTorch's own shape functions go by another operand, or leave one out. Before such an operator is traced, its operands
are put in the order in which eager's result lies. These are copies and transposes that loops see through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch._prims_common as prims
from torch import Tensor

import plait.graph.refuse  # noqa: F401 - what is refused is looked at first
from plait import compat

aten = torch.ops.aten


def _known_rows(*tensors: Any) -> bool:
    return all(prims.is_contiguous_or_false(x) for x in tensors if isinstance(x, Tensor))


def _of_one_shape(*tensors: Tensor) -> list[Tensor]:
    found: list[Tensor] = aten.broadcast_tensors(list(tensors))
    return found


def _order(*tensors: Tensor) -> list[int]:
    """The dimensions, from outermost to innermost in memory, of what eager makes of operands of one shape."""
    found: Any = prims.compute_elementwise_output_logical_to_physical_perm(*tensors, _skip_checks=True)
    return list(found[0])


def _back(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _pow_scalar(base: Any, exponent: Tensor) -> Any:
    """Eager's result is row-major."""
    return NotImplemented if _known_rows(exponent) else aten.pow.Scalar(base, exponent.contiguous())


def _copysign(x: Tensor, sign: Tensor) -> Any:
    """In eager the first operand's order counts first."""
    if _known_rows(x, sign):
        return NotImplemented
    x, sign = _of_one_shape(x, sign)
    order = _order(x, sign)
    made = aten.copysign.Tensor(x.permute(order).contiguous(), sign.permute(order).contiguous())
    return made.permute(_back(order))


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """In eager the order of the indices' dimensions counts too."""
    given = [i for i in indices if i is not None]
    if _known_rows(*given) or any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return NotImplemented
    rows = [None if i is None else i.contiguous() for i in indices]
    out = aten.index.Tensor(x, rows)
    given = _of_one_shape(*given)
    n, found = given[0].ndim, [k for k, i in enumerate(indices) if i is not None]
    rest = [s for k, s in enumerate(x.stride()) if k not in found]
    first = found[0] if found == list(range(found[0], found[-1] + 1)) else 0
    read = [*rest[:first], *[0] * n, *rest[first:]]
    at = [(*[0] * first, *i.stride(), *[0] * (len(rest) - first)) for i in given]
    order = _order(x.as_strided(out.shape, read), *(i.as_strided(out.shape, s) for i, s in zip(given, at, strict=True)))
    return out.permute(order).contiguous().permute(_back(order))


def _index_fill(op: Any) -> Callable[..., Any]:
    """In eager the result lies as a copy of the first operand."""

    def run(x: Tensor, *args: Any) -> Any:
        return NotImplemented if prims.is_non_overlapping_and_dense_or_false(x) else op(x.clone(), *args)

    return run


def _register() -> None:
    laid: dict[Any, Callable[..., Any]] = {
        aten.pow.Scalar: _pow_scalar,
        aten.copysign.Tensor: _copysign,
        aten.index.Tensor: _index,
        **{op: _index_fill(op) for op in (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)},
    }
    for op, run in laid.items():
        compat.CHECKS[op] = partial(_checked, compat.CHECKS.get(op), run)


def _checked(checks: Callable[[Any], Any] | None, run: Callable[..., Any], _: Any) -> Any:
    return run if checks is None else checks(run)


_register()
