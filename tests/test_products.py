"""Products of few rows, on a CPU or as on a GPU (tests/interpreted.py)."""

from __future__ import annotations

import os

import pytest

from tests.layer_programs import KERNELS, case
from tests.product_programs import CASES, check

AS_GPU = "TRITON_INTERPRET" in os.environ or "PLAIT_GPU_ARCH" in os.environ


@pytest.mark.parametrize("name", list(CASES))
def test_as_eager(name: str) -> None:
    check(CASES[name], "python" if AS_GPU else "native", "cpu", AS_GPU)


@pytest.mark.skipif(not AS_GPU, reason="counts what a GPU launches")
@pytest.mark.parametrize("rows", [8, 72])
@pytest.mark.parametrize("name", list(KERNELS))
def test_kernels_of_a_layer(name: str, rows: int) -> None:
    check(case(name, rows), "python", "cpu", on_gpu=True)
