"""Python numbers as results: floats and bools that come from sizes and from values of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import plait
from plait.errors import InternalError
from plait.ir.text import program_text, read_program
from plait.wrapper.text import read, text
from plait.wrapper.verify import verify

CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "float": lambda x: (x + 1, x[0].item()),
    "alone": lambda x: x[1].item(),
    "computed": lambda x: (x.double()[0].item() * 2.0 + 0.5, x * x[0].item()),
    "of a half": lambda x: x.half()[2].item(),
    "bool": lambda x: ((x[0] > 0).item(), (x[1] > 0).item()),
    "int": lambda x: x.long().sum().item(),
}


class Wrapped(torch.nn.Module):
    def __init__(self, fn: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> Any:
        return self.fn(x)


@pytest.mark.parametrize("wrapper", ["native", "python"])
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, wrapper: str) -> None:
    run = plait.compile(Wrapped(CASES[name]), (torch.randn(3),), options={"wrapper": wrapper})
    for _ in range(3):
        x = torch.randn(3)
        want, got = CASES[name](x), run(x)
        many = isinstance(want, tuple)
        for a, b in zip(want if many else (want,), got if many else (got,), strict=True):
            assert type(a) is type(b)
            torch.testing.assert_close(b, a, rtol=0, atol=0)


def test_bools_through_torch_compile() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(CASES["bool"], backend="plait", fullgraph=True)
        assert run(torch.tensor([1.0, -1.0])) == (True, False)
        assert all(type(b) is bool for b in run(torch.tensor([-1.0, 1.0])))


LOOPS = """
inputs()
v: f64[()] @ () = fixed

def pointwise() -> v:
    return 2.5

return (value(v),)
"""


def test_text() -> None:
    p = read_program(LOOPS)
    assert read_program(program_text(p)) == p
    w = read("program('g')\nv = alloc(f64[()] @ ())\nfill(v, 2.5)\nreturn (value(v), 3)")
    assert read(text(w)) == w
    verify(w)


def test_a_value_can_only_be_returned() -> None:
    w = read("program('g')\nv = alloc(f64[()] @ ())\nfill(v, value(v))\nreturn ()")
    with pytest.raises(InternalError, match="only be returned"):
        verify(w)
