"""Convolutions of a GPU's programs, compiled on a machine without one."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor

from plait.wrapper.instructions import CallExtern, Launch, Literal
from tests.test_cuda_programs import compile_only, fakes, of, record

__all__ = ["compile_only"]


def convolved(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, b, padding=1) + y)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_bias_fuses_with_what_follows(compile_only: None, device: str) -> None:
    mode, args = fakes((2, 8, 16, 16), (8, 8, 3, 3), (8,), (2, 8, 16, 16), device=device)
    made = record(convolved, *args, mode=mode)
    (call,) = of(made.wrapper, CallExtern)
    (last,) = of(made.wrapper, Launch)
    assert call.op == "aten::convolution" and len(last.args) == (4 if device == "cuda" else 3)
    assert (call.args[2] == Literal("none")) == (device == "cuda")
