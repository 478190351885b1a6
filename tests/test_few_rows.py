"""Sums of few rows of a large table: kept for these rows alone, with the numbers of the table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from plait.devices import facts_of
from plait.graph.few_rows import add_few_rows
from plait.wrapper.instructions import Alloc, TensorInput
from tests.test_cuda_programs import compile_only, fakes, of, record

aten = torch.ops.aten
ROWS, WIDTH = 5000, 512
__all__ = ["compile_only"]


def gradient(dtype: torch.dtype, rows: int = ROWS) -> Callable[[Tensor, Tensor], Tensor]:
    """Of an embedding, as PyTorch decomposes it."""

    def fn(at: Tensor, grad: Tensor) -> Tensor:
        zeros = aten.full.default([rows, grad.shape[-1]], 0, dtype=torch.float32, device=at.device)
        total: Tensor = aten.index_put.default(zeros, [at], grad.float(), True)
        return total.to(dtype)

    return fn


def traced(fn: Callable[..., Tensor], *args: Tensor) -> GraphModule:
    return make_fx(fn, tracing_mode="fake")(*args)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.graph.few_rows.facts_of", lambda device: facts_of("cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (3, 40), (2, 1, 500)])
def test_sums_are_those_of_the_table(
    on_gpu: None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    at = torch.randint(-40, 40, shape)  # each several times, and some from the end
    grad = torch.randn(*shape, WIDTH).to(dtype)
    grad[0] = 2.0**-13  # less than half types add to larger numbers
    gm = traced(gradient(dtype), at, grad)
    want = gm(at, grad)
    assert add_few_rows(gm) == 1 and add_few_rows(gm) == 0
    gm.graph.eliminate_dead_code()
    gm.recompile()
    torch.testing.assert_close(gm(at, grad), want, rtol=8e-3, atol=1e-5)
    made = [n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert not any(x.dtype == torch.float32 and x.shape[0] == ROWS for x in made)


def test_what_is_not_finite_stays_in_its_rows(on_gpu: None) -> None:
    at, grad = torch.tensor([3, 9, 3, 4]), torch.ones(4, WIDTH, dtype=torch.bfloat16)
    grad[1] = torch.inf
    grad[3, 5] = torch.nan
    gm = traced(gradient(torch.bfloat16), at, grad)
    want = gm(at, grad)
    assert add_few_rows(gm) == 1
    gm.recompile()
    torch.testing.assert_close(gm(at, grad), want, equal_nan=True)


def test_tables_stay_where_it_does_not_pay(on_gpu: None) -> None:
    def unchanged(fn: Callable[..., Tensor], n: int, width: int = WIDTH) -> bool:
        at, grad = torch.zeros(n, dtype=torch.int64), torch.zeros(n, width, dtype=torch.bfloat16)
        return add_few_rows(traced(fn, at, grad)) == 0

    half = gradient(torch.bfloat16)
    assert not unchanged(half, ROWS // 4)
    assert unchanged(half, ROWS // 4 + 1)  # many rows
    assert unchanged(half, 8, 64)  # a small table
    assert unchanged(gradient(torch.float64), 8)

    def needed(at: Tensor, grad: Tensor) -> Tensor:
        zeros = aten.full.default([ROWS, WIDTH], 0, dtype=torch.float32)
        total: Tensor = aten.index_put.default(zeros, [at], grad.float(), True)
        return total + total.to(torch.bfloat16)

    assert unchanged(needed, 8)


def test_a_program_has_no_table_of_float32(compile_only: None) -> None:
    mode, (grad,) = fakes((64, WIDTH), dtype=torch.bfloat16)
    with mode:
        at = torch.zeros(64, dtype=torch.int64, device="cuda")
    p = record(lambda g, i: gradient(torch.bfloat16)(i, g), grad, at, mode=mode).wrapper
    assert len([i for i in p.inputs if isinstance(i, TensorInput)]) == 2
    tables = [str(i) for i in of(p, Alloc) if str(ROWS) in str(i)]
    assert not any("f32" in t for t in tables), tables
