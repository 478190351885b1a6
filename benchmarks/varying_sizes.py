"""What a program for sizes that vary costs above one for the sizes that it is called with.

Usage: python -m benchmarks.varying_sizes. CPU time of a call with one thread, the least of 60
rounds in which both take turns; Dynamo's guards, of sizes too, are part of a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from plait.capture.backend import plait_backend
from plait.log import watched

ROUNDS, CALLS = 60, 5


class Attention(nn.Module):
    """One head, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        """Of batches of rows."""
        q, k, v = self.project(x).chunk(3, -1)
        return (q @ k.transpose(1, 2) * 0.125).softmax(-1) @ v


def pointwise(x: Tensor) -> Tensor:
    """Rows that are normed, gated and added up."""
    return (x.softmax(-1) * x.sigmoid()).cumsum(-1) + x.mean(-1, keepdim=True)


def block(n: int, m: int) -> Sequence[nn.Module]:
    """A convolution of n channels to m, normed and cut."""
    return nn.Conv2d(n, m, 3, padding=1), nn.BatchNorm2d(m), nn.ReLU()


Case = tuple[str, Callable[..., Any], tuple[int, ...], tuple[int, ...]]
"""Name, function, sizes, and the dimensions that vary."""


def cases() -> list[Case]:
    """Small ones: there the difference is largest."""
    mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    encoder = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return [
        ("mlp", mlp, (48, 32), (0,)),
        ("pointwise", pointwise, (96, 200), (0, 1)),
        ("attention", Attention(), (4, 48, 64), (0, 1)),
        ("encoder", encoder.eval(), (4, 48, 128), (0, 1)),
        ("convolutions", nn.Sequential(*block(3, 16), *block(16, 16)).eval(), (2, 3, 32, 32),
         (0, 2, 3)),
    ]  # fmt: skip


def compiled(fn: Callable[..., Any], x: Tensor, vary: Sequence[int]) -> Callable[..., Any]:
    """fn, compiled for x, and for others in these dimensions; that others need no compile is
    checked."""
    graphs = []

    def backend(gm: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return plait_backend(gm, inputs)

    call: Callable[..., Any] = torch.compile(fn, backend=backend, dynamic=bool(vary))
    call(x)
    n_graphs = len(graphs)
    if vary:
        call(torch.randn([n + 4 * (d in vary) for d, n in enumerate(x.shape)]))
    assert len(graphs) == n_graphs, f"{len(graphs)} graphs"
    return call


def fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls fn, of its own code: Dynamo keeps graphs by code."""

    def own(x: Tensor) -> Any:
        return fn(x)

    return FunctionType(own.__code__.replace(), own.__globals__, "own", None, own.__closure__)


def main() -> None:
    """Prints a line a case."""
    torch.set_num_threads(1)
    for name, fn, shape, vary in watched("cases", cases()):
        x = torch.randn(shape)
        calls = [compiled(fresh(fn), x, dims) for dims in ((), vary)]
        best = [float("inf")] * 2
        for _ in range(ROUNDS):
            for k, call in enumerate(calls):
                start = time.process_time_ns()
                for _ in range(CALLS):
                    call(x)
                best[k] = min(best[k], (time.process_time_ns() - start) / CALLS / 1000)
        print(f"{name}: fixed {best[0]:.1f} us, varying {best[1]:.1f}: {best[1] / best[0]:.2f} x")


if __name__ == "__main__":
    with torch.no_grad():
        main()
