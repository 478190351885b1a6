"""Patterns of quantised models on a GPU: as near to float64 as eager, in every target."""

from __future__ import annotations

import pytest
import torch

from benchmarks.quantised import CASES
from tests.flex_programs import WRAPPERS
from tests.test_quantised import FEW, MANY, check


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few rows", "many rows"])
def test_as_eager(name: str, sizes: tuple[int, int, int]) -> None:
    check(name, sizes, "cuda", "native", torch.bfloat16)


@pytest.mark.parametrize("name", ["int4 weights", "rms norm, fp8", "silu, to fp8 by blocks"])
@pytest.mark.parametrize("wrapper", WRAPPERS[1:])
def test_every_target(wrapper: str, name: str) -> None:
    check(name, FEW, "cuda", wrapper, torch.bfloat16)
