"""Operators of which eager chooses an algorithm by sizes, or looks at values, in one program for
all sizes: `plait.compile` and packages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import AdditionalInputs, Dim, ShapesCollection

import plait

ROWS = ((5, 7), (5, 40), (40, 5), (26, 26), (25, 25), (1, 1), (0, 5))
Make = Callable[[int, int], Sequence[Tensor]]


def rows(n: int, m: int) -> Sequence[Tensor]:
    return torch.randn(n, 8), torch.randn(m, 8)


def numbers(n: int, m: int) -> Sequence[Tensor]:
    return torch.randint(0, 50, (n, 3)), torch.randint(0, 50, (m,))


def odd_numbers(n: int, m: int) -> Sequence[Tensor]:
    among = torch.tensor([1.0, math.nan, -0.0, math.inf, 5.0])
    x = torch.tensor([1.0, math.nan, 0.0, 2.0, math.inf, -math.inf])
    return x[torch.randint(0, 6, (n,))], among[torch.randint(0, 5, (m,))]


CHOICES: dict[str, tuple[Callable[..., Any], Make]] = {
    "cdist": (lambda a, b: torch.cdist(a, b), rows),
    "sums of differences": (lambda a, b: torch.cdist(a, b, 1.0), rows),
    "batches": (lambda a, b: torch.cdist(a, b.expand(2, -1, -1)), rows),
    "never by a product": (
        lambda a, b: torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist"),
        rows,
    ),
    "isin": (lambda a, b: torch.isin(a, b), numbers),
    "not in": (lambda a, b: torch.isin(a, b, invert=True), numbers),
    "isin, odd numbers": (lambda a, b: torch.isin(a, b), odd_numbers),
    "isin, two types": (lambda a, b: torch.isin(a, b.double()), numbers),
}
VARY = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})


def agrees(run: Callable[..., Any], fn: Callable[..., Any], make: Make, *sizes: Any) -> None:
    for n, m in sizes:
        args = make(n, m)
        torch.testing.assert_close(run(*args), fn(*args), msg=lambda text: f"{n}, {m}: {text}")  # noqa: B023


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("example", [(5, 7), (5, 40), (40, 5), (400, 3)])
def test_one_program_for_both_sides(name: str, example: tuple[int, int]) -> None:
    fn, make = CHOICES[name]
    agrees(plait.compile(fn, make(*example), VARY), fn, make, *ROWS)


@pytest.mark.parametrize("wrapper", ["python", "cpp", "fx"])
@pytest.mark.parametrize("name", ["cdist", "isin"])
def test_in_other_targets(name: str, wrapper: str) -> None:
    fn, make = CHOICES[name]
    run = plait.compile(fn, make(5, 7), VARY, options={"wrapper": wrapper})
    agrees(run, fn, make, *ROWS)


@pytest.mark.parametrize("name", ["cdist", "isin"])
def test_in_a_package(name: str, tmp_path: Path) -> None:
    fn, make = CHOICES[name]
    path = tmp_path / "model.plait"
    plait.package(fn, path, make(30, 7), VARY, machines="portable")
    agrees(plait.load(path), fn, make, *ROWS)


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("unique", [False, True])
def test_elements_among_nans(unique: bool, invert: bool) -> None:
    """A search that halves what is sorted cannot tell on which side of a NaN it is."""
    fn = lambda x, y: torch.isin(x, y, assume_unique=unique, invert=invert)
    x = torch.tensor([1.0, 2.0, math.nan, 3.0, math.inf])
    for extra in ([], [math.inf]):
        among = torch.tensor([1.0, *[math.nan] * 300, 3.0, *extra])
        assert torch.equal(torch.compile(fn, backend="plait")(x, among), fn(x, among))


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "cov": lambda x: torch.cov(x),
    "without a correction": lambda x: torch.cov(x, correction=0),
    "corrcoef": lambda x: torch.corrcoef(x),
    "of rows": lambda x: torch.cov(x.t()),
    "of one variable": lambda x: torch.cov(x[0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex64])
@pytest.mark.parametrize("name", STATISTICS)
def test_covariances(name: str, dtype: torch.dtype) -> None:
    """torch's own steps ask whether there are degrees of freedom."""
    fn = STATISTICS[name]
    x = (torch.randn(4, 9) * 5).to(dtype)
    x = x * (1 + 2j) if dtype.is_complex else x
    run = plait.compile(fn, (x,), ({1: Dim.DYNAMIC},))
    for given in (x, x[:, :5].contiguous(), x[:, :3].contiguous()):
        torch.testing.assert_close(run(given), fn(given))


@pytest.mark.filterwarnings("ignore:cov.*degrees of freedom")
def test_no_degrees_of_freedom() -> None:
    x = torch.randn(3, 1)
    torch.testing.assert_close(plait.compile(torch.cov, (x,))(x), torch.cov(x), equal_nan=True)


def test_sizes_of_arguments_without_names() -> None:
    """A builtin has no parameters to be named by, and `*xs` has one for several."""
    a, b = rows(5, 7)
    run = plait.compile(torch.mul, (a, b[:5]), ({0: Dim.AUTO}, {0: Dim.AUTO}))
    assert torch.equal(run(b, b), b * b)

    def total(scale: float, *xs: Tensor) -> Tensor:
        return sum(x.sum(0) * scale for x in xs)  # type: ignore[return-value]

    sizes = {0: Dim.DYNAMIC}
    for shapes in (
        (None, sizes, sizes),
        (None, (sizes, sizes)),
        {"scale": None, "xs": (sizes, sizes)},
    ):
        run = plait.compile(total, (2.0, a, b), shapes)
        torch.testing.assert_close(run(2.0, b, a), total(2.0, b, a))
    for one in ((sizes,), ((sizes,),)):
        run = plait.compile(lambda *xs: xs[0] * 2, (a,), one)
        assert torch.equal(run(b), b * 2)


def test_sizes_as_torch_collects_them() -> None:
    a, b = torch.randn(5, 8), torch.randn(5, 8)
    by_tensor = ShapesCollection()  # type: ignore[no-untyped-call]
    by_tensor[a], by_tensor[b] = {0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}
    by_example = AdditionalInputs()  # type: ignore[no-untyped-call]
    by_example.add((torch.randn(3, 8), torch.randn(3, 8)))  # type: ignore[no-untyped-call]
    for shapes in (by_tensor, by_example):
        run = plait.compile(lambda a, b: a * b, (a, b), shapes)
        assert torch.equal(run(a[:2], b[:2]), a[:2] * b[:2])


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "fake_quantize": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
    "by tensors": lambda x: torch.fake_quantize_per_tensor_affine(
        x, torch.tensor(0.1), torch.tensor(1, dtype=torch.int32), -128, 127
    ),
    "by channel": lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.linspace(0.1, 0.4, 8), torch.zeros(8, dtype=torch.int32), 1, -128, 127
    ),
    "learnable": lambda x: torch._fake_quantize_learnable_per_tensor_affine(
        x, torch.tensor([0.1]), torch.tensor([1.0]), -128, 127
    ),
    "margins": lambda x: F.multi_margin_loss(x, torch.zeros(x.shape[0], dtype=torch.int64)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_operators_whose_shapes_torch_does_not_know(name: str) -> None:
    """Where sizes vary: with numbers it runs their kernels on zeros."""
    fn = SHAPES[name]
    x, y = torch.randn(5, 8), torch.randn(3, 8)
    run = plait.compile(fn, (x,), ({0: Dim.DYNAMIC},))
    for given in (x, y):
        torch.testing.assert_close(run(given), fn(given))
    trained = torch.compile(fn, backend="plait", dynamic=True, fullgraph=True)
    for given in (x, y):
        ours, eagers = (given.clone().requires_grad_() for _ in range(2))
        trained(ours).sum().backward()
        fn(eagers).sum().backward()
        assert ours.grad is not None and eagers.grad is not None
        torch.testing.assert_close(ours.grad, eagers.grad)
