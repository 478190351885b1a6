"""Sizes and element types of fake results that torch gets wrong.

`correct` puts in shape functions of our own. In all versions: for packed sequences, FlexAttention,
`isin` (torch finds its shape by a choice of algorithms, which leaves a guard) and operators of
which torch knows no shapes where sizes vary (`fake_quantize`). In torch 2.11 and 2.12: for what
counts and finds (`unique`, `bincount`). Inside `short_shapes` those of batch norms with given
statistics and of some activations are short ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import decomposition_table, meta_table
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental import symbolic_shapes

from plait.compat import versions
from plait.compat.shared import Shared

aten = torch.ops.aten
_COUNTING = (
    aten.bincount.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default,
)  # fmt: skip


# Operators whose results lie as arguments do, of which torch knows no shapes where sizes vary: the
# arguments, and whether the result is a mask.
_LIKE: dict[Any, tuple[tuple[int, bool], ...]] = {
    **dict.fromkeys(
        (
            aten.fake_quantize_per_tensor_affine_cachemask.default,
            aten.fake_quantize_per_channel_affine_cachemask.default,
            aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
        ),
        ((0, False), (0, True)),
    ),
    **dict.fromkeys(
        (
            aten._fake_quantize_learnable_per_tensor_affine.default,
            aten._fake_quantize_learnable_per_channel_affine.default,
            aten._dirichlet_grad.default,
            aten._sample_dirichlet.default,
            aten._standard_gamma_grad.default,
            aten.binomial.default,
        ),
        ((0, False),),
    ),
    **dict.fromkeys(
        (
            aten._fake_quantize_learnable_per_tensor_affine_backward.default,
            aten._fake_quantize_learnable_per_channel_affine_backward.default,
        ),
        ((1, False), (2, False), (3, False)),
    ),
    **dict.fromkeys(
        (aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default),
        ((1, False),),
    ),
}


_STATISTICS = (
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update_functional.default,
)
_TABLES = fake_impls.op_implementations_dict, meta_table  # what is in the second one goes first


def correct() -> None:
    """From now on fake tensors use these functions; called once."""
    shapes = fake_impls.op_implementations_dict
    shapes[aten._pack_padded_sequence.default] = _packed
    shapes.update({op: _like(of) for op, of in _LIKE.items()})
    if versions.BEFORE_2_13:
        shapes.update({op: _typed(shapes[op]) for op in _COUNTING})
    for table in _TABLES:
        table.update(dict.fromkeys(_STATISTICS, _norm_statistics))
        table[aten.isin.Tensor_Tensor] = _isin
    # What torch makes it of counts elements.
    backward: Any = aten.fake_quantize_per_channel_affine_cachemask_backward.default
    backward.py_kernels[DispatchKey.CompositeImplicitAutograd] = torch.mul
    backward._dispatch_cache.clear()
    flex: Any = torch.ops.higher_order.flex_attention
    if flex in registered_hop_fake_fns:
        registered_hop_fake_fns[flex] = _as_wide(registered_hop_fake_fns[flex])
    FakeTensorMode.cache_clear()  # another back end may have been here before


def _norm_statistics(mode: Any, op: Any, x: torch.Tensor, *given: Any) -> Any:
    """Of a batch norm that computes its statistics, of 16 bits: on a CPU they have the element type
    of the parameters, and running ones keep theirs. Torch says float32 or x's."""
    with mode:
        out, *found = decomposition_table[op](x, *given)
        if x.dtype not in (torch.float16, torch.bfloat16):
            return out, *found
        mean, rstd, *others, new_mean, new_var = found
        own = next((t.dtype for t in given[:4] if t is not None), x.dtype)
        stats = own if x.is_cpu else torch.float32
        running = [t.to(r.dtype) for t, r in zip((new_mean, new_var), given[2:4], strict=True)]
        return out, mean.to(stats), rstd.to(stats), *others, *running


def _like(of: tuple[tuple[int, bool], ...]) -> Callable[..., Any]:
    """The shape function of an operator of `_LIKE`."""

    def run(mode: Any, op: Any, *args: Any, **_: Any) -> Any:
        with mode:
            made = [torch.empty_like(args[k], dtype=torch.bool if m else None) for k, m in of]
        return made[0] if len(made) == 1 else tuple(made)

    return run


def _isin(mode: Any, op: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    with mode:
        return torch.empty(x.shape, dtype=torch.bool, device=x.device)


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


def _is_plain(x: torch.Tensor) -> bool:
    """Whether x is an image on a CPU that lies as new memory would, channels innermost or not."""
    if x.dim() != 4 or not x.is_cpu or x.dtype != torch.float32:
        return False
    if not all(isinstance(k, int) and k > 0 for k in x.shape):
        return False
    _, channels, high, wide = x.shape
    area = high * wide
    inner = (area, wide, 1), (1, wide * channels, channels)
    return x.stride() in [(channels * area, *strides) for strides in inner]


def _norm(mode: Any, op: Any, x: torch.Tensor, *given: Any) -> Any:
    """Of a batch norm with given statistics."""
    kinds = [(t.shape, t.dtype, t.device) for t in given[:4] if t is not None]
    with mode:
        if not _is_plain(x) or any(k != (x.shape[1:2], x.dtype, x.device) for k in kinds):
            return decomposition_table[op](x, *given)
        return torch.empty_like(x), x.new_empty((0,)), x.new_empty((0,))


def _activation(mode: Any, op: Any, x: torch.Tensor) -> Any:
    with mode:
        return torch.empty_like(x) if _is_plain(x) else decomposition_table[op](x)


_SHORT: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_no_training.default: _norm,
    aten.hardswish.default: _activation, aten.hardsigmoid.default: _activation,
}  # fmt: skip


def _put_short() -> None:
    for table in _TABLES:
        table.update(_SHORT)


def _take_short() -> None:
    for table in _TABLES:
        for op in _SHORT:
            del table[op]


short_shapes = Shared(_put_short, _take_short)
"""Shapes without those of up to twelve steps that an operator could be made of, which take a fifth
of the time to trace a network of convolutions."""
