"""FX graphs on a GPU against eager: Triton's own launcher runs the kernels. Collected where torch
has a CUDA device."""

from __future__ import annotations

import pytest
import torch

from tests import test_gpu
from tests.fuzz.check import passes, with_road
from tests.fuzz.make import generate
from tests.test_models import trains_as_eager


@pytest.fixture(autouse=True)
def _fx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_WRAPPER", "fx")


@pytest.mark.parametrize("name", test_gpu.CASES)
def test_case(name: str) -> None:
    test_gpu.test_case(name)


@pytest.mark.parametrize("name", ["bert", "unet"])
def test_training_step(name: str) -> None:
    trains_as_eager(name, *test_gpu.moved(name))


@pytest.mark.parametrize("seed", range(8))
def test_random_graphs(seed: int) -> None:
    passes(with_road(generate(seed, "cuda"), wrapper="fx"))


def test_tensors_may_start_anywhere_and_sizes_may_be_one() -> None:
    run = torch.compile(lambda x: (x * 2).softmax(-1), backend="plait", dynamic=True)
    whole = torch.randn(400, device=test_gpu.CUDA)
    for start, rows, cols in ((1, 7, 33), (3, 2, 5), (0, 16, 16), (1, 1, 2)):
        x = whole[start : start + rows * cols].view(rows, cols)
        torch.testing.assert_close(run(x), (x * 2).softmax(-1))
