"""Packages for AMD's GPUs, written without one and run on the one that tests/fake_hip.cpp and
tests/fake_gpu.cpp play: run by tests/test_hip.py.

`python -m tests.hip_programs write FOLDER GPU` compiles every program; `python -m
tests.hip_programs run FOLDER` loads the packages, whose launches are checked by the driver and then
run by Triton's interpreter on the launch's pointers, and compares with eager.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.export import Dim
from torch.library import triton_op, wrap_triton

import plait

N = Dim("n", min=2)


@triton.jit
def tables_kernel(x, out, n, by, BLOCK: tl.constexpr):
    row, part = tl.program_id(1), tl.program_id(0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, mask=at < n)
    tl.store(out + row * n + at, v * (row + 1) * by, mask=at < n)


@triton_op("plait_hip::tables", mutates_args={})
def tables(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    rows, n = x.shape
    wrap_triton(tables_kernel)[(triton.cdiv(n, 16), rows)](x, out, n, 0.5, BLOCK=16)
    return out


def users(x: Tensor) -> Tensor:
    """With a kernel of the user's in a package, without one in eager."""
    if sys.argv[1] == "write":
        return tables(x.sin()) + 1
    return x.sin() * torch.arange(1, len(x) + 1)[:, None] * 0.5 + 1


PROGRAMS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, int], bool]] = {
    "softmax": (lambda x: torch.softmax(x * 2, -1), (6, 300), True),
    "long_softmax": (lambda x: torch.softmax(x, -1), (2, 40_003), False),
    "layer_norm": (lambda x: torch.layer_norm(x, (200,)).tanh(), (8, 200), True),
    "columns": (lambda x: (x.sum(0), x.amax(0), x.std(0)), (70, 33), False),
    "transposed": (lambda x: (x.t() + 1).contiguous(), (70, 130), False),
    "narrow": (lambda x: torch.sigmoid(x.bfloat16().float()) * x.shape[0], (5, 16), True),
    "index": (lambda x: x.cumsum(1).argmax(1).float() // 3, (7, 50), True),
    "users": (users, (5, 70), True),
    "sum": (lambda x: torch.erf(x).abs().log1p().pow(2.5).sum(), (40, 50), False),
}


def inputs_of(shape: tuple[int, int]) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 0.25


def write(folder: Path, gpu: str) -> None:
    """A package a program, and the text of every kernel."""
    from plait.kernel.triton.target import TritonTarget

    build = TritonTarget.build

    def recorded(self: Any, source: Any, cfg: Any) -> Any:
        for job in source.units:
            assert job.gpu.name == gpu and "asm" not in job.text
            assert "extra.hip" in job.text or "def tables_kernel" in job.text
            facts = {"text": job.text, "types": list(job.signature.values())}
            (folder / f"{job.name}.json").write_text(json.dumps(facts))
        return build(self, source, cfg)

    TritonTarget.build = recorded  # type: ignore[method-assign]
    for name, (f, shape, dynamic) in PROGRAMS.items():
        plait.package(
            f, folder / name, (inputs_of(shape),), ({0: N},) if dynamic else None,
            device="cuda", machines=[gpu],
        )  # fmt: skip


TYPES = {
    "*fp32": torch.float32, "*bf16": torch.bfloat16, "*i64": torch.int64, "*i32": torch.int32,
    "*i1": torch.bool,
}  # fmt: skip


def run(folder: Path) -> None:
    """Every program of the folder, on the GPU that is played."""
    hip = ctypes.CDLL("libamdhip64.so")

    from plait.ir.calls import pack_grid
    from tests.triton_tools import interpreted, launch

    functions: dict[str, tuple[Any, list[str]]] = {}
    failed: list[Exception] = []

    def memory_at(address: int, kind: str) -> Tensor:
        memory = (ctypes.c_byte * 16).from_address(address)
        return torch.frombuffer(memory, dtype=TYPES[kind], count=1)

    @ctypes.CFUNCTYPE(
        None,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.c_size_t,
    )
    def on_launch(symbol: bytes, grid: Any, words: Any, n: int) -> None:
        try:
            name = symbol.decode()
            if name not in functions:
                facts = json.loads((folder / f"{name}.json").read_text())
                functions[name] = interpreted(name, facts["text"], folder), facts["types"]
            function, types = functions[name]
            assert n == len(types) + 2, f"{n} arguments for {types}"
            assert not words[n - 1] and not words[n - 2], "scratch memory that nobody asked for"
            tensors = [
                memory_at(w, t) for w, t in zip(words[: n - 2], types, strict=True) if t != "i64"
            ]
            sizes = [w for w, t in zip(words[: n - 2], types, strict=True) if t == "i64"]
            assert launch(function, tensors, sizes, pack_grid(grid[0], grid[1], grid[2])) == 0
        except Exception as error:  # noqa: BLE001  (nothing may pass through C)
            failed.append(error)

    hip.fake_hip_on_launch(on_launch)
    for name, (f, shape, dynamic) in PROGRAMS.items():
        program = plait.load(folder / name, device="cuda")
        assert program.machine.startswith("gfx")
        for rows in (shape[0], shape[0] + 3) if dynamic else (shape[0],):
            x = inputs_of((rows, shape[1]))
            got = program(torch.ops.fake_gpu.to_gpu(x))
            if failed:
                raise failed[0]
            want = f(x)
            for a, b in zip(
                *((t,) if isinstance(t, Tensor) else t for t in (got, want)), strict=True
            ):
                torch.testing.assert_close(torch.ops.fake_gpu.to_host(a), b, rtol=2e-6, atol=1e-6)
    print(f"{len(PROGRAMS)} programs, {len(functions)} kernels launched")


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), sys.argv[3])
    else:
        ctypes.CDLL(os.environ["FAKE_TORCH"], mode=ctypes.RTLD_GLOBAL)
        run(Path(sys.argv[2]))
