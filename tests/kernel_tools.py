"""Loads kernel libraries without the executor: compile, dlopen, fill the maths table, call with numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from plait.config import Config
from plait.kernel.cpp import emit_library
from plait.runtime.mathtable import NAMES
from plait.runtime.toolchain import ISAS, Isa, Toolchain, find_toolchain
from plait.schedule.plan import Kernel


@lru_cache(maxsize=1)
def math_table() -> ctypes.Array:
    """Addresses of mathtable.NAMES."""
    lib = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    table = (ctypes.c_void_p * len(NAMES))()
    for k, name in enumerate(NAMES):
        table[k] = ctypes.cast(getattr(lib, name), ctypes.c_void_p).value
    return table


class Loaded:
    """A compiled library of kernels."""

    def __init__(self, kernels: Sequence[Kernel], isa: Isa, folder: Path, opt_level: int = 2) -> None:
        found = find_toolchain(Config())
        self.source = emit_library(kernels, isa)
        path = folder / f"k{abs(hash(self.source.text))}-{isa.name}.so"
        Toolchain(found.compiler, found.version, isa, opt_level).compile(self.source.text, path)
        self.lib = ctypes.CDLL(str(path))
        self.lib.plait_init(math_table())

    def __call__(
        self, kernel: Kernel, arrays: dict[str, np.ndarray], sizes: dict[str, int] | None = None, threads: int = 1
    ) -> int:
        """Runs a kernel on arrays (by buffer name, memory as their buffer says) and returns its code."""
        fn = getattr(self.lib, self.source.entry_points[kernel.name])
        fn.restype = ctypes.c_int64
        bufs = (ctypes.c_void_p * max(1, len(kernel.args)))(*(arrays[b.name].ctypes.data for b in kernel.args))
        values = [(sizes or {})[str(s)] for s in kernel.sizes]
        syms = (ctypes.c_int64 * max(1, len(values)))(*values)
        codes = [fn(ctypes.c_int64(t), ctypes.c_int64(threads), bufs, syms) for t in range(threads)]
        return next((c for c in codes if c), 0)


def usable_isas() -> list[Isa]:
    """Every instruction set that this machine can run."""
    have = Path("/proc/cpuinfo").read_text()
    return [i for i in ISAS.values() if all(f in have for f in i.cpu)]
