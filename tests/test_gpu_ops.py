"""PyTorch's own op samples on a GPU, forward and gradient: the slice of every op that
test_opinfo.py runs on a CPU, with float16 besides. Needs the package expecttest, as torch's op
database does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's op database needs the package expecttest")

from tests.opinfo_tools import Case, check_forward, check_gradient, name_of, pick, traceable
from tests.test_opinfo import ALL, DIFFERENTIABLE, FLOATS, passes

warnings.filterwarnings("ignore", category=UserWarning)

# Eager refuses the samples of the first on a GPU; the others return the state of a random generator
# besides.
_APART = """_softmax_backward_data torch.ops.aten._flash_attention_forward
    torch.ops.aten._efficient_attention_forward""".split()
OPS = [op for op in ALL if op.name not in _APART]
# PyTorch 2.11 cannot trace a quantile of symbolic sizes.
DYNAMIC = [op for op in OPS[::6] if op in FLOATS and "quantile" not in op.name]


def samples(op: Any, dtype: torch.dtype, count: int, **how: Any) -> list[Case]:
    """Samples on the GPU, none where the op has no such dtype there."""
    supported = (
        op.supported_backward_dtypes("cuda")
        if how.get("requires_grad")
        else op.supported_dtypes("cuda")
    )
    if dtype not in supported:
        return []
    return [c for c in pick(op, dtype, count, device="cuda", **how) if traceable(c)]


def test_there_are_samples() -> None:
    """An op without a sample that can be traced passes every test here."""
    some = OPS[::10]
    assert sum(bool(samples(op, torch.float32, 1)) for op in some) >= 0.9 * len(some)


@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_forward(op: Any) -> None:
    cases = samples(op, torch.float32, 2, strided=(1,))
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
        cases += samples(op, dtype, 1)
    if cases:
        passes(check_forward(cases))


@pytest.mark.parametrize("op", [op for op in DIFFERENTIABLE if op in OPS], ids=name_of)
def test_gradient(op: Any) -> None:
    cases = samples(op, torch.float32, 2, requires_grad=True) + samples(
        op, torch.bfloat16, 1, requires_grad=True
    )
    if cases:
        passes(check_gradient(cases))


@pytest.mark.parametrize("op", DYNAMIC, ids=name_of)
def test_dynamic(op: Any) -> None:
    if cases := samples(op, torch.float32, 2):
        passes(check_forward(cases, dynamic=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (op, d)
        for op in OPS
        for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32)
    ],
    ids=lambda x: name_of(x) if hasattr(x, "op") else str(x),
)
def test_forward_all(op: Any, dtype: torch.dtype) -> None:
    for strided in ((), range(100)):
        cases = samples(op, dtype, 20, strided=strided)
        for k in range(0, len(cases), 10):
            passes(check_forward(cases[k : k + 10]))
