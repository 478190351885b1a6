"""How fast PyTorch's attention is on one core of this CPU, in float32, against the same as two
products and a softmax: `python -m benchmarks.attention_cpu`.

GFLOP/s are of the products that are needed: half of all where each query sees what is before it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.log import watched

HEADS = 12
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)


def least(run: Callable[[], Tensor], seconds: float) -> float:
    """The least CPU time of a call, in seconds."""
    run()
    best, end = float("inf"), time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.thread_time()
        run()
        best = min(best, time.thread_time() - begin)
    return best


def steps(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention as operators of its own."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    made: Tensor = scores.softmax(-1) @ v
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--longest", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    print("| width | batch | causal | length | attention µs | GFLOP/s | steps µs |")
    print("|--:|--:|---|--:|--:|--:|--:|")
    lengths = [n for n in LENGTHS if n <= args.longest]
    cases = [*product((32, 64), (1, 8), (False, True), lengths)]
    for width, batch, causal, n in watched("cases", cases):
        q, k, v = (torch.randn(batch, n, HEADS, width).transpose(1, 2) for _ in range(3))
        mask = torch.ones(n, n, dtype=torch.bool).triu(1) if causal else None

        def whole() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: B023

        def apart() -> Tensor:
            return steps(q, k, v, mask)  # noqa: B023

        one, other = least(whole, args.seconds), least(apart, args.seconds)
        flops = 4 * batch * HEADS * n * n * width / (2 if causal else 1)
        told = f"{one * 1e6:.0f} | {flops / one / 1e9:.0f} | {other * 1e6:.0f}"
        print(f"| {width} | {batch} | {causal} | {n} | {told} |", flush=True)


if __name__ == "__main__":
    main()
