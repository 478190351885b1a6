"""Nothing is left behind, in any target: of calls that succeed and that fail, and of programs that
are dropped."""

from __future__ import annotations

import ctypes
import gc
import itertools
import linecache
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.config import Config
from plait.graph.captured import Captured
from plait.ir.dtypes import f32
from plait.runtime.load import arena_stats
from plait.wrapper.instructions import (
    Arena,
    CallExtern,
    CallPython,
    Copy,
    Hook,
    Instr,
    Place,
    Ref,
    SizeOf,
    Symbol,
    View,
    WrapperProgram,
)
from plait.wrapper.program import Artifacts
from plait.wrapper.targets import TARGETS
from tests.native_tools import alloc, extern, launch, library, program, ret, tensor
from tests.test_cuda_programs import pipeline

KIB = 1 << 10


def everything(*last: Instr) -> WrapperProgram:
    """An arena, an allocation, views, an operator with two results, one that writes into memory, a
    Python function, a hook, a mutated input and `last`, which may fail."""
    return program(
        (tensor("x", 8), tensor("state", 8)),
        Symbol("s0", SizeOf("x", "size", 0)),
        Arena("room", 64),
        Place("a", "room", 0, f32, (8,), (1,)),
        alloc("y", 8),
        launch("k_inc", "x", "a", n=8),
        launch("k_inc", "a", "y", n=8),
        View("v", "y", f32, (4, 2), (2, 1), 0),
        CallExtern("aten::sort", (Ref("v"),), (), ("s", "i")),
        View("t", "s", f32, (2, 4), (1, 2), 0),
        alloc("m", 4, 4),
        CallExtern(
            "aten::mm.out", (Ref("v"), Ref("t")), (("out", Ref("m")),), (), ("m",), may_keep=False
        ),
        CallPython(0, "f", (Ref("y"),), (), ("z",)),
        Hook("a", 1, "a", "k_inc"),
        Copy("state", "z"),
        *last,
        ret("t", "y", "m", "z"),
        n_callables=2,
    )


def state() -> tuple[int, int, int, int]:
    """Resident bytes, tensors, bytes of arenas that are lent, texts that are kept."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # the heap's reserves do not count
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tensors = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
    texts = sum(name.startswith("<") for name in linecache.cache)
    return pages * os.sysconf("SC_PAGE_SIZE"), tensors, arena_stats()["in_use_bytes"], texts


def leave_nothing(work: Callable[[], None], times: int, nbytes: int) -> None:
    """Runs work that often in each of five windows. What leaks, leaks every time: at least `nbytes`
    in each."""
    work()
    states = [state()]
    for _ in range(5):
        for _ in range(times):
            work()
        states.append(state())
    growth = [min(b - a for a, b in itertools.pairwise(row)) for row in zip(*states, strict=True)]
    assert growth[0] < nbytes and max(growth[1:]) <= 0, growth


def some(*now: str) -> list[Any]:
    """All targets, of which these are not slow."""
    return [pytest.param(t, marks=[] if t in now else pytest.mark.slow) for t in TARGETS]


@pytest.mark.parametrize("target", some("native"))
@pytest.mark.slow
def test_ten_thousand_calls(target: str) -> None:
    parts = Artifacts({"cpu": library()}, callables=(lambda y: y + 1, lambda node, label, t: None))
    made = TARGETS[target](everything(), parts)
    failing = (
        CallExtern("aten::mm", (Ref("m"), Ref("y")), (), ("bad",)),
        extern("aten::neg", Ref("bad"), outs=("n",)),
    )
    bad = TARGETS[target](everything(*failing), parts)
    x, kept = torch.zeros(8), torch.zeros(8)

    def calls() -> None:
        for _ in range(250):
            made(x, kept)
            made.boxed([torch.zeros(8), torch.zeros(8)])
        for _ in range(25):
            with pytest.raises(RuntimeError, match="mat2 must be a matrix"):
                bad(x, kept)

    leave_nothing(calls, 4, 2000 * 40)


def fn(x: Tensor) -> tuple[Tensor, ...]:
    """Kernels, an operator with several results, views."""
    values, where = torch.sort((x * 2).sin(), -1)
    return values.view(-1, 2).sum(0), where.T, x.exp()


@pytest.mark.parametrize("target", some("python"))
@pytest.mark.slow
def test_a_hundred_programs(target: str, captured: Captured) -> None:
    cfg = replace(Config.from_env(), wrapper=target)
    x = torch.randn(4, 6)

    def compiles() -> None:
        got: Any = pipeline.compile_graph(captured, cfg).call(x)
        assert torch.equal(got[1], fn(x)[1])

    leave_nothing(compiles, 20, 20 * KIB)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Captured:
    """The graph of fn, as the compiler gets it."""
    found: list[Captured] = []
    compile_graph = pipeline.compile_graph

    def spy(given: Captured, *rest: Any) -> Any:
        found.append(given)
        return compile_graph(given, *rest)

    with monkeypatch.context() as m:
        m.setattr("plait.capture.program.compile_graph", spy)
        with torch.no_grad():
            torch.compile(fn, backend="plait")(torch.randn(4, 6))
    return found[0]
