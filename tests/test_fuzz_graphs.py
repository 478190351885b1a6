"""Random whole graphs against eager; a failure prints the program (`python -m tests.fuzz_graphs SEED` runs one)."""

from __future__ import annotations

import pytest

from tests.fuzz_graphs import check, generate


@pytest.mark.parametrize("seed", range(24))
def test_random_graphs(seed: int) -> None:
    check(generate(seed), dynamic=seed % 3 == 2, backward=seed % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1400, 20))
def test_many_random_graphs(first: int) -> None:
    for seed in range(first, first + 20):
        for backward in (False, True):
            check(generate(seed), dynamic=seed % 3 == 2, backward=backward)
