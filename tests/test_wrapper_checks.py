"""Checks that users switch on: layouts, addresses, and finite values, in every target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.wrapper import instructions as ins
from plait.wrapper.program import Program
from plait.wrapper.targets import TARGETS
from tests.models import MODELS
from tests.test_models import build, close, double

ALL = {"size_asserts": True, "alignment_asserts": True, "nan_asserts": True}
FINITE = {**ALL, "finite_asserts": True}


def checked(
    fn: Any, target: str = "native", options: dict[str, bool] = FINITE, **kwargs: Any
) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(
        fn, backend="plait", options={**options, "wrapper": target}, **kwargs
    )
    return compiled


def checks(program: Program, kind: type) -> list[Any]:
    return [i for i in program.record.wrapper.body if isinstance(i, kind)]


SLOW = ("gpt2", "llama", "vit")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MODELS]
)
def test_good_models_pass(name: str, programs: list[Program]) -> None:
    model, exact, x = build(name)
    model.eval(), exact.eval()
    with torch.no_grad():
        close(checked(model, options=ALL)(x), model(x), exact(double(x)), name)
    for kind in (ins.CheckFinite, ins.AssertSizeStride, ins.AssertAlignment):
        assert checks(programs[0], kind)
    model, exact, x = build(name)
    checked(model, options=ALL)(x).float().square().mean().backward()
    assert len(programs) > 2 and all(checks(p, ins.CheckFinite) for p in programs)


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_first_bad_kernel_is_named(target: str, dynamic: bool) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = F.softmax(x.log(), -1)  # NaN below 0
        return (y @ w).relu()

    compiled = checked(fn, target, dynamic=dynamic)
    x, w = torch.rand(40, 64), torch.randn(64, 48)
    torch.testing.assert_close(compiled(x, w), fn(x, w))
    x[3, 5] = -1
    with pytest.raises(
        RuntimeError, match=r"NaN or an infinity, computed by plait_log_softmax\w* \(.*aten.log"
    ):
        compiled(x, w)
    x[3, 5] = float("inf")
    with pytest.raises(
        RuntimeError, match=r"'arg\d' holds a NaN or an infinity, computed by the caller"
    ):
        compiled(x, w)


@pytest.mark.parametrize("target", list(TARGETS))
def test_operators_results_and_what_is_written_in_place(target: str) -> None:
    def fn(x: Tensor, buffer: Tensor) -> Tensor:
        y = torch.linalg.inv(x)
        buffer.add_(y.sum())
        return y * 2

    compiled = checked(fn, target)
    x, buffer = torch.randn(5, 5), torch.zeros(7)
    torch.testing.assert_close(compiled(x, buffer), torch.linalg.inv(x) * 2)
    buffer.fill_(3e38)
    with pytest.raises(
        RuntimeError,
        match=r"'arg\d' holds a NaN or an infinity, computed by plait_\w+ \(.*aten.add",
    ):
        compiled(torch.eye(5) * 1e-37, buffer)
    with pytest.raises(RuntimeError, match="computed by aten::linalg_inv_ex"):
        compiled(torch.eye(5) * 1e-39, buffer.zero_())


@pytest.mark.parametrize("target", list(TARGETS))
def test_returned_views_are_looked_at(target: str, programs: list[Program]) -> None:
    """A view of an argument that is returned, and memory of which only a part is read and
    returned."""
    compiled = checked(lambda x: (x.t()[1:], (x / 0.5)[:, ::2], x.view(torch.int32)), target)
    x = torch.randn(6, 4)
    for got, want in zip(
        compiled(x), (x.t()[1:], (x / 0.5)[:, ::2], x.view(torch.int32)), strict=True
    ):
        torch.testing.assert_close(got, want)
    looked_at = {i.tensor for i in checks(programs[0], ins.CheckFinite)}
    assert "arg0" in looked_at and len(looked_at) >= 2


def test_memory_that_is_written_in_parts_is_complete_when_it_is_looked_at() -> None:
    """A concatenation whose parts several instructions write: what is not written yet holds
    anything."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        a, b = x @ w, F.softmax(x, -1)
        c = torch.cat([a, b.cumsum(0), x], 1)
        return c + torch.cat([b, a * 2, x], 1).sin()

    compiled, x, w = checked(fn), torch.randn(64, 80), torch.randn(80, 80)
    for _ in range(3):
        junk = [torch.full((64, 240), float("nan")) for _ in range(8)]
        del junk  # the allocator hands such memory out again
        torch.testing.assert_close(compiled(x, w), fn(x, w))


@pytest.mark.parametrize("target", list(TARGETS))
def test_layouts_that_were_not_promised(target: str) -> None:
    """An operator whose results differ from what it said when it was traced: other strides are
    mended, other sizes are an error that names it."""

    @torch.library.custom_op(f"plait_checks::liar_{target}", mutates_args=())
    def liar(x: Tensor) -> Tensor:
        if x[0, 0] > 5:
            return x[1:] * 2
        return (x * 2).t().contiguous().t() if x[0, 0] > 0 else x * 2

    @liar.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    compiled = checked(lambda x: liar(x) + 1, target)
    x = -torch.ones(3, 5)
    torch.testing.assert_close(compiled(x), x * 2 + 1)
    torch.testing.assert_close(compiled(-x), -x * 2 + 1)
    with pytest.raises(
        RuntimeError, match=r"plait_checks.*liar.*sizes \[2, 5\].*expected \[3, 5\]"
    ):
        compiled(-x * 9)


def test_nothing_is_checked_unasked(programs: list[Program]) -> None:
    torch.compile(lambda x: (x @ x).relu(), backend="plait")(torch.randn(40, 40))
    assert not any(
        checks(programs[0], k) for k in (ins.CheckFinite, ins.AssertSizeStride, ins.AssertAlignment)
    )
