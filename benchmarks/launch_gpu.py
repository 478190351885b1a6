"""CPU time of a kernel launch on a GPU: plait's launcher, the bare driver call, and Triton's own
launch from Python.

Kernels with 1, 4 and 19 pointer arguments; the least mean of batches that take turns, in ns. Usage:
launch_gpu.py
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import triton
from table import render

from plait.config import Config
from plait.log import watched
from plait.runtime.cubin import Job
from plait.runtime.cubin_pool import CubinPool
from plait.runtime.triton_worker import load_module

ROOT = Path(__file__).resolve().parent.parent


def source(n: int) -> str:
    """A kernel that touches one element through its first argument."""
    names = ", ".join(f"p{k}" for k in range(n))
    return (
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        f"def touch{n}({names}):\n    tl.store(p0, tl.load(p0) + 1.0)\n"
    )


def python_ns(n: int, folder: Path) -> float:
    """A launch through Triton's Python launcher."""
    name = f"touch{n}"
    bound = getattr(load_module(name, source(n), folder), name)[(1,)]
    args = [torch.zeros(4, device="cuda") for _ in range(n)]
    best = float("inf")
    for _ in range(100):
        start = time.perf_counter_ns()
        for _ in range(256):
            bound(*args)
        best = min(best, (time.perf_counter_ns() - start) / 256)
        torch.cuda.synchronize()
    return best


def main() -> None:
    """Builds the timer, compiles the kernels, prints a table."""
    major, minor = torch.cuda.get_device_capability()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "launch"
        subprocess.run(
            [
                "g++",
                "-std=c++20",
                "-O2",
                "-I",
                str(ROOT / "native"),
                "-o",
                str(program),
                str(ROOT / "benchmarks" / "launch_gpu.cpp"),
                str(ROOT / "native" / "core" / "cuda.cpp"),
                *map(str, (ROOT / "native" / "core" / "drivers").glob("*.cpp")),
                "-ldl",
            ],
            check=True,
        )
        pool = CubinPool(2)
        for n in watched("kernels", (1, 4, 19)):
            job = Job(
                f"touch{n}", source(n), {f"p{k}": "*fp32" for k in range(n)}, 10 * major + minor, 4
            )
            (made,) = pool.compile([job], Config(cache_dir=str(folder)))
            cubin = folder / f"touch{n}.cubin"
            cubin.write_bytes(made.image)
            done = subprocess.run(
                [program, cubin, made.symbol, str(made.shared), str(made.num_warps), str(n)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            ns = json.loads(done.stdout)
            bare, ours = ns["bare_ns"], ns["plait_ns"]
            rows.append(
                [
                    str(n),
                    f"{bare:.0f}",
                    f"{ours:.0f}",
                    f"{ours / bare:.3f}",
                    f"{python_ns(n, folder):.0f}",
                ]
            )
        pool.stop()
    print(f"{torch.cuda.get_device_name()}, triton {triton.__version__}")
    print(render(("pointers", "bare ns", "plait ns", "plait / bare", "Triton's Python ns"), rows))


if __name__ == "__main__":
    main()
