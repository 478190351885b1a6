"""The fuzzers of the CPU suite on a GPU: random kernels against the slow reference, random whole
graphs against eager."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import BAD, run
from tests.fuzz.check import passes
from tests.fuzz.make import SUBJECTS, generate
from tests.gpu_kernels import OnDevice, long_rows, wrong


@pytest.mark.parametrize("first", range(5000, 5160, 40))
def test_random_kernels(first: int) -> None:
    found = wrong(range(first, first + 40), OnDevice, True)
    assert not found, "\n".join(found)


def test_long_rows() -> None:
    assert long_rows(OnDevice) == ""


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed: int) -> None:
    passes(generate(seed, "cuda"))


@pytest.mark.parametrize("seed", range(20))
def test_random_control_flow(seed: int) -> None:
    passes(generate(seed, "cuda", subject="flow"))


@pytest.mark.parametrize("seed", range(12))
def test_random_networks(seed: int) -> None:
    passes(generate(seed, "cuda", subject="networks"))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20000, 21000, 40))
def test_many_random_kernels(first: int) -> None:
    found = wrong(range(first, first + 40), OnDevice, True)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("first", range(200_000, 210_000, 500))
def test_many_random_graphs(first: int, subject: str) -> None:
    """In processes of their own: what takes the device along is a failure of one test."""
    found = run(500, None, 2, first, "cuda", 3600, subject)
    bad = [f for f in found["failures"] if f["kind"] in BAD]
    assert not bad, "\n\n".join(f"seed {f['seed']}: {f['what']}" for f in bad)
