"""What a traced function asks of where its tensors lie, noted for checks at calls.

Tracing without Dynamo answers `x.storage_offset()` by the example's, and takes a stride that varies
for 2 or more, which decides `x.is_contiguous()` without a guard.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.capture.found import IndexByFound
from plait.compat.export import ExportEnv

_CHANNELS_LAST = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}


class NotingLayouts(IndexByFound):
    """Inside, `env` learns what is asked."""

    def __init__(self, env: ExportEnv) -> None:
        super().__init__()
        self.env = env

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.storage_offset:
            self.env.asks_offsets = True
        if func in (torch.Tensor.is_contiguous, torch.Tensor.contiguous):
            _ask_whether_dense(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _ask_whether_dense(x: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> None:
    """Asks what `x.is_contiguous(memory_format)` does, as one question."""
    order: Any = reversed(range(x.dim()))
    if memory_format != torch.contiguous_format:
        order = _CHANNELS_LAST.get(x.dim(), ())
    dense: Any = True
    stride: Any = 1
    for dim in order:
        dense = dense & ((x.shape[dim] == 1) | (x.stride(dim) == stride))
        stride = stride * x.shape[dim]
    bool(dense)
