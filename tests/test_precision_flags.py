"""Flags that let products of float32 be rounded, by the older and the newer API of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.wrapper.instructions import Call
from plait.wrapper.program import CompileRecord
from tests.product_programs import observing

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


def hidden(x: Tensor, w: Tensor) -> Tensor:
    """A sum that is computed as a product where products are as exact."""
    return (x[:, :, None] * w[None]).sum(1)


def point(x: Tensor, w: Tensor) -> Tensor:
    """A convolution that is."""
    return torch.nn.functional.conv2d(x, w)


IMAGE = torch.randn(2, 64, 16, 16).contiguous(memory_format=torch.channels_last)
CHANGING = {
    "sum": (hidden, (torch.randn(64, 96), torch.randn(96, 80)), "matmul"),
    "convolution": (point, (IMAGE, torch.randn(64, 64, 1, 1)), "conv"),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("case", CHANGING)
def test_flags_that_change(case: str, trained: bool) -> None:
    """What was compiled because products were exact is compiled again when they are not, forward
    and backward; as often as there are answers."""
    fn, inputs, op = CHANGING[case]
    inputs = tuple(x.clone().requires_grad_(trained) for x in inputs)
    flags = getattr(BACKENDS.mkldnn, op)
    before = flags.fp32_precision
    torch.compiler.reset()
    records: list[CompileRecord] = []
    compiled = torch.compile(fn, backend="plait", options={"small_matmul_flops": 0})
    products = []
    try:
        with observing(records):
            for precision in ("ieee", "bf16", "ieee"):
                records.clear()
                flags.fp32_precision = precision
                found = compiled(*inputs)
                if trained:
                    found.sum().backward()
                calls = [i.op for r in records for i in r.wrapper.body if isinstance(i, Call)]
                products.append((len(records), sum("mm" in op for op in calls)))
    finally:
        flags.fp32_precision = before
    n = 1 + trained
    assert products == [(n, 3 if trained else 1), (n, 0), (0, 0)], products
