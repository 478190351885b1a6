"""Streams that the user chose, on a GPU: work runs where it was put, in the order that was asked
for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import graph_bytecode_inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from plait import compat
from plait.compile import compile_graph
from plait.config import Config
from plait.graph.captured import Captured
from tests.test_gpu import CUDA

WRAPPERS = pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
CALLERS, SIDE, EVENT = range(3)
SLEEP = 50_000_000  # cycles
HERE, OTHER = (
    torch.cuda.current_stream(),
    torch.cuda.Stream(),
)  # for good: torch knows them by weak references
RECORDED = torch.cuda.Event()
streams = torch.ops.streams


def late(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x is only ready on the side stream, which the caller's waits for in the end."""
    z = (x * 2).sin() @ x
    streams.record_event(EVENT, SIDE)
    w = y.cos() + 1
    streams.wait_event(EVENT, CALLERS)
    return z + w


@WRAPPERS
def test_work_runs_on_its_stream(wrapper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.streams, "CALLERS_STREAM", CALLERS)  # torch 2.11 has no name for it
    with FakeTensorMode(), torch.no_grad():
        given = [torch.empty(64, 64, device=CUDA) for _ in range(2)]
        graph = make_fx(late, compat.decompositions.decomposition_table())(*given)
    for node in graph.graph.nodes:
        if node.name in ("mul", "sin", "mm"):
            node.meta["custom"] = {"stream": SIDE}
    run = compile_graph(
        Captured(graph, "late", "inference"), Config.from_env().with_options({"wrapper": wrapper})
    )
    here, side, event = HERE, OTHER, RECORDED
    event.record(side)
    y = torch.randn(64, 64, device=CUDA)
    for value in range(5):
        graph_bytecode_inputs.store_user_object_weakrefs(here, side, event)
        x = torch.full((64, 64), -1.0, device=CUDA)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP)
            x.fill_(float(value))
        (got,) = run.call(x, y)
        assert torch.cuda.current_stream() == here
        want = (
            (torch.full_like(x, float(value)) * 2).sin() @ torch.full_like(x, float(value))
            + y.cos()
            + 1
        )
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("wrapper", ["native", "python", "fx"])
def test_the_callers_stream_comes_back_after_an_error(
    wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat.streams, "CALLERS_STREAM", CALLERS)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() @ x
        streams.record_event(7, SIDE)  # there is none
        return y

    with FakeTensorMode(), torch.no_grad():
        graph = make_fx(fn, compat.decompositions.decomposition_table())(
            torch.empty(8, 8, device=CUDA)
        )
    for node in graph.graph.nodes:
        if node.name in ("sin", "mm"):
            node.meta["custom"] = {"stream": SIDE}
    run = compile_graph(
        Captured(graph, "wrong", "inference"), Config.from_env().with_options({"wrapper": wrapper})
    )
    graph_bytecode_inputs.store_user_object_weakrefs(HERE, OTHER)
    with pytest.raises(AssertionError, match="not registered"):
        run.call(torch.randn(8, 8, device=CUDA))
    assert torch.cuda.current_stream() == HERE


def _prefetch(x: torch.Tensor, y: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
    here = torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        z = (x @ x).sin()
    w = y.cos() + 1
    here.wait_stream(side)
    return z + w


def _events(
    x: torch.Tensor, y: torch.Tensor, side: torch.cuda.Stream, event: torch.cuda.Event
) -> torch.Tensor:
    with torch.cuda.stream(side):
        z = (x @ x).sin()
        event.record(side)
    w = y.cos() + 1
    event.wait()
    return z + w


@WRAPPERS
@pytest.mark.parametrize("fn", [_prefetch, _events])
def test_as_eager(fn: Callable[..., torch.Tensor], wrapper: str) -> None:
    x, y = torch.randn(128, 128, device=CUDA), torch.randn(128, 128, device=CUDA)
    more: list[Any] = [OTHER] + [RECORDED] * (fn is _events)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="plait", options={"wrapper": wrapper})
    for _ in range(3):
        torch.cuda.synchronize()
        torch.testing.assert_close(compiled(x, y, *more), fn(x, y, *more))
