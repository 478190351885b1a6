"""What a loss saves for its gradient: rows of what goes in and two numbers each, not its
log_softmax."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ir.dtypes import DType, bf16, f16, f32
from plait.wrapper.program import Program
from tests.test_models import distance

M, N = 37, 1001
DTYPES = {torch.float32: f32, torch.bfloat16: bf16, torch.float16: f16}


def large_inputs(program: Program) -> list[DType]:
    """Of a backward pass: the dtypes of those as large as the matrix that went into the loss."""
    inputs = program.record.wrapper.inputs
    return [i.dtype for i in inputs if getattr(i, "shape", None) and set(i.shape) >= {M, N}]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("dim", [1, -1, 0])
def test_log_softmax_is_made_again(dtype: torch.dtype, dim: int, programs: list[Program]) -> None:
    labels = torch.randint(N, (M,))

    def loss(x: Tensor) -> Tensor:
        if dim == 0:
            return F.nll_loss(F.log_softmax((x * 2).float(), 0).t(), labels)
        return F.cross_entropy((x * 2).float(), labels)

    x = torch.randn(*((N, M) if dim == 0 else (M, N)), dtype=dtype)
    results = []
    for fn in (loss, torch.compile(loss, backend="plait")):
        leaf = x.clone().requires_grad_()
        out = fn(leaf)
        out.backward()
        results.append((out.detach(), leaf.grad))
    exact = x.double().requires_grad_()
    loss64: Tensor = F.cross_entropy((exact.t() if dim == 0 else exact) * 2, labels)
    loss64.backward()
    for want, got, right in zip(*results, (loss64.detach(), exact.grad), strict=True):
        rounding = torch.finfo(want.dtype).eps * float(right.abs().max())
        assert distance(got, right) <= 2 * distance(want, right) + rounding
    assert large_inputs(programs[1]) == [DTYPES[dtype]]


def test_what_the_caller_gets_is_saved(programs: list[Program]) -> None:
    x = torch.randn(M, N).requires_grad_()
    compiled: Callable[[Tensor], Tensor] = torch.compile(
        lambda x: F.log_softmax(x * 2, -1), backend="plait"
    )
    out = compiled(x)
    torch.testing.assert_close(out, F.log_softmax(x * 2, -1))
    out[:, 3].sum().backward()
    assert len(large_inputs(programs[1])) == 2  # the result and its gradient


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (0, 5), (5, 0)])
def test_odd_sizes(shape: tuple[int, ...]) -> None:
    x, y = (torch.full(shape, 0.3).requires_grad_() for _ in range(2))
    compiled = torch.compile(lambda x: (F.log_softmax(x, -1) * 2).exp().sum(), backend="plait")
    compiled(x).backward()
    (F.log_softmax(y, -1) * 2).exp().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
