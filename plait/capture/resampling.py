"""Keeps interpolation whole while AOTAutograd traces, where its operators do better than what torch makes of them.

torch decomposes linear and cubic interpolation at the autograd key, before it asks any table of decompositions, into
loads by computed indices. Of bytes these are others than its own kernels give, which weigh in fixed point; and the
gradient of such a load is a scatter with atomics, where the rules of lower/resample.py gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from plait.capture.shared import Shared

_AUTOGRAD, _COMPOSITE = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd

_changed: list[tuple[Any, dict[Any, Any]]] = []  # operators and the kernels that they had


def _change() -> None:
    aten = torch.ops.aten
    for packet in (aten.upsample_bilinear2d, aten.upsample_trilinear3d, aten.upsample_bicubic2d):
        op, vec = packet.default, packet.vec
        if _AUTOGRAD not in vec.py_kernels:
            continue  # a torch that does not decompose it there
        _changed.extend((x, dict(x.py_kernels)) for x in (op, vec))
        mine = partial(_resampled, op, vec.py_kernels[_AUTOGRAD])
        _set_kernels(vec, vec.py_kernels | {_AUTOGRAD: mine, _COMPOSITE: mine})
        _set_kernels(op, {key: kernel for key, kernel in op.py_kernels.items() if key != _AUTOGRAD})


def _undo() -> None:
    while _changed:
        _set_kernels(*_changed.pop())


def _set_kernels(op: Any, kernels: Mapping[Any, Any]) -> None:
    """Replaces the kernels of an operator that are Python, and forgets which one was found for which key."""
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()


def _resampled(op: Any, loads: Callable[..., Any], x: torch.Tensor, size: Any, align: bool, factors: Any) -> Any:
    """The .vec overload: x resampled by `op`, or by torch's decomposition `loads`."""
    output_size: Any = torch._decomp.decompositions.upsample_compute_output_size
    sizes = output_size(x.size(), size, factors)
    known = all(isinstance(s, int) for s in (*x.size(), *sizes))  # torch cannot trace the gradients between others
    image = x.dtype == torch.uint8 and x.device.type == "cpu"  # no other device has a kernel for them
    if image or (known and x.requires_grad and torch.is_grad_enabled()):
        return op(x, sizes, align, *(factors or ()))
    return loads(x, size, align, factors)


whole_resampling = Shared(_change, _undo)
"""Inside, traces keep interpolation of bytes, and of known sizes if it needs a gradient, as operators."""
