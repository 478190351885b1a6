"""Flags that let products of float32 be rounded, by the older and the newer API of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

BACKENDS: Any = torch.backends


@pytest.mark.parametrize("precision", ["ieee", "tf32", "none"])
@pytest.mark.parametrize("of", ["cuda", "mkldnn"])
def test_newer_flags_of_a_backend(of: str, precision: str) -> None:
    """The older question raises then, whichever device a program is of."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu()

    flags = getattr(BACKENDS, of).matmul
    before, flags.fp32_precision = flags.fp32_precision, precision
    torch.compiler.reset()
    try:
        compiled = torch.compile(fn, backend="plait", fullgraph=True)
        for seed in range(2):
            torch.manual_seed(seed)
            x, w = torch.randn(5, 70), torch.randn(70, 30)
            found, exact = compiled(x, w), fn(x.double(), w.double())
            limit = 3 * (fn(x, w) - exact).abs().max() + 1e-5
            assert (found - exact).abs().max() <= limit
    finally:
        flags.fp32_precision = before
