"""`python -m tests.user_triton_as_gpu` compiles the programs of `user_triton.py` and
`user_kernels.py` as for a GPU, and runs them without one: the user's kernels, called by ours, in
Triton's interpreter (see `interpreted.py`)."""

from __future__ import annotations

import os
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "PLAIT_WRAPPER": "python"}

import torch
import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget

from plait.config import Config
from plait.kernel.triton.target import TritonTarget
from plait.runtime.cubin_pool import pool
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


if __name__ == "__main__":
    emitted = record()
    programs, kernels = prepare()
    for name in programs.CASES:
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
