"""Products of few rows or results on a GPU: as near to float64 as eager's, in every target."""

from __future__ import annotations

import pytest

from tests.flex_programs import WRAPPERS
from tests.product_programs import CASES, check


@pytest.mark.parametrize("name", list(CASES))
def test_as_eager(name: str) -> None:
    check(CASES[name], "native", "cuda", on_gpu=True)


@pytest.mark.parametrize("name", ["residual", "parts"])
@pytest.mark.parametrize("wrapper", WRAPPERS[1:])
def test_every_target(wrapper: str, name: str) -> None:
    check(CASES[name], wrapper, "cuda", on_gpu=wrapper != "fx")
