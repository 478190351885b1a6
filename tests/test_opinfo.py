"""PyTorch's own op samples, forward and gradient: a fixed slice of every op here, everything under
the marker `slow`.

The slice: two float32 samples (one of them not contiguous), one each of bfloat16, int64 and bool,
two of gradients, and every sixth op with dynamic sizes. What counts as wrong is decided in
opinfo_tools.py.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import plait.lower
from tests.opinfo_tools import (
    RANDOM,
    UNTRACEABLE,
    Case,
    Outcome,
    check_forward,
    check_gradient,
    check_through_dynamo,
    name_of,
    pick,
    traceable,
)  # fmt: skip

warnings.filterwarnings("ignore", category=UserWarning)

EXTERN_OPS = Path(plait.lower.__file__).parent / "extern_ops.txt"
# Its samples are views of larger memory, which copies of them are not: see test_lower_programs.py.
PARTIAL = "as_strided.partial_views"


def _apart(op: Any) -> bool:
    return op.name in UNTRACEABLE or op.name.startswith("masked.")


# NOTE: no op is looked for in a list: two are compared by some fifty fields.
ALL = [op for op in op_db if op.name not in RANDOM and not _apart(op) and name_of(op) != PARTIAL]
# Those of jiterator are for CUDA only.
BEHIND_DYNAMO = [
    op
    for op in op_db
    if _apart(op)
    and torch.float32 in op.supported_dtypes("cpu")
    and not op.name.startswith("jiterator")
]
FLOATS = [op for op in ALL if torch.float32 in op.supported_dtypes("cpu")]
# The gradient of linalg.eig is defined for some losses only; AOTAutograd cannot trace those of the
# others.
_NO_GRADIENT = ("index_fill", "linalg.eig", "put")
DIFFERENTIABLE = [
    op
    for op in ALL
    if op.supports_autograd
    and torch.float32 in op.supported_backward_dtypes("cpu")
    and op.name not in _NO_GRADIENT
]
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)

LISTED = {
    line.split()[1] for line in EXTERN_OPS.read_text().splitlines() if line.startswith("fallback")
}

ops = pytest.mark.parametrize("op", ALL, ids=name_of)


def passes(outcome: Outcome) -> None:
    assert not outcome.failures, "\n".join(outcome.failures[:5])
    broken = {op: why for op, why in outcome.fallbacks.items() if "bug in plait" in why}
    assert not broken, f"rules that fail: {broken}"
    missing = {
        op
        for op, why in outcome.fallbacks.items()
        if op.startswith("aten::") and why == "no lowering rule"
    }
    missing -= LISTED
    assert not missing, f"neither a rule nor a line in extern_ops.txt: {missing}"


def mixed(op: Any) -> list[Case]:
    """One case of each kind, which share a compile."""
    cases: list[Case] = []
    supported = op.supported_dtypes("cpu")
    if torch.float32 in supported:
        cases += pick(op, torch.float32, 2, strided=(1,))
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        if dtype in supported:
            cases += pick(op, dtype, 1)
    return [c for c in cases if traceable(c)]


@pytest.mark.slow
def test_there_are_samples() -> None:
    """An op without a sample that can be traced passes every test here."""
    some = ALL[::10]
    assert sum(bool(mixed(op)) for op in some) >= 0.95 * len(some)


@ops
def test_forward(op: Any) -> None:
    if cases := mixed(op):
        passes(check_forward(cases))


# Gradients take longest to compile: `make test` has every third op's.
SPREAD = [
    pytest.param(op, marks=[pytest.mark.slow] * bool(k % 3), id=name_of(op))
    for k, op in enumerate(DIFFERENTIABLE)
]


@pytest.mark.parametrize("op", SPREAD)
def test_gradient(op: Any) -> None:
    if cases := [c for c in pick(op, torch.float32, 2, requires_grad=True) if traceable(c)]:
        passes(check_gradient(cases))


@pytest.mark.parametrize(
    "op", [op for op in ALL[::6] if torch.float32 in op.supported_dtypes("cpu")], ids=name_of
)
def test_dynamic(op: Any) -> None:
    if cases := [c for c in pick(op, torch.float32, 2) if traceable(c)]:
        passes(check_forward(cases, dynamic=True))


# --------------------------------------------------------------------------------------- everything
@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        pytest.param(op, d, id=f"{name_of(op)}-{d}")
        for op in ALL
        for d in DTYPES
        if d in op.supported_dtypes("cpu")
    ],
)
def test_forward_all(op: Any, dtype: torch.dtype) -> None:
    for strided in ((), range(100)):
        cases = [c for c in pick(op, dtype, 40, strided=strided) if traceable(c)]
        for k in range(0, len(cases), 10):
            passes(check_forward(cases[k : k + 10]))


@pytest.mark.slow
@pytest.mark.parametrize("op", FLOATS, ids=name_of)
def test_dynamic_all(op: Any) -> None:
    for case in pick(op, torch.float32, 20):
        if traceable(case):
            passes(check_forward([case], dynamic=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        pytest.param(op, d, id=f"{name_of(op)}-{d}")
        for op in DIFFERENTIABLE
        for d in (torch.float32, torch.float64, torch.bfloat16)
        if d in op.supported_backward_dtypes("cpu")
    ],
)
def test_gradient_all(op: Any, dtype: torch.dtype) -> None:
    cases = [c for c in pick(op, dtype, 24, requires_grad=True) if traceable(c)]
    for k in range(0, len(cases), 6):
        passes(check_gradient(cases[k : k + 6]))


@pytest.mark.slow
@pytest.mark.parametrize("op", BEHIND_DYNAMO, ids=name_of)
def test_behind_dynamo(op: Any) -> None:
    """Ops whose sizes or control flow depend on values: Dynamo captures or breaks the graph around
    them."""
    for case in pick(op, torch.float32, 4):
        passes(check_through_dynamo(case))
