"""Convolutions on a CPU, of images in rows and with channels innermost, forward and backward:
microseconds, what channels-last gains and what plait/graph/conv_cost.py takes it for; of points
also as products. ATen calls oneDNN for points only if it has several threads: the limit makes them
one. Usage: OMP_NUM_THREADS=2 OMP_THREAD_LIMIT=1 python benchmarks/conv_cpu.py"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from table import render

from plait.graph.conv_cost import Convolution, host_gain_ns
from plait.log import watched

aten = torch.ops.aten
CASES = [  # batch, channels, size, results, filter, stride, groups, -1: one that is transposed
    (4, 3, 224, 32, 3, 2, 1), (4, 32, 112, 32, 3, 1, 32), (4, 144, 56, 144, 3, 1, 144),
    (4, 384, 14, 384, 3, 1, 384), (4, 144, 56, 24, 1, 1, 1), (4, 64, 14, 384, 1, 1, 1),
    (1, 64, 56, 256, 1, 1, 1), (1, 64, 56, 64, 3, 1, 1), (1, 32, 56, 64, 3, 2, 1),
    (1, 256, 14, 256, 3, 1, 1), (1, 256, 14, 256, 3, 1, 16), (1, 120, 28, 120, 3, 1, 5),
    (2, 3, 224, 768, 16, 16, 1), (1, 8, 8, 8, 3, 1, 1), (4, 116, 28, 116, 1, 1, 1),
    (4, 512, 7, 512, 3, 1, 1), (1, 512, 16, 512, 3, 1, 1), (1, 64, 256, 32, 3, 1, 1),
    (1, 336, 14, 336, 3, 1, 14), (1, 64, 128, 32, 2, 2, -1), (8, 512, 4, 256, 4, 2, -1),
]  # fmt: skip
ROUNDS, CALLS = 4, 8
HEADS = (
    "case",
    "rows",
    "last",
    "gain",
    "estimate",
    "product, rows",
    "last",
    "backward, rows",
    "last",
)


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
    transposed, parts = groups < 0, abs(groups)
    x, w = torch.randn(n, channels, size, size), torch.randn(results, channels // parts, k, k)
    w = w.transpose(0, 1).contiguous() if transposed else w
    pad = [0 if k == stride else k // 2 - (k % 2 == 0)] * 2
    how = [stride] * 2, pad, [1, 1], transposed, [0, 0], parts
    calls: list[Callable[[], Any]] = []
    for form in (torch.contiguous_format, torch.channels_last):
        image = x.contiguous(memory_format=form)
        made = aten.convolution.default(image, w, None, *how)
        grad = torch.randn_like(made)
        calls.append(lambda i=image: aten.convolution.default(i, w, None, *how))
        calls.append(
            lambda i=image, g=grad: aten.convolution_backward.default(
                g, i, w, None, *how, [True, True, False]
            )
        )
    if k == stride == 1:
        images, matrix = x.view(n, channels, -1), w.view(results, channels)
        points = image.permute(0, 2, 3, 1).reshape(-1, channels)
        calls.append(lambda: torch.bmm(matrix.expand(n, *matrix.shape), images))
        calls.append(lambda: torch.mm(points, matrix.t()))
    rows, rows_back, last, last_back, *products = least_us(calls)
    c = Convolution(x, w, made, (stride,) * 2, tuple(pad), (1, 1), transposed, (0, 0), parts)
    name = f"{n}x{channels}x{size}x{size}, {results} of {k}x{k}, stride {stride}, groups {parts}"
    us = (rows, last, rows - last, host_gain_ns(c) / 1e3, *(products or ("", "")))
    shown = (t if isinstance(t, str) else f"{t:.1f}" for t in (*us, rows_back, last_back))
    return [name + (", transposed" if transposed else ""), *shown]


def main() -> None:
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(render(HEADS, [row(case) for case in watched("cases", CASES)]))


if __name__ == "__main__":
    main()
