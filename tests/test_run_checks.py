"""Run-time checks of kernels: what fails in eager fails compiled, with the same class of error; the
rest does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import plait
from plait.ir.checks import ZERO_DIVISION
from plait.ir.dtypes import i64
from plait.ir.expr import symbol
from plait.ir.loops import apply, check_of, const, walk
from plait.ir.record import Recorder
from plait.ir.rules import Simplifier
from tests.against_eager import compiled

X = torch.arange(15.0).reshape(5, 3)
POSITIONS = {"too large": (1, 7), "negative": (1, -1), "too small": (1, -9), "fine": (1, 2)}
Case = Callable[[torch.Tensor, torch.Tensor], Any]


def wide(i: torch.Tensor) -> torch.Tensor:
    return i[:, None].expand(2, 3)


INDEXED: dict[str, Case] = {
    "index": lambda x, i: x[i],
    "index of columns": lambda x, i: x[:, i],
    "embedding": lambda x, i: F.embedding(i, x),
    "gather": lambda x, i: x.gather(0, wide(i)),
    "take_along_dim": lambda x, i: x.take_along_dim(wide(i), 0),
    "scatter": lambda x, i: x.scatter(0, wide(i), 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, wide(i), x[:2]),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, wide(i), x[:2], "amax"),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_select of columns": lambda x, i: x.index_select(1, i),
    "index_select of numbers": lambda x, i: x[:, 0].index_select(0, i),
    "take": lambda x, i: x.take(i * 10),
    "index_put": lambda x, i: x.index_put((i,), x[:2]),
    "index_put and add": lambda x, i: x.index_put((i,), x[:2], True),
    "index_fill": lambda x, i: x.index_fill(0, i, 9.0),
    "index_fill of columns": lambda x, i: x.index_fill(1, i, 9.0),
    "index_add": lambda x, i: x.index_add(0, i, x[:2]),
    "index_add of columns": lambda x, i: x.index_add(1, i, x[:, :2]),
    "index_add of numbers": lambda x, i: x[:, 0].index_add(0, i, x[0, :2]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:2]),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x[:2], "amax"),
    "max_unpool2d": lambda x, i: torch.ops.aten.max_unpool2d(
        x[None, :2, :1], i[None, :, None], [2, 3]
    ),
    "max_unpool3d": lambda x, i: torch.ops.aten.max_unpool3d(
        x[None, None, :2, :1], i[None, None, :, None], [1, 2, 3], [1, 1, 1], [0, 0, 0]
    ),
}


def outcome(fn: Callable[..., Any], *args: Any) -> tuple[type, str, Any]:
    """The class and the words of the error, or the result."""
    try:
        return object, "", fn(*args)
    except Exception as e:  # noqa: BLE001  any error is an outcome
        return type(e), str(e), None


def same_outcome(fn: Callable[..., Any], *args: Any, close: bool = False) -> str:
    """Compares a function with its compiled self; an error is caught wherever eager's is. The
    error's words, if any."""
    want, _, values = outcome(fn, *args)
    got, words, results = outcome(compiled(fn), *args)
    assert got is want or (want is not object and issubclass(got, want)), words
    if close:
        torch.testing.assert_close(results, values, equal_nan=True)
    else:
        assert values is None or torch.equal(results, values)
    return words


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", INDEXED)
def test_positions(name: str) -> None:
    run = compiled(INDEXED[name])
    for at in POSITIONS.values():
        i = torch.tensor(at)
        want, _, values = outcome(INDEXED[name], X, i)
        got, words, results = outcome(run, X, i)
        assert got == want, (at, words)
        assert values is None or torch.equal(results, values)


STILL: dict[str, Case] = {
    "index of one": lambda x, i: x[0, :1][i],
    "index of an expanded row": lambda x, i: x[:1].expand(5, 3)[i],
    "take from one": lambda x, i: x[0, 0].take(i),
    "gather of one": lambda x, i: x[0, :1].gather(0, i[:1]),
    "index of zeros": lambda x, i: torch.zeros(5)[i],
    "index of equal numbers": lambda x, i: torch.full((5,), 3)[i],
    "embedding of zeros": lambda x, i: F.embedding(i, torch.zeros(5, 2)),
    "sum of an expanded row": lambda x, i: x[:1].expand(5, 3)[i].sum(),
    "masked_scatter of one": lambda x, i: torch.masked_scatter(x, x > i[0] + 10, x[0, 0]),
}


@pytest.mark.parametrize("name", STILL)
def test_positions_that_no_load_moves_with(name: str) -> None:
    run = compiled(STILL[name])
    for at in ((0, 0), (7, 0), (0, -9), (7, 7), (3, 1)):
        i = torch.tensor(at)
        want, _, values = outcome(STILL[name], X, i)
        got, words, results = outcome(run, X, i)
        assert got == want, (at, words)
        assert values is None or torch.equal(results, values)


LOSSES: dict[str, Case] = {
    "nll_loss": lambda x, t: F.nll_loss(x[:2], t),
    "nll_loss of each": lambda x, t: F.nll_loss(x[:2], t, reduction="none"),
    "nll_loss of one": lambda x, t: F.nll_loss(x[0], t[1]),
    "nll_loss with weights": lambda x, t: F.nll_loss(x[:2], t, x[0]),
    "nll_loss2d": lambda x, t: F.nll_loss(x[:2, :, None, None], t[:, None, None]),
    "cross_entropy": lambda x, t: F.cross_entropy(x[:2], t),
}


@pytest.mark.parametrize("name", LOSSES)
def test_targets(name: str) -> None:
    for at in ((1, 2), (1, -100), (1, 3), (1, -1)):
        words = same_outcome(LOSSES[name], X, torch.tensor(at), close=True)
        assert words.startswith("a target is out of bounds") == (at[1] in (3, -1))


def test_integer_linspace() -> None:
    """Every truncation is eager's, also where a step rounds to the other side of an integer."""
    rng = random.Random(0)
    for dtype in (torch.int64, torch.int16, torch.uint8):
        low = 0 if dtype == torch.uint8 else -100
        cases = [
            (rng.uniform(low, 100), rng.uniform(low, 100), rng.randint(1, 60)) for _ in range(12)
        ]

        def f(dtype: torch.dtype, cases: list[tuple[float, float, int]]) -> list[torch.Tensor]:
            whole = [torch.linspace(int(a), int(b), n, dtype=dtype) for a, b, n in cases]
            return [*whole, *(torch.linspace(a, b, n, dtype=dtype) for a, b, n in cases)]

        for want, got in zip(f(dtype, cases), compiled(f)(dtype, cases), strict=True):
            assert torch.equal(got, want)


def test_words_of_an_error() -> None:
    i = torch.tensor([7])
    words = same_outcome(lambda x, i: x[i] + 1, X, i)
    assert words.startswith("index is out of bounds for dimension 0 with size 5 (in kernel plait_")
    assert same_outcome(lambda x, i: F.embedding(i, x), X, i).startswith("index out of range in s")
    words = same_outcome(lambda a: 1 // a, torch.tensor([0]))
    assert words.startswith("ZeroDivisionError (in kernel plait_")


DIVISIONS: dict[str, Callable[..., Any]] = {
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "number by tensor": lambda a, b: 7 // b,
    "number modulo tensor": lambda a, b: 7 % b,
    "sum": lambda a, b: (a // b).sum(),
    "by one number": lambda a, b: a // b[37],
    "by the number 0": lambda a, b: a % 0,
    "by the number 3": lambda a, b: a // 3,
    "guarded": lambda a, b: a // torch.where(b == 0, 1, b),
}
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("name", DIVISIONS)
def test_integer_division_by_zero(name: str) -> None:
    """One zero among 39 divisors: in a whole vector, in the last part of one, and none at all."""
    for dtype in INTEGERS if name in ("floor_divide", "remainder") else (torch.int64,):
        run = compiled(DIVISIONS[name])
        for zero in (0, 37, 38, None):
            a = torch.arange(1, 40).to(dtype)
            b = a.flip(0) - 20
            b[b == 0] = 5
            if zero is not None:
                b[zero] = 0
            want, _, values = outcome(DIVISIONS[name], a, b)
            got, words, results = outcome(run, a, b)
            assert got == want, (dtype, zero, words)
            assert values is None or torch.equal(results, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax"])
def test_indices_into_nothing(reduce: str, dtype: torch.dtype) -> None:
    nothing, i = torch.zeros(0, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    for own in (True, False):
        assert same_outcome(
            lambda x, i, own=own: x.scatter_reduce(0, i, i.to(x), reduce, include_self=own),
            nothing,
            i,
        )


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_a_row_written_into_a_size_that_becomes_0(wrapper: str) -> None:
    columns, options = {1: torch.export.Dim.AUTO}, {"wrapper": wrapper}
    for at in (0, -1):
        given = torch.ones(2, 3), torch.zeros(2)
        run = plait.compile(
            lambda x, y, at=at: x.select_scatter(y, 1, at), given, (columns, None), options
        )
        assert torch.equal(run(torch.ones(2, 1), torch.zeros(2)), torch.zeros(2, 1))
        with pytest.raises(IndexError, match="out of bounds"):
            run(torch.ones(2, 0), torch.zeros(2))


def test_nothing_is_divided_in_empty_tensors() -> None:
    empty = torch.ones(0, dtype=torch.int64)
    assert not same_outcome(lambda a, b: a // b, empty, torch.tensor(0))
    assert not same_outcome(lambda a: a % 0, empty)


def test_floats_and_bools() -> None:
    zeros = torch.zeros(3)
    assert not same_outcome(lambda a, b: torch.nan_to_num(a // b), zeros + 1, zeros)
    assert same_outcome(lambda a, b: a % b, zeros > 1, zeros < 1)


def test_python_target() -> None:
    run = torch.compile(lambda a, b: a // b, backend="plait", options={"wrapper": "python"})
    a = torch.tensor([4, 6])
    assert torch.equal(run(a, a), torch.ones(2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(a, a - 4)
    read = torch.compile(lambda x, i: x[i], backend="plait", options={"wrapper": "python"})
    with pytest.raises(IndexError, match="out of bounds for dimension 0 with size 5"):
        read(X, torch.tensor([7]))


def test_a_constant_divisor_needs_no_check() -> None:
    ops = Recorder()
    for divisor, checks in ((3, ()), (0, (ZERO_DIVISION,))):
        a = ops.load("a", (0,), i64)
        value = Simplifier()(apply("mod", a, ops.nonzero(const(divisor, i64), ZERO_DIVISION)))
        assert tuple(c for n in walk((value,)) if (c := check_of(n))) == checks
    size = ops.index(symbol("s0", lo=2))
    assert Simplifier()(ops.nonzero(size, ZERO_DIVISION)) == size


OF_SOMETHING: dict[str, Callable[..., Any]] = {
    "max": torch.max,
    "min": torch.min,
    "amax": torch.amax,
    "amin": torch.amin,
    "aminmax": torch.aminmax,
    "argmax": torch.argmax,
    "max of rows": lambda x: x.max(0),
    "min of rows": lambda x: x.min(0, keepdim=True),
    "amin of rows": lambda x: x.amin(0),
    "argmin of rows": lambda x: x.argmin(0),
    "median of rows": lambda x: x.median(0),
    "mode of rows": lambda x: x.mode(0),
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "negative norm": lambda x: torch.linalg.vector_norm(x, -1, 0),
}


@pytest.mark.parametrize("name", OF_SOMETHING)
def test_extremum_of_nothing(name: str) -> None:
    fn = OF_SOMETHING[name]
    assert outcome(fn, torch.zeros(0, 3))[0] in (RuntimeError, IndexError)
    with pytest.raises((RuntimeError, IndexError)):
        compiled(fn)(torch.zeros(0, 3))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compiled(lambda x: fn(x[x[:, 0] > 2]))
        with pytest.raises((RuntimeError, IndexError)):
            run(torch.zeros(4, 3))
        torch.testing.assert_close(run(X), fn(X[1:]))


def test_extremum_of_nothing_in_an_exported_program() -> None:
    batch = torch.export.Dim("batch", max=64)
    program = plait.compile(Extrema(), (X,), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(program(X[:4]), Extrema()(X[:4]))
    with pytest.raises(RuntimeError, match="one or more elements"):
        program(X[:0])
    sums = plait.compile(Sums(), (X,), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(sums(X[:0]), Sums()(X[:0]))


class Extrema(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.max(), x.min(1).values


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.amax(1), x.sum(), x.logsumexp(1)


# ------------------------------------------------------------------------- sizes of what is written
def rows(n: int) -> torch.Tensor:
    return torch.arange(n) % 8


VALUES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int], tuple[torch.Tensor, ...]]]] = {
    "rows": (lambda x, v, i: x.index_put((i,), v), lambda n: (torch.ones(n, 4), rows(6))),
    "rows, added": (
        lambda x, v, i: x.index_put((i,), v, accumulate=True),
        lambda n: (torch.ones(n, 4), rows(6)),
    ),
    "columns": (lambda x, v, i: x.index_put((i,), v), lambda n: (torch.ones(n - 2), rows(6))),
    "a rank too many": (
        lambda x, v, i: x.index_put((i,), v.unsqueeze(0)),
        lambda n: (torch.ones(n, 4), rows(6)),
    ),
    "behind a mask": (
        lambda x, v, m: x.index_put((m,), v),
        lambda n: (torch.ones(n - 2), torch.ones(8) > 0),
    ),
    "index_add": (lambda x, v, i: x.index_add(0, i, v), lambda n: (torch.ones(6, n - 2), rows(6))),
    "index_copy": (
        lambda x, v, i: x.index_copy(0, i, v),
        lambda n: (torch.ones(6, n - 2), rows(6)),
    ),
    "index_reduce": (
        lambda x, v, i: x.index_reduce(0, i, v, "amax"),
        lambda n: (torch.ones(n, 4), rows(6)),
    ),
    "slice_scatter": (lambda x, v: x.slice_scatter(v, 0, 0, 6), lambda n: (torch.ones(n, 4),)),
    "select_scatter": (lambda x, v: x.select_scatter(v, 0, 1), lambda n: (torch.ones(n - 2),)),
    "diagonal_scatter": (lambda x, v: x.diagonal_scatter(v), lambda n: (torch.ones(n - 2),)),
    "a diagonal below": (lambda x, v: x.diagonal_scatter(v, -3), lambda n: (torch.ones(n - 2),)),
    "a diagonal above": (lambda x, v: x.diagonal_scatter(v, 1), lambda n: (torch.ones(n - 3),)),
}
"""Writes to x, of 8 x 4, and their arguments, which fit where n is 6."""


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_values_of_another_size_are_refused(name: str, dynamic: bool) -> None:
    """Tracing does not compare them: what is missing would be read from memory of others."""
    fn, given = VALUES[name]
    run = torch.compile(fn, backend="plait", dynamic=dynamic)
    for n in (6, 5, 7, 3, 6):
        args = (torch.zeros(8, 4), *given(n))
        want, _, values = outcome(fn, *args)
        got, words, results = outcome(run, *args)
        assert got is want or (want is not object and issubclass(got, want)), (n, words)
        assert values is None or torch.equal(results, values)


@pytest.mark.parametrize("dynamic", [False, True, None])
def test_parts_that_are_not_there(dynamic: bool | None) -> None:
    """Tracing does not look at the position either."""
    for fn in (
        lambda x, k: x.select_scatter(torch.ones(4), 0, k),
        lambda x, k: (x * 2).select_scatter(torch.ones(3), 1, k),
        lambda x, k: x.clone().select(0, k).zero_(),
    ):
        run = torch.compile(fn, backend="plait", dynamic=dynamic)
        for k in (1, 3, -3, -4, 4, 2, 5):
            want, _, values = outcome(fn, X[:3].repeat(1, 2)[:, :4].clone(), k)
            got, words, results = outcome(run, X[:3].repeat(1, 2)[:, :4].clone(), k)
            assert got is want, (k, words)
            assert values is None or torch.equal(results, values)


def test_values_of_another_size_are_refused_without_guards() -> None:
    fn = lambda x, v, i: x.index_put((i,), v)
    n = torch.export.Dim("n")
    run = plait.compile(
        fn, (torch.zeros(8, 4), torch.ones(6, 4), rows(6)), dynamic_shapes=(None, {0: n}, None)
    )
    assert torch.equal(run(torch.zeros(8, 4), torch.ones(6, 4), rows(6))[:6], torch.ones(6, 4))
    for k in (5, 7):
        with pytest.raises(RuntimeError, match=f"shape mismatch.*{k}"):
            run(torch.zeros(8, 4), torch.ones(k, 4), rows(6))


# ---------------------------------------------------------------------------------------- of values
def checked(condition: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch._check(condition(x))
        return x + 1

    return fn


def asserted(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x > 0).all())
    return x + 1


OF_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": checked(lambda x: x.sum().item() > 0),
    "not": checked(lambda x: x.sum().item() != -3.0),
    "two floats": checked(lambda x: x.sum().item() < x[0].item() * 4 + x.shape[0]),
    "joined": checked(lambda x: (x.sum().item() > 0) & (x[0].item() < 9)),
    "power": checked(lambda x: x.sum().item() ** 2 + x.sum().item() >= 6.5),
    "assertion": asserted,
    "inverse": lambda x: torch.linalg.inv(x.diag()) + 1,
    "factors": lambda x: torch.linalg.inv(torch.linalg.cholesky(x.diag())) + 1,
    "solution": lambda x: torch.linalg.solve(x.diag(), x) + 1,
}
FILLS = (1.0, -1.0, 20.0, 0.0, float("nan"))


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx", "package"])
@pytest.mark.parametrize("name", OF_VALUES)
def test_conditions_of_values_without_dynamo(name: str, wrapper: str, tmp_path: Path) -> None:
    fn = OF_VALUES[name]
    if wrapper == "package":
        plait.package(fn, tmp_path / "p.plait", (torch.ones(3),))
        run = plait.load(tmp_path / "p.plait")
    else:
        run = plait.compile(fn, (torch.ones(3),), options={"wrapper": wrapper})
    for value in FILLS:
        agrees(run, fn, torch.full((3,), value))


@pytest.mark.parametrize(
    "name", [n for n in OF_VALUES if n not in ("inverse", "factors", "solution")]
)
def test_conditions_of_values(name: str) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(
            OF_VALUES[name], backend="plait", fullgraph=True, options={"strict": True}
        )
        for value in FILLS:
            agrees(run, OF_VALUES[name], torch.full((3,), value))


def agrees(run: Callable[..., Any], fn: Callable[..., Any], x: torch.Tensor) -> None:
    """run(x) is fn(x), or raises an error of its class."""
    try:
        want = fn(x)
    except Exception as error:  # noqa: BLE001 - whatever eager raises
        with pytest.raises(type(error)):
            run(x)
    else:
        torch.testing.assert_close(run(x), want, equal_nan=True)
