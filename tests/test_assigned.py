"""Modules whose forward assigns tensors: plait.compile writes buffers, and says what it cannot assign."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import Unsupported
from tests.metadata import facts

ROW = torch.arange(4.0)


class Assigns(nn.Module):
    def __init__(self, fn: Callable[..., Any], attributes: dict[str, Any], **buffers: Tensor | None) -> None:
        super().__init__()
        self.fn = fn
        for name, x in buffers.items():
            self.register_buffer(name, x if x is None else x.clone())
        for name, x in attributes.items():
            setattr(self, name, x)

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)


def counted(m: Any, x: Tensor) -> Tensor:
    m.a = m.a + 1
    return x + m.a


def returned(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    old = m.a
    m.a = m.a + x
    return old, old[:2], m.a


def swapped(m: Any, x: Tensor) -> Tensor:
    m.a, m.b = m.b, m.a
    return x + m.a


def written_again(m: Any, x: Tensor) -> Tensor:
    m.a = torch.roll(m.a, 1, 0)
    m.a.mul_(x)
    m.b = m.a
    return m.a + m.b


def of_a_parameter(m: Any, x: Tensor) -> Tensor:
    m.w = nn.Parameter(m.w * 2)
    return x * m.w


def kept(m: Any, x: Tensor) -> Tensor:
    m.last = x * 2
    return x + 1


def grown(m: Any, x: Tensor) -> Tensor:
    m.a = torch.cat([m.a, x])
    return m.a


def wider(m: Any, x: Tensor) -> Tensor:
    m.a = m.a.double()
    return x + m.a


def by_data(m: Any, x: Tensor) -> Tensor:
    m.a.data = m.a.data + 1
    return x + m.a


@pytest.mark.parametrize("fn", [counted, returned, swapped, written_again, of_a_parameter])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_assigned_is_written(fn: Callable[..., Any], packed: bool, tmp_path: Path) -> None:
    ours, eager = (Assigns(fn, {"w": nn.Parameter(ROW.clone())}, a=ROW, b=ROW * 2) for _ in range(2))
    with torch.no_grad():
        if packed:
            plait.package(ours, tmp_path / "p.plait", (ROW,))
            call: Callable[..., Any] = plait.load(tmp_path / "p.plait")
        else:
            call = plait.compile(ours, (ROW,))
        for k in range(3):
            torch.testing.assert_close(call(ROW + k), eager(ROW + k), rtol=0, atol=0)
    if not packed:
        torch.testing.assert_close(ours.state_dict(), eager.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "fn, attributes, buffers",
    [
        (grown, {}, {"a": ROW}),
        (wider, {}, {"a": ROW}),
        (by_data, {}, {"a": ROW}),
        (counted, {"a": ROW.clone()}, {}),
        (kept, {}, {"last": None}),
    ],
    ids=["grown", "wider", "by data", "no buffer", "an empty buffer"],
)
def test_what_no_program_can_assign_is_told(
    fn: Callable[..., Any], attributes: dict[str, Any], buffers: dict[str, Any]
) -> None:
    module = Assigns(fn, attributes, **buffers)
    before = dict(module.__dict__), dict(module._buffers)
    with pytest.raises(Unsupported):
        plait.compile(module, (ROW,))
    assert (module.__dict__, module._buffers) == before


def test_what_a_module_keeps_beside_its_state_is_warned_of() -> None:
    module = Assigns(kept, {"last": None})
    with pytest.warns(UserWarning, match="assigns 'last'"):
        call = plait.compile(module, (ROW,))
    assert torch.equal(call(ROW), ROW + 1) and module.last is None


def test_a_layer_in_two_places_and_a_tensor_in_two_layers() -> None:
    layer, tied = nn.Linear(4, 4), nn.Linear(4, 4)
    tied.weight = layer.weight
    module = nn.Sequential(layer, nn.Sequential(layer), tied)
    before = {name: id(x) for name, x in module.named_parameters(remove_duplicate=False)}
    want = module(ROW)
    torch.testing.assert_close(plait.compile(module, (ROW,))(ROW), want)
    assert {name: id(x) for name, x in module.named_parameters(remove_duplicate=False)} == before
    assert torch.equal(module(ROW), want)


@pytest.mark.parametrize("road", ["native", "python", "cpp", "fx", "package"])
def test_results_in_a_buffer_that_is_assigned_lie_as_in_eager(road: str, tmp_path: Path) -> None:
    def parts(m: Any, x: Tensor) -> Any:
        old = m.a
        m.a = old + x
        return old.diagonal(), old.t()[1:], old[:, 1], old.view(torch.int32)

    ours, eager = (Assigns(parts, {}, a=torch.arange(16.0).view(4, 4)) for _ in range(2))
    if road == "package":
        plait.package(ours, tmp_path / "p.plait", (ROW,))
        call: Callable[..., Any] = plait.load(tmp_path / "p.plait")
    else:
        call = plait.compile(ours, (ROW,), options={"wrapper": road})
    for _ in range(2):
        got, want = call(ROW), eager(ROW)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert facts(got[:3], []) == facts(want[:3], [])
