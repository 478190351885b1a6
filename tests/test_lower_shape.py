"""Tensors made from nothing and tensors put together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from plait.ir.loops import Pointwise
from tests.lower_tools import check, lowered

r = torch.randn

BOTH = {  # with and without the decompositions that usually run before
    "tril": (lambda x: x.tril(1), r(2, 4, 5)),
    "triu": (lambda x: x.triu(-1), r(4, 5)),
    "roll": (lambda x: torch.roll(x, (1, -2), (0, 1)), r(4, 5)),
    "reflect": (lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"), r(2, 3, 4, 5)),
    "reflect of no images": (lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"), r(0, 3, 4, 5)),
    "replicate of no images": (lambda x: F.pad(x, (2, 1), mode="replicate"), r(0, 3, 4)),
    "replicate": (lambda x: F.pad(x, (2, 1, 1, 3), mode="replicate"), r(2, 3, 4, 5)),
    "eye": (lambda x: torch.eye(x.shape[0], 5), r(4)),
    "stack": (lambda x, y: torch.stack([x, y], 1) * 2, r(3, 4), r(3, 4)),
    "meshgrid": (lambda x, y: torch.meshgrid(x, y, indexing="ij"), r(3), r(4)),
    "linspace of tensors": (lambda x, y: torch.linspace(x, y, 50), r(()), r(())),
}
ONCE = {
    "roll flat": (lambda x: torch.roll(x, 3), r(4, 5)),
    "linspace": (lambda x: torch.linspace(0, 1, x.shape[0]), r(14)),
    "flip": (lambda x: x.flip(0, -1), r(3, 4, 5)),
    "flip nothing": (lambda x: x.flip(0), r(())),
    "repeat": (lambda x: x.repeat(2, 3, 2), r(3, 4)),
    "repeat nothing": (lambda x: x.repeat(2, 1), r(0, 4)),
    "pad and crop": (lambda x: F.pad(x, (1, 2, -1, 1), value=3), r(4, 5)),
    "pad ints": (lambda x: F.pad(x, (1, 2)), torch.randint(0, 4, (3, 4))),
    "pad bools": (lambda x: F.pad(x, (1, 2), value=True), torch.randint(0, 2, (3, 4)).bool()),
    "pad half": (lambda x: F.pad(x, (1, 2), value=0.1), r(3, 4).bfloat16()),
    "cat": (lambda x, y: torch.cat([x, y], 1) + 1, r(3, 4), r(3, 2)),
    "cat promotes": (lambda x, y: torch.cat([x, y, x], 0), r(3, 4), torch.randint(0, 3, (5, 4))),
    "cat of an old-style empty": (lambda x, y: torch.cat([x, y, x], 0), r(3, 4), torch.zeros(0)),
    "cat of nothing": (lambda x: torch.cat([x, x], 1), r(3, 0)),
    "cat of many": (lambda x: torch.cat([x] * 8, -1).relu(), r(3, 4)),
    "cat channels_last": (
        lambda x: torch.cat([x, x], 1) * 2,
        r(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ),
    "constants": (
        lambda x: (
            torch.full_like(x, 2),
            torch.ones_like(x),
            torch.zeros(x.shape[1], 2, dtype=torch.int8),
            x.new_full((3,), True),
            torch.full((2,), float("nan")),
            torch.scalar_tensor(3, dtype=torch.int64),
        ),
        r(4, 5),
    ),
    "arange": (
        lambda x: (
            torch.arange(x.shape[0]),
            torch.arange(1, x.shape[0], 2),
            torch.arange(0, 1, 0.1),
            torch.arange(2, 9, dtype=torch.float32),
            torch.arange(5, 0, -1, dtype=torch.int8),
            torch.arange(0.0, 7, 2, dtype=torch.bfloat16),
        ),
        r(7),
    ),
}


@pytest.mark.parametrize("decompose", [True, False])
@pytest.mark.parametrize("case", BOTH)
def test_direct_and_decomposed(case: str, decompose: bool) -> None:
    fn, *args = BOTH[case]
    check(fn, *args, decompose=decompose)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64])
def test_ends_of_linspace_have_its_dtype(dtype: torch.dtype) -> None:
    """Those that are tensors too: ATen converts them first."""
    start, end = torch.tensor(4.3), torch.tensor(50)

    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.linspace(x, y, 50, dtype=dtype)
            for x, y in ((a, b), (a, 1.6), (1.6, b), (1.6, 50))
        )

    check(fn, start, end, decompose=False, exact=True)


@pytest.mark.parametrize("case", ONCE)
def test_equal(case: str) -> None:
    fn, *args = ONCE[case]
    check(fn, *args)


def test_cat_is_one_loop_for_loops_and_pieces_for_the_caller() -> None:
    x, y = r(3, 4), r(3, 2)
    loops = lowered(lambda a, b: torch.cat([a, b], 1).exp(), (x, y)).program.ops
    assert [op.index for op in loops if isinstance(op, Pointwise)] == [None, None]
    pieces = lowered(lambda a, b: torch.cat([a, b], 1), (x, y)).program.ops
    assert len(pieces) == 2 and all(
        isinstance(p, Pointwise) and p.index is not None for p in pieces
    )


def test_results_that_are_alike_are_tensors_of_their_own() -> None:
    """One copy serves a product and the first of them."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.transpose(0, 1).reshape(320, 64)
        return y @ w, y, y.clone()

    x, w = torch.randn(4, 80, 64), torch.randn(64, 512)
    made = torch.compile(fn, backend="plait")(x, w)
    assert len({t.data_ptr() for t in made}) == 3
    torch.testing.assert_close(made, fn(x, w))
