"""Sizes and element types of fake results that torch gets wrong.

`correct` puts in shape functions of our own: for packed sequences and FlexAttention in all
versions, for what counts and finds (`unique`, `bincount`) in torch 2.11 and 2.12. Inside
`norms_known` that of batch norms with given statistics is a short one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx.experimental import symbolic_shapes

from plait.compat import versions
from plait.compat.shared import Shared

aten = torch.ops.aten
_COUNTING = (
    aten.bincount.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default,
)  # fmt: skip


def correct() -> None:
    """From now on fake tensors use these functions; called once."""
    shapes = fake_impls.op_implementations_dict
    shapes[aten._pack_padded_sequence.default] = _packed
    if versions.BEFORE_2_13:
        shapes.update({op: _typed(shapes[op]) for op in _COUNTING})
    flex: Any = torch.ops.higher_order.flex_attention
    if flex in registered_hop_fake_fns:
        registered_hop_fake_fns[flex] = _as_wide(registered_hop_fake_fns[flex])


def _as_wide(shapes: Callable[..., Any]) -> Callable[..., Any]:
    """A shape function of FlexAttention, whose logarithms and greatest scores are float64 where
    queries are. Torch's says float32 of all."""

    def run(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = shapes(q, *args, **kwargs)
        if made is NotImplemented or q.dtype != torch.float64:
            return made
        return made[0], *(x.new_empty(x.shape, dtype=q.dtype) for x in made[1:])

    return run


def _typed(shapes: Callable[..., Any]) -> Callable[..., Any]:
    """A shape function of an operator that counts, which gives all results the element type of what
    is counted."""

    def run(mode: Any, op: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = shapes(mode, op, x, *args, **kwargs)
        if isinstance(made, tuple):
            return made[0], *(y.new_empty(y.shape, dtype=torch.int64) for y in made[1:])
        weights = args[0] if args else kwargs.get("weights")
        if weights is None:
            return made.new_empty(made.shape, dtype=torch.int64)
        kept = torch.float32 if weights.dtype == torch.float32 else torch.float64
        return made.new_empty(made.shape, dtype=kept)

    return run


def _packed(mode: Any, op: Any, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """Shapes of packed sequences: as many rows as all have together, and a number for each step.
    PyTorch's own function takes the rows for those of one sequence."""
    env = mode.shape_env
    if env is None or not env.allow_dynamic_output_shape_ops:
        raise DynamicOutputShapeException(op)
    rows, steps = env.create_unbacked_symint(), env.create_unbacked_symint()
    for n in (rows, steps):
        symbolic_shapes._constrain_range_for_size(n)
    return x.new_empty((rows, *x.shape[2:])), lengths.new_empty((steps,), dtype=torch.int64)


_NORM = aten._native_batch_norm_legit_no_training.default
_long: Any = decomposition_table[_NORM]


@functools.wraps(_long)  # torch goes by its name
def _short(x: torch.Tensor, *given: Any) -> Any:
    """The shapes of a batch norm, without those of twelve steps that it could be made of, which
    take an eighth of the time to trace a network of convolutions."""
    statistics = [t for t in given[:4] if t is not None]
    if x.dim() != 4 or not x.is_cpu or x.dtype != torch.float32:
        return _long(x, *given)
    n, channels, *sides = x.shape
    sizes = (channels, *sides)
    if not all(isinstance(k, int) and k > 1 for k in sizes) or not isinstance(n, int) or n == 0:
        return _long(x, *given)
    kinds = {(t.shape, t.dtype, t.device) for t in statistics}
    if kinds != {((channels,), x.dtype, x.device)}:
        return _long(x, *given)
    high, wide = sides
    area = high * wide
    inner = (area, wide, 1), (1, wide * channels, channels)
    if x.stride() not in [(channels * area, *strides) for strides in inner]:
        return _long(x, *given)
    return torch.empty_like(x), x.new_empty((0,)), x.new_empty((0,))


norms_known = Shared(
    lambda: decomposition_table.update({_NORM: _short}),
    lambda: decomposition_table.update({_NORM: _long}),
)
