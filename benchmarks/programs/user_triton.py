"""Programs with Triton kernels of the user's, for a GPU: those of `tests/user_kernels.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from programs import Program

sys.path.append(str(Path(__file__).parents[2]))  # where tests are


def normalised(device: str) -> Program:
    """rms_norm of 8192 x 2048 between pointwise operators."""
    from tests.user_kernels import rms_norm

    def fn(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        found: Tensor = rms_norm(x + gate.sigmoid(), weight)
        return found * torch.nn.functional.silu(gate)

    x, weight, gate = (torch.randn(s, device=device) for s in ((8192, 2048), 2048, (8192, 2048)))
    return Program(fn, (x, weight, gate))


def projected(device: str) -> Program:
    """An autotuned product of 512 x 512, read by a pointwise operator."""
    from tests.user_kernels import matmul

    def fn(a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = matmul(a, b)
        return found.relu()

    return Program(fn, tuple(torch.randn(512, 512, device=device) for _ in range(2)))


def rotated(device: str) -> Program:
    """Rotary embedding in place, 4 x 1024 positions, 16 heads of 64."""
    from tests.user_kernels import rotary

    shapes = (4, 1024, 16, 64), (1024, 32), (1024, 32)
    return Program(rotary, tuple(torch.randn(s, device=device) for s in shapes))


def launched(device: str) -> Program:
    """Twenty launches of a kernel that has next to nothing to do: what a launch costs."""
    from tests.user_kernels_odd import scale_into

    def fn(x: Tensor) -> Tensor:
        for k in range(20):
            out = torch.empty_like(x)
            scale_into(x, out, 1.5 + k)
            x = out
        return x

    return Program(fn, (torch.randn(1000, device=device),))


def halves(device: str) -> Program:
    """Parts of a new tensor, a launch each."""
    from tests.user_kernels_odd import scale_into

    def fn(x: Tensor) -> Tensor:
        out = torch.empty(2, x.numel(), device=x.device)
        for k in range(2):
            scale_into(x, out[k], 2.0 + k)
        return out

    return Program(fn, (torch.randn(1 << 24, device=device),))


PROGRAMS = {f.__name__: f for f in (normalised, projected, rotated, launched, halves)}
