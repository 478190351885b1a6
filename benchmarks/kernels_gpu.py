"""Bandwidth of plait's Triton kernels on a GPU, beside eager, torch.compile's default back end and
a device copy.

Each case is lowered, scheduled and emitted by plait; the kernels are launched through Triton
itself, so that only what runs on the device is compared. Time is the median over repetitions with a
cold L2 cache. A case's bytes are those of its inputs and outputs, each counted once. Usage:
kernels_gpu.py [CASE ...] [--json FILE]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
from plait.ir.calls import TensorArg
from plait.kernel.triton.dialects import gpu_of
from plait.kernel.triton.target import emit_kernel
from plait.log import watched
from plait.lower.graph import load_rules, lower_graph
from plait.pipelines import clean_graph, schedule
from plait.runtime.triton_worker import load_module
from plait.schedule.plan import Alias, Kernel, Plan

f32, bf16 = torch.float32, torch.bfloat16
aten = torch.ops.aten


def _randn(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def _norm(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return _randn(rows, n, dtype=dtype), _randn(n, dtype=dtype), _randn(n, dtype=dtype)


def _labels(rows: int, classes: int) -> tuple[Tensor, Tensor]:
    return _randn(rows, classes), torch.randint(0, classes, (rows,), device="cuda")


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, b)


def _layer_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, b: Tensor
) -> Any:
    return aten.native_layer_norm_backward(dy, x, w.shape, mean, rstd, w, b, [True, True, True])


def _layer_norm_saved(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, w, b = _norm(rows, n, dtype)
    _, mean, rstd = torch.native_layer_norm(x, (n,), w, b, 1e-5)
    return _randn(rows, n, dtype=dtype), x, mean, rstd, w, b


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(
        x.dtype
    ) * w


def _rms_norm_backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    wide, d = x.float(), dy.float()
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    dn = d * w.float()
    dx = r * dn - wide * r.pow(3) * (dn * wide).mean(-1, keepdim=True)
    return dx.to(x.dtype), (d * wide * r).sum(0).to(w.dtype)


def _cross_entropy_backward(dy: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Of the mean, from log_softmax x as a training step saves it."""
    scale = torch.ones((), device=x.device) * y.shape[0]
    inner = aten.nll_loss_backward(dy, x, y, None, 1, -100, scale)
    return aten._log_softmax_backward_data(inner, x, -1, x.dtype)


def _batch_norm_backward(dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor) -> Any:
    return aten.native_batch_norm_backward(
        dy, x, w, None, None, mean, rstd, True, 1e-5, [True, True, True]
    )  # fmt: skip


def _batch_norm_saved(*shape: int) -> tuple[Tensor, ...]:
    x, c = _randn(*shape), shape[1]
    return (
        _randn(*shape),
        x,
        _randn(c),
        x.mean((0, 2, 3)),
        torch.rsqrt(x.var((0, 2, 3), correction=0) + 1e-5),
    )


MB = 1 << 20
Case = tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]


def _sized(
    name: str, fn: Callable[..., Any], make: Callable[[int], tuple[Tensor, ...]]
) -> dict[str, Case]:
    """A case a size in MB of the largest input."""
    return {f"{name}_{n}M": (fn, partial(make, n * MB)) for n in (1, 16, 128, 1024)}


CASES: dict[str, Case] = {
    **_sized("add_f32", lambda x, y: x + y, lambda n: (_randn(n // 4), _randn(n // 4))),
    **_sized("softmax_1k_f32", lambda x: F.softmax(x, -1), lambda n: (_randn(n // 4096, 1024),)),
    **_sized("layer_norm_1k_f32", _layer_norm, lambda n: _norm(n // 4096, 1024, f32)),
    **_sized(
        "cross_entropy_32k_f32",
        lambda x, y: F.cross_entropy(x, y),
        lambda n: _labels(n // 128000, 32000),
    ),
    "add_bf16_128M": (
        lambda x, y: x + y,
        lambda: (_randn(1 << 26, dtype=bf16), _randn(1 << 26, dtype=bf16)),
    ),
    "gelu_f32": (F.gelu, lambda: (_randn(1 << 25),)),
    "silu_mul_bf16": (
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
    "softmax_4k_bf16": (lambda x: F.softmax(x, -1), lambda: (_randn(8192, 4096, dtype=bf16),)),
    "softmax_32k_f32": (lambda x: F.softmax(x, -1), lambda: (_randn(2048, 32768),)),
    "log_softmax_50257_f32": (lambda x: F.log_softmax(x, -1), lambda: (_randn(2048, 50257),)),
    "softmax_50257_bf16": (lambda x: F.softmax(x, -1), lambda: (_randn(4096, 50257, dtype=bf16),)),
    "softmax_128k_f32": (lambda x: F.softmax(x, -1), lambda: (_randn(1024, 131072),)),
    "layer_norm_8k_bf16": (_layer_norm, lambda: _norm(8192, 8192, bf16)),
    "layer_norm_64k_f32": (_layer_norm, lambda: _norm(1024, 65536, f32)),
    "layer_norm_64k_bf16": (_layer_norm, lambda: _norm(1024, 65536, bf16)),
    "rms_norm_4k_bf16": (_rms_norm, lambda: _norm(8192, 4096, bf16)[:2]),
    "sum_rows_f32": (lambda x: x.sum(-1), lambda: (_randn(8192, 8192),)),
    "sum_columns_f32": (lambda x: x.sum(0), lambda: (_randn(8192, 8192),)),
    "sum_all_f32": (lambda x: x.sum(), lambda: (_randn(1 << 26),)),
    "mean_exp_logits_f32": (lambda x: x.exp().mean(), lambda: (_randn(2048, 50257),)),
    "batch_stats_f32": (lambda x: torch.var_mean(x, (0, 2, 3)), lambda: (_randn(64, 256, 56, 56),)),
    "bwd_gelu_f32": (
        lambda dy, x: aten.gelu_backward(dy, x),
        lambda: (_randn(1 << 25), _randn(1 << 25)),
    ),
    "bwd_softmax_1k_f32": (
        lambda dy, y: aten._softmax_backward_data(dy, y, -1, f32),
        lambda: (_randn(32768, 1024), _randn(32768, 1024).softmax(-1)),
    ),
    "bwd_softmax_4k_bf16": (
        lambda dy, y: aten._softmax_backward_data(dy, y, -1, bf16),
        lambda: (_randn(8192, 4096, dtype=bf16), _randn(8192, 4096, dtype=bf16).softmax(-1)),
    ),
    "bwd_softmax_50257_bf16": (
        lambda dy, y: aten._softmax_backward_data(dy, y, -1, bf16),
        lambda: (_randn(2048, 50257, dtype=bf16), _randn(2048, 50257, dtype=bf16).softmax(-1)),
    ),
    "bwd_cross_entropy_32k_f32": (
        _cross_entropy_backward,
        lambda: (
            _randn(),
            _randn(2048, 32000).log_softmax(-1),
            torch.randint(0, 32000, (2048,), device="cuda"),
        ),
    ),
    "bwd_layer_norm_1k_f32": (_layer_norm_backward, lambda: _layer_norm_saved(32768, 1024, f32)),
    "bwd_layer_norm_4k_bf16": (_layer_norm_backward, lambda: _layer_norm_saved(8192, 4096, bf16)),
    "bwd_rms_norm_4k_bf16": (
        _rms_norm_backward,
        lambda: (_randn(8192, 4096, dtype=bf16), *_norm(8192, 4096, bf16)[:2]),
    ),
    "bwd_bias_768_f32": (lambda dy: dy.sum(0), lambda: (_randn(32768, 768),)),
    "bwd_bias_4k_bf16": (lambda dy: dy.sum(0), lambda: (_randn(8192, 4096, dtype=bf16),)),
    "bwd_batch_norm_f32": (_batch_norm_backward, lambda: _batch_norm_saved(64, 256, 56, 56)),
}


MIDDLE = {
    "sum": lambda x: x.sum(1), "mean": lambda x: x.mean(1), "max": lambda x: x.amax(1),
    "argmin": lambda x: x.argmin(1), "softmax": lambda x: F.softmax(x, 1),
    "softmax_last": lambda x: F.softmax(x, 2),
}  # fmt: skip
"""Of a tensor whose rows have an odd length: over its middle axis, or along its rows."""
CASES |= {
    f"{name}_4095_{kind}": (
        fn,
        lambda dtype=dtype, n=32 if "softmax" in name else 128: (
            _randn(n, 4096, 4095, dtype=dtype),
        ),
    )
    for kind, dtype in (("f32", f32), ("bf16", bf16))
    for name, fn in MIDDLE.items()
}


def planned(fn: Callable[..., Any], args: Sequence[Tensor]) -> Plan:
    """The schedule of fn on these arguments. The loops of a graph do not depend on the device, what
    is made of them does."""
    host = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype) for a in args]

    def flat(*a: Tensor) -> tuple[Any, ...]:
        out = fn(*a)
        return out if isinstance(out, tuple) else (out,)

    functional = torch.func.functionalize(flat)
    graph = make_fx(
        functional, compat.decompositions.decomposition_table(), "fake", _allow_non_fake_inputs=True
    )(*host)
    cfg = Config()
    captured = clean_graph(Captured(graph, "bench", "inference"), cfg)
    program = lower_graph(captured, cfg).program
    buffers = {n: replace(b, device="cuda:0") for n, b in program.buffers.items()}
    return schedule(replace(program, buffers=buffers), cfg)


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
                    memory[b.name] = torch.empty_strided(
                        b.shape, b.strides, dtype=dtypes[b.dtype.name], device="cuda"
                    )
            self._add(step, [memory[b.name] for b in step.args], folder)
        self.outputs = [
            memory[o.buf].as_strided(o.shape, o.strides, o.offset)
            for o in plan.program.outputs
            if isinstance(o, TensorArg)
        ]

    def _add(self, kernel: Kernel, tensors: list[Tensor], folder: Path) -> None:
        made = emit_kernel(kernel, kernel.name, gpu=gpu_of("cuda", Config()))
        fn = getattr(load_module(made.name, made.text, folder), made.name)
        grid = (made.grid,)
        options = {
            "num_warps": made.num_warps, "num_stages": made.num_stages, "debug": made.checks,
            "sanitize_overflow": False, "launch_pdl": made.early,
        }  # fmt: skip
        self.calls.append(lambda: fn[grid](*tensors, **options))

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
        atol = 1e-2 * min(1.0, w.abs().max().item())  # the shares of a long softmax are all small
        torch.testing.assert_close(got, w, rtol=2e-2 if w.dtype == bf16 else 1e-4, atol=atol)
    nbytes = _nbytes((*args, *wants))
    torch._dynamo.reset()
    compiled = torch.compile(fn, dynamic=False)
    compiled(*args)
    source = torch.empty(max(nbytes // 2, 1), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    peers = {
        "copy": lambda: target.copy_(source), "plait": runner, "eager": lambda: fn(*args),
        "inductor": lambda: compiled(*args),
    }  # fmt: skip
    row = {
        peer: do_bench(call, warmup=10, rep=50, return_mode="median")
        for peer, call in peers.items()
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
        for name in watched("kernels", names):
            try:
                row = measure(name, Path(folder))
            except Exception as error:  # noqa: BLE001  (one case must not cost the others' numbers)
                lines.append([name, "", f"{type(error).__name__}: {str(error)[:90]}", *[""] * 6])
                continue
            rows.append(row)
            if out is not None:  # after every case: a run that is cut off has its numbers
                Path(out).write_text(json.dumps(rows, indent=1) + "\n")
            rate = row["nbytes"] / row["plait"] / 1e6
            best = min(row["eager"], row["inductor"])
            lines.append(
                [
                    name,
                    str(row["kernels"]),
                    f"{row['plait'] * 1e3:.1f}",
                    f"{rate:.0f}",
                    f"{row['copy'] / row['plait']:.2f}",
                    f"{row['eager'] / row['plait']:.2f}",
                    f"{row['inductor'] / row['plait']:.2f}",
                    "slower" if row["plait"] > 1.02 * best else "",
                    "< 0.9" if row["copy"] < 0.9 * row["plait"] else "",
                ]
            )
    head = ["case", "kernels", "us", "GB/s", "of copy", "x eager", "x Inductor", "", ""]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(render(head, lines))


if __name__ == "__main__":
    main()
