"""What measuring tiles gains on a GPU: each case compiled with option autotune off and on, in one
run.

A call: the median of rounds that alternate between the sides, each a median with a cold L2 cache.
First call: seconds from the first call to its result, with an empty folder of caches, and again
with what is kept there then. Usage: tuning_gpu.py [CASE ...] [--json FILE]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernels_gpu import CASES
from table import render
from triton.testing import do_bench

from plait.log import watched
from plait.wrapper.program import CompileRecord, observers

NAMES = (
    "add_f32_1M", "silu_mul_bf16", "bias_gelu_bf16", "transpose_add_f32", "softmax_1k_f32_16M",
    "softmax_4k_bf16", "softmax_32k_f32", "log_softmax_50257_f32", "layer_norm_1k_f32_16M",
    "layer_norm_8k_bf16", "layer_norm_64k_f32", "rms_norm_4k_bf16", "cross_entropy_32k_f32_128M",
    "sum_rows_f32", "sum_columns_f32", "sum_all_f32", "batch_stats_f32", "bwd_softmax_4k_bf16",
    "bwd_layer_norm_4k_bf16", "bwd_bias_4k_bf16",
)  # fmt: skip
ROUNDS = 3


def first_call(
    fn: Callable[..., Any], args: tuple[Any, ...], autotune: bool
) -> tuple[Callable[[], Any], float]:
    """The compiled function on these arguments, and the seconds that its first call took."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="plait", dynamic=False, options={"autotune": autotune})
    torch.cuda.synchronize()
    start = time.perf_counter()
    compiled(*args)
    torch.cuda.synchronize()
    return lambda: compiled(*args), time.perf_counter() - start


def measure(name: str) -> dict[str, Any]:
    """One case: times of both sides, and what the tuner said."""
    fn, make = CASES[name][:2]
    args = make()
    want = fn(*args)
    records: list[CompileRecord] = []
    token = observers.set((records.append,))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PLAIT_CACHE_DIR"] = folder
        plain, plain_s = first_call(fn, args, False)
        tuned, tuned_s = first_call(fn, args, True)
        notes = records[-1].tuned
        _, known_s = first_call(fn, args, True)
    observers.reset(token)
    for got in (plain(), tuned()):
        for a, b in zip(
            got if isinstance(got, tuple) else (got,),
            want if isinstance(want, tuple) else (want,),
            strict=True,
        ):
            torch.testing.assert_close(
                a, b, rtol=2e-2 if b.dtype == torch.bfloat16 else 1e-4, atol=1e-2
            )
    rounds = [
        [do_bench(call, warmup=5, rep=20, return_mode="median") * 1e3 for call in (plain, tuned)]
        for _ in range(ROUNDS)
    ]
    off, on = (statistics.median(r[k] for r in rounds) for k in range(2))
    firsts = {"first_s": plain_s, "tuning_s": tuned_s, "known_s": known_s}
    return {"case": name, "off_us": off, "on_us": on, **firsts, "notes": notes}


def main() -> None:
    """Measures the cases named on the command line, or all."""
    arguments = sys.argv[1:]
    out = arguments.pop(arguments.index("--json") + 1) if "--json" in arguments else None
    rows, lines = [], []
    with torch.no_grad():
        for name in watched("cases", [a for a in arguments if a != "--json"] or NAMES):
            try:
                row = measure(name)
            except Exception as error:  # noqa: BLE001  (one case must not cost the others' numbers)
                lines.append([name, f"{type(error).__name__}: {str(error)[:90]}", *[""] * 5])
                continue
            rows.append(row)
            numbers = [
                f"{row['off_us']:.1f}",
                f"{row['on_us']:.1f}",
                f"{row['off_us'] / row['on_us']:.2f}",
            ]
            lines.append(
                [name, *numbers, *(f"{row[k]:.2f}" for k in ("first_s", "tuning_s", "known_s"))]
            )
            print(*(f"{name}: {note}" for note in row["notes"]), sep="\n", flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(render(["case", "off us", "on us", "gain", "first s", "tuning s", "known s"], lines))
    if out is not None:
        Path(out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
