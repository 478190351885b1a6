"""Numbers that only a run tells (sizes of `nonzero`, values of `item`), called with others than
were traced: what eager gives, or a clear error where tracing equated them with something else, on
every road and target. Never memory of others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.errors import InputError
from plait.wrapper.targets import TARGETS

Call = tuple[Any, ...]
Case = tuple[Callable[..., Tensor], list[Call]]

X, Y, M = (
    torch.tensor([1.0, 2, -2, 3]),
    torch.tensor([3.0, 4, 5]),
    torch.tensor([True, False, True, False]),
)
ONE, NONE, ALL = (
    torch.tensor([False, True, False, False]),
    torch.zeros(4, dtype=torch.bool),
    torch.ones(4).bool(),
)
MASKS = (M, ONE, NONE, ALL)
SQUARE, W = torch.arange(16.0).reshape(4, 4).sin(), torch.arange(12.0).reshape(4, 3).cos()
INDICES = [torch.tensor(i) for i in (2, -1, 0, -4, 3, 4, 7, -5, -9)]

LENGTHS = ([4, 3, 2, 1], [4, 4, 4, 4], [2, 1, 1, 1], [1, 2, 3, 4], [4, 3, 2, 0])


def packed(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    return torch._pack_padded_sequence(x[..., None], lengths, batch_first)


def four(x: Tensor) -> Tensor:
    z = x.nonzero()
    torch._check(z.size(0) == 4)
    return z + 3


def two_or_three(x: Tensor) -> Tensor:
    z = x.nonzero()
    torch._check(z.size(0) >= 2)
    torch._check(z.size(0) <= 3)
    return z * 2


def even(x: Tensor) -> Tensor:
    z = x.nonzero()
    torch._check(z.size(0) % 2 == 0)
    return z.view(-1, 2) + 1


def write(x: Tensor, i: Tensor) -> Tensor:
    x = x + 1
    x[i.item()] = 5.0
    return x


def written_and_cut(x: Tensor, i: Tensor) -> Tensor:
    x = x + 1
    x[: i.item()] = 5.0
    return x[i.item() :]


def written_column(x: Tensor, i: Tensor) -> Tensor:
    x = x + 1
    x[1:, i] = torch.arange(3.0)
    x[i, i] += 7
    return x


def written_argument(x: Tensor, i: Tensor) -> Tensor:
    x[..., i.item()] = x[i]
    return x * 2


def bits_of_a_row(x: Tensor, i: Tensor) -> Tensor:
    return (x * 2).view(torch.int32).t()[:, i.item() :].t()


def asserted_value(x: Tensor, i: Tensor) -> Tensor:
    n = i.item()
    torch._check(n == 3)
    return x[:n] * 2


# Called first as they are compiled. The results of these are eager's whenever eager gives one.
EXACT: dict[str, Case] = {
    "check of a size": (four, [(torch.ones(4),), (torch.zeros(4),), (X - 1,)]),
    "check of a range": (two_or_three, [(X - 1,), (torch.zeros(4),), (torch.ones(4),), (X * M,)]),
    "check of a multiple": (even, [(X,), (X * M,), (X * ONE,), (X * 0,)]),
    "check of a value": (
        asserted_value,
        [(X, torch.tensor(3)), (X, torch.tensor(2)), (X, torch.tensor(4))],
    ),
    "masked": (lambda x, m: torch.masked_select(x, m) * 2, [(X, m) for m in MASKS]),
    "only the number of them": (
        lambda x: torch.zeros(x.nonzero().size(0)) + 1,
        [(X,), (X * M,), (X * 0,)],
    ),
    "product": (lambda x, m, w: x[m] @ w, [(SQUARE, m, W) for m in MASKS]),
    "view": (lambda x, m: x[m].view(2) + 1, [(X, m) for m in MASKS]),
    "concatenated and viewed": (
        lambda x, m: torch.cat([x[m], x[~m]]).view(2, 2) * 2,
        [(X, m) for m in MASKS],
    ),
    "two of them": (
        lambda x, m, n: torch.cat([x[m], x[n]]).view(2, 2),
        [(X, M, ~M), (X, M, M), (X, ALL, M), (X, NONE, ONE)],
    ),
    "inverse of unique": (
        lambda x, y: torch.unique(x, return_inverse=True)[1] * y,
        [(Y, Y), (torch.tensor([1.0, 2, 1]), Y), (torch.ones(3), Y)],
    ),
    "first": (lambda x: x.nonzero()[0] * 2, [(X,), (X * ONE,), (X * 0,)]),
    "index": (lambda x, i: x[i.item()] * 2, [(SQUARE, i) for i in INDICES]),
    "index of a computed number": (
        lambda x, i: x[(i + 0).item()] * 2,
        [(SQUARE, i) for i in INDICES],
    ),
    "select": (lambda x, i: x.select(1, i.item()) * 2, [(SQUARE, i) for i in INDICES]),
    "write": (write, [(SQUARE, i) for i in INDICES]),
    "write to a column": (written_column, [(SQUARE, i) for i in INDICES]),
    "write to an argument": (written_argument, [(SQUARE, i) for i in INDICES]),
    "places of a tensor": (
        lambda x, i: x[None, i, 1:] * x[i : i + 1, 1:],
        [(SQUARE, i) for i in INDICES],
    ),
    "written and cut": (written_and_cut, [(SQUARE, i) for i in INDICES]),
    "a row, seen": (lambda x, i: x.narrow(0, i.item(), 1), [(SQUARE, i) for i in INDICES]),
    "a column of a value, seen": (
        lambda x, i: (x * 2).narrow(1, i.item(), 1),
        [(SQUARE, i) for i in INDICES],
    ),
    "the lesser of two": (
        lambda x, i: x[max(0, i.item() - 1) : min(i.item(), 5)] * 2,
        [(X, i) for i in INDICES],
    ),
    "a row of a value's bits, seen": (bits_of_a_row, [(SQUARE, i) for i in INDICES]),
    "packed sequences": (
        lambda x, n: packed(x, n, True)[0] * 2,
        [(SQUARE, torch.tensor(n)) for n in LENGTHS],
    ),
    "steps of packed sequences": (
        lambda x, n: packed(x, n, False)[1] + 1,
        [(SQUARE, torch.tensor(n)) for n in LENGTHS],
    ),
}
# Of these eager broadcasts one element, where tracing has taken one size for another.
BROADCAST: dict[str, Case] = {
    "index by a mask": (lambda x, y: x[x > 0] * y, [(X, Y), (-X, Y), (X.abs(), Y), (X * 0, Y)]),
    "unique": (
        lambda x, y: torch.unique(x) * y,
        [(torch.tensor([1.0, 2, 3]), Y), (torch.tensor([1.0, 2, 1]), Y), (torch.ones(3), Y)],
    ),
    "repeated": (
        lambda x, r, y: torch.repeat_interleave(x, r) + y,
        [(Y, torch.tensor(r), Y) for r in ([1, 2, 0], [1, 1, 0], [1, 2, 3], [0, 1, 0], [0, 0, 0])],
    ),
    "slice": (
        lambda x, i, y: x[: i.item()] * y,
        [(X, torch.tensor(i), Y) for i in (3, 2, 7, -1, 1, 0)],
    ),
}
CASES = {**EXACT, **BROADCAST}
ON_ALL_TARGETS = (
    "check of a size",
    "check of a range",
    "two of them",
    "select",
    "write",
    "a row, seen",
    "a row of a value's bits, seen",
    "packed sequences",
    "index by a mask",
)


def agrees(compiled: Callable[..., Tensor], name: str) -> None:
    fn, calls = CASES[name]
    for args in calls:
        try:
            want: Any = fn(*args)
        except (RuntimeError, IndexError) as error:
            want = error
        given = [a.clone() for a in args]
        if isinstance(want, Exception):
            with pytest.raises((RuntimeError, IndexError)):
                compiled(*given)
            continue
        try:
            got = compiled(*given)
        except RuntimeError as error:
            assert name in BROADCAST and re.search(
                r"made by .*aten|found \d+ where \d+ was traced", str(error)
            )
            continue
        assert got.shape == want.shape and torch.equal(got, want), (name, args, got, want)


@pytest.mark.parametrize("name", CASES)
def test_bound_programs(name: str) -> None:
    fn, calls = CASES[name]
    agrees(plait.compile(fn, calls[0]), name)


@pytest.mark.parametrize("target", [t for t in TARGETS if t != "native"])
@pytest.mark.parametrize("name", ON_ALL_TARGETS)
def test_all_targets(name: str, target: str) -> None:
    fn, calls = CASES[name]
    agrees(plait.compile(fn, calls[0], options={"wrapper": target}), name)


@pytest.mark.parametrize("name", CASES)
def test_compiled_functions(name: str) -> None:
    fn, _ = CASES[name]
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        torch._dynamo.reset()
        agrees(torch.compile(fn, backend="plait", fullgraph=True), name)


@pytest.mark.parametrize(
    "name", ["index by a mask", "check of a size", "product", "concatenated and viewed"]
)
def test_all_sizes_dynamic(name: str) -> None:
    fn, _ = CASES[name]
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        torch._dynamo.reset()
        agrees(torch.compile(fn, backend="plait", fullgraph=True, dynamic=True), name)


class Of(torch.nn.Module):
    def __init__(self, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Tensor) -> Tensor:
        return self.fn(*args)


@pytest.mark.parametrize("name", ON_ALL_TARGETS)
def test_packages(name: str, tmp_path: Path) -> None:
    fn, calls = CASES[name]
    plait.package(Of(fn), tmp_path / "p.plait", calls[0])
    agrees(plait.load(tmp_path / "p.plait"), name)


@pytest.mark.parametrize("target", TARGETS)
def test_the_error_says_what_was_found_and_where(target: str) -> None:
    here = Path(__file__).name
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        run = torch.compile(
            lambda x, y: x[x > 0] * y, backend="plait", fullgraph=True, options={"wrapper": target}
        )
        run(X, Y)
        where = rf"made by .*{here}:\d+ aten.index.Tensor.*sizes \[1\].*expected \[3\]"
        with pytest.raises(RuntimeError, match=where):
            run(-X, Y)
        bounded = torch.compile(
            two_or_three, backend="plait", fullgraph=True, options={"wrapper": target}
        )
        bounded(X - 1)
        with pytest.raises(
            RuntimeError,
            match=rf"found 4 where at most 3 was traced: size 0 of {here}:\d+ aten.nonzero",
        ):
            bounded(torch.ones(4))


@pytest.mark.parametrize("target", TARGETS)
def test_an_index_out_of_range_is_an_index_error(target: str) -> None:
    run = plait.compile(
        lambda x, i: x.select(1, i.item()) + 1, (SQUARE, INDICES[0]), options={"wrapper": target}
    )
    for i in (4, -5):
        with pytest.raises(
            IndexError, match=rf"index {i} is out of bounds for dimension 1 with size 4"
        ):
            run(SQUARE, torch.tensor(i))


@pytest.mark.parametrize("target", TARGETS)
def test_an_element_of_what_is_empty_is_an_index_error(target: str) -> None:
    run = plait.compile(
        lambda x: torch.masked_select(x, x > 0).select(0, 0), (X,), options={"wrapper": target}
    )
    assert torch.equal(run(X), X[X > 0][0])
    with pytest.raises(IndexError, match="index 0 is out of bounds for dimension 0 with size 0"):
        run(-X.abs())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dims", [(), (0,), ((0, 1),)], ids=["all", "one", "two"])
def test_a_found_size_of_1_is_not_squeezed_as_another(dims: tuple[Any, ...], target: str) -> None:
    """A graph has one number of dimensions, and that of eager's result depends on the size."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.nonzero().mT.squeeze(*dims) + 1

    run = plait.compile(fn, (torch.ones(3),), options={"wrapper": target})
    for n in (3, 2, 0):
        x = (torch.arange(3) < n).float()
        assert torch.equal(run(x), fn(x))
    if dims != (0,):
        with pytest.raises(
            RuntimeError, match=r"is 1, which breaks the condition Ne\(u\d+, 1\) that was traced"
        ):
            run(torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("way", ["compile", "direct"])
def test_writes_to_positions(way: str) -> None:
    """Each of several is a view of one tensor; of a number there is one."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, columns = torch.where(x > 0)
        rows.cumsum_(0)
        columns[1:].add_(rows[1:])
        (one,) = x[0, 0].nonzero(as_tuple=True)
        one.neg_().sub_(1)
        return rows, columns, one, columns.view(torch.int32)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        if way == "compile":
            run = torch.compile(fn, backend="plait", fullgraph=True, options={"strict": True})
        else:
            run = plait.compile(fn, (torch.ones(3, 4),))
        for x in (torch.randn(3, 4), -torch.ones(3, 4), torch.zeros(3, 4)):
            for got, want in zip(run(x), fn(x), strict=True):
                assert torch.equal(got, want) and (not got.numel() or got.stride() == want.stride())


def test_few_where_many_were_traced() -> None:
    x, y = torch.randn(100_000), torch.randn(100_000)
    run = plait.compile(lambda x, y: x[x > -99] * y, (x, y))
    assert torch.equal(run(x, y), x * y)
    fewer = x.where(torch.arange(100_000) < 1000, -100.0)
    with pytest.raises(RuntimeError, match=r"sizes \[1000\].*expected \[100000\]"):
        run(fewer, y)


def test_training_saves_what_was_found() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        kept = x[x > 0] * 3
        return (kept.sin() * kept).sum() + (kept * w[0, 0]).exp().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        run = torch.compile(fn, backend="plait", fullgraph=True)
        for x in (X, -X, X.abs(), -X.abs()):
            grads = []
            for f in (run, fn):
                a, w = x.clone().requires_grad_(), W[:1].clone().requires_grad_()
                f(a, w).backward()
                grads.append((a.grad, w.grad))
            torch.testing.assert_close(*grads)


def test_results_of_exported_programs(tmp_path: Path) -> None:
    exported = torch.export.export(Of(lambda x, m: x[m] * 2 + 1), (X, M))
    plait.package(exported, tmp_path / "p.plait")
    for run in (plait.compile(exported), plait.load(tmp_path / "p.plait")):
        for m in MASKS:
            assert torch.equal(run(X, m), X[m] * 2 + 1)


def test_branches_with_such_sizes() -> None:
    def fn(x: Tensor, p: Tensor) -> Tensor:
        return torch.cond(p, lambda x: x[x > 0].sum() * 2, lambda x: x.nonzero().sum() * 1.0, (x,))

    for compiled in (plait.compile(fn, (X, torch.tensor(True))),):
        for p in (True, False):
            for x in (X, -X, X * 0):
                assert compiled(x, torch.tensor(p)) == fn(x, torch.tensor(p))


# With a size of 5 where they are compiled, which varies. What tracing takes for granted of sizes of
# 2 and more.
VARYING: dict[str, Callable[[Tensor], Any]] = {
    "head": lambda x: x[:2] + 1,
    "head, seen": lambda x: x[:2],
    "tail": lambda x: x[-2:] * 2,
    "element": lambda x: x[1] + x,
    "narrow": lambda x: x.narrow(0, 1, 1) * 1,
    "view": lambda x: x[:2].view(2) * 1,
    "sum of a head": lambda x: x[:2].sum(),
    "largest": lambda x: x.topk(2)[0] * 1,
    "differences": lambda x: x[1:] - x[:-1],
    "behind two": lambda x: x[2:].clone(),
    "rolled": lambda x: x.roll(1),
    "all": lambda x: x.view(-1, 1).softmax(0).sum(1),
    "added": lambda x: x + torch.ones(2, 1),
    "joined": lambda x: torch.cat([x, x]).view(2, -1).sum(0),
    "beside a constant": lambda x: x + torch.tensor(3).to(x),
}
LEAST = {"behind two": 4}  # of a part, too, tracing assumes that it has two elements
EVERY_SIZE = {"rolled", "all", "added", "joined", "beside a constant"}


@pytest.mark.parametrize("packaged", [False, True])
@pytest.mark.parametrize("name", VARYING)
def test_small_sizes(name: str, packaged: bool, tmp_path: Path) -> None:
    """Eager's result, or an error that says which size."""
    fn, shapes = VARYING[name], ({0: torch.export.Dim.AUTO},)
    if packaged:
        plait.package(
            Of(fn), tmp_path / "p.plait", (torch.ones(5),), dynamic_shapes={"args": shapes}
        )
        compiled: Callable[..., Any] = plait.load(tmp_path / "p.plait")
    else:
        compiled = plait.compile(fn, (torch.ones(5),), shapes)
    for n in (7, 3, 2, 1, 0):
        x = torch.arange(float(n))
        try:
            got = compiled(x)
        except InputError as error:
            assert (
                n < LEAST.get(name, 3)
                and name not in EVERY_SIZE
                and "expected size at least" in str(error)
            )
            continue
        except IndexError:
            with pytest.raises(IndexError):
                fn(x)
            continue
        torch.testing.assert_close(got, fn(x))


@pytest.mark.parametrize("n", (5, 1, 0))
@pytest.mark.parametrize("packaged", (False, True), ids=("compile", "package"))
def test_sizes_that_are_let_in_are_the_range_of_the_symbol(
    packaged: bool, n: int, tmp_path: Path
) -> None:
    """A loop that may be empty reads nothing: an empty tensor may have no memory at all."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.abs().sum(-1), torch.where(x > 0, x, y), torch.var_mean(x, -1, correction=0)[1]

    def given(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(3, n), torch.randn(3, 1).expand(3, n)

    shapes = ({1: torch.export.Dim.AUTO},) * 2
    if packaged:
        plait.package(Of(fn), tmp_path / "p.plait", given(4), dynamic_shapes={"args": shapes})
        compiled: Callable[..., Any] = plait.load(tmp_path / "p.plait")
    else:
        compiled = plait.compile(fn, given(4), shapes)
    args = given(n)
    torch.testing.assert_close(compiled(*args), fn(*args), equal_nan=True)


def test_offsets_into_one_of_several_results() -> None:
    def fn(x: Tensor, mean: Tensor, i: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, mean, mean + 1)[i.item() :]

    args = (torch.randn(3, 1), torch.randn(1), torch.tensor(1))
    compiled = plait.compile(fn, args)
    for i in (0, 1, 2):
        got, want = (f(*args[:2], torch.tensor(i)) for f in (compiled, fn))
        torch.testing.assert_close(got, want)
        assert got.storage_offset() == want.storage_offset()


def test_functions_of_found_sizes_are_checked_before_they_are_used() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x[x != 0]
        n = round(y.shape[0] / 2)
        return torch.zeros(3).scatter_add(0, torch.ones(3, dtype=torch.int64), y[:3] / (n + 1))

    x = torch.arange(20.0)
    for run in (plait.compile(fn, (x,)), torch.compile(fn, backend="plait")):
        torch.testing.assert_close(run(x), fn(x))


def test_a_found_size_of_memory_that_is_written_over() -> None:
    """It is read once the operator has made the memory, not once another loop has written into
    it."""

    def f(x: Tensor, a: Tensor, y: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        x.masked_fill_(x > 0, 1)
        own = torch.unique(a).clone()
        sums = y.cumsum(1)
        own.index_put_((i,), v, accumulate=True)
        return sums, own

    args = (
        torch.arange(40),
        torch.ones(1),
        torch.ones(64, 2),
        torch.zeros(1, dtype=torch.int64),
        torch.tensor(2.0),
    )
    run = plait.compile(f, args)
    torch.testing.assert_close(run(*args), f(*args))


def test_a_found_size_that_only_bounds_an_index_is_known_before() -> None:
    """Loops that share a launch with one that waits for a number wait, too."""

    def f(x: Tensor, y: Tensor, n: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        z = torch.where(x > 0, x, y)
        return z, torch.arange(n.item()).gather(0, index)

    args = (torch.zeros(0, 5), torch.zeros(0, 1), torch.tensor(0), torch.zeros(0, dtype=torch.long))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(f, backend="plait", fullgraph=True, options={"strict": True})
        for n in (0, 3):
            args = (*args[:2], torch.tensor(n), torch.arange(n))
            torch.testing.assert_close(run(*args), f(*args))


@pytest.mark.parametrize("target", TARGETS)
def test_a_size_that_is_a_stride_in_the_example(target: str) -> None:
    """PyTorch takes the size for the stride and 1, whatever it is called with."""
    auto = torch.export.Dim.AUTO

    def given(n: int, m: int, step: int) -> torch.Tensor:
        return torch.arange(40.0).as_strided((n, m), (step, 1))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.diff(dim=1)

    run = plait.compile(fn, (given(2, 3, 2),), ({0: auto, 1: auto},), options={"wrapper": target})
    for n, m in ((2, 3), (4, 5)):
        x = given(n, m, m - 1)
        torch.testing.assert_close(run(x), fn(x))
    with pytest.raises(InputError):
        run(given(2, 3, 3))


def test_empty_products_of_bools() -> None:
    a, b = torch.ones(4, 3).bool(), torch.ones(3, 0).bool()
    assert torch.equal(plait.compile(torch.matmul, (a, b))(a, b), a @ b)
    for n, k in ((0, 4), (3, 0), (0, 0)):
        args = (torch.ones(n).bool(), torch.ones(n, k).bool(), torch.ones(k).bool())
        assert torch.equal(plait.compile(torch.addmv, args)(*args), torch.addmv(*args))


@pytest.mark.parametrize("target", [*TARGETS, "package"])
def test_strides_that_vary_are_checked(target: str, tmp_path: Path) -> None:
    """Nobody guards them without Dynamo: they are another size's multiple only where they were in
    the example."""
    auto = torch.export.Dim.AUTO

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), y * 2

    def given(m: int, step: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(2, m)[1:], torch.arange(17.0 * width).view(17, width)[
            :, : m * step : step
        ]

    shapes = ({0: auto, 1: auto}, {0: auto, 1: auto})
    if target == "package":
        plait.package(fn, tmp_path / "p.plait", given(3, 2, 6), shapes)
        run = plait.load(tmp_path / "p.plait")
    else:
        run = plait.compile(fn, given(3, 2, 6), shapes, options={"wrapper": target})
    for m, step, width in ((3, 2, 6), (5, 2, 10), (4, 3, 12), (5, 1, 5)):
        args = given(m, step, width)
        torch.testing.assert_close(run(*args), fn(*args))
    for m, step, width in ((3, 2, 7), (4, 2, 20), (3, 1, 8)):
        with pytest.raises(RuntimeError, match=r"strides \[\d+, \d\], expected"):
            run(*given(m, step, width))


@pytest.mark.parametrize("target", TARGETS)
def test_strides_that_are_equal_in_the_example_only(target: str) -> None:
    auto = torch.export.Dim.AUTO

    def given(n: int, *steps: int) -> tuple[torch.Tensor, ...]:
        wide = [torch.arange(12.0 * n * step).view(n, 12 * step)[:, ::step] for step in steps]
        return *wide, torch.arange(40.0)[steps[0] : 30]

    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, y * 2, z.sum()

    run = plait.compile(
        fn, given(4, 2, 2), ({0: auto}, {0: auto}, {0: auto}), options={"wrapper": target}
    )
    for case in ((4, 2, 2), (3, 2, 3), (5, 3, 2), (4, 1, 5)):
        args = given(*case)
        torch.testing.assert_close(run(*args), fn(*args))


@pytest.mark.parametrize("target", TARGETS)
def test_a_bool_that_is_found_in_training(target: str) -> None:
    """The backward program is given it as a number that is 0 or 1."""

    def fn(x: Tensor) -> Tensor:
        is_positive = (x.sum() > 0).item()
        return torch.where(x > 0, x * x, is_positive).sum() * is_positive + x.sin().sum()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(
            fn, backend="plait", fullgraph=True, options={"wrapper": target, "strict": True}
        )
        for sign in (1, -1, 1):
            grads = []
            for f in (fn, run):
                x = (torch.tensor([1.0, 2, -2, 3]) * sign).requires_grad_()
                f(x).backward()
                grads.append(x.grad)
            torch.testing.assert_close(grads[1], grads[0])
