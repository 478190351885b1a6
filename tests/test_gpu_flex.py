"""FlexAttention on a GPU: as eager's, in every target, by CUDA graphs, for lengths that vary."""

from __future__ import annotations

import pytest
import torch

from plait.graph import attention
from tests.flex_programs import CASES, WRAPPERS, check


@pytest.mark.parametrize("name", list(CASES))
def test_as_eager(name: str) -> None:
    check(name, "native", "cuda")


@pytest.mark.parametrize("wrapper", WRAPPERS[1:])
def test_every_target(wrapper: str) -> None:
    check("document", wrapper, "cuda")


def test_lengths_that_vary() -> None:
    check("plain", "native", "cuda", longer=(0, 5, 100))


def test_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MOST_SCORES", 4000)
    check("window", "native", "cuda")


def test_by_graphs() -> None:
    fn = CASES["causal"].program("cuda")
    options = {"cuda_graphs": True, "strict": True}
    compiled = torch.compile(fn, backend="plait", options=options)
    for seed in range(4):
        given = [x.detach() for x in CASES["causal"].inputs("cuda", seed)]
        torch.testing.assert_close(compiled(*given), fn(*given))
