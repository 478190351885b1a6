"""The table of test_indices_of_nothing.py on a GPU, where eager looks at sizes alone when nothing
is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import plait
from tests.test_indices_of_nothing import (
    INDICES,
    OF_ROWS,
    OPS,
    WIDE,
    at_once,
    compare,
    dimensions,
    given,
    shapes,
)

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")
TABLE = OPS | OF_ROWS | WIDE


def harmless(name: str, d: int, rank: int) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Sizes and indices with which eager does not lose the device: none is outside where it looks
    at them."""
    for shape, index in itertools.product(shapes(rank), INDICES.values()):
        nothing = 0 in shape[:d] + shape[d + 1 :] and not name.startswith("index_put")
        if nothing or not index or (shape[d] and max(map(abs, index)) == 0):
            yield shape, index


@pytest.mark.parametrize("name", TABLE)
def test_sizes_that_become_0(name: str) -> None:
    for rank in (1, 2, 3):
        for d in dimensions(name, rank)[-2:]:
            fn = lambda x, i, v, d=d: TABLE[name](x, i, v, d)
            example = given(name, (3, 4, 5)[:rank], d, [0, 1, 2, 1, 0, 2, 2], "cuda")
            sizes = tuple(dict.fromkeys(range(t.dim()), torch.export.Dim.AUTO) for t in example)
            run = plait.compile(fn, example, sizes)
            for shape, index in harmless(name, d, rank):
                compare(
                    fn,
                    run,
                    given(name, shape, d, index, "cuda"),
                    f"{shape}, dimension {d}, {index}",
                )


@pytest.mark.parametrize("name", TABLE)
def test_sizes_of_0(name: str) -> None:
    fn = lambda x, i, v: TABLE[name](x, i, v, 0)
    for shape, index in harmless(name, 0, 2):
        if 0 in shape and index in (INDICES["inside"], INDICES["outside"]):
            compare(fn, at_once(fn), given(name, shape, 0, index, "cuda"), f"{shape}, {index}")
