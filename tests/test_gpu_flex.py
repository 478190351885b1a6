"""FlexAttention on a GPU: as eager's, in every target, by CUDA graphs, for lengths that vary."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import plait
from plait.graph import attention
from plait.wrapper.instructions import Launch
from tests.flex_programs import (
    CASES,
    LARGE,
    WRAPPERS,
    check,
    check_found_lengths,
    check_ignored,
    check_pages,
    check_refused,
    check_tables,
    random_case,
)


@pytest.mark.parametrize("name", list(CASES))
def test_as_eager(name: str) -> None:
    check(name, "native", "cuda")


@pytest.mark.parametrize("name", list(LARGE))
def test_blocks_of_many(name: str) -> None:
    forward, *_ = check(LARGE[name], "native", "cuda")
    launched = [i.kernel for i in forward.wrapper.body if isinstance(i, Launch)]
    assert any(k.startswith("attention_result") for k in launched), launched


@pytest.mark.parametrize("seed", range(12))
def test_random_formulas(seed: int) -> None:
    check(random_case(seed), "native", "cuda")


@pytest.mark.parametrize("wrapper", WRAPPERS[1:])
def test_every_target(wrapper: str) -> None:
    check("document", wrapper, "cuda")


@pytest.mark.parametrize("name", ["plain", "some scores"])
def test_lengths_that_vary(name: str) -> None:
    check(dataclasses.replace(CASES[name], mask=None), "native", "cuda", longer=(0, 5, 100))


def test_keys_that_vary() -> None:
    """One query, whose keys are cut into parts."""
    case = dataclasses.replace(LARGE["parts"], lengths=(1, 1100), longer_queries=False)
    check(case, "native", "cuda", longer=(0, 300, 7000))


def test_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MOST_SCORES", 4000)
    check("double", "native", "cuda")  # no kernel holds float64


@pytest.mark.parametrize("n_queries", [1, 20])
def test_pages(n_queries: int) -> None:
    check_pages(n_queries, "native", "cuda")


def test_tables() -> None:
    check_tables("native", "cuda")


def test_lengths_that_are_found() -> None:
    check_found_lengths("native", "cuda")


@pytest.mark.parametrize("wrapper", ["native", "fx"])
def test_ignored_scores(wrapper: str) -> None:
    check_ignored(wrapper, "cuda")


def test_a_kernel_that_is_refused() -> None:
    check_refused("soft cap", "native", "cuda")


def test_by_package(tmp_path: Path) -> None:
    fn = LARGE["causal heads"].program("cuda")
    given = [x.detach() for x in LARGE["causal heads"].inputs("cuda")]
    plait.package(fn, str(tmp_path / "flex.plait"), tuple(given))
    got = plait.load(str(tmp_path / "flex.plait"))(*given)
    torch.testing.assert_close(got, fn(*given), rtol=2e-2, atol=2e-2)


def test_by_graphs() -> None:
    fn = CASES["causal"].program("cuda")
    options = {"cuda_graphs": True, "strict": True}
    compiled = torch.compile(fn, backend="plait", options=options)
    for seed in range(4):
        given = [x.detach() for x in CASES["causal"].inputs("cuda", seed)]
        torch.testing.assert_close(compiled(*given), fn(*given))


def test_gradients_of_scores_are_float32() -> None:
    """As eager's: their types are not those that tracing gave them."""
    torch._dynamo.reset()
    q, k, v, g = (torch.randn(2, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))

    def fn(*given: torch.Tensor) -> torch.Tensor:
        capped: torch.Tensor = flex_attention(
            *given, score_mod=lambda s, b, h, i, j: 2 * torch.tanh(s / 2)
        )
        return capped

    def gradients(call: Any, dtype: torch.dtype) -> Any:
        given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(call(*given), given, g.to(dtype))

    exact = gradients(fn, torch.float64)
    eager, made = (
        [(x - e).square().mean().sqrt().item() for x, e in zip(found, exact, strict=True)]
        for found in (
            gradients(f, torch.bfloat16) for f in (fn, torch.compile(fn, backend="plait"))
        )
    )
    assert all(a <= 1.05 * b for a, b in zip(made, eager, strict=True)), (made, eager)
