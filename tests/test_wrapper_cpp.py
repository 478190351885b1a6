"""The C++ target end to end: threads, errors, and what may stand in a source."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from plait.config import Config
from plait.errors import warn_once
from plait.ir.dtypes import f32
from plait.ir.expr import compare, symbol
from plait.runtime.load import LoadError, arena_stats, load
from plait.runtime.toolchain import ToolchainMissing
from plait.wrapper.cpp import build_cpp, load_program, make_cpp
from plait.wrapper.instructions import (
    Arena,
    AssertScalar,
    CallExtern,
    CallPython,
    DefineKernel,
    Launch,
    Note,
    Place,
    Ref,
    Return,
    Symbol,
    SymbolInput,
    TensorInput,
    View,
    WrapperProgram,
)
from plait.wrapper.native import encode
from plait.wrapper.program import Artifacts
from plait.wrapper.text import read
from tests.against_eager import same
from tests.native_tools import alloc, extern, launch, library, program, ret, tensor
from tests.test_cuda_programs import compile_only, fakes, record  # noqa: F401  (a fixture)
from tests.test_frontend_cases import BOTH, NO_GRAD
from tests.test_threads import call_at_once


def compiled(
    fn: Callable[..., Any], wrapper: str = "cpp", dynamic: bool | None = None
) -> Callable[..., Any]:
    return torch.compile(fn, backend="plait", dynamic=dynamic, options={"wrapper": wrapper})


def build(p: WrapperProgram, callables: tuple[Any, ...] = ()) -> Any:
    return load_program(p, Artifacts({"cpu": library()}, callables=callables))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) for n in (*BOTH, *NO_GRAD)]
)
def test_borders(name: str) -> None:
    fn, make = {**BOTH, **NO_GRAD}[name]
    same(fn, make, other=compiled(fn))
    if name in BOTH:
        torch._dynamo.reset()
        same(fn, make, grad=True, other=compiled(fn, dynamic=True))


def test_threads_call_one_program() -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.Softmax(-1)
    )
    fn = compiled(net, dynamic=True)
    inputs = [torch.randn(n, 64) for n in (3, 40, 300)]
    with torch.no_grad():
        want = [net(x) for x in inputs]
        fn(inputs[0])
    call_at_once(fn, inputs, want, 100, 1e-4, 1e-5)


def test_a_machine_without_compiler_runs_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(cfg: Config) -> None:
        raise ToolchainMissing("no C++ compiler in this test")

    monkeypatch.setattr("plait.wrapper.cpp.find_toolchain", nothing)
    warn_once.cache_clear()
    p = program((tensor("x", 4),), alloc("y", 4), launch("k_inc", "x", "y", n=4), ret("y"))
    with pytest.warns(UserWarning, match="without making C"):
        made = build(p)
    assert made.stats()["steps"] > 0
    assert torch.equal(made(torch.zeros(4))[0], torch.ones(4))


def test_nothing_of_the_plan_runs() -> None:
    p = program((tensor("x", 4),), alloc("y", 4), launch("k_inc", "x", "y", n=4), ret("y"))
    made = build(p)
    assert made.stats()["steps"] == 0
    assert torch.equal(made(torch.zeros(4))[0], torch.ones(4))


# -------------------------------------------------------------------------------- errors and memory
def everything(*last: Any) -> WrapperProgram:
    """An arena, an allocation, a view, an operator with two results and `last`, which may fail."""
    return program(
        (tensor("x", 8),),
        Arena("room", 64),
        Place("a", "room", 0, f32, (8,), (1,)),
        alloc("y", 8),
        launch("k_inc", "x", "a", n=8),
        launch("k_inc", "a", "y", n=8),
        View("v", "y", f32, (4, 2), (2, 1), 0),
        CallExtern("aten::sort", (Ref("v"),), (), ("s", "i")),
        *last,
        ret("s", "y"),
        n_callables=1,
    )


def failing_operator() -> tuple[Any, ...]:
    return (
        CallExtern("aten::mm", (Ref("s"), Ref("s")), (), ("m",)),
        extern("aten::neg", Ref("m"), outs=("n",)),
    )


def failing_python() -> tuple[Any, ...]:
    return (CallPython(0, "f", (Ref("y"), Ref("v"), Ref("i")), (), ("m",)),)


@pytest.mark.parametrize("last", [failing_operator, failing_python])
def test_an_error_frees_everything(last: Callable[[], tuple[Any, ...]]) -> None:
    held: list[StorageWeakRef] = []

    def fails(*tensors: Tensor) -> None:
        held.extend(StorageWeakRef(t.untyped_storage()) for t in tensors)
        raise KeyError("mine")

    made = build(everything(*last()), (fails,))
    x = torch.zeros(8)
    held.append(StorageWeakRef(x.untyped_storage()))
    given: list[Any] = [x]
    del x
    for _ in range(2):
        with pytest.raises((RuntimeError, KeyError), match=r"mat1 and mat2|mine") as raised:
            made.boxed(given)
        del raised
        given = [torch.zeros(8)]
    gc.collect()
    assert all(h.expired() for h in held)
    assert arena_stats()["in_use_bytes"] == 0


def test_inputs_of_a_boxed_call_die_early() -> None:
    seen: list[bool] = []
    held: list[StorageWeakRef] = []

    def look(y: Tensor) -> Tensor:
        seen.append(held[-1].expired())
        return y

    body = (
        alloc("y", 8),
        launch("k_inc", "x", "y", n=8),
        CallPython(0, "f", (Ref("y"),), (), ("z",)),
        ret("z"),
    )
    made = build(program((tensor("x", 8), tensor("unused", 8)), *body, n_callables=1), (look,))
    for k in range(2):
        given = [torch.zeros(8), torch.zeros(8)]
        held.append(StorageWeakRef(given[k].untyped_storage()))
        made.boxed(given)
    assert seen == [True, True]


def test_sizes_overflow_as_in_native() -> None:
    n = symbol("n", lo=1)
    p = WrapperProgram(
        "g", (SymbolInput("n"),), (Symbol("m", n * n * n), Return((symbol("m"), 7 // n)))
    )
    native, cpp = load(encode(p), {}), build(p)
    for value in (3, 2**20):
        assert cpp(value) == native(value)
    for value in (2**40, 0):
        messages = []
        for made in (native, cpp):
            with pytest.raises(RuntimeError) as raised:
                made(value)
            messages.append(str(raised.value))
        assert (
            messages[0]
            == messages[1]
            == "a size expression overflows or divides by a number that is not positive"
        )


# --------------------------------------------------------------------------------------- the source
NASTY = 'a */ b \\\n#error "no" ??/\n\\ \u2028 é \x00 %s {} \\'


def test_any_text_is_safe() -> None:
    p = program(
        (tensor("x", 4), SymbolInput("n")),
        Note(NASTY),
        AssertScalar(compare("lt", symbol("n"), 3), NASTY),
        alloc("y", 4),
        launch("k_inc", "x", "y", n=4),
        ret("y"),
    )
    p = replace(p, name=NASTY)
    for made in (build(p), load(encode(p), {"cpu": library()})):
        assert torch.equal(made(torch.zeros(4), 2)[0], torch.ones(4))
        with pytest.raises(RuntimeError, match=re.escape(NASTY)):
            made(torch.zeros(4), 3)


def test_names_that_are_reserved_or_no_names() -> None:
    p = read("""
program('g')
lambda_ = symbol('int', lo=2)
ref['int'] = int_input()
call = tensor_input(f32[4] @ (1,))
ref['9 lives'] = tensor_input(f32[4] @ (1,))
ref['9_lives'] = alloc(f32[4] @ (1,))
copy(ref['9_lives'], call, bump=False)
return (ref['9_lives'], call, ref['9 lives'], lambda_ + 1)
""")
    assert make_cpp(p) == make_cpp(p)
    x, y = torch.randn(4), torch.randn(4)
    out = build(p)(5, x, y)
    assert torch.equal(out[0], x)
    assert out[1] is x
    assert out[2] is y
    assert out[3] == 6


def test_the_header_needs_no_other() -> None:
    header = Path(__file__).parents[1] / "plait" / "include" / "plait" / "wrapper.h"
    assert re.findall(r"#include.*", header.read_text()) == ["#include <stdint.h>"]


def test_another_version_or_program_is_refused(tmp_path: Path) -> None:
    p = WrapperProgram("g", (), (Return(()),))
    built = str(build_cpp(make_cpp(p), Config.from_env()))
    with pytest.raises(LoadError, match="program 'plait_other' is not in"):
        load(encode(p), {}, generated=built, entry="plait_other")
    old = build_cpp('extern "C" { extern const int plait_table_version = 0; }', Config.from_env())
    with pytest.raises(LoadError, match="was made for another version of plait"):
        load(encode(p), {}, generated=str(old))


def test_a_program_for_a_gpu_builds(compile_only: None) -> None:  # noqa: F811
    mode, (x, w) = fakes((64, 32), (32, 16))
    made = record(lambda x, w: ((x @ w).softmax(-1), x.sum(0)), x, w, mode=mode).wrapper
    assert any(isinstance(i, DefineKernel) and i.device != "cpu" for i in made.body)
    source = make_cpp(made)
    assert source.count("TRY(launch(call, kernel::") == sum(
        isinstance(i, Launch) for i in made.body
    )
    assert Path(str(build_cpp(source, Config.from_env()))).is_file()


def test_memory_of_a_kernels_view_outlives_its_base() -> None:
    x = TensorInput("x", f32, (4,), (1,))
    body = (
        alloc("y", 8),
        launch("k_inc", "x", "y", n=4),
        View("v", "y", f32, (4,), (1,), 0),
        alloc("z", 4),
    )
    made = build(program((x,), *body, launch("k_inc", "v", "z", n=4), ret("z")))
    assert torch.equal(made(torch.zeros(4))[0], torch.full((4,), 2.0))
