"""While compiling, and only then, the garbage collector is held; frames have room."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable

import pytest
import torch

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
