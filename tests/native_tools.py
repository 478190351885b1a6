"""Hand-written programs for the native executor: kernels of a few lines of C++, lists of
instructions."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from plait.ir.checks import OUT_OF_RANGE
from plait.ir.dtypes import DType, f32
from plait.ir.expr import Size
from plait.runtime.load import Program, load
from plait.wrapper.instructions import (
    Alloc,
    CallExtern,
    DefineKernel,
    Input,
    Instr,
    Launch,
    Operand,
    Ref,
    Return,
    TensorInput,
    WrapperProgram,
)
from plait.wrapper.native import encode
from plait.wrapper.package import Contents, PackageWriter

# Every kernel follows the ABI of docs/native-interface.md; shares are contiguous ranges of
# elements.
SOURCE = r"""
#include <stdint.h>
#include <time.h>
#define KERNEL extern "C" int64_t
#define ARGS (int64_t tid, int64_t n_threads, void* const* b, const int64_t* s)
#define SHARE(n) int64_t lo = (n) * tid / n_threads, hi = (n) * (tid + 1) / n_threads;
static const float* in(void* const* b, int k) { return (const float*)b[k]; }
static float* out(void* const* b, int k) { return (float*)b[k]; }

KERNEL k_add ARGS {
  SHARE(s[0])
  for (int64_t i = lo; i < hi; ++i) out(b, 2)[i] = in(b, 0)[i] + in(b, 1)[i];
  return 0;
}
KERNEL k_inc ARGS {
  SHARE(s[0])
  for (int64_t i = lo; i < hi; ++i) out(b, 1)[i] = in(b, 0)[i] + 1;
  return 0;
}
KERNEL k_twice ARGS {
  SHARE(s[0])
  for (int64_t i = lo; i < hi; ++i) out(b, 1)[i] = in(b, 0)[i] * 2;
  return 0;
}
// Reads what other threads wrote in the task before: wrong without the barrier.
KERNEL k_reverse ARGS {
  SHARE(s[0])
  for (int64_t i = lo; i < hi; ++i) out(b, 1)[i] = in(b, 0)[s[0] - 1 - i];
  return 0;
}
KERNEL k_sum ARGS {
  float a = 0;
  for (int64_t i = 0; i < s[0]; ++i) a += in(b, 0)[i];
  *out(b, 1) = a;
  return 0;
}
KERNEL k_fails ARGS { SHARE(s[0]) return lo <= 3 && 3 < hi ? 7 : 0; }
KERNEL k_threads ARGS { if (tid == 0) *out(b, 0) = (float)n_threads; return 0; }
KERNEL k_sleep ARGS {
  struct timespec t = {0, (long)s[0]};
  if (tid == 0) nanosleep(&t, 0);
  return 0;
}
static void* const* table;
extern "C" void plait_init(void* const* t) { table = t; }
KERNEL k_has_math ARGS { *out(b, 0) = table && table[0] ? 1.0f : 0.0f; return 0; }
"""
N_ARGS = {
    "k_add": (3, 1),
    "k_inc": (2, 1),
    "k_twice": (2, 1),
    "k_reverse": (2, 1),
    "k_sum": (2, 1),
    "k_fails": (0, 1),
    "k_threads": (1, 0),
    "k_sleep": (0, 1),
    "k_has_math": (1, 0),
}
SOURCE += "".join(
    f'extern "C" const int32_t {name}_takes[2] = {{{a}, {s}}};\n' for name, (a, s) in N_ARGS.items()
)


@functools.cache
def library() -> str:
    """The path of the library with all kernels above, built once a process."""
    folder = Path(tempfile.mkdtemp(prefix="plait_test_"))
    source = folder / "kernels.cpp"
    source.write_text(SOURCE)
    target = folder / "kernels.so"
    command = ["g++", "-O2", "-shared", "-fPIC", "-o", str(target), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return str(target)


def tensor(name: str, *shape: Size, dtype: DType = f32) -> TensorInput:
    """A contiguous tensor input."""
    return TensorInput(name, dtype, shape, contiguous(shape))


def contiguous(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size
    return tuple(strides)


def launch(
    kernel: str, *args: str, n: Size | None = None, work_ns: Size = 100, barrier: bool = True
) -> Launch:
    """A launch whose last argument is its only output."""
    sizes = () if n is None else (n,)
    return Launch(kernel, args, sizes, args[-1:], work_ns, True, barrier)


def program(
    inputs: tuple[Input, ...], *body: Instr, n_constants: int = 0, n_callables: int = 0
) -> WrapperProgram:
    """The program with the kernels that it launches declared."""
    used = dict.fromkeys(i.kernel for i in body if isinstance(i, Launch))
    checks = {"k_fails": (OUT_OF_RANGE,) * 7}
    kernels = tuple(DefineKernel(k, *N_ARGS[k], checks.get(k, ())) for k in used)
    return WrapperProgram("test", inputs, (*kernels, *body), n_constants, n_callables)


def build(
    p: WrapperProgram, constants: Sequence[torch.Tensor] = (), callables: Sequence[object] = ()
) -> Program:
    """Encodes and loads."""
    return load(encode(p), {"cpu": library()}, constants, callables)


def ret(*names: str) -> Return:
    """Returns these tensors."""
    return Return(tuple(Ref(n) for n in names))


def alloc(name: str, *shape: Size, dtype: DType = f32) -> Alloc:
    """A contiguous allocation."""
    return Alloc(name, dtype, shape, contiguous(shape))


def extern(op: str, *args: Operand, outs: tuple[str | None, ...], **kwargs: Operand) -> CallExtern:
    """A call with keywords."""
    return CallExtern(op, args, tuple(kwargs.items()), outs)


def add_program() -> Program:
    """x + y of eight elements."""
    inputs = (tensor("x", 8), tensor("y", 8))
    return build(program(inputs, alloc("o", 8), launch("k_add", "x", "y", "o", n=8), ret("o")))


def write_package(path: Path, contents: Contents) -> None:
    """Writes a package at once. Raises as `PackageWriter.finish`."""
    with PackageWriter(path) as writer:
        writer.finish(contents)
