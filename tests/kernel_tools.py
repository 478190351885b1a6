"""Loads kernel libraries without the executor: compile, dlopen, fill the maths table, call with
numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.config import Config
from plait.ir.dtypes import DType
from plait.ir.expr import Size
from plait.ir.loops import Buffer
from plait.kernel.cpu.target import emit_library
from plait.kernel.target import Choices, Source, Target
from plait.runtime.mathtable import NAMES
from plait.runtime.toolchain import ISAS, Isa, Toolchain, find_toolchain
from plait.schedule.plan import Kernel

TORCH = {
    "b1": torch.bool, "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32,
    "u64": torch.uint64, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32,
    "i64": torch.int64, "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32,
    "f64": torch.float64,
}  # fmt: skip


def as_tensor(array: np.ndarray, dtype: DType) -> torch.Tensor:
    """A flat array as a tensor on the same memory, of the buffer's dtype."""
    return torch.from_numpy(array.reshape(-1)).view(TORCH[dtype.name])


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

    def __init__(
        self, kernels: Sequence[Kernel], isa: Isa, folder: Path, opt_level: int = 2
    ) -> None:
        found = find_toolchain(Config())
        self.source = emit_library(kernels, isa, verifies=True)
        path = folder / f"k{abs(hash(self.source.text))}-{isa.name}.so"
        Toolchain(found.compiler, found.version, isa, opt_level).compile(self.source.text, path)
        self.lib = ctypes.CDLL(str(path))
        self.lib.plait_init(math_table())

    def __call__(
        self,
        kernel: Kernel,
        arrays: dict[str, np.ndarray],
        sizes: dict[str, int] | None = None,
        threads: int = 1,
    ) -> int:
        """Runs a kernel on arrays (by buffer name, memory as their buffer says) and returns its
        code."""
        codes = [self.part(kernel, arrays, t, threads, sizes) for t in range(threads)]
        return next((c for c in codes if c), 0)

    def part(
        self,
        kernel: Kernel,
        arrays: dict[str, np.ndarray],
        tid: int,
        threads: int,
        sizes: dict[str, int] | None = None,
    ) -> int:
        """Runs the share of one thread."""
        fn = getattr(self.lib, self.source.entry_points[kernel.name])
        fn.restype = ctypes.c_int64
        bufs = (ctypes.c_void_p * max(1, len(kernel.args)))(
            *(arrays[b.name].ctypes.data for b in kernel.args)
        )
        values = [(sizes or {})[str(s)] for s in kernel.sizes]
        syms = (ctypes.c_int64 * max(1, len(values)))(*values)
        return int(fn(ctypes.c_int64(tid), ctypes.c_int64(threads), bufs, syms))


def isas() -> list[Any]:
    """Parameters of a test: the names of what this machine has, of which the widest alone is
    quick."""
    first, *others = (i.name for i in usable_isas())
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


def usable_isas() -> list[Isa]:
    """Every instruction set that this machine can run."""
    have = Path("/proc/cpuinfo").read_text()
    return [i for i in ISAS.values() if all(f in have for f in i.cpu)]


def emitted(
    target: Target, kernels: Sequence[Kernel], cfg: Config, choices: Choices | None = None
) -> Source:
    """The source of kernels, as the pipeline has a target write it."""
    machines = target.machines({k.device for k in kernels}, cfg)
    made = target.emit(kernels, aligned(kernels), machines, choices or {}, cfg.verifies)
    return target.finish(made, machines)


def aligned(kernels: Sequence[Kernel]) -> dict[str, frozenset[str]]:
    """All buffers of kernels start at multiples of 16 bytes."""
    return {k.name: frozenset() for k in kernels}


def strided(
    name: str, d: DType, shape: Sequence[Size], order: Sequence[int] | None = None
) -> Buffer:
    """A dense buffer. order: dimensions from outermost to innermost in memory (row-major by
    default)."""
    strides: list[Size] = [0] * len(shape)
    step: Size = 1
    for k in reversed(list(order) if order is not None else range(len(shape))):
        strides[k] = step
        step = step * shape[k]
    return Buffer(name, d, tuple(shape), tuple(strides))
