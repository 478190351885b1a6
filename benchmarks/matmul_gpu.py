"""Products on a GPU by every road: CPU time a call (matmul_gpu.cpp) and time on the device.

Device: 50 calls in one CUDA graph, least of many replays, eager's `out=` against plait's program of
one product; inputs and results stay in the GPU's cache. Usage: matmul_gpu.py [--device]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from table import render
from torch import Tensor

from plait.ir.dtypes import DType, bf16, f16, f32
from plait.log import watched
from plait.runtime.load import Program, load
from plait.wrapper.instructions import CallExtern, Ref, Return, TensorInput, WrapperProgram
from plait.wrapper.native import encode

ROOT = Path(__file__).resolve().parent.parent
TORCH = Path(torch.__file__).parent
DTYPES: dict[str, tuple[DType, torch.dtype]] = {
    "f16": (f16, torch.float16), "f32": (f32, torch.float32), "bf16": (bf16, torch.bfloat16),
}  # fmt: skip
SHAPES: tuple[tuple[str, tuple[int, ...]], ...] = (
    *(("mm", (n, n, n)) for n in (64, 128, 256, 512, 1024)),
    ("addmm", (256, 256, 1024)), ("addmm", (256, 1024, 256)),
    ("addmm", (128, 768, 2304)), ("addmm", (128, 768, 3072)), ("addmm", (128, 3072, 768)),
    ("mm", (128, 768, 50257)), ("addmm", (2048, 768, 2304)), ("addmm", (2048, 3072, 768)),
    ("mm", (1, 768, 50257)), ("mm", (8, 768, 50257)), ("mm", (2048, 768, 50257)),
    ("mm", (768, 2048, 50257)), ("mm", (2048, 50257, 768)), ("mm", (768, 2048, 3072)),
    ("mm", (64, 65536, 64)), ("mm", (1, 4096, 4096)), ("bmm", (48, 64, 64, 64)),
    ("bmm", (48, 512, 64, 512)),
)  # fmt: skip
CALLS, REPLAYS = 50, 30


def host() -> None:
    """Builds and runs the timer of calls."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "matmul"
        sources = [ROOT / "benchmarks" / "matmul_gpu.cpp", ROOT / "native" / "core" / "blaslt.cpp"]
        lib = TORCH / "lib"
        subprocess.run(
            [
                "g++",
                "-std=c++20",
                "-O2",
                "-I",
                str(ROOT / "native"),
                "-isystem",
                str(TORCH / "include"),
                "-o",
                str(program),
                *map(str, sources),
                f"-L{lib}",
                f"-Wl,-rpath,{lib}",
                "-Wl,--no-as-needed",
                "-ltorch_cuda",
                "-ltorch_cpu",
                "-lc10",
                "-ldl",
                "-lpthread",
            ],
            check=True,
        )
        done = subprocess.run([program], capture_output=True, text=True, check=True)
    roads = ("boxed", "typed", "direct", "plan", "bare")
    rows = []
    for line in done.stdout.splitlines():
        ns = json.loads(line)
        rows.append(
            [ns["case"], *(f"{ns[road] / 1000:.2f}" if road in ns else "" for road in roads)]
        )
    print(render(("CPU µs a call", *roads), rows), flush=True)


def plan(op: str, tensors: list[Tensor], dtype: DType, n: int = 1) -> Program:
    """A program of n equal products into the last operand."""
    names = [f"x{k}" for k in range(len(tensors))]
    inputs = tuple(
        TensorInput(n, dtype, tuple(t.shape), t.stride(), "cuda:0")
        for n, t in zip(names, tensors, strict=True)
    )
    *args, out = names
    call = CallExtern(
        f"aten::{op}.out", tuple(map(Ref, args)), (("out", Ref(out)),), (), (out,), may_keep=False
    )
    return load(encode(WrapperProgram("product", inputs, (*[call] * n, Return((Ref(out),))))), {})


def device_us(call: Callable[[], object]) -> Callable[[], float]:
    """A function that times one replay of many calls, in microseconds a call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / CALLS

    return replay


def inside_us(run: Callable[[], object]) -> float:
    """CPU time of one of many calls in a program."""
    best = float("inf")
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        best = min(best, (time.perf_counter() - start) * 1e6 / CALLS)
    return best


def device() -> None:
    """Eager's algorithm against the plan's, and what a program adds to a plan."""
    rows = []
    for name, (dtype, torch_dtype) in DTYPES.items():
        for op, shape in watched(name, SHAPES):
            *batch, m, k, n = shape
            make = {"device": "cuda", "dtype": torch_dtype}
            tensors = [torch.randn(*batch, m, k, **make), torch.randn(*batch, n, k, **make).mT]
            if op == "addmm":
                tensors.insert(0, torch.randn(n, **make))
            tensors.append(torch.empty(*batch, m, n, **make))
            run, eager = plan(op, tensors, dtype), getattr(torch, op)
            sides = [
                device_us(partial(eager, *tensors[:-1], out=tensors[-1])),
                device_us(partial(run, *tensors)),
            ]
            best = [float("inf")] * 2
            for _ in range(REPLAYS):
                best = [min(b, side()) for b, side in zip(best, sides, strict=True)]
            label = f"{name} {op} {'x'.join(map(str, shape))}"
            inside = inside_us(partial(plan(op, tensors, dtype, CALLS), *tensors))
            rows.append(
                [label, *(f"{b:.2f}" for b in best), f"{best[0] / best[1]:.2f}", f"{inside:.2f}"]
            )
    titles = ("device µs a call", "eager", "plan", "eager / plan", "CPU µs in a program")
    print(render(titles, rows), flush=True)


def main() -> None:
    """Command line: see the module's docstring."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if "--device" not in sys.argv:
        host()
    device()


if __name__ == "__main__":
    main()
