"""Convolutions on a CPU, of images in rows and with channels innermost, forward and backward:
microseconds, and how many bytes of images and results a nanosecond the difference is. What
plait/graph/conv_cost.py knows of a CPU. Usage: OMP_NUM_THREADS=1 python benchmarks/conv_cpu.py"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from table import render

CASES = [  # batch, channels, size, results, filter, stride, groups
    (4, 3, 224, 32, 3, 2, 1), (4, 32, 112, 32, 3, 1, 32), (4, 144, 56, 144, 3, 1, 144),
    (4, 384, 14, 384, 3, 1, 384), (4, 144, 56, 24, 1, 1, 1), (4, 64, 14, 384, 1, 1, 1),
    (1, 64, 56, 256, 1, 1, 1), (1, 64, 56, 64, 3, 1, 1), (1, 32, 56, 64, 3, 2, 1),
    (1, 256, 14, 256, 3, 1, 1), (1, 256, 14, 256, 3, 1, 16), (1, 120, 28, 120, 3, 1, 5),
    (2, 3, 224, 768, 16, 16, 1), (1, 8, 8, 8, 3, 1, 1),
]  # fmt: skip
ROUNDS, CALLS = 4, 8
HEADS = ("case", "rows", "last", "bytes/ns", "backward, rows", "last")


def least_us(calls: list[Callable[[], Any]]) -> list[float]:
    """The least time of each call; their rounds alternate."""
    best = [math.inf] * len(calls)
    for _ in range(ROUNDS):
        for k, call in enumerate(calls):
            for _ in range(CALLS):
                start = time.perf_counter()
                call()
                best[k] = min(best[k], time.perf_counter() - start)
    return [1e6 * t for t in best]


def row(case: tuple[int, ...]) -> list[str]:
    """One row of the table."""
    n, channels, size, results, k, stride, groups = case
    x, w = torch.randn(n, channels, size, size), torch.randn(results, channels // groups, k, k)
    how = [stride] * 2, [0 if k == stride else k // 2] * 2, [1, 1], False, [0, 0], groups
    calls: list[Callable[[], Any]] = []
    for form in (torch.contiguous_format, torch.channels_last):
        image = x.contiguous(memory_format=form)
        made = torch.ops.aten.convolution.default(image, w, None, *how)
        grad = torch.randn_like(made)
        calls.append(lambda i=image: torch.ops.aten.convolution.default(i, w, None, *how))
        calls.append(
            lambda i=image, g=grad: torch.ops.aten.convolution_backward.default(
                g, i, w, None, *how, [True, True, False]
            )
        )
    rows, rows_back, last, last_back = least_us(calls)
    rate = 4e-3 * (x.numel() + made.numel()) / (rows - last)
    name = f"{n}x{channels}x{size}x{size}, {results} of {k}x{k}, stride {stride}, groups {groups}"
    return [name, *(f"{t:.1f}" for t in (rows, last, rate, rows_back, last_back))]


def main() -> None:
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(render(HEADS, [row(case) for case in CASES]))


if __name__ == "__main__":
    main()
