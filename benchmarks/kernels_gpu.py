"""Bandwidth of plait's Triton kernels on a GPU, beside eager, torch.compile's default back end and a device copy.

Each case is lowered, scheduled and emitted by plait; the kernels are launched through Triton itself, so that only
what runs on the device is compared. Time is the median over repetitions with a cold L2 cache. A case's bytes are those
of its inputs and outputs, each counted once.
Usage: kernels_gpu.py [CASE ...] [--json FILE]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from table import render
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from triton.testing import do_bench

from plait import compat
from plait.config import Config
from plait.graph.captured import Captured
from plait.graph.clean import clean_graph
from plait.ir.loops import TensorArg
from plait.kernel.triton import emit_kernel
from plait.lower.graph import load_rules, lower_graph
from plait.runtime.triton_worker import load_module
from plait.schedule import schedule
from plait.schedule.plan import Alias, Kernel, Plan

f32, bf16 = torch.float32, torch.bfloat16


def _randn(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def _norm(n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return _randn(8192, n, dtype=dtype), _randn(n, dtype=dtype), _randn(n, dtype=dtype)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "add_1M_f32": (lambda x, y: x + y, lambda: (_randn(1 << 18), _randn(1 << 18))),
    "add_64M_f32": (lambda x, y: x + y, lambda: (_randn(1 << 24), _randn(1 << 24))),
    "add_1G_f32": (lambda x, y: x + y, lambda: (_randn(1 << 26), _randn(1 << 26))),
    "add_256M_bf16": (
        lambda x, y: x + y, lambda: (_randn(1 << 26, dtype=bf16), _randn(1 << 26, dtype=bf16)),
    ),
    "gelu_256M_f32": (F.gelu, lambda: (_randn(1 << 25),)),
    "silu_mul_256M_bf16": (
        lambda x, y: F.silu(x) * y,
        lambda: (_randn(1 << 25, dtype=bf16), _randn(1 << 25, dtype=bf16)),
    ),
    "bias_gelu_bf16": (
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        lambda: (_randn(8192, 4096, dtype=bf16), _randn(4096, dtype=bf16)),
    ),
    "transpose_add_f32": (lambda x, y: x.t() + y, lambda: (_randn(8192, 4096), _randn(4096, 8192))),
    "nchw_to_nhwc_f32": (
        lambda x: (x * 2).contiguous(memory_format=torch.channels_last),
        lambda: (_randn(32, 64, 128, 128),),
    ),
    "softmax_1k_f32": (lambda x: F.softmax(x, -1), lambda: (_randn(32768, 1024),)),
    "softmax_4k_bf16": (lambda x: F.softmax(x, -1), lambda: (_randn(8192, 4096, dtype=bf16),)),
    "log_softmax_50k_f32": (lambda x: F.log_softmax(x, -1), lambda: (_randn(2048, 50257),)),
    "layer_norm_1k_f32": (lambda x, w, b: F.layer_norm(x, (1024,), w, b), lambda: _norm(1024, f32)),
    "layer_norm_8k_bf16": (lambda x, w, b: F.layer_norm(x, (8192,), w, b), lambda: _norm(8192, bf16)),
    "rms_norm_4k_bf16": (
        lambda x, w, b: (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(bf16) * w,
        lambda: _norm(4096, bf16),
    ),
    "cross_entropy_32k": (
        lambda x, y: F.cross_entropy(x, y, reduction="none"),
        lambda: (_randn(4096, 32000), torch.randint(0, 32000, (4096,), device="cuda")),
    ),
    "sum_rows_f32": (lambda x: x.sum(-1), lambda: (_randn(8192, 8192),)),
    "sum_columns_f32": (lambda x: x.sum(0), lambda: (_randn(8192, 8192),)),
    "sum_all_f32": (lambda x: x.sum(), lambda: (_randn(1 << 26),)),
    "batch_stats_f32": (
        lambda x: torch.var_mean(x, (0, 2, 3)), lambda: (_randn(64, 256, 56, 56),),
    ),
}  # fmt: skip


def planned(fn: Callable[..., Any], args: Sequence[Tensor]) -> Plan:
    """The schedule of fn on these arguments. The loops of a graph do not depend on the device."""
    host = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype) for a in args]

    def flat(*a: Tensor) -> tuple[Any, ...]:
        out = fn(*a)
        return out if isinstance(out, tuple) else (out,)

    functional = torch.func.functionalize(flat)
    graph = make_fx(functional, compat.decomposition_table(), "fake", _allow_non_fake_inputs=True)(*host)
    captured = clean_graph(Captured(graph, "bench", "inference"))
    cfg = Config()
    return schedule(lower_graph(captured, cfg).program, cfg)


class Runner:
    """Launches a plan's kernels, in order, on buffers made once."""

    def __init__(self, plan: Plan, args: Sequence[Tensor], folder: Path) -> None:
        self.calls: list[Callable[[], Any]] = []
        memory: dict[str, Tensor] = {}
        for name, arg in zip(plan.program.inputs, args, strict=True):
            if isinstance(name, str):
                memory[name] = arg
        dtypes = {
            "f32": f32, "bf16": bf16, "f16": torch.float16, "i64": torch.int64, "b1": torch.bool,
            "f64": torch.float64, "i32": torch.int32,
        }  # fmt: skip
        for step in plan.steps:
            if isinstance(step, Alias):
                b = plan.buffers[step.out]
                memory[step.out] = memory[step.base].as_strided(b.shape, b.strides, step.offset)
                continue
            if not isinstance(step, Kernel):
                raise RuntimeError(f"{type(step).__name__} in the plan: {step}")
            for b in step.args:
                if b.name not in memory:
                    memory[b.name] = torch.empty_strided(b.shape, b.strides, dtype=dtypes[b.dtype.name], device="cuda")
            self._add(step, [memory[b.name] for b in step.args], folder)
        self.outputs = [
            memory[o.buf].as_strided(o.shape, o.strides, o.offset)
            for o in plan.program.outputs
            if isinstance(o, TensorArg)
        ]

    def _add(self, kernel: Kernel, tensors: list[Tensor], folder: Path) -> None:
        made = emit_kernel(kernel, kernel.name)
        fn = getattr(load_module(made.name, made.text, folder), made.name)
        grid, warps = (made.grid,), made.num_warps
        self.calls.append(lambda: fn[grid](*tensors, num_warps=warps))

    def __call__(self) -> None:
        for call in self.calls:
            call()


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Milliseconds of each peer, and whether plait's numbers are right."""
    fn, make = CASES[name]
    args = make()
    runner = Runner(planned(fn, args), args, folder)
    runner()
    want = fn(*args)
    wants = want if isinstance(want, tuple) else (want,)
    for got, w in zip(runner.outputs, wants, strict=True):
        torch.testing.assert_close(got, w, rtol=2e-2 if w.dtype == bf16 else 1e-4, atol=1e-2)
    nbytes = _nbytes((*args, *wants))
    torch._dynamo.reset()
    compiled = torch.compile(fn, dynamic=False)
    compiled(*args)
    source = torch.empty(max(nbytes // 2, 1), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    row = {
        "copy": do_bench(lambda: target.copy_(source), return_mode="median"),
        "plait": do_bench(runner, return_mode="median"),
        "eager": do_bench(lambda: fn(*args), return_mode="median"),
        "inductor": do_bench(lambda: compiled(*args), return_mode="median"),
    }
    return {"case": name, "nbytes": nbytes, "kernels": len(runner.calls), **row}


def main() -> None:
    """Measures the cases named on the command line, or all."""
    arguments = sys.argv[1:]
    out = arguments.pop(arguments.index("--json") + 1) if "--json" in arguments else None
    names = [a for a in arguments if a != "--json"] or list(CASES)
    load_rules()
    rows, lines = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                row = measure(name, Path(folder))
            except Exception as error:  # noqa: BLE001  (one case must not cost the others' numbers)
                lines.append([name, "", f"{type(error).__name__}: {str(error)[:90]}", "", "", "", ""])
                continue
            rows.append(row)
            rate = row["nbytes"] / row["plait"] / 1e6
            best = min(row["eager"], row["inductor"])
            lines.append(
                [name, str(row["kernels"]), f"{row['plait'] * 1e3:.1f}", f"{rate:.0f}",
                 f"{row['copy'] / row['plait']:.2f}", f"{row['eager'] / row['plait']:.2f}",
                 f"{row['inductor'] / row['plait']:.2f}" + ("" if row["plait"] <= 1.02 * best else "  MISSED")]
            )  # fmt: skip
    head = ["case", "kernels", "us", "GB/s", "of copy", "x eager", "x Inductor"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(render(head, lines))
    if out is not None:
        Path(out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
