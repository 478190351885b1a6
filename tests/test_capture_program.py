"""While compiling, and only then, the garbage collector is held, and torch makes nothing that
nobody asked for; frames have room."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch._functorch.config as functorch_config
from torch._dynamo import guards
from torch._functorch import aot_autograd

import plait
from plait.capture.program import collector_paused, roomy
from plait.errors import UserError


def test_the_collector_is_off_inside_and_on_after() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_after_an_error() -> None:
    with pytest.raises(UserError), collector_paused():
        raise UserError("no")
    assert gc.isenabled()


@pytest.mark.parametrize("backend", ["plait", "aot_eager"])
def test_the_collector_is_off_while_dynamo_traces_for_plait(backend: str) -> None:
    seen = []

    @torch._dynamo.assume_constant_result  # called while Dynamo traces
    def asked() -> int:
        seen.append(gc.isenabled())
        return 1

    compiled = torch.compile(lambda x: x + asked(), backend=backend)
    compiled(torch.ones(3))
    assert seen == [backend != "plait"]
    assert gc.isenabled()


@pytest.mark.parametrize("backend", ["plait", "aot_eager"])
def test_guards_are_measured_for_others_and_for_readers_of_their_log(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(*given: object) -> float:
        measured.append(given)
        return 1.0

    monkeypatch.setattr(guards, "profile_guard_manager", measure)
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert len(measured) == (backend != "plait")
    monkeypatch.setattr(guards.guards_log, "isEnabledFor", lambda _: True)
    torch.compile(lambda x: x + 2, backend=backend)(torch.ones(3))
    assert len(measured) == 1 + (backend != "plait")
    assert guards.profile_guard_manager is measure


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_states_of_random_numbers_are_made_for_whoever_asks(
    ahead: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tracker = [], aot_autograd.PhiloxStateTracker
    monkeypatch.setattr(tracker, "reset", lambda: made.append(1))
    fn, x = lambda x: x + 1, torch.ones(3)
    refused = pytest.raises(Exception, match=r"functionalize|CUDA not available")
    with functorch_config.patch(functionalize_rng_ops=asked), refused if asked else nullcontext():
        plait.compile(fn, (x,)) if ahead else torch.compile(fn, backend="plait")(x)
    assert bool(made) == asked
    assert aot_autograd.PhiloxStateTracker is tracker


def test_whoever_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_compiling_leaves_it_on() -> None:
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: x * 2, backend="plait")(x).sum().backward()
    plait.compile(lambda x: x * 2, (torch.ones(3),))
    assert gc.isenabled()


def _called(n: int) -> int:
    return n + 1


def _loop() -> int:
    """How many pages a loop of calls maps."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for k in range(200):
        _called(k)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _below(depth: int, run: Callable[[], int]) -> int:
    return _below(depth - 1, run) if depth else run()


def test_calls_map_no_memory_however_deep_the_stack_is() -> None:
    """Python's own do, at some depth."""
    deep = range(300)
    assert max(_below(n, _loop) for n in deep) >= 200
    assert max(_below(n, roomy(_loop)) for n in deep) < 50
    assert roomy(lambda: _below(900, _loop))() < 50
