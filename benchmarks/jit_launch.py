"""CPU time of a launch of Triton kernels from C++, above the bare driver call: ad hoc, bound, ad
hoc from C, and on a GPU Triton's own launch from Python.

Usage: jit_launch.py [--gpu]. Without --gpu the driver is a stub whose calls do nothing, so that all
that is measured is the launcher. Triton must be on the path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import render

from plait.runtime.triton_worker import load_module
from plait.tools.pack import triton_pack

ROOT = Path(__file__).resolve().parent.parent
COUNTS = (0, 3, 19, 58)
STUB = """\
#include <stddef.h>
static long context, module;
int cuCtxGetCurrent(void** c) { *c = &context; return 0; }
int cuDeviceGetAttribute(int* v, int a, int d) { *v = a == 75 ? 9 : 0; return 0; }
int cuModuleLoadData(void** m, const void* i) { *m = &module; return 0; }
int cuModuleGetFunction(void** f, void* m, const char* n) { *f = &module; return 0; }
int cuStreamIsCapturing(void* s, int* c) { *c = 0; return 0; }
"""
NOTHING = """cuInit cuGetErrorString cuCtxGetDevice cuDevicePrimaryCtxRetain cuCtxSetCurrent
cuModuleUnload cuFuncGetAttribute cuFuncSetAttribute cuLaunchKernelEx cuStreamGetCaptureInfo_v2
cuGraphExecKernelNodeSetParams_v2 cuGraphMemcpyNodeGetParams cuGraphExecMemcpyNodeSetParams
cuGraphLaunch cuMemcpyDtoDAsync_v2 cuEventCreate cuEventRecord cuStreamWaitEvent cuCtxSynchronize
cuEventSynchronize cuEventElapsedTime cuEventDestroy_v2 cuMemsetD8Async cuDeviceGetName
cuDriverGetVersion cuTensorMapEncodeTiled"""
MORE = """

@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned(x, y, n, BLOCK: tl.constexpr):
    pass


@triton.jit
def described(x, y):
    y.store([0, 0], x.load([0, 0]))
"""


def types(n: int) -> list[str]:
    """Of a kernel with n arguments."""
    n_pointers = (2 * n + 1) // 3
    return ["*fp32:D"] * n_pointers + ["i32"] * (n - n_pointers)


def source() -> str:
    """Kernels that do nothing with their arguments."""
    functions = (
        f"\n\n@triton.jit\ndef args{n}({', '.join(f'a{k}' for k in range(n))}):\n    pass\n"
        for n in COUNTS
    )
    return "import triton\nimport triton.language as tl\n" + "".join(functions) + MORE


def python_ns(folder: Path) -> dict[str, tuple[float, float]]:
    """Median and 99th percentile of launches through Triton's Python launcher."""
    import torch
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    module = load_module("kernels", source(), folder)
    memory = torch.zeros(8, 8, device="cuda")
    calls = {
        str(n): (f"args{n}", [memory if t.startswith("*") else 100 for t in types(n)])
        for n in COUNTS
    }
    calls["3, tuned"] = "tuned", [memory, memory, 101]
    calls["2 descriptors"] = "described", [TensorDescriptor.from_tensor(memory, [8, 8])] * 2
    found = {}
    for label, (name, args) in calls.items():
        grid = (lambda meta: (triton.cdiv(101, meta["BLOCK"]),)) if name == "tuned" else (1,)
        bound = getattr(module, name)[grid]
        samples = []
        for k in range(1000):
            start = time.perf_counter_ns()
            for _ in range(16):
                bound(*args)
            samples.append((time.perf_counter_ns() - start) / 16)
            if k % 8 == 0:
                torch.cuda.synchronize()
        samples.sort()
        found[label] = samples[len(samples) // 2], samples[len(samples) * 99 // 100]
    return found


def main() -> None:
    """Builds pack, stub and timer; prints a table."""
    gpu = "--gpu" in sys.argv[1:]
    capability = 90
    if gpu:
        import torch

        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernels.py").write_text(source())
        signatures = [f"args{n} {','.join(types(n))}" for n in COUNTS]
        signatures += [
            "tuned *fp32:D,*fp32:D,i32,=64",
            "described tensordesc<fp32[8,8]>,tensordesc<fp32[8,8]>",
        ]
        triton_pack(folder / "kernels.pack", folder / "kernels.py", signatures, [capability])
        env = dict(os.environ)
        if not gpu:
            (folder / "stub.c").write_text(
                STUB + "".join(f"int {f}() {{ return 0; }}\n" for f in NOTHING.split())
            )
            command = [
                "gcc",
                "-O2",
                "-shared",
                "-fPIC",
                "-o",
                folder / "libcuda.so.1",
                folder / "stub.c",
            ]
            subprocess.run(command, check=True)
            env["LD_LIBRARY_PATH"] = str(folder)
        native = ROOT / "native"
        launch = ROOT / "triton_launch"
        sources = [ROOT / "benchmarks" / "jit_launch.cpp", *(launch / "src").glob("*.cpp")]
        sources += [native / "core" / f"{name}.cpp" for name in ("cuda", "hip", "cubins")]
        subprocess.run(
            [
                "g++",
                "-std=c++20",
                "-O2",
                "-I",
                native,
                "-I",
                launch / "include",
                "-I",
                ROOT / "plait" / "include",
                "-o",
                folder / "timer",
                *sources,
                "-ldl",
            ],
            check=True,
        )
        done = subprocess.run(
            [folder / "timer", folder / "kernels.pack"], env=env, check=True, stdout=subprocess.PIPE
        )
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        python = python_ns(folder) if gpu else {}
    header = ["arguments", "bare p50", "p99"]
    ways = ("bare again", "ad hoc", "bound", "from C")
    for way in ways:
        header += [f"{way}: more", "p99"]
    header.append("first launch")
    table = []
    for r in rows:
        cells = [f"{r['bare p50']:.0f} ns", f"{r['bare p99']:.0f}"]
        for way in ways:
            timed = f"{way} p50" in r
            cells += [
                f"{r[f'{way} {p}'] - r[f'bare {p}']:.0f} ns" if timed else ""
                for p in ("p50", "p99")
            ]
        cells.append(f"{r['first ms']:.1f} ms")
        if gpu:
            cells += [f"{ns / 1000:.1f} us" for ns in python[r["arguments"]]]
        table.append([r["arguments"], *cells])
    print(render((*header, *(("Python p50", "p99") if gpu else ())), table))


if __name__ == "__main__":
    main()
