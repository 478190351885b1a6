"""The C++ target beside the native executor and Inductor's C++ wrapper: what a call and a kernel
cost, and how long GPT-2 takes to build.

Usage: python benchmarks/cpp_target.py > benchmarks/results/cpp-target.md. Kernels do next to
nothing, so that what is left of a call is the program around them; each figure is the best of many
short rounds. Every build is a process of its own with empty caches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import metrics

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.models import gpt2
from benchmarks.native_call import add_sum, build, chain, dynamic, linear, measure
from plait.config import Config
from plait.log import watched
from plait.runtime.load import Program
from plait.wrapper.cpp import build_cpp, load_program, make_cpp
from plait.wrapper.instructions import Launch, WrapperProgram
from plait.wrapper.program import Artifacts, CompileRecord, observers
from tests.native_tools import library

COMPILERS = {
    "native": {"backend": "plait"},
    "cpp": {"backend": "plait", "options": {"wrapper": "cpp"}},
    "inductor": {"backend": "inductor"},
    "inductor-cpp": {"backend": "inductor", "options": {"cpp_wrapper": True}},
}


def build_in_cpp(p: WrapperProgram) -> Program:
    """The C++ target."""
    return load_program(p, Artifacts({"cpu": library()}))


def by_hand() -> None:
    """The same hand-written programs in native and in C++."""
    x, v, a, w, b = (
        torch.randn(8, 8),
        torch.randn(4),
        torch.randn(4, 16),
        torch.randn(8, 16),
        torch.randn(8),
    )
    both = (build, build_in_cpp)
    few, many = ([measure(partial(chain(n, how), v)) for how in both] for n in (1, 31))
    rows = {
        "(x + y).sum() 8x8": [measure(partial(add_sum(how), x, x)) for how in both],
        "chain of 2 kernels in an arena": few,
        "each further kernel": [(m - f) / 30 for f, m in zip(few, many, strict=True)],
        "dynamic x + 1": [measure(partial(dynamic(how), x)) for how in both],
        **{
            f"{op} 4x16x8": [measure(partial(linear(op, how), a, w, b)) for how in both]
            for op in ("mm", "addmm")
        },
    }
    print("\n## Programs by hand, ns a call\n\n| | native | cpp |\n| --- | ---: | ---: |")
    for name, ns in rows.items():
        print(f"| {name} | {ns[0]:.1f} | {ns[1]:.1f} |")


def sums(n: int, x: Tensor) -> Tensor:
    """n steps of two reductions that cannot be fused into one kernel."""
    for _ in range(n):
        x = (x.sum(0, keepdim=True) + x.sum(1, keepdim=True)) * 0.1
    return x


def of_compilers() -> None:
    """A chain of kernels through torch.compile."""
    x = torch.randn(8, 8)
    print("\n## Sums over rows and columns of 8x8 in turn, compiled, ns a call\n")
    print(
        "| | 2 steps | 62 steps | kernels | each further kernel |\n| --- | ---: | ---: | ---: | "
        "---: |"
    )
    records: list[CompileRecord] = []
    token = observers.set((records.append,))
    for name, how in watched("compilers", COMPILERS.items()):
        ns, kernels = [], []
        for n in (2, 62):
            torch._dynamo.reset()
            metrics.reset()
            compiled: Any = torch.compile(partial(sums, n), **how)
            torch.testing.assert_close(compiled(x), sums(n, x))
            ns.append(measure(partial(compiled, x)))
            launches = sum(isinstance(i, Launch) for i in records[-1].wrapper.body)
            kernels.append(
                launches if how["backend"] == "plait" else metrics.generated_kernel_count
            )
        each = (ns[1] - ns[0]) / (kernels[1] - kernels[0])
        print(
            f"| {name} | {ns[0]:.0f} | {ns[1]:.0f} | {kernels[0]}, {kernels[1]} | {each:.0f} |",
            flush=True,
        )
    observers.reset(token)


def first_call(name: str) -> None:
    """Seconds that the first call of GPT-2 takes, and lines and seconds of its C++."""
    tokens = torch.randint(0, 50257, (1, 64))
    model = gpt2().eval()
    want = model(tokens)
    records: list[CompileRecord] = []
    observers.set((records.append,))
    start = time.perf_counter()
    got = torch.compile(model, **COMPILERS[name])(tokens)  # type: ignore[call-overload]
    found: dict[str, float] = {"seconds": time.perf_counter() - start}
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    if name == "cpp":
        source = make_cpp(records[0].wrapper)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            build_cpp(source, Config(cache_dir=folder))
            found |= {"lines": source.count("\n"), "build": time.perf_counter() - start}
    print(json.dumps(found))


def builds() -> None:
    """The first call of GPT-2, cold."""
    print(
        "\n## GPT-2, batch 1, 64 tokens: the first call with empty caches\n\n| | seconds |\n| --- "
        "| ---: |"
    )
    cpp: dict[str, float] = {}
    for name in watched("compilers", COMPILERS):
        with tempfile.TemporaryDirectory() as folder:
            env = {
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
                "PLAIT_CACHE_DIR": f"{folder}/plait",
            }
            command = [sys.executable, __file__, name]
            done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        cpp = found if name == "cpp" else cpp
        print(f"| {name} | {found['seconds']:.2f} |")
    print(
        f"\nThe C++ of plait's program has {cpp['lines']} lines, which take "
        f"{cpp['build'] * 1e3:.0f} ms to build."
    )


def main() -> None:
    print("# The C++ target\n")
    print(
        f"- torch: {torch.__version__}, {torch.get_num_threads()} threads\n- command: `python "
        "benchmarks/cpp_target.py`"
    )
    by_hand()
    of_compilers()
    builds()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    first_call(sys.argv[1]) if sys.argv[1:] else main()
