"""Products whose rows keep their bits on a CPU, in bfloat16 above all, where the machine may
multiply pairs of numbers: any sizes, layouts and numbers of rows, numbers that are none, and what
kernels are for machines that have less."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import plait
from plait.config import Config
from plait.errors import UserError
from plait.kernel.cpu import loose
from plait.runtime.toolchain import check_isa, detect_isa

Program = Callable[..., list[Tensor]]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("avx512", "portable")]
ROWS = 301  # of several blocks, in panels of another length than those of one row
COUNTS = (1, 2, 7, 63, 66, 200)


@pytest.fixture(params=["auto", "avx2", *SLOW])
def isa(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    try:
        check_isa(Config(isa=name))
    except UserError as error:
        pytest.skip(str(error))
    return name


def compiled(fn: Program, isa: str, varies: bool = False) -> Program:
    """varies: one program takes any number of rows from 2 on, of the first argument."""
    torch._dynamo.reset()
    options = {"batch_invariant": True, "strict": True, "isa": isa}
    run = torch.compile(fn, backend="plait", options=options, dynamic=None if varies else False)

    def call(x: Tensor, *ws: Tensor) -> list[Tensor]:
        if varies:
            torch._dynamo.mark_dynamic(x := x.clone(), 0)
        return run(x, *ws)

    return call


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape) / 4).to(dtype)


def products(x: Tensor, *ws: Tensor) -> list[Tensor]:
    """Of the first columns of x and each matrix."""
    return [x[:, : len(w)] @ w for w in ws]


def matrices(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Of odd sizes, in all layouts, for rows of equal numbers: what products are added up takes
    itself away again, so that any other order of a sum shows in results of 16 bits."""
    odd = [numbers(k, n, dtype=dtype) for k, n in ((2, 33), (33, 17), (65, 1), (767, 49))]
    turned = [numbers(n, k, dtype=dtype).T for k, n in ((3, 16), (31, 81), (255, 5), (1601, 40))]
    far, wide = numbers(400, 90, dtype=dtype), numbers(50, 400, dtype=dtype)
    found = [
        *odd,
        *turned,
        far[::3, ::2],
        wide.T[5:, 1::7],
        numbers(400, 1, dtype=dtype).expand(400, 20),
    ]
    for w in found:
        half, column = len(w) // 2, w[:, :1] if w.stride(1) == 0 else w
        column *= 2 ** torch.randint(-9, 9, column.shape)
        column[len(w) - half :] = -column[:half].flip(0)
    return found


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.int16), y.view(torch.int16))


def rows_differ(isa: str, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether any product of rows has other bits among more of them, or where their number
    varies."""
    ws, x = matrices(dtype), numbers(ROWS, 1, dtype=dtype).expand(ROWS, 1601).contiguous()
    known = compiled(products, isa)(x[40:42], *ws)
    run = compiled(products, isa, varies=True)
    want = run(x, *ws)
    pairs = [(a, b[40:42]) for a, b in zip(known, want, strict=True)]
    for some in (*(slice(n) for n in COUNTS), slice(40, 43)):
        pairs += ((a, b[some]) for a, b in zip(run(x[some], *ws), want, strict=True))
    return not all(same(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_keep_their_bits(isa: str, dtype: torch.dtype) -> None:
    assert not rows_differ(isa, dtype)


def test_batches_keep_their_bits(isa: str) -> None:
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x @ y.mT, x @ y[:, : x.shape[2]], x.mT @ y[:, : x.shape[1]]]

    x, y, run = numbers(5, 35, 33), numbers(5, 51, 33), compiled(fn, isa)
    want = run(x, y)
    for some in (slice(1), slice(3, 4)):
        assert all(map(same, run(x[some].clone(), y[some].clone()), (z[some] for z in want)))
    assert same(run(x[:, :9].clone(), y)[0], want[0][:, :9])


@pytest.mark.parametrize("depth", [1, 33, 768, 3072, 16384])
def test_products_are_as_near_as_eagers(isa: str, depth: int) -> None:
    """Where what is added up takes itself away again, no rounding at the end hides errors."""
    x, w, order = numbers(70, depth), numbers(depth, 64), torch.randperm(2 * depth)
    x, w = torch.cat([x, x], 1)[:, order], torch.cat([w, -w])[order]
    run = compiled(products, isa)
    for a, b in ((x, w), (x.abs(), w.abs())):
        exact, size = a.double() @ b.double(), a.abs().double() @ b.abs().double()
        made, own = (fn(a, b)[0].double() for fn in (run, products))
        errors = [((y - exact) / size).square().mean().sqrt() for y in (made, own)]
        assert errors[0] <= 1.1 * errors[1]


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_in_its_row(isa: str, number: float) -> None:
    """Also where the last number of a row is one of a pair with the first of the next one."""
    ws, x, run = matrices(), numbers(70, 1601), compiled(products, isa)
    want = run(x, *ws)
    y = x.clone()
    y[33, ::32] = number
    others = torch.arange(70) != 33
    for a, b, eager in zip(run(y, *ws), want, products(y, *ws), strict=True):
        assert same(a[others], b[others])
        assert torch.equal(a[33].isnan(), eager[33].isnan())
        assert torch.equal(a[33].isinf(), eager[33].isinf())


def test_what_is_no_number_stays_in_its_column(isa: str) -> None:
    def fn(x: Tensor, w: Tensor) -> list[Tensor]:
        return [x @ w, x @ w.T.contiguous().T]

    x, w, run = numbers(9, 33), numbers(33, 19), compiled(fn, isa)
    want = run(x, w)
    w[32, 18] = torch.nan
    for a, b in zip(run(x, w), want, strict=True):
        assert same(a[:, :18], b[:, :18]) and a[:, 18].isnan().all()


def test_products_of_nothing(isa: str) -> None:
    x, run = numbers(5, 8), compiled(products, isa)
    ws = numbers(0, 4), numbers(8, 0), numbers(8, 3)
    for some in (5, 1, 0):
        for a, b in zip(run(x[:some], *ws), products(x[:some], *ws), strict=True):
            torch.testing.assert_close(a, b)
    assert not run(x, *ws)[0].any()


def source(isa: str) -> str:
    options = {"batch_invariant": True, "isa": isa}
    graphs = plait.explain(products, numbers(3, 40), numbers(40, 50), options=options, quiet=True)
    return str(graphs.graphs[0].kernel_source)


def test_pairs_are_multiplied_where_the_machine_can() -> None:
    assert ("sum_pairs(" in source("auto")) == detect_isa().bf16_pairs
    assert "sum_pairs(" not in source("avx512")  # of any machine that has it


def test_the_tests_find_what_they_are_for() -> None:
    """Sums that begin anew with each panel, which is shorter where rows are few; the number behind
    an odd row in the last pair."""
    if not detect_isa().bf16_pairs:
        pytest.skip("this machine multiplies no pairs")
    anew = replace(loose._PAIRS, made_of=loose._MADE_OF_PAIRS.replace("from > since", "false"))
    with mock.patch.object(loose, "_PAIRS", anew):
        assert rows_differ("auto")
    write = loose._tile_of_pairs

    def wider(*args: Any) -> str:
        return re.sub(r"splat_u32\((r\d+)\[k\]\)", r"splat_u32(pair_at(\1 + k))", write(*args))

    with mock.patch.object(loose, "_tile_of_pairs", wider), pytest.raises(AssertionError):
        test_what_is_no_number_stays_in_its_row("auto", torch.nan)


def test_products_are_rounded_where_they_are_made() -> None:
    """None takes twice the memory of eager's on the way."""
    names = re.findall(r'extern "C" i64 (plait_\w+?)\(', source("auto"))
    assert len(names) == 1 and names[0].startswith("plait_loose_mm_40x50")
