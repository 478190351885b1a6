"""Patterns of quantised models on a GPU: as near to float64 as eager, in every target."""

from __future__ import annotations

import pytest
import torch

from benchmarks.quantised import CASES, e4m3, e5m2
from tests.flex_programs import WRAPPERS
from tests.test_quantised import FEW, MANY, check, check_codes


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("sizes", [FEW, (40, 128, 256), MANY], ids=["few", "some", "many"])
def test_as_eager(name: str, sizes: tuple[int, int, int]) -> None:
    check(name, sizes, "cuda", "native", torch.bfloat16)


@pytest.mark.parametrize("name", ["int4 weights", "rms norm, fp8", "silu, to fp8 by blocks"])
@pytest.mark.parametrize("wrapper", WRAPPERS[1:])
def test_every_target(wrapper: str, name: str) -> None:
    check(name, FEW, "cuda", wrapper, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, e4m3, e5m2], ids=str)
def test_codes_are_eagers(kind: torch.dtype, dtype: torch.dtype) -> None:
    check_codes(kind, "cuda", dtype)
