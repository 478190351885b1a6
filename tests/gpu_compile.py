"""Compiles random kernels, with no GPU: `python -m tests.gpu_compile GPU FIRST COUNT`, where GPU is
a name such as sm_90 or gfx942."""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from plait.errors import Unsupported
from plait.kernel.triton.dialects import GPUS
from plait.kernel.triton.target import TritonKernel, emit_kernel
from plait.log import watched
from plait.runtime.cubin import NUMBERS
from plait.runtime.triton_worker import load_module
from tests.fuzz_kernels import Maker

ACCESS = re.compile(r"\b(ld|st|atom|red|cp)\.(?!param)")
"""An instruction that reads or writes memory."""


def compiled(kernel: TritonKernel, folder: Path) -> bytes:
    """The image of a kernel. One that may start early touches no memory before it waits."""
    fn = getattr(load_module(kernel.name, kernel.text, folder), kernel.name)
    source = ASTSource(fn, dict(kernel.signature), {}, {})
    options = {
        "num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "debug": kernel.checks,
        "sanitize_overflow": False, **NUMBERS,
    }  # fmt: skip
    made = triton.compile(source, GPUTarget(*kernel.gpu[:3]), options).asm
    before, wait, _ = made.get("ptx", "").partition("griddepcontrol.wait")
    assert bool(wait) == kernel.early and not (wait and ACCESS.search(before))
    cubin = made[kernel.gpu.image]
    assert isinstance(cubin, bytes)
    return cubin


def main() -> None:
    """Command line: see the module's docstring."""
    gpu, first, count = GPUS[sys.argv[1]], *map(int, sys.argv[2:4])
    n = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in watched("kernels", range(first, first + count)):
            kernel = dataclasses.replace(Maker(seed).kernel(), name=f"fuzz_{seed}")
            try:
                made = emit_kernel(kernel, kernel.name, gpu=gpu)
            except Unsupported:
                n += 1
                continue
            cubin = compiled(made, Path(folder))
            assert cubin[:4] == b"\x7fELF"
            assert made.name.encode() in cubin  # the symbol that profilers show
            n += 1
    print(f"{n} kernels for {gpu.name}")


if __name__ == "__main__":
    main()
