"""Convolutions that are loops: those on a GPU whose channels each have a filter of their own. Group
norms of images whose channels are innermost, and long cats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from plait.devices import facts_of
from plait.ir.calls import Extern
from plait.ir.loops import Pointwise, Reduction
from plait.lower import norm
from plait.lower.core import Lowering
from tests.lower_tools import Evaluation, check, lowered

r = torch.randn
CASES = {  # sizes of the input and of the filters, stride, padding, dilation
    "plain": ((2, 6, 9, 8), (6, 1, 3, 3), 1, 0, 1),
    "padded": ((2, 6, 9, 8), (6, 1, 3, 3), 1, 1, 1),
    "strided": ((2, 6, 9, 8), (6, 1, 4, 2), 2, (2, 1), 1),
    "dilated": ((2, 6, 9, 8), (6, 1, 3, 2), (1, 2), (3, 1), (2, 3)),
    "sequence": ((2, 6, 19), (6, 1, 4), 1, 3, 1),
    "volume": ((1, 4, 5, 6, 4), (4, 1, 2, 2, 2), 1, 1, 1),
    "several filters": ((2, 3, 9, 8), (6, 1, 3, 3), 1, 1, 1),
    "one channel": ((2, 1, 1, 29), (6, 1, 1, 10), (1, 5), 0, 1),
    "point": ((2, 6, 4, 3), (6, 1, 1, 1), 1, 0, 1),
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules take a CPU for a GPU."""
    monkeypatch.setattr(Lowering, "facts", lambda ctx: facts_of("cuda"))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_depthwise(name: str, last: bool) -> None:
    shape, filters, stride, padding, dilation = CASES[name]
    n = len(shape) - 2
    op = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    x, w, b = r(shape), r(filters), r(filters[0])
    if last and n > 1:
        x = x.to(memory_format=(torch.channels_last, torch.channels_last_3d)[n - 2])
    given = (None, stride, padding, dilation, shape[1])
    check(lambda x, w: op(x, w, *given), x, w)
    check(lambda x, w, b: op(x, w, b, *given[1:]), x, w, b)
    low = lowered(lambda x, w: op(x, w, *given), (x, w), False)
    calls = any(isinstance(o, Extern) for o in low.program.ops)
    assert calls == (name not in ("sequence", "point") and not (last and n > 1))


def test_sums_are_float32() -> None:
    x, w, b = r(2, 4, 9, 8).bfloat16(), r(4, 1, 3, 3).bfloat16(), r(4).bfloat16()
    x = x.to(memory_format=torch.channels_last)
    low = lowered(lambda x, w, b: F.conv2d(x, w, b, groups=4), (x, w, b), False)
    (got,) = Evaluation(low, (x, w, b)).run()
    assert torch.equal(got, F.conv2d(x.float(), w.float(), b.float(), groups=4).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_norm_by_channels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = (r(2, 6, 5, 7) * 3 + 9).to(dtype), r(6).to(dtype), r(6).to(dtype)
    x = x.to(memory_format=torch.channels_last)

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 2, w, b)

    def reductions() -> int:
        program = lowered(fn, (x, w, b), False, decompose=False).program
        return sum(isinstance(o, Reduction) for o in program.ops)

    assert reductions() == 1  # small: in one piece
    monkeypatch.setattr(norm, "LARGE_NBYTES", 0)
    assert reductions() == 3
    check(fn, x, w, b, decompose=False)


def test_long_cats_copy_what_is_in_memory_together() -> None:
    xs = [r(2, n, 3) for n in (1, 2, 3, 1, 4, 2, 0, 1, 2, 3, 2)]

    def fn(*xs: torch.Tensor) -> torch.Tensor:
        return torch.cat([*xs, xs[0] * 2, xs[1]], 1)

    def loops() -> int:
        return sum(isinstance(o, Pointwise) for o in lowered(fn, xs, False).program.ops)

    assert loops() == 5  # the product, eight, two, the product where it is to lie, one
    check(fn, *xs)
