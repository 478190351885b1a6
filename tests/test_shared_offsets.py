"""Steps of a loop that was written out: kernels that are the same but for rows are one function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import plait
from plait.config import WRAPPERS
from plait.schedule.plan import kernels_of
from plait.schedule.text import plan_text, read_plan
from plait.wrapper.program import CompileRecord

STEPS = 12
Fn = Callable[[Tensor, Tensor], Tensor]


def cells(x: Tensor, w: Tensor) -> Tensor:
    """Each step reads rows, multiplies, and writes a row of the result."""
    h, out = torch.zeros_like(x[:, 0]), []
    for k in range(STEPS):
        h = torch.tanh(x[:, k] + h @ w) * torch.sigmoid(x[:, STEPS - 1 - k])
        out.append(h)
    return torch.stack(out, 1)


def sums(x: Tensor, w: Tensor) -> Tensor:
    """Reductions of windows that are read partly outside, with what is found by an index."""
    rows = torch.arange(x.shape[0]) % 2
    wide = torch.nn.functional.pad(x[rows] * w[0], (2, 2))
    out: list[Tensor] = []
    for k in range(STEPS):
        before = out[-1].sum() if out else 0.0
        out.append(torch.softmax(wide[..., 5 * k : 5 * k + 9] + before, -1))
    return torch.stack(out)


def pairs(x: Tensor, w: Tensor) -> Tensor:
    """Two recurrences of different shapes, steps of which are one launch."""
    h, g, out = x[:, 0], x[:2, 0, :8], []
    for k in range(STEPS):
        h, g = torch.tanh(x[:, k] + h @ w), torch.tanh(x[:2, k, :8] + torch.mm(g, w[:8, :8]))
        out += [h.sum(), g.sum()]
    return torch.stack(out)


def record(fn: Fn, **options: object) -> tuple[CompileRecord, Tensor, Tensor]:
    x, w = torch.randn(3, STEPS, 64), torch.randn(64, 64) / 8
    call = plait.compile(fn, (x, w), options=options)
    return call.record, call(x, w), fn(x, w)  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("fn", [cells, sums, pairs])
def test_as_eager(fn: Fn, wrapper: str) -> None:
    made, got, want = record(fn, wrapper=wrapper)
    torch.testing.assert_close(got, want)
    assert any(k.lengths for k in kernels_of(made.plan)), "no kernel is given a place"


def test_one_function() -> None:
    """However many steps there are."""
    made, _, _ = record(cells)
    steps = [k for k in kernels_of(made.plan) if k.lengths]
    assert len(steps) >= STEPS - 2, made.plan
    assert len({k.name for k in steps}) == 1
    assert made.kernel_source.count('extern "C" i64 ') <= 3
    assert plan_text(read_plan(plan_text(made.plan), made.plan.program)) == plan_text(made.plan)


def test_what_is_the_same_anywhere_takes_no_place() -> None:
    """Axes along which all kernels begin at one place stay numbers."""
    made, got, want = record(lambda x, w: cells(x[1:], w))
    torch.testing.assert_close(got, want)
    (given,) = {len(k.lengths) for k in kernels_of(made.plan) if k.lengths}
    assert given == 1  # the number of the step: all rows are told by it
