"""Reads and writes at computed positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.against_eager import same
from tests.lower_tools import Evaluation, check, lowered

aten = torch.ops.aten
r = torch.randn


def ints(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape)


at = torch.tensor([0, 2, -1, 1])

READS = {
    "rows": (lambda x, i: x[i], r(4, 5), at),
    "columns": (lambda x, i: x[:, i], r(3, 4, 5), at),
    "apart": (lambda x, i: x[i, :, i], r(4, 3, 4), at),
    "broadcast": (lambda x, i: x[i, i[:, None]], r(4, 4, 3), at),
    "int32": (lambda x, i: x[i], r(4, 5), at.int()),
    "mask": (lambda x: x[x > 0], r(4, 5)),
    "mask then loops": (lambda x: x[x > 0] * 2 + 1, r(4, 5)),
    "gather": (lambda x, i: x.gather(1, i), r(4, 5), ints(5, 3, 2)),
    "gather of a number": (lambda x, i: x.gather(0, i), r(()), ints(1, 2)),
    "gather by a number": (lambda x, i: x.gather(0, i), r(3), ints(3)),
    "index_select": (lambda x, i: x.index_select(1, i), r(4, 5), at.abs()),
    "index_select of a number": (lambda x, i: x.index_select(0, i), r(()), ints(1, 1)),
    "embedding": (lambda w, i: F.embedding(i, w), r(7, 5), ints(7, 3, 4)),
    "embedding of a number": (lambda w, i: F.embedding(i, w), r(7, 5), torch.tensor(3)),
    "take": (torch.take, r(4, 5), ints(20, 3, 2, low=-20)),
    "take at a number": (torch.take, r(4, 5), torch.tensor(-3)),
    "take nothing": (torch.take, r(0, 5), ints(1, 0)),
    "nothing": (lambda x, i: x[i], r(4, 5), ints(4, 0)),
    "nonzero": (torch.nonzero, ints(2, 3, 4)),
    "unique": (lambda x: torch.unique(x, return_inverse=True), ints(3, 7)),
    "masked_select": (lambda x, m: torch.masked_select(x, m).sum(), r(4, 5), r(4, 5) > 0),
    "repeat_interleave": (
        lambda x, m: torch.repeat_interleave(x, m, 0),
        r(3, 5),
        torch.tensor([1, 2, 0]),
    ),
}
WRITES = {
    "slice_scatter": (lambda x, y: aten.slice_scatter(x, y, 1, 1, 9, 2), r(4, 12), r(4, 4)),
    "slice_scatter from the end": (lambda x, y: aten.slice_scatter(x, y, 0, -3), r(8, 4), r(3, 4)),
    "slice_scatter of all": (lambda x, y: aten.slice_scatter(x, y, 0, 0), r(8, 4), r(8, 4)),
    "select_scatter": (lambda x, y: aten.select_scatter(x, y, 1, -1), r(8, 4), r(8)),
    "diagonal_scatter": (lambda x, y: torch.diagonal_scatter(x, y, 1), r(4, 4), r(3)),
    "diagonal_scatter below": (
        lambda x, y: torch.diagonal_scatter(x, y, -2, 2, 0),
        r(5, 3, 4),
        r(3, 2),
    ),
    "masked_fill": (lambda x, m: x.masked_fill(m, -1.0), r(4, 5), r(4, 5) > 0),
    "masked_fill by a tensor": (lambda x, m, v: x.masked_fill(m, v), r(4, 5), r(5) > 0, r(())),
    "scatter": (lambda x, i, s: x.scatter(1, i, s), r(4, 5), ints(5, 3, 1), r(4, 5)),
    "scatter a number": (lambda x, i: x.scatter(0, i, 2.5), r(4, 5), ints(4, 3, 1)),
    "scatter into a number": (lambda x, i: x.scatter(0, i, 2.5), r(()), ints(1)),
    "scatter with": (
        lambda x, i, s: aten.scatter.reduce(x, 1, i, s, reduce="multiply"),
        r(4, 5),
        ints(5, 3, 1),
        r(4, 5),
    ),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s), r(4, 5), ints(5, 3, 4), r(4, 5)),
    "scatter_add into a view": (
        lambda x, i, s: x.t().scatter_add(1, i, s),
        r(5, 4),
        ints(5, 3, 4),
        r(4, 5),
    ),
    "index_put": (lambda x, i, v: x.index_put((i,), v), r(4, 5), torch.tensor([1, -1]), r(2, 5)),
    "index_put adds": (
        lambda x, i, v: x.index_put((i, i), v, accumulate=True),
        r(4, 4),
        torch.tensor([1, -1, 1]),
        r(3),
    ),
    "index_put bool adds": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        r(4) > 0,
        ints(4, 3),
        r(3) > 0,
    ),
    "index_put mask": (lambda x, v: x.index_put((x > 0,), v), r(4, 5), r(())),
    "index_put rows of a mask": (lambda x, m, v: x.index_put((m,), v), r(4, 5), r(4) > 0, r(1, 5)),
    "index_put as many as hit": (
        lambda x, m, v: x.index_put((m,), v),
        r(4, 5),
        torch.tensor([True, False, True, True]),
        r(3, 5),
    ),
    "masked_scatter": (lambda x, m, s: x.masked_scatter(m, s), r(3, 4), r(3, 4) > 0, r(12)),
}
ALONG = {
    "index_add": (
        lambda x, i, v: x.index_add(0, i, v, alpha=2),
        r(4, 5),
        torch.tensor([1, 3, 1]),
        r(3, 5),
    ),
    "index_copy": (lambda x, i, v: x.index_copy(0, i, v), r(4, 5), torch.tensor([1, 3]), r(2, 5)),
    "index_fill": (lambda x, i: x.index_fill(1, i, 3.0), r(4, 5), torch.tensor([1, -1])),
    "embedding backward": (
        lambda g, i: aten.embedding_dense_backward(g, i, 7, 2, False),
        r(3, 4, 5),
        ints(7, 3, 4),
    ),
}


@pytest.mark.parametrize("case", READS)
def test_reads(case: str) -> None:
    fn, *args = READS[case]
    check(fn, *args)


@pytest.mark.parametrize("case", WRITES)
def test_writes(case: str) -> None:
    fn, *args = WRITES[case]
    check(fn, *args)


@pytest.mark.parametrize("decompose", [True, False])
@pytest.mark.parametrize("case", ALONG)
def test_along_one_dimension(case: str, decompose: bool) -> None:
    fn, *args = ALONG[case]
    check(fn, *args, decompose=decompose)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_reductions(reduce: str, include_self: bool) -> None:
    def scatter(x, i, s):
        return x.scatter_reduce(1, i, s, reduce, include_self=include_self)

    check(scatter, r(4, 5), ints(5, 3, 4), r(4, 5))
    check(scatter, ints(9, 4, 5, low=-9), ints(5, 3, 4), ints(9, 4, 5, low=-9))
    if reduce != "sum":
        check(
            lambda x, i, s: x.index_reduce(1, i, s, reduce, include_self=include_self),
            r(4, 5),
            ints(5, 4),
            r(4, 4),
        )


one, two = torch.tensor([0]), torch.ones(1, 3)
INTO_SHARED = {
    "index_fill": lambda x: x.index_fill(0, one, 9.0),
    "index_put": lambda x: x.index_put((one,), torch.ones(3)),
    "index_add": lambda x: x.index_add(0, one, two),
    "index_copy": lambda x: x.index_copy(0, one, two),
    "scatter": lambda x: x.scatter(0, torch.tensor([[0, 0, 0]]), 7.0),
    "scatter_add": lambda x: x.scatter_add(0, torch.tensor([[0, 1, 0]]), two),
    "scatter_reduce": lambda x: x.scatter_reduce(0, torch.tensor([[0, 1, 0]]), two, "amax"),
    "a clone": lambda x: x.clone().index_fill_(0, one, 9.0),
}


@pytest.mark.parametrize("case", INTO_SHARED)
def test_writes_to_a_tensor_whose_elements_share_memory(case: str) -> None:
    fn = INTO_SHARED[case]
    given = torch.arange(5.0)
    same(
        lambda a, b: (fn(a), fn(b)),
        lambda: (given[:3].expand(2, 3), given.as_strided((3, 3), (1, 1))),
        calls=1,
    )


def test_writes_to_a_view_that_starts_its_memory() -> None:
    def fn(p, q, i):
        front = (p + 1).chunk(2, 1)[0]
        return (
            front.index_fill(1, i, 9.0) * 2,
            q[:, :2].index_put((i,), torch.ones(2)),
            q[:, ::2].index_fill(1, i, 0.0),
        )

    same(fn, lambda: (torch.arange(12.0).view(3, 4), torch.arange(15.0).view(3, 5), one), calls=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_half_types(dtype: torch.dtype) -> None:
    def fn(x, i, s):
        return x.scatter_reduce(0, i, s, "mean"), x.index_reduce(
            0, i, s, "mean", include_self=False
        )

    same(
        fn,
        lambda: (torch.arange(4.0).to(dtype), torch.tensor([0, 1, 0]), torch.ones(3, dtype=dtype)),
        calls=1,
    )


COLLIDE = {
    "scatter_add": lambda x, i, s: x.scatter_add(0, i, s),
    "scatter_add to rows": lambda x, i, s: (
        x[:, None].expand(2, 3).scatter_add(0, i[:, None].expand(300, 3), s[:, None].expand(300, 3))
    ),
    "scatter_reduce": lambda x, i, s: x.scatter_reduce(0, i, s, "sum"),
    "scatter_reduce to means": lambda x, i, s: x.scatter_reduce(0, i, s, "mean"),
    "scatter with": lambda x, i, s: aten.scatter.reduce(x, 0, i, s, reduce="add"),
    "index_add": lambda x, i, s: x[:, None].expand(2, 3).index_add(0, i, s[:, None].expand(300, 3)),
    "products": lambda x, i, s: x.scatter_reduce(0, i, s * 0 + 1.0078125, "prod"),
}


@pytest.mark.parametrize("case", COLLIDE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_that_collide_are_rounded_once(case: str, dtype: torch.dtype) -> None:
    """Added one by one and rounded each time, the values would vanish beside the sum."""
    big = 4096 if dtype == torch.float16 else 512
    x, i = torch.tensor([big, 1.0], dtype=dtype), torch.arange(300) % 2
    same(COLLIDE[case], lambda: (x, i, torch.ones(300, dtype=dtype)), calls=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_repeated_rows_are_rounded_once(dtype: torch.dtype) -> None:
    """Eager adds them one by one on a CPU; sums in float32 are closer."""

    def fn(table, grad, i):
        row = aten.embedding_dense_backward(grad, i, 4, -1, False)
        return row, table.index_put((i,), grad, accumulate=True)

    grad, i = torch.full((5000, 2), 1.25, dtype=dtype), torch.zeros(5000, dtype=torch.int64)
    for got in torch.compile(fn, backend="plait")(torch.zeros(4, 2, dtype=dtype), grad, i):
        assert torch.equal(got[0], torch.full((2,), 6250.0, dtype=dtype))
        assert not got[1:].any()


def test_scaled_bools_are_added() -> None:
    given = lambda: (
        torch.tensor([False, True, False]),
        torch.tensor([0, 2]),
        torch.tensor([True, False]),
    )
    same(lambda x, i, s: x.index_add(0, i, s, alpha=2), given, calls=1)


@pytest.mark.parametrize(
    ("fn", "bad"),
    [
        (lambda x, i: x[i], 4),
        (lambda x, i: x[i], -5),
        (lambda x, i: x.gather(0, i), -1),
        (lambda x, i: x.gather(0, i), 4),
        (lambda x, i: x.index_select(0, i), -1),
        (lambda x, i: x.scatter(0, i, 1.0), 4),
        (lambda x, i: F.embedding(i, x[:, None]), 4),
    ],
)
def test_positions_outside_are_errors(fn, bad: int) -> None:
    x = r(4)
    low = lowered(fn, (x, torch.tensor([1])))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        Evaluation(low, (x, torch.tensor([bad]))).run()


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)])
def test_results_on_the_way_keep_their_elements(given: tuple[bool, bool], n: int) -> None:
    """Several writes after one call of an operator: each may take the memory of the one before
    unless that is a result."""

    def fn(x, i, v, at, more):
        first = x.put(i, v, accumulate=True)
        second = first.index_put((i,), v[:, None], accumulate=True)
        third = second.scatter_add(1, at, more)
        return [r for r, wanted in zip((first, second), given, strict=True) if wanted] + [
            third,
            third.sum(),
        ]

    x, i, at = (
        torch.arange(12).view(4, 3),
        torch.tensor([2, 1, 2]),
        torch.zeros(4, n, dtype=torch.int64),
    )
    args = (x, i, torch.tensor([5, 6, 7]), at, torch.ones_like(at))
    got = torch.compile(fn, backend="plait")(*args)
    assert all(map(torch.equal, got, fn(*args)))
    assert len({r.data_ptr() for r in got}) == len(got)


PARTS_ADDED: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, int], tuple[int, int]]] = {
    "a part of a larger one": (
        lambda x, i, v: x[:, :3] + torch.zeros(4, 3).index_add(0, i, v),
        (4, 6),
        (3, 3),
    ),
    "to a part of what is scattered": (
        lambda x, i, v: x + torch.zeros(4, 6).index_add(0, i, v)[:, :3],
        (4, 3),
        (3, 6),
    ),
    "rows of a larger one": (
        lambda x, i, v: x[:4] + torch.zeros(4, 6).index_add(0, i, v),
        (9, 6),
        (3, 6),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PARTS_ADDED)
def test_parts_that_are_added_to_what_is_scattered_into_zeros(name: str, dynamic: bool) -> None:
    """The sum is scattered into the part, not into all that it is a part of."""
    fn, of_x, of_values = PARTS_ADDED[name]
    args = (r(*of_x), torch.tensor([1, 1, 3]), r(*of_values))
    got = torch.compile(fn, backend="plait", dynamic=dynamic)(*args)
    torch.testing.assert_close(got, fn(*args))
