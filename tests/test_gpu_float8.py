"""Floats of 8 bits on a GPU: casts, moves and comparisons, bit for bit as eager's there."""

from __future__ import annotations

import pytest
import torch

from tests.test_float8 import (
    OPERATORS,
    REFUSED,
    WIDE,
    check_operator,
    check_products,
    codes,
    formats,
    numbers,
    same,
    wides,
)


@formats
@wides
def test_casts(kind: torch.dtype, wide: torch.dtype) -> None:
    """Every code and every number, NaNs of either sign apart."""
    back = torch.compile(lambda x: x.to(wide), backend="plait")
    same(back(codes(kind).cuda()), codes(kind).cuda().to(wide))
    x = numbers(kind).to(wide)
    if wide.itemsize == 2:
        x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(wide)
    x = x.cuda()
    got, want = torch.compile(lambda x: x.to(kind), backend="plait")(x), x.to(kind)
    same(got.float(), want.float())


@formats
@pytest.mark.parametrize("name", [*OPERATORS, *REFUSED])
def test_operators(name: str, kind: torch.dtype) -> None:
    check_operator(name, kind, "cuda")


def test_products() -> None:
    check_products("cuda")


@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_beside_cuda_graphs(wide: torch.dtype) -> None:
    """A cache of float8, written and read in recordings."""

    def fn(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache.index_put_((at,), x.to(cache.dtype))
        return cache.to(wide) * 2

    compiled = torch.compile(fn, backend="plait", mode="reduce-overhead")
    a = torch.randn(64, 32, device="cuda").to(torch.float8_e4m3fn)
    b = a.clone()
    for step in range(4):
        x, at = torch.randn(1, 32, device="cuda"), torch.tensor([step], device="cuda")
        same(compiled(a, x, at).clone(), fn(b, x, at))
    same(a, b)
