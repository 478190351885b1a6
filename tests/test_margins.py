"""Losses of margins: margins that are met exactly, NaNs, labels behind the first -1."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plait

ROWS = ((1, 1), (1, 5), (3, 5), (17, 33))


def rows(n: int, classes: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers, so that many margins are met exactly."""
    x = torch.randint(-2, 3, (n, classes)).to(dtype)
    if n > 1:
        x[0, 0], x[1, 2] = math.nan, math.inf
    return x


def check(fn, x: Tensor) -> None:
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, got = fn(a), torch.compile(fn, backend="plait")(b)
    torch.testing.assert_close(got, want, equal_nan=True)
    dy = torch.randn_like(want)
    gradients = (torch.autograd.grad(y, t, dy)[0] for y, t in ((got, b), (want, a)))
    torch.testing.assert_close(*gradients, equal_nan=True)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("p, weighed, margin", [(1, False, 1), (2, True, 1), (1, True, 0.5)])
def test_multi_margin_loss(
    p: int, weighed: bool, margin: float, dtype: torch.dtype, reduction: str
) -> None:  # fmt: skip
    for n, classes in ROWS:
        target = torch.randint(0, classes, (n,))
        weight = torch.rand(classes, dtype=dtype) if weighed else None

        def fn(x: Tensor, target: Tensor = target, weight: Tensor | None = weight) -> Tensor:
            return F.multi_margin_loss(x, target, p, margin, weight, reduction=reduction)

        check(fn, rows(n, classes, dtype))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_multilabel_margin_loss(dtype: torch.dtype, reduction: str) -> None:
    for n, classes in ROWS:
        target = torch.randint(-1, classes, (n, classes))

        def fn(x: Tensor, target: Tensor = target) -> Tensor:
            return F.multilabel_margin_loss(x, target, reduction=reduction)

        check(fn, rows(n, classes, dtype))


LOSSES = (F.multi_margin_loss, F.multilabel_margin_loss)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_targets_of_another_shape_are_refused(loss) -> None:
    for target in (torch.zeros(2, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int64)):
        for run in (loss, torch.compile(loss, backend="plait")):
            with pytest.raises(RuntimeError):
                run(torch.randn(3, 5), target)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", [(2, 0), (0, 0), (0,)])
def test_rows_without_numbers_are_refused_as_eager_does(loss, shape: tuple[int, ...]) -> None:
    """By plait.compile, too, whose trace has no fake loss that looks at shapes."""
    x, target = torch.randn(shape), torch.zeros(shape, dtype=torch.int64)
    target = target if loss is F.multilabel_margin_loss else target.new_zeros(shape[:-1])
    with pytest.raises(RuntimeError):
        loss(x, target)
    for run in (torch.compile(loss, backend="plait"), lambda *xs: plait.compile(loss, xs)):
        with pytest.raises((RuntimeError, ValueError)):
            run(x, target)
