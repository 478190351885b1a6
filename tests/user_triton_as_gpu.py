"""`python -m tests.user_triton_as_gpu` compiles the programs of `user_triton.py` and
`user_kernels.py` as for a GPU, and runs them without one: the user's kernels, called by ours, in
Triton's interpreter (see `interpreted.py`)."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "PLAIT_WRAPPER": "python"}

import torch
import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import InterpreterError

import plait
from plait.compat.user_kernels import written_names
from plait.config import Config
from plait.kernel.triton.target import TritonTarget
from plait.runtime.cubin_pool import pool
from plait.wrapper.instructions import Launch
from plait.wrapper.program import CompileRecord, observers
from tests import interpreted


def prepare() -> Any:
    """The programs, with kernels that Dynamo takes for real ones: PyTorch's analysis of them
    compiles for a GPU that it thinks is there."""
    interpreted.pytest_configure()
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_benchmarker=lambda: None,
    )
    triton.runtime.driver.set_active(gpu)
    for facts in ("has_triton", "has_triton_tma", "has_triton_tensor_descriptor_host_tma"):
        setattr(torch.utils._triton, facts, lambda: True)
    triton.knobs.runtime.interpret = False
    from tests import user_kernels, user_triton

    triton.knobs.runtime.interpret = True
    user_triton.interpreted()  # for calls of kernels by Python
    return user_triton, user_kernels


def record() -> dict[str, Any]:
    """The kernels of the user's that are emitted from now on, by name."""
    emit, seen = TritonTarget.emit_users, {}

    def recorded(self: Any, *args: Any) -> Any:
        source = emit(self, *args)
        seen.update({unit.name: unit for unit in source.units})
        return source

    TritonTarget.emit_users = recorded  # type: ignore[method-assign]
    return seen


def check_written(odd: Any) -> None:
    """What kernels write, by their IR: of arguments with defaults, swapped, and in branches."""
    given = dict.fromkeys("abc", torch.empty(2)) | {"n": 2}
    more = {"which": 4, "BLOCK": 64}
    assert written_names(odd.swap_kernel, {**given, "rounds": 2, "BLOCK": 64}, {}) == {"a", "b"}
    assert written_names(odd.branch_kernel, {**given, **more}, {}) == {"a", "b"}
    assert written_names(odd.summed_descriptor_kernel, {**given, "BLOCK": 64}, {}) == {"b"}


def check_loaded_pointer(odd: Any) -> None:
    """A kernel that writes through a pointer from memory changes tensors that nobody sees: eager
    runs the graph."""
    torch._dynamo.reset()

    def through(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        odd.table_kernel[(1,)](table, x.numel(), BLOCK=64)
        return x + y

    made: list[CompileRecord] = []
    token = observers.set((made.append,))
    x = torch.ones(20)
    got = torch.compile(through, backend="plait")(x, torch.tensor([x.data_ptr()]))
    observers.reset(token)
    torch.testing.assert_close(got, torch.ones(20).sin() + torch.arange(20))
    assert "a pointer from memory" in made[-1].ladder[0].reason, made[-1].ladder


def check_refused(odd: Any) -> None:
    """A kernel that Triton refuses is called as Python, and nothing else is."""
    torch._dynamo.reset()
    pipeline: Any = importlib.import_module("plait.compile")
    build = pipeline._build

    def compiled(sources: Any, cfg: Config) -> Any:
        units = [u for s in sources.values() for u in s.units if "refused" in u.name]
        pool().compile(units, cfg)
        return build(sources, cfg)

    def refused(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        odd.refused_kernel[(1,)](x.sin(), out, x.numel(), BLOCK=64)
        return odd.affine(out, 2.0, 1)

    made: list[CompileRecord] = []
    token = observers.set((made.append,))
    pipeline._build = compiled
    with suppress(InterpreterError):  # Python has no more luck
        torch.compile(refused, backend="plait")(torch.ones(20))
    pipeline._build = build
    observers.reset(token)
    (step,) = made[-1].ladder
    assert step.rung == "python" and "has no attribute 'no_such_thing'" in step.reason, step


def check_parts(odd: Any) -> None:
    """Parts of one tensor are written where they are: nothing fills it first."""
    torch._dynamo.reset()

    def halves(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(2, x.numel(), device=x.device)
        for k in (1, 0):
            odd.scale_into(x, out[k], k + 2.0)
        return out

    made: list[CompileRecord] = []
    token = observers.set((made.append,))
    x = torch.ones(40)
    got = torch.compile(halves, backend="plait")(x)
    observers.reset(token)
    torch.testing.assert_close(got, torch.stack([x * 2, x * 3]))
    launches = [i for i in made[-1].wrapper.body if isinstance(i, Launch)]
    assert len(launches) == 2, launches


CHECKS = (check_written, check_loaded_pointer, check_refused, check_parts)


if __name__ == "__main__":
    emitted = record()
    programs, kernels = prepare()
    for check in () if sys.argv[1:] == ["rms_norm", "rotary"] else CHECKS:
        check(kernels.user_kernels_odd)
    for name in programs.CASES if sys.argv[1:] in ([], ["rms_norm", "rotary"]) else ():
        for wrapper in ("python", "fx"):
            for dynamic in (False, True):
                programs.check(name, wrapper, "cpu", dynamic)
                print("passed", name, wrapper, dynamic, flush=True)
    programs.check_told("cpu", launched=True)
    for name in sys.argv[1:] or kernels.CASES:
        for dynamic in (False, True):
            kernels.check(name, "python", "cpu", dynamic)
            print("passed", name, dynamic, flush=True)
        kernels.check_launched(name, "cpu")
        kernels.check_traced(name, plait.compile, "cpu")
    emitted = {k: unit for k, unit in emitted.items() if "refused" not in k}
    # What the interpreter has run is compiled too, inlined early returns and descriptors included.
    with tempfile.TemporaryDirectory() as folder:
        cfg = Config().with_options({"cache_dir": folder})
        cubins = pool().compile(list(emitted.values()), cfg)
    for unit, cubin in zip(emitted.values(), cubins, strict=True):
        assert cubin.symbol == unit.name and not cubin.pdl, cubin.symbol
        described = "descriptor" in unit.text
        assert described == bool(cubin.global_scratch[0]), (cubin.symbol, cubin.global_scratch)
    print("passed", len(cubins), "cubins")
    print("passed all")
