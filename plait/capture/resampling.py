"""Interpolation kept whole while AOTAutograd traces, where its operators do better than what torch
makes of them.

torch decomposes linear and cubic interpolation at the autograd key, before it asks any table of
decompositions, into loads by computed indices. Of bytes these are others than its own kernels give,
which weigh in fixed point; and the gradient of such a load is a scatter with atomics, where the
rules of lower/resample.py gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from plait.devices import facts_of

AUTOGRAD = torch._C.DispatchKey.Autograd
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_aten = torch.ops.aten
_WHOLE = {
    packet.vec: packet.default
    for packet in (_aten.upsample_bilinear2d, _aten.upsample_trilinear3d, _aten.upsample_bicubic2d)
}


def whole(op: Any, kernels: Mapping[Any, Callable[..., Any]]) -> Mapping[Any, Callable[..., Any]]:
    """The Python kernels that an operator shall have while it is traced, of those that it has."""
    if op in _WHOLE and AUTOGRAD in kernels:
        mine = partial(_resampled, _WHOLE[op], kernels[AUTOGRAD])
        return {**kernels, AUTOGRAD: mine, COMPOSITE: mine}
    if op in _WHOLE.values():
        return {key: kernel for key, kernel in kernels.items() if key != AUTOGRAD}
    return kernels


def _resampled(
    op: Any, loads: Callable[..., Any], x: torch.Tensor, size: Any, align: bool, factors: Any
) -> Any:
    """The .vec overload: x resampled by `op`, or by torch's decomposition `loads`."""
    output_size: Any = torch._decomp.decompositions.upsample_compute_output_size
    sizes = output_size(x.size(), size, factors)
    # torch cannot trace gradients where sizes vary; no other device has a kernel for bytes.
    known = all(isinstance(s, int) for s in (*x.size(), *sizes))
    image = x.dtype == torch.uint8 and facts_of(x.device).eager_cpu
    if image or (known and x.requires_grad and torch.is_grad_enabled()):
        return op(x, sizes, align, *(factors or ()))
    return loads(x, size, align, factors)
