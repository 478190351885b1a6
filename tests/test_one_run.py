"""Functions that are traced in one run: which ones, and that two runs give the same graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.capture.flat_module import FunctionModule
from plait.capture.python_state import same_program
from plait.capture.trace import Traced, trace
from plait.compat import export
from plait.config import Config
from plait.errors import Unsupported

X, Y = torch.randn(4, 6), torch.randn(4, 6)


class Buffers(nn.Module):
    """One is written in place, one is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(6))
        self.register_buffer("b", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.a.add_(1)
        self.b = self.b * 2
        return x * self.a + self.b


def writes_both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x[0].add_(y[1])
    y.mul_(2)
    return x + y, x


def swallows(x: Tensor) -> Tensor:
    """What comes of a number that is found at run time stays here."""
    try:
        return x * x.sum().item()
    except Exception:  # noqa: BLE001  as programs do
        return x


def leaves_a_mode(x: Tensor) -> Tensor:
    torch.set_grad_enabled(not torch.is_grad_enabled())
    return x @ x.t()


ONCE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "results": (lambda x: (x, x.t(), None, [x + 1, {"a": x[0], "n": 3}]), (X,)),
    "writes": (lambda x, y: (y, x.add_(y)), (X, Y)),
    "writes both": (writes_both, (X, Y)),
    "a view": (lambda x: x.view(2, 12).mul_(2), (X,)),
    "random": (lambda x: torch.rand_like(x) + nn.functional.dropout(x), (X,)),
    "buffers": (Buffers(), (X,)),
    "batch norm": (nn.BatchNorm1d(6), (X,)),
    "a branch": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), (X,)),
    "recurrent": (nn.GRU(6, 3, 2), (X,)),
}
TWICE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a number": (lambda x: x * x.sum().item(), (X,)),
    "a size": (lambda x: x[x > 0] * 2, (X,)),
    "swallowed": (swallows, (X,)),
    "a mode": (leaves_a_mode, (X,)),
}


def traced(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> tuple[int, Traced]:
    """How often fn was run, and what was traced."""
    runs = itertools.count()
    module = fn if isinstance(fn, nn.Module) else FunctionModule(fn)
    forward = module.forward

    def counted(*args: Any) -> Any:
        next(runs)
        return forward(*args)

    module.forward = counted
    try:
        made = trace(module, args, {}, None, "the test", Config())
    finally:
        module.forward = forward
    return next(runs), made


@pytest.mark.parametrize("name", [*ONCE, *TWICE])
def test_two_runs_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args = (ONCE | TWICE)[name]
    runs, one = traced(fn, args)
    assert runs == 1 if name in ONCE else runs > 1
    monkeypatch.setattr(export, "_at_once", lambda *_: None)
    runs, two = traced(fn, args)
    assert runs > 1
    assert (one.mutated, one.views) == (two.mutated, two.views)
    assert same_program(one.graph, two.graph)


def test_what_two_runs_refuse() -> None:
    with pytest.raises(Unsupported, match="aliased inputs that are mutated"):
        plait.compile(lambda x, y: (x.add_(1), y), (X[:3], X[1:]))
    with pytest.raises(Unsupported, match="metadata mutation"):
        plait.compile(lambda x: x.unsqueeze_(0), (X,))
    with pytest.raises(Unsupported, match="neither argument nor parameter nor buffer"):
        plait.compile(lambda x: X.add_(1) + x, (Y,))
