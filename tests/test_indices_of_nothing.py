"""Operators that index, on tensors and with indices of no elements: what eager refuses is refused,
what it runs runs.

Eager looks at an index at times where nothing is read or written, and at times it does not. The
table is of operators; the targets are all shapes with and without a size of 0, the indices are
inside and outside of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import plait
from tests.against_eager import compiled

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")
Tensors = tuple[torch.Tensor, ...]
Op = Callable[..., torch.Tensor]  # of a tensor, an index, what is written there, and a dimension

INDICES: dict[str, list[int]] = {
    "none": [], "inside": [0, 0], "outside": [7, 0], "negative": [-1, 0], "least": [-(2**63), 0],
}  # fmt: skip


def at(d: int, i: torch.Tensor) -> tuple[Any, ...]:
    return (*[slice(None)] * d, i)


def put(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor, d: int, add: bool) -> torch.Tensor:
    return torch.ops.aten.index_put(x, [None] * d + [i], v, add)


def written(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor, d: int) -> torch.Tensor:
    y = x * 1
    y[at(d, i)] = 2.0
    return y


OPS: dict[str, Op] = {
    "index": lambda x, i, v, d: x[at(d, i)],
    "index_select": lambda x, i, v, d: x.index_select(d, i),
    "index_put": lambda x, i, v, d: put(x, i, v, d, False),
    "index_put of one": lambda x, i, v, d: put(x, i, x.new_ones(()), d, False),
    "index_put, added": lambda x, i, v, d: put(x, i, v, d, True),
    "index_put of one, added": lambda x, i, v, d: put(x, i, x.new_ones(1), d, True),
    "assignment": written,
    "index_add": lambda x, i, v, d: x.index_add(d, i, v),
    "index_add of twice": lambda x, i, v, d: x.index_add(d, i, v, alpha=2),
    "index_copy": lambda x, i, v, d: x.index_copy(d, i, v),
    "index_fill": lambda x, i, v, d: x.index_fill(d, i, 2.0),
}
OF_ROWS: dict[str, Op] = {
    "embedding": lambda x, i, v, d: F.embedding(i, x),
    "embedding_bag": lambda x, i, v, d: F.embedding_bag(i, x, torch.tensor([0], device=x.device)),
}
OF_ALL: dict[str, Op] = {
    "take": lambda x, i, v, d: x.take(i),
    "put": lambda x, i, v, d: x.put(i, x.new_ones(i.shape)),
    "put, added": lambda x, i, v, d: x.put(i, x.new_ones(i.shape), True),
}
WIDE: dict[str, Op] = {  # with an index in the shape of the values
    "gather": lambda x, i, v, d: x.gather(d, i),
    "take_along_dim": lambda x, i, v, d: x.take_along_dim(i, d),
    "scatter": lambda x, i, v, d: x.scatter(d, i, v),
    "scatter of a number": lambda x, i, v, d: x.scatter(d, i, 2.0),
    "scatter_add": lambda x, i, v, d: x.scatter_add(d, i, v),
    "scatter, multiplied": lambda x, i, v, d: x.scatter(d, i, 2.0, reduce="multiply"),
}
for how, own in itertools.product(("prod", "mean", "amax"), (True, False)):
    OPS[f"index_reduce {how} {own}"] = lambda x, i, v, d, h=how, o=own: x.index_reduce(
        d, i, v, h, include_self=o
    )
    WIDE[f"scatter_reduce {how} {own}"] = lambda x, i, v, d, h=how, o=own: x.scatter_reduce(
        d, i, v, h, include_self=o
    )
TABLE = OPS | OF_ROWS | OF_ALL | WIDE


def dimensions(name: str, rank: int) -> list[int]:
    if name in OF_ROWS:
        return [0] if rank == 2 else []
    return [0] if name in OF_ALL else list(range(rank))


def given(
    name: str, shape: tuple[int, ...], d: int, index: list[int], device: str = "cpu"
) -> Tensors:
    """The operands: x, an index, values."""
    x = torch.arange(float(torch.Size(shape).numel()), device=device).reshape(shape) + 1
    i = torch.tensor(index, dtype=torch.int64, device=device)
    v = torch.ones(*shape[:d], len(index), *shape[d + 1 :], device=device)
    if name in WIDE:
        i = i.view([-1 if k == d else 1 for k in range(len(shape))]).expand(v.shape).contiguous()
    return x, i, v


def shapes(rank: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(*[(n, 0) for n in (3, 4, 5)[:rank]])


def outcome(fn: Callable[..., Any], *args: Any) -> tuple[type, str, Any]:
    try:
        return object, "", fn(*args)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
        return type(error), str(error), None


def assert_alike(want: tuple[type, str, Any], got: tuple[type, str, Any], where: str) -> None:
    assert (want[0] is object) == (got[0] is object), f"{where}: eager {want}, plait {got}"
    assert issubclass(got[0], want[0]) or "setStorage" in want[1], (
        f"{where}: eager {want}, plait {got}"
    )
    torch.testing.assert_close(got[2], want[2], msg=lambda m: f"{where}: {m}")


def compare(fn: Op, run: Callable[..., Any], args: Tensors, where: str) -> None:
    got = outcome(run, *args)
    if not issubclass(got[0], plait.errors.InputError):  # tracing took sizes for larger ones
        assert_alike(outcome(fn, *args), got, where)


def at_once(fn: Op) -> Callable[..., Any]:
    """A function that compiles fn for its arguments and calls it."""
    return lambda *args: plait.compile(fn, args)(*args)


@pytest.mark.parametrize("name", TABLE)
def test_sizes_that_become_0(name: str) -> None:
    """Of one program for all sizes."""
    for rank in (1, 2, 3):
        for d in dimensions(name, rank)[-2:]:
            fn = lambda x, i, v, d=d: TABLE[name](x, i, v, d)
            example = given(name, (3, 4, 5)[:rank], d, [0, 1, 2, 1, 0, 2, 2])
            sizes = tuple(dict.fromkeys(range(t.dim()), torch.export.Dim.AUTO) for t in example)
            run = plait.compile(fn, example, sizes)
            for shape, index in itertools.product(shapes(rank), INDICES.values()):
                compare(fn, run, given(name, shape, d, index), f"{shape}, dimension {d}, {index}")


@pytest.mark.parametrize("name", TABLE)
def test_sizes_of_0(name: str) -> None:
    for shape, d in (((0,), 0), ((0, 0), 0), ((0, 4), 0), ((3, 0), 0)):
        for key in ("inside", "outside"):
            if d in dimensions(name, len(shape)):
                args = given(name, shape, d, INDICES[key])
                fn = lambda x, i, v, d=d: TABLE[name](x, i, v, d)
                compare(fn, at_once(fn), args, f"{shape}, dimension {d}, {key}")


def test_values_of_another_rank() -> None:
    """Eager does not look at them where it writes nothing."""

    def fn(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Tensors:
        mean = x.scatter_reduce(0, i, v, "mean", include_self=False)
        product = x.scatter(1, i, v, reduce="multiply")
        return x.scatter(0, i, v), x.scatter_add(1, i, v), mean, product

    x, none = torch.randn(4, 3), torch.zeros(0, 3, dtype=torch.int64)
    run = compiled(fn, options={"strict": True})
    for shape in ((3,), (2, 2, 2), ()):
        torch.testing.assert_close(run(x, none, torch.ones(shape)), (x, x, x, x))


SMOOTH = [name for name in TABLE if name not in ("scatter, multiplied", "index_reduce amax False")]


def gradients(fn: Op, args: Tensors) -> list[torch.Tensor | None]:
    x, i, v = (a.clone().requires_grad_(a.is_floating_point()) for a in args)
    out = fn(x, i, v)
    (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum().backward()
    return [out.detach(), x.grad, v.grad]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients(name: str) -> None:
    fn = lambda x, i, v: TABLE[name](x, i, v, 0)
    for shape, index in (
        ((0, 0), "none"),
        ((0, 0), "inside"),
        ((0, 4), "inside"),
        ((3, 0), "inside"),
    ):
        args = given(name, shape, 0, INDICES[index])
        want, got = (outcome(gradients, f, args) for f in (fn, compiled(fn)))
        assert_alike(want, got, f"{shape}, {index}")


PROGRAMS = (
    "index",
    "index_select",
    "embedding",
    "index_put, added",
    "index_add",
    "index_reduce amax True",
)


@pytest.mark.parametrize("wrapper", ["python", "cpp", "fx", "package"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_targets(name: str, wrapper: str, tmp_path: Path) -> None:
    fn = lambda x, i, v: TABLE[name](x, i, v, 0)
    example = given(name, (3, 4), 0, [0, 1, 2, 1, 0, 2, 2])
    sizes = tuple(dict.fromkeys(range(t.dim()), torch.export.Dim.AUTO) for t in example)
    if wrapper == "package":
        plait.package(fn, tmp_path / "p.plait", example, sizes)
        run = plait.load(tmp_path / "p.plait")
    else:
        run = plait.compile(fn, example, sizes, {"wrapper": wrapper})
    for shape, index in itertools.product(shapes(2), INDICES.values()):
        compare(fn, run, given(name, shape, 0, index), f"{shape}, {index}")


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx", "package"])
@pytest.mark.parametrize("road", ["static", "dynamic", "direct"])
def test_of_two_operators_in_one_kernel(road: str, wrapper: str, tmp_path: Path) -> None:
    """What is looked at before the kernel of the second one runs is looked at before both."""

    def fn(x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> Tensors:
        return (x * 2).sum(1), F.embedding(i, w)

    given = torch.ones(16, 5), torch.ones(2, 16), torch.tensor(0)
    empty = given[0], torch.ones(0, 16), given[2]
    dims = (None, {0: torch.export.Dim("n", max=9)}, None) if road == "dynamic" else None
    first = given if road == "dynamic" else empty
    with pytest.raises(RuntimeError, match="indexing axis dim should be positive"):
        fn(*empty)
    with pytest.raises(RuntimeError, match="indexing axis dim should be positive"):
        if wrapper == "package":
            plait.package(fn, tmp_path / "p", first, dims)
            run = plait.load(tmp_path / "p")
        elif road == "static":
            run = torch.compile(fn, backend="plait", options={"wrapper": wrapper})
        else:
            run = plait.compile(fn, first, dims, options={"wrapper": wrapper})
        if road == "dynamic":
            assert all(map(torch.equal, run(*given), fn(*given)))
        run(*empty)


def test_an_index_of_a_column_that_is_cut_out() -> None:
    """What is written is not read again; that there is nothing to write to is seen."""

    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[i, 0] = 2.0
        return y

    for shape in ((0, 3), (2, 3)):
        args = torch.zeros(shape), torch.zeros(2, dtype=torch.int64)
        assert_alike(outcome(fn, *args), outcome(at_once(fn), *args), str(shape))


def test_targets_that_are_ignored_need_no_class() -> None:
    fn = lambda x, t: F.cross_entropy(x, t, reduction="sum")
    for target in (-100, 0):
        args = torch.zeros(2, 0), torch.full((2,), target)
        assert_alike(outcome(fn, *args), outcome(at_once(fn), *args), str(target))


@pytest.mark.parametrize("name", ["index_copy", "index_fill"])
def test_an_index_of_an_empty_dimension_is_eagers_error(name: str) -> None:
    """Eager has no IndexError there: it makes a view as long as the indices first."""
    for shape, d in (((0,), 0), ((0, 3), 0), ((3, 0), 1)):
        args = given(name, shape, d, [0, -1])
        fn = lambda x, i, v, d=d: OPS[name](x, i, v, d)
        want, got = outcome(fn, *args), outcome(compiled(fn), *args)
        assert want[0] is got[0] is RuntimeError, (shape, want, got)
