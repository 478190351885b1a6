"""Sorting, on a CPU or as on a GPU (tests/interpreted.py), where a few numbers are sorted by
loops."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.lower import sort
from plait.wrapper.instructions import CallExtern
from plait.wrapper.program import CompileRecord
from tests.product_programs import observing

AS_GPU = "TRITON_INTERPRET" in os.environ or "PLAIT_GPU_ARCH" in os.environ


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    """Some equal, some NaN, zeros of both signs."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(-4, 5, shape, generator=gen).to(dtype)
    if dtype.is_floating_point:
        x = x.masked_fill(torch.rand(shape, generator=gen) < 0.1, torch.nan)
        x = torch.where(torch.rand(shape, generator=gen) < 0.5, -x, x)
    return x


def check(fn: Any, x: Tensor, calls: int) -> None:
    records: list[CompileRecord] = []
    torch.compiler.reset()
    with observing(records):
        made = torch.compile(fn, backend="plait")(x)
    for a, b in zip(made, fn(x), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    if AS_GPU:
        assert sum(isinstance(i, CallExtern) for i in records[0].wrapper.body) == calls


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_by_pairs(dtype: torch.dtype, descending: bool) -> None:
    x = numbers(dtype, 3, 37, 2)
    check(lambda x: torch.sort(x, dim=1, stable=True, descending=descending), x, 0)


def test_of_transposed_and_of_none() -> None:
    check(lambda x: torch.sort(x.t(), stable=True), numbers(torch.float32, 21, 4), 0)
    check(lambda x: torch.sort(x, stable=True), torch.zeros(0, 3), 0)
    check(lambda x: torch.sort(x, stable=True), torch.tensor(3.0), 1)


def test_choices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that topk gives are few numbers."""
    monkeypatch.setattr(sort, "_PAIRS", 0)

    def fn(x: Tensor) -> Any:
        chosen = x.topk(2, -1).indices.flatten()
        return torch.sort(chosen, stable=True)

    gen = torch.Generator().manual_seed(1)
    check(fn, torch.rand(70, 5, generator=gen), 1)
    check(lambda x: torch.sort(x.argmax(1), stable=True), torch.rand(70, 5, generator=gen), 0)


def test_many_are_sorted_by_the_library() -> None:
    check(lambda x: torch.sort(x, stable=True), torch.arange(5000).flip(0), 1)
