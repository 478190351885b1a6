"""`python -m tests.user_triton_as_gpu` compiles the programs of `user_triton.py` and
`user_kernels.py` as for a GPU, and runs them without one: the user's kernels, called by ours, in
Triton's interpreter (see `interpreted.py`)."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "PLAIT_WRAPPER": "python"}

import torch
import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget

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
    torch.utils._triton.has_triton = lambda: True
    triton.knobs.runtime.interpret = False
    from tests import user_kernels, user_triton

    triton.knobs.runtime.interpret = True
    return user_triton, user_kernels


if __name__ == "__main__":
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
    print("passed all")
