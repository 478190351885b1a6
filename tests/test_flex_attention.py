"""FlexAttention becomes kernels and products, forward and backward, in every target."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import plait
from plait.graph import attention
from plait.wrapper.instructions import CallExtern
from tests.flex_programs import (
    CASES,
    WRAPPERS,
    check,
    check_found_lengths,
    check_ignored,
    check_pages,
    check_refused,
    check_tables,
    gradients_anywhere,
    random_case,
    results,
)

HERE = os.environ.get("PLAIT_WRAPPER", "native")  # tests/interpreted.py has Python's alone


@pytest.mark.parametrize("name", list(CASES))
def test_as_eager(name: str) -> None:
    check(name, HERE, "cpu")


@pytest.mark.parametrize("seed", range(40))
def test_random_formulas(seed: int) -> None:
    check(random_case(seed), HERE, "cpu")


@pytest.mark.parametrize("wrapper", WRAPPERS[1:])
def test_every_target(wrapper: str) -> None:
    check("document", wrapper, "cpu")


def test_lengths_that_vary() -> None:
    check("plain", HERE, "cpu", longer=(0, 5, 100))


@pytest.mark.parametrize("name", ["alibi", "window"])
def test_blocks_of_queries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MOST_SCORES", 4000)
    check(name, "native", "cpu")


@pytest.mark.parametrize("name", ["causal", "whole"])
def test_plain_scores_are_the_library_s(name: str) -> None:
    """Causal and whole attention are PyTorch's kernels, forward and backward."""
    made = check(name, "native", "cpu")
    op = "aten::_scaled_dot_product_flash_attention_for_cpu"
    called = [{i.op for i in r.wrapper.body if isinstance(i, CallExtern)} for r in made]
    called = [ops - {"aten::sort.stable"} for ops in called]  # of an empty mask's lists of blocks
    assert called == [{op}, {f"{op}_backward"}]


def test_scores_that_ask_for_sizes() -> None:
    """Lengths vary, and so do the strides of one tensor that the score captures and the number of
    another's elements; both want gradients. There is no block mask."""

    def fn(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        n = w.shape[0]
        changed = lambda s, b, h, i, j: (
            torch.where(j < n, s, s - 2) * w[h] + (i + n) * 0.1 + bias[j, i]
        )
        out: torch.Tensor = flex_attention(q, k, k, changed)
        return out

    options = {"wrapper": HERE, "strict": True}
    compiled = torch.compile(fn, backend="plait", dynamic=True, options=options)
    for length, n in ((20, 7), (33, 12), (50, 3)):
        q, k = torch.randn(2, 2, length, 16), torch.randn(2, 2, length, 16)
        given = [x.requires_grad_() for x in (q, k, torch.randn(n), torch.randn(length, length))]
        with gradients_anywhere():
            got, want = results(compiled, given), results(fn, given)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_queries", [1, 20])
def test_pages(n_queries: int) -> None:
    check_pages(n_queries, HERE, "cpu")


def test_tables() -> None:
    check_tables(HERE, "cpu")


def test_lengths_that_are_found() -> None:
    check_found_lengths(HERE, "cpu")


def test_ignored_scores() -> None:
    check_ignored(HERE, "cpu")


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="attention has kernels on GPUs")
def test_a_kernel_that_is_refused() -> None:
    check_refused("soft cap", HERE, "cpu")


@pytest.mark.parametrize("batches, heads, keys", [(2, 2, 0), (2, 0, 5)])
def test_what_eager_refuses(batches: int, heads: int, keys: int) -> None:
    """Eager says so, in its own words."""
    q, k = torch.randn(2, heads, 4, 16), torch.randn(batches, heads, keys, 16)
    with pytest.raises((RuntimeError, IndexError, ZeroDivisionError)) as eager:
        flex_attention(q, k, k)
    with pytest.raises(type(eager.value), match=re.escape(str(eager.value).splitlines()[0])):
        torch.compile(flex_attention, backend="plait", options={"wrapper": HERE})(q, k, k)


def test_no_queries() -> None:
    q, k = torch.randn(2, 4, 0, 16), torch.randn(2, 4, 7, 16)
    fn = CASES["plain"].program("cpu")
    got, want = torch.compile(fn, backend="plait", options={"strict": True})(q, k, k), fn(q, k, k)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("road", ["compile", "package"])
def test_without_dynamo(road: str, tmp_path: Path) -> None:
    fn = CASES["causal"].program("cpu")
    given = [x.detach() for x in CASES["causal"].inputs("cpu")]
    if road == "compile":
        got = plait.compile(fn, tuple(given))
    else:
        plait.package(fn, str(tmp_path / "flex.plait"), tuple(given))
        got = plait.load(str(tmp_path / "flex.plait"))
    torch.testing.assert_close(got(*given), fn(*given))
