"""The fuzzers of the CPU suite on a GPU: random kernels against the slow reference, random whole graphs against
eager."""

from __future__ import annotations

import pytest

from tests.fuzz_graphs import check, generate
from tests.gpu_kernels import OnDevice, long_rows, wrong


@pytest.mark.parametrize("first", range(5000, 5160, 40))
def test_random_kernels(first: int) -> None:
    found = wrong(range(first, first + 40), OnDevice, True)
    assert not found, "\n".join(found)


def test_long_rows() -> None:
    assert long_rows(OnDevice) == ""


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed: int) -> None:
    check(generate(seed), dynamic=seed % 3 == 2, backward=seed % 2 == 1, device="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20000, 21000, 40))
def test_many_random_kernels(first: int) -> None:
    found = wrong(range(first, first + 40), OnDevice, True)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1400, 20))
def test_many_random_graphs(first: int) -> None:
    for seed in range(first, first + 20):
        for backward in (False, True):
            check(generate(seed), dynamic=seed % 3 == 2, backward=backward, device="cuda")
