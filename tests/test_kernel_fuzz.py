"""Random kernels of a fixed list of seeds, on every instruction set. See tests/fuzz_kernels.py for how to look
for more."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from plait.runtime.toolchain import Isa
from tests.fuzz_kernels import Maker, check, compare
from tests.kernel_tools import Loaded, usable_isas


@pytest.mark.parametrize("isa", usable_isas(), ids=lambda i: i.name)
@pytest.mark.parametrize("first", [1000, 2000])
def test_random_kernels(isa: Isa, first: int, tmp_path: Path) -> None:
    makers = {seed: Maker(seed) for seed in range(first, first + 40)}
    kernels = {
        seed: dataclasses.replace(m.kernel(), name=f"fuzz_{seed}") for seed, m in makers.items()
    }
    loaded = Loaded(list(kernels.values()), isa, tmp_path, opt_level=1)
    wrong = []
    for seed, maker in makers.items():
        for threads in (1, 3):
            text = compare(kernels[seed], maker, loaded, threads)
            if text:
                wrong.append(
                    f"python -m tests.fuzz_kernels {seed} {isa.name}  # threads={threads}: {text[:300]}"
                )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("seed", [275, 421, 481, 20041])
def test_seeds_that_failed_once(seed: int, tmp_path: Path) -> None:
    for isa in usable_isas():
        assert check(seed, isa, tmp_path, threads=2) == ""
