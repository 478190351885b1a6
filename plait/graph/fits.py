"""Sizes, dimensions and numbers that eager's kernels refuse although tracing takes them, and
results whose dtype or sizes are others in eager than PyTorch's own shape functions say.

A rule looks at an operator's operands before it is traced. What a size decides that is a number in
the example becomes a guard; what only a run tells becomes a check when the program runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from plait import compat
from plait.graph import fits_numbers as numbers
from plait.graph import fits_sizes as sizes
from plait.graph.refuse import or_else

aten = torch.ops.aten
Rule = Callable[..., Any]

_RULES: dict[OpOverload, Rule] = {
    aten._softmax_backward_data.default: numbers.softmax_backward,
    aten._unsafe_masked_index.default: sizes.masked_index,
    aten._unsafe_masked_index_put_accumulate.default: sizes.masked_index,
    aten.add.Tensor: numbers.added,
    aten.addcdiv.default: numbers.by_numbers,
    aten.addmv.default: numbers.addmv,
    aten.addr.default: numbers.addr,
    aten.baddbmm.default: numbers.by_numbers,
    aten.binary_cross_entropy.default: sizes.binary_cross_entropy,
    aten.binary_cross_entropy_with_logits.default: sizes.with_logits,
    aten.bitwise_not.default: numbers.bits,
    aten.clamp.default: numbers.clamped,
    aten.clamp_max.default: numbers.clamped,
    aten.clamp_min.default: numbers.clamped,
    aten.col2im.default: partial(sizes.windows, 2),
    aten.cumprod.default: numbers.running,
    aten.cumsum.default: numbers.running,
    aten.huber_loss.default: sizes.huber_loss,
    aten.im2col.default: partial(sizes.windows, 1),
    aten.isin.Scalar_Tensor: sizes.isin,
    aten.isin.Tensor_Tensor: sizes.isin,
    aten.index_add.default: sizes.index_source,
    aten.index_reduce.default: sizes.index_source,
    aten.index_select.default: sizes.index_select,
    aten.lerp.Scalar: numbers.by_numbers,
    aten.mvlgamma.default: numbers.mvlgamma,
    aten.nan_to_num.default: numbers.nan_to_num,
    aten.native_batch_norm.default: sizes.batch_norm,
    aten.native_dropout_backward.default: numbers.dropout_backward,
    aten.native_group_norm.default: sizes.group_norm,
    aten.nll_loss2d_forward.default: sizes.nll_loss2d,
    aten.constant_pad_nd.default: sizes.padded,
    aten.pixel_unshuffle.default: sizes.pixel_unshuffle,
    aten.repeat_interleave.Tensor: numbers.repeat_interleave,
    aten.select.int: numbers.selected,
    aten.smooth_l1_loss.default: sizes.smooth_l1_loss,
    aten.soft_margin_loss.default: sizes.soft_margin_loss,
    aten.squeeze.default: sizes.squeezed,
    aten.squeeze.dim: sizes.squeezed,
    aten.squeeze.dims: sizes.squeezed,
    **{
        op: partial(sizes.in_single, op)
        for op in (
            aten.native_layer_norm.default, aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_functional.default,
            aten._native_batch_norm_legit_no_training.default,
            aten._batch_norm_with_update_functional.default,
        )
    },
}  # fmt: skip

_RESAMPLING = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
""".split()  # fmt: skip

_BY_DIMENSION = """
    _log_softmax _log_softmax_backward_data _logcumsumexp _safe_softmax _softmax
    _softmax_backward_data cummax cummin cumprod cumsum diagonal diagonal_copy diagonal_scatter
    gather index_add index_copy index_fill index_reduce index_select kthvalue logcumsumexp median
    mode nanmedian renorm scatter scatter_add scatter_reduce select select_scatter slice
    slice_scatter sort topk unbind unfold
""".split()  # fmt: skip

_BINARY: dict[str, Rule] = {
    **dict.fromkeys(("xlogy", "special_xlog1py"), numbers.of_reals),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), numbers.on_bits),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), numbers.shifted),
    **dict.fromkeys(("sub", "rsub"), numbers.difference),
}

_OF_ELEMENTS = """
    add addcdiv addcmul addmm addmv addr baddbmm celu clamp clamp_max clamp_min constant_pad_nd elu
    fill full full_like hardshrink hardtanh index_add index_fill leaky_relu lerp masked_fill
    new_full pow rsub scalar_tensor scatter softplus sub threshold
""".split()  # fmt: skip
"""Operators whose kernels make elements of their numbers."""


def _overloads(packet: Any) -> list[OpOverload]:
    found = [getattr(packet, name) for name in packet.overloads()]
    return [op for op in found if not op._schema.is_mutable]


def _register() -> None:
    for name in _RESAMPLING:
        for op in _overloads(getattr(aten, name)):
            _put(op, sizes.scaled if op._overloadname == "vec" else sizes.resampled)
    for name, rule in _BINARY.items():
        for op in _overloads(getattr(aten, name)):
            _put(op, rule)
    for op, rule in _RULES.items():
        _put(op, rule)
    for name in _OF_ELEMENTS:
        for op in _overloads(getattr(aten, name)):
            if any(str(a.type) in ("number", "Optional[number]") for a in op._schema.arguments):
                _put(op, partial(numbers.held, op))
    for name in _BY_DIMENSION:  # a dimension is looked at first
        for op in _overloads(getattr(aten, name)):
            if dims := sizes.dims_of(op):
                _put(op, partial(sizes.dimensions, dims))


def _put(op: OpOverload, rule: Rule) -> None:
    compat.decompositions.CHECKS[op] = partial(_fitted, compat.decompositions.CHECKS.get(op), rule)


def _fitted(checks: Callable[[Any], Rule] | None, rule: Rule, decomposition: Any) -> Rule:
    return or_else(rule, decomposition if checks is None else checks(decomposition))


_register()
