"""Triton kernels of the user on a GPU: called, autotuned, as operators, in place, in training,
under every target."""

from __future__ import annotations

import pytest
import torch

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
    """The call runs at every call, between what is recorded."""
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
