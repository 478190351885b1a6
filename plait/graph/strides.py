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
from torch.fx.experimental.symbolic_shapes import guard_or_false

from plait import compat
from plait.graph.refuse import or_else  # what is refused is looked at first

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


def _second_in_rows(op: Any) -> Callable[..., Any]:
    """Eager raises 2 to the second operand first, and that result is row-major."""

    def run(first: Any, exponent: Tensor) -> Any:
        return NotImplemented if _known_rows(exponent) else op(first, exponent.contiguous())

    return run


def _in_turn(op: Any) -> Callable[..., Any]:
    """In eager the first operand's order counts first, then the second's. Tensors without dimensions stay as they are,
    for they do not decide the element type."""

    def is_laid(x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() > 0

    def run(*args: Any, **kwargs: Any) -> Any:
        if _known_rows(*args):
            return NotImplemented
        wide = _of_one_shape(*filter(is_laid, args))
        order = _order(*wide)
        given = iter([x.permute(order).contiguous() for x in wide])
        made = op(*(next(given) if is_laid(x) else x for x in args), **kwargs)
        return made.permute(_back(order))

    return run


def _in_format(op: Any) -> Callable[..., Any]:
    """On a CPU eager's result lies as its first operand, if that is channels-last, and else row-major."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.device.type != "cpu" or _known_rows(x):
            return NotImplemented
        order = prims.suggest_memory_format(x)
        if x.is_contiguous(memory_format=order):
            return NotImplemented
        return op(x.contiguous(memory_format=order), *args, **kwargs)

    return run


def _formatted(op: Any) -> Callable[..., Any]:
    """On a CPU eager's result of a channels-last operand is so, too."""

    def run(x: Tensor, *args: Any) -> Any:
        if x.device.type != "cpu" or _known_rows(x):
            return NotImplemented
        return op(x.contiguous(), *args).contiguous(memory_format=prims.suggest_memory_format(x))

    return run


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


def _constant_pad(x: Tensor, pad: Sequence[Any], value: Any = 0) -> Any:
    """Where nothing is added, eager copies what is left, in the order of x. Tracing asks that of constants alone."""
    if _known_rows(x) or not all(guard_or_false(n <= 0) for n in pad):
        return NotImplemented
    for k, n in enumerate(pad):
        dim = x.ndim - 1 - k // 2
        x = x.narrow(dim, 0 if k % 2 else -n, x.shape[dim] + n)
    return x.clone()


def _index_fill(op: Any) -> Callable[..., Any]:
    """In eager the result lies as a copy of the first operand."""

    def run(x: Tensor, *args: Any) -> Any:
        return NotImplemented if prims.is_non_overlapping_and_dense_or_false(x) else op(x.clone(), *args)

    return run


_IN_TURN = (
    aten.copysign.Tensor, aten.div.Tensor_mode, aten.floor_divide.default, aten.heaviside.default,
    aten.logaddexp.default, aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default,
    aten.native_dropout_backward.default, aten.special_xlog1py.default, aten.xlogy.Tensor,
)  # fmt: skip
_IN_FORMAT = (
    aten._batch_norm_with_update_functional.default, aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default, aten._native_batch_norm_legit.no_stats,
)  # fmt: skip

_FORMATTED = (
    aten.channel_shuffle.default, aten.max_unpool2d.default, aten.native_channel_shuffle.default,
    aten.reflection_pad3d.default, aten.replication_pad3d.default,
)  # fmt: skip


def _register() -> None:
    laid: dict[Any, Callable[..., Any]] = {
        aten.index.Tensor: _index,
        aten.constant_pad_nd.default: _constant_pad,
        **{op: _second_in_rows(op) for op in (aten.pow.Scalar, aten.ldexp.Tensor)},
        **{op: _in_turn(op) for op in _IN_TURN},
        **{op: _in_format(op) for op in _IN_FORMAT},
        **{op: _formatted(op) for op in _FORMATTED},
        **{op: _index_fill(op) for op in (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)},
    }
    for op, run in laid.items():
        compat.CHECKS[op] = partial(_checked, compat.CHECKS.get(op), run)


def _checked(checks: Callable[[Any], Any] | None, run: Callable[..., Any], decomposed: Any) -> Any:
    laid = or_else(run, decomposed)
    return laid if checks is None else checks(laid)


_register()
