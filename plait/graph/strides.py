"""Operators whose fake results lie otherwise than eager's do.

PyTorch's own shape functions go by another operand, or leave one out. Before such an operator is
traced, its operands are put in the order in which eager's result lies. These are copies and
transposes that loops see through.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch._prims_common as prims
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

import plait.graph.margins  # noqa: F401 - puts its decompositions into the table
from plait import compat
from plait.devices import facts_of
from plait.graph.refuse import or_else  # what is refused is looked at first

aten = torch.ops.aten


def is_view(x: Tensor, shape: Sequence[Any]) -> Any:
    """Whether x can be seen in another shape of as many elements, as one condition: dimensions lie
    one in the other wherever the new ones do not end where they do."""
    sizes, strides = x.shape, x.stride()
    ends, own = list(_behind(shape)), list(_behind(sizes))
    cut = [_any(n == end for end in ends) for n in own]
    fits: Any = True
    for i, j in itertools.combinations(range(x.dim()), 2):
        nested = strides[i] == sizes[j] * strides[j]
        apart = _any((*cut[i + 1 : j + 1], *(n != 1 for n in sizes[i + 1 : j])))
        fits = fits & ((sizes[i] == 1) | (sizes[j] == 1) | nested | apart)
    return fits


def _behind(sizes: Sequence[Any]) -> Iterator[Any]:
    """For each dimension, how many elements it and those behind it have."""
    for k in range(len(sizes)):
        yield reduce(operator.mul, sizes[k:])


def _any(conditions: Iterable[Any]) -> Any:
    return reduce(operator.or_, conditions, False)


def _known_rows(*tensors: Any) -> bool:
    return all(prims.is_contiguous_or_false(x) for x in tensors if isinstance(x, Tensor))


def _of_one_shape(*tensors: Tensor) -> list[Tensor]:
    found: list[Tensor] = aten.broadcast_tensors(list(tensors))
    return found


def _exact_rows(*tensors: Tensor) -> bool:
    """Whether all are surely row-major, their dimensions of size 1 too: eager heeds the strides of
    these."""
    return all(
        guard_or_false(have == want)
        for x in tensors
        for have, want in zip(x.stride(), prims.make_contiguous_strides_for(x.shape), strict=True)
    )


def _in_rows(x: Tensor) -> Tensor:
    return x if _exact_rows(x) else x.clone(memory_format=torch.contiguous_format)


def _order(shape: Sequence[Any], *operands: tuple[Tensor, Sequence[Any]]) -> list[int]:
    """The dimensions, from outermost to innermost in memory, of what eager makes in this shape.
    operands: tensors, each with its strides there: 0 where it is spread."""
    laid = [x.as_strided(shape, strides) for x, strides in operands]
    found: Any = prims.compute_elementwise_output_logical_to_physical_perm(*laid, _skip_checks=True)
    return list(found[0])


def _spread(x: Tensor, shape: Sequence[Any]) -> list[Any]:
    """Strides of x where it is spread to this shape."""
    first = len(shape) - x.ndim
    own = zip(x.shape, shape[first:], x.stride(), strict=True)
    return [0] * first + [s if guard_or_false(n == m) else 0 for n, m, s in own]


def _back(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _second_in_rows(op: Any) -> Callable[..., Any]:
    """Eager raises 2 to the second operand first, and that result is row-major."""

    def run(first: Any, exponent: Tensor) -> Any:
        return NotImplemented if _known_rows(exponent) else op(first, exponent.contiguous())

    return run


def _in_turn(op: Any) -> Callable[..., Any]:
    """In eager the first operand's order counts first, then the second's. Tensors without
    dimensions stay as they are, for they do not decide the element type."""

    def is_laid(x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() > 0

    def run(*args: Any, **kwargs: Any) -> Any:
        laid = list(filter(is_laid, args))
        if _exact_rows(*laid):
            return NotImplemented
        wide = _of_one_shape(*laid)
        shape = wide[0].shape
        order = _order(shape, *((x, _spread(x, shape)) for x in laid))
        given = iter([_in_rows(x.permute(order)) for x in wide])
        made = op(*(next(given) if is_laid(x) else x for x in args), **kwargs)
        return made.permute(_back(order))

    return run


def _in_format(op: Any) -> Callable[..., Any]:
    """On a CPU eager's result lies as its first operand, if that is channels-last, and else
    row-major."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not facts_of(x.device).eager_cpu or _known_rows(x):
            return NotImplemented
        order = prims.suggest_memory_format(x)
        if x.is_contiguous(memory_format=order):
            return NotImplemented
        return op(x.contiguous(memory_format=order), *args, **kwargs)

    return run


def _formatted(op: Any) -> Callable[..., Any]:
    """On a CPU eager's result of a channels-last operand is so, too."""

    def run(x: Tensor, *args: Any) -> Any:
        if not facts_of(x.device).eager_cpu or _known_rows(x):
            return NotImplemented
        return op(x.contiguous(), *args).contiguous(memory_format=prims.suggest_memory_format(x))

    return run


def _roll(x: Tensor, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Any:
    """On a CPU eager puts two slices side by side, dimension after dimension: those of a
    channels-last tensor are so, too, but an empty one."""
    if not facts_of(x.device).eager_cpu or not dims or _known_rows(x):
        return NotImplemented
    if len(dims) > 1:
        return aten.roll.default(aten.roll.default(x, shifts[:1], dims[:1]), shifts[1:], dims[1:])
    order, size = prims.suggest_memory_format(x), x.shape[dims[0]]
    if order == torch.contiguous_format or guard_or_false(size == 0):
        return NotImplemented
    if guard_or_false(shifts[0] % size == 0):
        return NotImplemented
    return aten.roll.default(x.contiguous(), shifts, dims).contiguous(memory_format=order)


def _unique(x: Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
    """Eager moves the dimension to the front, and results back."""
    if dim in (0, -x.dim()) or not x.dim():
        return NotImplemented
    found, *more = aten.unique_dim.default(x.movedim(dim, 0), 0, *args, **kwargs)
    return found.movedim(0, dim), *more


def _unique_of_neighbours(
    x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """The same. PyTorch's shapes of a dimension that is counted from the end are wrong."""
    if dim is None or dim == 0 or not x.dim():
        return NotImplemented
    op = aten.unique_consecutive.default
    found, *more = op(x.movedim(dim, 0), return_inverse, return_counts, 0)
    return found.movedim(0, dim), *more


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """In eager the order of the indices' dimensions counts too, and so do dimensions of size 1."""
    found = [k for k, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    rest = [k for k in range(x.ndim) if k not in found]
    ones = [k for k in rest if guard_or_false(x.shape[k] == 1)]
    masks = any(i.dtype in (torch.bool, torch.uint8) or not i.ndim for i in given)
    if masks or _exact_rows(*given, *([x] if ones else [])):
        return NotImplemented
    wide = _of_one_shape(*given)
    n, size = wide[0].ndim, wide[0].shape
    first = found[0] if found == list(range(found[0], found[-1] + 1)) else 0
    before, after = rest[:first], rest[first:]
    shape = [*(x.shape[k] for k in before), *size, *(x.shape[k] for k in after)]
    read = [*(x.stride(k) for k in before), *[0] * n, *(x.stride(k) for k in after)]
    order = _order(shape, (x, read), *_places(x, wide, shape, first))
    kept = [k for k in rest if k not in ones]
    moved = x.permute([*found, *kept, *ones]).squeeze(list(range(x.ndim - len(ones), x.ndim)))
    out = aten.index.Tensor(moved, list(map(_in_rows, given)))[(..., *[None] * len(ones))]
    at = {k: n + p for p, k in enumerate([*kept, *ones])}
    out = out.permute([*(at[k] for k in before), *range(n), *(at[k] for k in after)])
    return _in_rows(out.permute(order)).permute(_back(order))


def _places(
    x: Tensor, wide: Sequence[Tensor], shape: Sequence[Any], first: int
) -> list[tuple[Tensor, Sequence[Any]]]:
    """Indices of one shape, each with its strides in the shape of x[wide]. first: how many
    dimensions of x come before them there."""
    read = [i.to(x.device, torch.int64) for i in wide]
    last = len(shape) - first - read[0].ndim
    strides = [_among(i, first, last) for i in read]
    if not facts_of(x.device).eager_cpu and any(s != strides[0] for s in strides):
        rows = prims.make_contiguous_strides_for([*[1] * first, *wide[0].shape, *[1] * last])
        strides = [s if _known_rows(i) else list(rows) for i, s in zip(read, strides, strict=True)]
    for k in (*range(first), *range(len(shape) - last, len(shape))):
        for own in () if guard_or_false(shape[k] == 1) else strides:
            own[k] = 0
    return list(zip(read, strides, strict=True))


def _among(i: Tensor, first: int, last: int) -> list[Any]:
    """Strides of i between so many dimensions of size 1, as eager's reshape gives them. Those of
    fake tensors are others."""
    dims = [*[(1, 0)] * first, *zip(i.shape, i.stride(), strict=True), *[(1, 0)] * last]
    step, n, strides = i.stride(-1), 1, []
    for size, stride in reversed(dims):
        if not guard_or_false(size == 1) and not guard_or_false(stride == n * step):
            step, n = stride, 1
        strides.append(n * step)
        n = n * size
    return strides[::-1]


def _constant_pad(x: Tensor, pad: Sequence[Any], value: Any = 0) -> Any:
    """Where nothing is added, eager copies what is left, in the order of x. Tracing asks that of
    constants alone."""
    if _known_rows(x) or not all(guard_or_false(n <= 0) for n in pad):
        return NotImplemented
    for k, n in enumerate(pad):
        dim = x.ndim - 1 - k // 2
        x = x.narrow(dim, 0 if k % 2 else -n, x.shape[dim] + n)
    return x.clone()


def _index_fill(op: Any) -> Callable[..., Any]:
    """In eager the result lies as a copy of the first operand."""

    def run(x: Tensor, *args: Any) -> Any:
        return (
            NotImplemented
            if prims.is_non_overlapping_and_dense_or_false(x)
            else op(x.clone(), *args)
        )

    return run


_IN_TURN = (
    aten.copysign.Tensor, aten.div.Tensor_mode, aten.floor_divide.default, aten.heaviside.default,
    aten.logaddexp.default, aten.logical_and.default, aten.logical_or.default,
    aten.logical_xor.default, aten.native_dropout_backward.default, aten.special_xlog1py.default,
    aten.xlogy.Tensor,
)  # fmt: skip
_IN_FORMAT = (
    aten._batch_norm_with_update_functional.default,
    aten._native_batch_norm_legit_functional.default,
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
        aten.roll.default: _roll,
        aten.unique_consecutive.default: _unique_of_neighbours,
        aten.unique_dim.default: _unique,
        **{op: _second_in_rows(op) for op in (aten.pow.Scalar, aten.ldexp.Tensor)},
        **{op: _in_turn(op) for op in _IN_TURN},
        **{op: _in_format(op) for op in _IN_FORMAT},
        **{op: _formatted(op) for op in _FORMATTED},
        **{op: _index_fill(op) for op in (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)},
    }
    for op, run in laid.items():
        compat.decompositions.CHECKS[op] = partial(
            _checked, compat.decompositions.CHECKS.get(op), run
        )


def _checked(checks: Callable[[Any], Any] | None, run: Callable[..., Any], decomposed: Any) -> Any:
    laid = or_else(run, decomposed)
    return laid if checks is None else checks(laid)


_register()
