"""plait's operators on a GPU, end to end: against eager, and against the same kernel launched from
Python by Triton.

CPU µs: of a call, the median of batches that take turns. Device µs: of a call in a CUDA graph of
20, the least of many. Gradients: one call of forward and backward. Usage: ops_gpu.py
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
from table import render
from torch import Tensor

import plait.ops as ops
from plait.log import watched

CALLS, ROUNDS = 20, 15
Call = Callable[[], object]


def cpu_us(calls: list[Call]) -> list[float]:
    """CPU time of a call of each."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for times, call in zip(found, calls, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            times.append((time.perf_counter_ns() - start) / CALLS / 1000)
    torch.cuda.synchronize()
    return [statistics.median(times) for times in found]


def device_us(calls: list[Call]) -> list[float]:
    """Time on the device of a call of each."""
    graphs = []
    for call in calls:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        graphs.append(graph)
    best = [float("inf")] * len(calls)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(ROUNDS):
        for k, graph in enumerate(graphs):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best[k] = min(best[k], start.elapsed_time(end) * 1000 / CALLS)
    return best


def kernel_module() -> Any:
    """The file of the kernels."""
    spec = importlib.util.spec_from_file_location("operators", ops.KERNELS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)


def trained(fn: Callable[..., Any], *args: Any) -> Call:
    """Forward and backward."""
    wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]

    def step() -> object:
        out = fn(*args)
        outs = [out] if isinstance(out, Tensor) else list(out)
        return torch.autograd.grad(outs, wanted, [o.detach() for o in outs])

    return step


def eager_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = (t[: x.shape[1], None, :].repeat(1, 1, 2) for t in (cos, sin))
    half = x.shape[-1] // 2
    return x * c + torch.cat([-x[..., half:], x[..., :half]], -1) * s


def cases() -> list[tuple[str, Call, Call, Call | None]]:
    """Name, eager, plait, Triton from Python."""
    kernels = kernel_module()
    add_kernel, norm_kernel, softmax_kernel = (
        kernels.add_kernel,
        kernels.rms_norm_kernel,
        kernels.softmax_kernel,
    )
    tl = triton.language
    found: list[tuple[str, Call, Call, Call | None]] = []
    for rows, n in ((8, 4096), (4096, 4096)):
        x, r, w = rand(rows, n), rand(rows, n), rand(n)
        b = rand(n)

        def add(x: Tensor = x, b: Tensor = b, rows: int = rows, n: int = n) -> Tensor:
            out = torch.empty_like(x)
            add_kernel[(rows * triton.cdiv(n, 1024),)](
                x, b, out, 0.0, 0, 1.0, 1, n, rows, 1, 1, 1, rows, 1, 1, n, 0, 0, 0, 0, 0, 0, 0, n,
                0, 0, 0, 1, tl.bfloat16, tl.float32, False, 1, 1024, num_warps=4,
            )  # fmt: skip
            return out

        def norm(
            x: Tensor = x, r: Tensor = r, w: Tensor = w, rows: int = rows, n: int = n
        ) -> tuple[Tensor, Tensor]:
            y, s, rstd = (
                torch.empty_like(x),
                torch.empty_like(x),
                torch.empty(rows, 1, device="cuda"),
            )
            norm_kernel[(rows,)](
                x,
                r,
                w,
                y,
                s,
                rstd,
                rows,
                n,
                n,
                n,
                1e-5,
                tl.float32,
                1,
                triton.next_power_of_2(n),
                False,
                num_warps=8,
            )
            return y, s

        def softmax(x: Tensor = x, rows: int = rows, n: int = n) -> Tensor:
            y = torch.empty_like(x)
            softmax_kernel[(rows,)](
                x,
                y,
                rows,
                1,
                n,
                n,
                tl.float32,
                True,
                1,
                triton.next_power_of_2(n),
                False,
                num_warps=8,
            )
            return y

        at = f"{rows} x {n}"
        found += [
            (f"add {at} + {n}", lambda x=x, b=b: x + b, lambda x=x, b=b: ops.add(x, b), add),
            (
                f"add_rms_norm {at}",
                lambda x=x, r=r, w=w, n=n: F.rms_norm(x + r, (n,), w, 1e-5),
                lambda x=x, r=r, w=w, n=n: ops.add_rms_norm(x, r, [n], w, 1e-5),
                norm,
            ),
            (
                f"softmax {at}",
                lambda x=x: torch.softmax(x, 1),
                lambda x=x: ops.softmax(x, 1),
                softmax,
            ),
        ]
    long, deep = rand(64, 131072), rand(64, 512, 512)
    q, cos, sin = rand(4, 2048, 32, 128), rand(2048, 64), rand(2048, 64)
    logits, target = rand(4096, 50257, grad=True), torch.randint(50257, (4096,), device="cuda")
    g, h, w = rand(4096, 4096, grad=True), rand(4096, 4096, grad=True), rand(4096, grad=True)
    found += [
        ("softmax 64 x 131072", lambda: torch.softmax(long, 1), lambda: ops.softmax(long, 1), None),
        (
            "softmax 64 x 512 x 512, dim 1",
            lambda: torch.softmax(deep, 1),
            lambda: ops.softmax(deep, 1),
            None,
        ),
        (
            "rotary 4 x 2048 x 32 x 128",
            lambda: eager_rotary(q, cos, sin),
            lambda: ops.rotary(q, cos, sin),
            None,
        ),
        (
            "cross_entropy 4096 x 50257",
            lambda: F.cross_entropy(logits.detach(), target),
            lambda: ops.cross_entropy(logits.detach(), target),
            None,
        ),
        (
            "cross_entropy and gradient",
            trained(F.cross_entropy, logits, target),
            trained(ops.cross_entropy, logits, target),
            None,
        ),
        (
            "add_rms_norm and gradient",
            trained(lambda x, r, w: (F.rms_norm(x + r, (4096,), w, 1e-5), x + r), g, h, w),
            trained(lambda x, r, w: ops.add_rms_norm(x, r, [4096], w, 1e-5), g, h, w),
            None,
        ),
        (
            "softmax and gradient",
            trained(lambda x: torch.softmax(x, 1), g),
            trained(lambda x: ops.softmax(x, 1), g),
            None,
        ),
    ]
    half, single = torch.bfloat16, torch.float32
    for m, n, k, dtype in (
        (1, 4096, 4096, half), (16, 4096, 4096, half), (64, 4096, 4096, half),
        (256, 4096, 4096, half), (1, 1024, 4096, half), (16, 1024, 4096, half),
        (128, 128, 65536, half), (1, 4096, 4096, single), (16, 4096, 4096, single),
        (1024, 1024, 1024, half), (2048, 4096, 11008, half), (4096, 4096, 4096, half),
        (4096, 4096, 4096, torch.float16), (1024, 1024, 1024, single),
    ):  # fmt: skip
        a, turned, plain = (
            rand(m, k, dtype=dtype),
            rand(n, k, dtype=dtype).t(),
            rand(k, n, dtype=dtype),
        )
        for b, order in ((turned, ""), *([(plain, ", other by rows")] if m <= 256 else [])):
            found.append((f"matmul {m}x{n}x{k} {str(dtype)[6:]}{order}", lambda a=a, b=b: a @ b,
                          lambda a=a, b=b: ops.matmul(a, b), None))  # fmt: skip
    return found


def main() -> None:
    """Prints a table."""
    rows = []
    for name, eager, ours, python in watched("operators", cases()):
        calls = [eager, ours, *([python] if python else [])]
        for call in calls:
            call()
        cpu = cpu_us(calls)
        device = device_us(calls) if "gradient" not in name else []
        rows.append([
            name, *(f"{t:.1f}" for t in cpu), *([""] * (3 - len(cpu))),
            *(f"{t:.1f}" for t in device[:2]), *([""] * (2 - len(device[:2]))),
            f"{device[0] / device[1]:.2f}" if device else "",
        ])  # fmt: skip
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(
        render(
            (
                "",
                "CPU µs: eager",
                "plait",
                "Triton's Python",
                "device µs: eager",
                "plait",
                "eager / plait",
            ),
            rows,
        )
    )


if __name__ == "__main__":
    main()
