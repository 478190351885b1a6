"""Triton kernels of the user on a GPU: called, autotuned, as operators, in place, in training,
under every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.tools.explain import explain
from tests import user_kernels
from tests.user_triton import CASES, TRAINED, WRAPPERS, check, check_told


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", list(CASES))
def test_as_without_the_kernel(name: str, wrapper: str) -> None:
    check(name, wrapper, "cuda")


@pytest.mark.parametrize("name", list(CASES))
def test_sizes_that_vary(name: str) -> None:
    check(name, "native", "cuda", dynamic=True)


def test_the_call_is_told() -> None:
    check_told("cuda", launched=True)


@pytest.mark.parametrize("name", list(CASES))
def test_beside_cuda_graphs(name: str) -> None:
    """The kernel is recorded with its neighbours."""
    fn, plain = CASES[name]
    compiled = torch.compile(fn, backend="plait", options={"cuda_graphs": True, "strict": True})
    for _ in range(4):
        given = [torch.randn(70, device="cuda", requires_grad=name in TRAINED) for _ in range(2)]
        mine, theirs = (
            [t.detach().clone().requires_grad_(t.requires_grad) for t in given] for _ in range(2)
        )
        got, want = compiled(*mine), plain(*theirs)
        torch.testing.assert_close(got, want)
        if name in TRAINED:
            got.sum().backward()
            want.sum().backward()
            torch.testing.assert_close([t.grad for t in mine], [t.grad for t in theirs])


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", list(user_kernels.CASES))
def test_kernels_that_people_write(name: str, wrapper: str) -> None:
    user_kernels.check(name, wrapper, "cuda")


@pytest.mark.parametrize("name", list(user_kernels.CASES))
def test_kernels_of_sizes_that_vary(name: str) -> None:
    user_kernels.check(name, "native", "cuda", dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", list(user_kernels.CASES))
def test_kernels_in_cuda_graphs(name: str, dynamic: bool) -> None:
    user_kernels.check(name, "native", "cuda", dynamic, cuda_graphs=True)


@pytest.mark.parametrize("name", list(user_kernels.CASES))
def test_the_launch_is_ours(name: str) -> None:
    user_kernels.check_launched(name, "cuda")


@pytest.mark.parametrize("name", list(user_kernels.CASES))
def test_packages(name: str, tmp_path: Path) -> None:
    def made(fn: Any, given: tuple[torch.Tensor, ...]) -> Any:
        plait.package(fn, tmp_path / "p.plait", given)
        return plait.load(tmp_path / "p.plait")

    user_kernels.check_traced(name, made, "cuda")


def test_an_autotuned_kernel_is_measured() -> None:
    """One of its configurations is chosen on the device; the next time the outcome is known."""
    said = []
    for _ in range(2):
        torch._dynamo.reset()
        fn, _ = user_kernels.CASES["matmul"]
        report = explain(fn, *(torch.randn(64, 64, device="cuda") for _ in range(2)), quiet=True)
        said += [note for g in report.graphs for note in g.tuned if "matmul_kernel" in note]
    assert len(said) == 2 and " us" in said[0] and "measured before" in said[1], said
