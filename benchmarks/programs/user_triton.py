"""Programs with Triton kernels of the user's, for `make bench-gpu GROUP=programs`: an rms_norm
between pointwise operators, an autotuned matrix product, rotary embedding in place.

`programs(device)` gives, by name, a function and its arguments. The kernels are those of
`tests/user_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.user_kernels import matmul, rms_norm, rotary


def normalised(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """Pointwise neighbours on both sides of a kernel."""
    return rms_norm(x + gate.sigmoid(), weight) * torch.nn.functional.silu(gate)


def projected(a: Tensor, b: Tensor) -> Tensor:
    """An autotuned product, read by a pointwise operator."""
    return matmul(a, b).relu()


def programs(device: str) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Name -> a function and what it is called with."""

    def r(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    return {
        "rms_norm": (normalised, (r(8192, 2048), r(2048), r(8192, 2048))),
        "matmul": (projected, (r(512, 512), r(512, 512))),
        "rotary": (rotary, (r(4, 1024, 16, 64), r(1024, 32), r(1024, 32))),
    }
