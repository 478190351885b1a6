"""Whole models on a GPU: plait beside eager and torch.compile's default back end, in one run.

First call: from the first call to its result on the device, caches fresh for plait and for the peer. A call: the median
of CUDA-event times over repeated calls in blocks that alternate between the sides; host: wall clock to enqueue a call.
Usage: models_gpu.py [NAME ...] [--json FILE]
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
from models import CASES
from table import render

NAMES = ("pw", "tf6", "resnet18", "gpt2", "gpt2-train", "bert-train")


def timed(call: Callable[[], Any], n: int) -> tuple[float, float]:
    """Microseconds a call on the device and on the host."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    t = time.perf_counter()
    for _ in range(n):
        call()
    host = (time.perf_counter() - t) * 1e6 / n
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / n, host


def race(name: str) -> dict[str, Any]:
    """One model: what each side took, and how far it is from eager."""
    case = CASES[name]
    made = case.make()
    module, args = made[0].to("cuda"), [a.to("cuda") for a in made[1]]
    train = name.endswith("-train")

    def call_of(f: Callable[..., Any]) -> Callable[[], Any]:
        if not train:
            return lambda: f(*args)

        def step() -> Any:
            loss = f(*args)
            loss.backward()
            return loss

        return step

    sides: dict[str, Any] = {"eager": {"call": call_of(module)}}
    with torch.set_grad_enabled(train):
        want = sides["eager"]["call"]()
        for side in ("plait", "inductor"):
            torch._dynamo.reset()
            call = call_of(torch.compile(module, backend=side))
            torch.cuda.synchronize()
            start = time.perf_counter()
            got = call()
            torch.cuda.synchronize()
            error = float((got.double() - want.double()).abs().max() / want.double().abs().max())
            sides[side] = {"call": call, "first_s": time.perf_counter() - start, "error": error}
        for s in sides.values():
            timed(s["call"], 10)
            s["us"], s["host_us"] = [], []
        for _ in range(7):
            for s in sides.values():
                us, host = timed(s["call"], 10)
                s["us"].append(us), s["host_us"].append(host)
    return {
        side: {k: statistics.median(v) if isinstance(v, list) else v for k, v in s.items() if k != "call"}
        for side, s in sides.items()
    }


def main() -> None:
    """Command line: see the module's docstring."""
    names = [a for a in sys.argv[1:] if not a.startswith("--")]
    path = sys.argv[sys.argv.index("--json") + 1] if "--json" in sys.argv else ""
    names = [n for n in names if n != path] or list(NAMES)
    results: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"PLAIT_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        for name in names:
            results[name] = race(name)
            for side, r in results[name].items():
                cells = [
                    r.get("first_s"),
                    r["us"],
                    r["host_us"],
                    results[name]["eager"]["us"] / r["us"],
                    r.get("error"),
                ]
                rows.append([f"{name} {side}", *("" if c is None else f"{c:.3g}" for c in cells)])
            print(render(("", "first s", "call µs", "host µs", "eager / it", "error"), rows), flush=True)
            if path:
                Path(path).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
