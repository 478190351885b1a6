"""Products and convolutions with constant weights on one core: what plait calls without `freeze`,
its kernels under `batch_invariant`, which pack nothing ahead, oneDNN with weights that it packed,
and plait's packed kernels: `python -m benchmarks.packed_cpu [NAME ...]`.

The best call of each side counts, in CPU time, calls interleaved: other work on the machine
disturbs all of them alike. Columns are GFLOP/s of the sums as they are written down, of which
Winograd's method needs fewer, and the largest error of plait's and of eager's numbers from float64.
"""

from __future__ import annotations

import argparse
import fnmatch
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import plait
from plait.log import watched

ROWS = {  # rows, depth, columns
    "tf6 qkv": (256, 256, 768),
    "tf6 up": (256, 256, 1024),
    "tf6 down": (256, 1024, 256),
    "gpt2 qkv": (128, 768, 2304),
    "gpt2 down": (128, 3072, 768),
    "minilm up": (2048, 384, 1536),
    "minilm down": (2048, 1536, 384),
    "gpt2 logits": (128, 768, 50257),
    "llama up": (512, 2048, 8192),
    "few rows": (16, 384, 1536),
    "one row": (1, 384, 1536),
}
IMAGES = {  # images, channels, height, columns, kernel, stride, padding, and maybe groups
    "resnet 64": (4, 64, 32, 64, 3, 1, 1),
    "resnet 128": (4, 128, 16, 128, 3, 1, 1),
    "resnet 256": (4, 256, 8, 256, 3, 1, 1),
    "resnet 512": (4, 512, 4, 512, 3, 1, 1),
    "16 tiles": (1, 256, 8, 256, 3, 1, 1),
    "9 tiles": (1, 256, 6, 256, 3, 1, 1),
    "resnet stem": (4, 3, 128, 64, 7, 2, 3),
    "resnet down": (4, 64, 32, 128, 1, 2, 0),
    "mobilenet points": (1, 112, 14, 672, 1, 1, 0),
    "mobilenet few": (1, 24, 56, 72, 1, 1, 0),
    "mobilenet each": (1, 672, 14, 672, 3, 1, 1, 672),
    "mobilenet 5x5": (1, 120, 28, 120, 5, 1, 2, 120),
}


def race(sides: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Seconds of CPU time of the best call of each."""
    best = dict.fromkeys(sides, float("inf"))
    for fn in sides.values():
        fn()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, fn in sides.items():
            start = time.process_time()
            fn()
            best[name] = min(best[name], time.process_time() - start)
    return best


def measure(name: str, seconds: float) -> str:
    """A row of the table."""
    mkldnn: Any = torch.ops.mkldnn
    layer: nn.Module
    if name in ROWS:
        rows, depth, columns = ROWS[name]
        layer, x = nn.Linear(depth, columns), torch.randn(rows, depth)
        packed = mkldnn._reorder_linear_weight(layer.weight, rows)
        flops = 2 * rows * depth * columns

        def vendor() -> Any:
            return mkldnn._linear_pointwise(x, packed, layer.bias, "none", [], "")

    else:
        n, channels, high, columns, kernel, stride, padding, *groups = IMAGES[name]
        group = groups[0] if groups else 1
        layer = nn.Conv2d(channels, columns, kernel, stride, padding, 1, group)
        x = torch.randn(n, channels, high, high).to(memory_format=torch.channels_last)
        place = [padding] * 2, [stride] * 2, [1, 1], group
        packed = mkldnn._reorder_convolution_weight(layer.weight, *place, list(x.shape))
        flops = 2 * layer(x).numel() * channels // group * kernel * kernel

        def vendor() -> Any:
            return mkldnn._convolution_pointwise(x, packed, layer.bias, *place, "none", [], "")

    plain, frozen = plait.compile(layer, (x,)), plait.compile(layer, (x,), freeze=True)
    rows = plait.compile(layer, (x,), options={"batch_invariant": True})
    sides = {"plain": lambda: plain(x), "rows": lambda: rows(x), "oneDNN": vendor}
    found = race({**sides, "ours": lambda: frozen(x)}, seconds)
    errors = [fn(x) for fn in (frozen, layer)]
    exact = layer.double()(x.double())
    speeds = "".join(f"{flops / t / 1e9:9.0f}" for t in found.values())
    return f"{name:17}{speeds}" + "".join(f"{(e - exact).abs().max():9.1e}" for e in errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["*"])
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    print(f"{'':17}{'plain':>9}{'rows':>9}{'oneDNN':>9}{'ours':>9}{'error':>9}{'eager':>9}")
    known = (*ROWS, *IMAGES)
    names = [n for n in known if any(fnmatch.fnmatch(n, pattern) for pattern in args.names)]
    for name in watched("products", names):
        print(measure(name, args.seconds), flush=True)


if __name__ == "__main__":
    main()
