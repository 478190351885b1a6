"""Products of few rows, on a CPU or as on a GPU (tests/interpreted.py)."""

from __future__ import annotations

import os

import pytest

from tests.product_programs import CASES, check

AS_GPU = "TRITON_INTERPRET" in os.environ or "PLAIT_GPU_ARCH" in os.environ


@pytest.mark.parametrize("name", list(CASES))
def test_as_eager(name: str) -> None:
    check(CASES[name], "python" if AS_GPU else "native", "cpu", AS_GPU)
