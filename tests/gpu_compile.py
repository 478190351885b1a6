"""Compiles random kernels to cubins, with no GPU: `python -m tests.gpu_compile CAPABILITY FIRST
COUNT`."""

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
from plait.kernel.triton.target import EARLY, TritonKernel, emit_kernel
from plait.runtime.cubin import NUMBERS
from plait.runtime.triton_worker import load_module
from tests.fuzz_kernels import Maker

ACCESS = re.compile(r"\b(ld|st|atom|red|cp)\.(?!param)")
"""An instruction that reads or writes memory."""


def compiled(kernel: TritonKernel, capability: int, folder: Path) -> bytes:
    """The cubin of a kernel. One that may start early touches no memory before it waits."""
    fn = getattr(load_module(kernel.name, kernel.text, folder), kernel.name)
    source = ASTSource(fn, dict(kernel.signature), {}, {})
    options = {
        "num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "debug": kernel.checks,
        "sanitize_overflow": False, **NUMBERS,
    }  # fmt: skip
    made = triton.compile(source, GPUTarget("cuda", capability, 32), options).asm
    before, wait, _ = made["ptx"].partition("griddepcontrol.wait")
    assert bool(wait) == kernel.early and not (wait and ACCESS.search(before))
    cubin = made["cubin"]
    assert isinstance(cubin, bytes)
    return cubin


def main() -> None:
    """Command line: see the module's docstring."""
    capability, first, count = map(int, sys.argv[1:4])
    n = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            kernel = dataclasses.replace(Maker(seed).kernel(), name=f"fuzz_{seed}")
            try:
                made = emit_kernel(kernel, kernel.name, early=capability >= EARLY)
            except Unsupported:
                n += 1
                continue
            cubin = compiled(made, capability, Path(folder))
            assert cubin[:4] == b"\x7fELF"
            assert made.name.encode() in cubin  # the symbol that profilers show
            n += 1
    print(f"{n} kernels for sm_{capability}")


if __name__ == "__main__":
    main()
