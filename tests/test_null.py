"""The whole pipeline on the null target, without any compiler: programs against eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import plait
from plait import extend
from plait.config import Config
from plait.kernel.null.target import NullTarget
from plait.kernel.target import Measured
from plait.pipelines import make_kernels
from plait.runtime import toolchain
from plait.runtime.toolchain import ToolchainMissing


@pytest.fixture(autouse=True)
def null(monkeypatch: pytest.MonkeyPatch) -> Iterator[NullTarget]:
    """Kernels for the CPU are made by the null target, and nobody finds a compiler."""

    def missing(*_: object) -> None:
        raise ToolchainMissing("no compiler here")

    monkeypatch.setattr(toolchain, "_find", missing)
    monkeypatch.setattr("plait.kernel.cpu.target.find_toolchain", missing)
    monkeypatch.setattr("plait.runtime.cache.find_toolchain", missing)
    target = NullTarget()
    before = extend.kernel_target("cpu", target)
    yield target
    extend.kernel_target("cpu", before)


OPTIONS = {"wrapper": "python", "strict": True}


def compiled(fn: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="plait", options=OPTIONS, **more)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v


def statistics(x: Tensor) -> tuple[Tensor, ...]:
    return x.var(-1), x.argmax(0), x.cumsum(1), x.bfloat16().exp().float(), (x > 0).sum()


def picked(x: Tensor, at: Tensor) -> Tensor:
    return F.layer_norm(x[at], x.shape[-1:]) * x.mean()


def scattered(x: Tensor, at: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, at, x[: len(at)]).t().contiguous()


def in_place(x: Tensor, at: Tensor) -> Tensor:
    x[at] = 3.0
    return x.mul_(2).sin()


PROGRAMS = {
    attention: lambda: [torch.randn(2, 5, 4) for _ in range(3)],
    statistics: lambda: [torch.randn(6, 7)],
    picked: lambda: [torch.randn(8, 9), torch.tensor([0, 7, -1, 3])],
    scattered: lambda: [torch.randn(6, 5), torch.tensor([0, 3, 3, 1])],
    in_place: lambda: [torch.randn(6, 5), torch.tensor([4, 2])],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_as_eager(fn: Callable[..., Any], dynamic: bool) -> None:
    torch.manual_seed(0)
    mine = PROGRAMS[fn]()
    theirs = [x.clone() for x in mine]
    torch.testing.assert_close(compiled(fn, dynamic=dynamic)(*mine), fn(*theirs))
    torch.testing.assert_close(mine, theirs)


def test_training() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    x = torch.randn(4, 6)
    model(x).square().sum().backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    compiled(lambda x: model(x).square().sum())(x).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], want)


def test_a_check_that_fails_is_told() -> None:
    f = compiled(lambda x, at: x.abs()[at] + 1)
    f(torch.ones(5), torch.tensor([0]))
    with pytest.raises(IndexError, match="index is out of bounds for dimension 0 with size 5"):
        f(torch.ones(5), torch.tensor([9]))


def test_its_kernels_ran(null: NullTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right here is so by the kernels, not by eager."""
    monkeypatch.setattr("plait.kernel.null.run.run_kernel", lambda *_: 0)
    x = torch.ones(5)
    assert not torch.equal(compiled(lambda x: x * 2 + 1)(x), x * 2 + 1)


@pytest.mark.parametrize("wrapper", ["native", "cpp"])
def test_other_wrappers_call_aten(wrapper: str) -> None:
    """What they lack is said; the program is compiled, without kernels."""
    x = torch.rand(5)
    told = f"call of ATen: the wrapper '{wrapper}' launches no kernels of the null target; try"
    with pytest.warns(UserWarning, match=told):
        report = plait.explain(lambda x: x * 2 + 1, x, options={"wrapper": wrapper}, quiet=True)
    assert sum(report.extern_calls.values()) == 2 and report.graphs[0].kernel_source == ""


def test_measuring_is_a_step_of_its_own(null: NullTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs where the option says so, before kernels are written, and is given to them."""
    steps: list[str] = []
    given: list[object] = []

    def log(step: str, fn: Callable[..., Any], *args: Any) -> Any:
        steps.append(step)
        return fn(*args)

    emit = null.emit

    def watched(kernels: Any, unaligned: Any, machines: Any, choices: Any, verifies: bool) -> Any:
        given.append(choices)
        return emit(kernels, unaligned, machines, choices, verifies)

    monkeypatch.setattr(null, "emit", watched)
    monkeypatch.setattr(null, "measure", lambda k, *_: Measured({k[0].name: "a tile"}, ("a note",)))
    records = plait.explain(lambda x: x * 2 + 1, torch.ones(5), options=OPTIONS, quiet=True).graphs
    plan = records[0].plan
    name = plan.steps[0].name
    plain = make_kernels(plan, Config(), log)
    assert (
        steps == ["share lengths", "find machines", "write templates", "emit kernels"]
        and given[-1] == {}
        and plain.notes == ()
    )
    tuned = make_kernels(plan, replace(Config(), autotune=True), log)
    before = ["share lengths", "find machines", "write templates"]
    assert steps[4:] == [*before, "measure candidates", "emit kernels"]
    assert given[-1] == {name: "a tile"} and tuned.notes == ("a note",)


def test_kernels_that_are_alike() -> None:
    """In one launch, with a length each."""

    def fn(xs: list[torch.Tensor]) -> None:
        for x in xs:
            x.mul_(0.5).add_(1)

    def make() -> list[torch.Tensor]:
        return [torch.rand(16 * n) for n in range(1, 11)]

    torch.manual_seed(0)
    xs = make()
    want = [x * 0.5 + 1 for x in xs]
    compiled(fn)(xs)
    torch.testing.assert_close(xs, want)
