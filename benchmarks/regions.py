"""How the time of a compile grows with the layers of a model whose block is a
nested_compile_region.

`python benchmarks/regions.py` prints, for a GPT-2 and a Llama block, forward and backward, the CPU
time of all but Dynamo and AOTAutograd with 8 and with 32 layers, and the quotient: first with the
compilers of kernels, which are processes of their own and find nothing in the cache, then that of
the thread that compiles alone. Every graph is compiled three times; the least time counts.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait.capture.program as road
from plait.log import watched
from plait.wrapper.program import Program

WIDTH, HEADS = 128, 4


class Gpt2Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, d // HEADS)
        a = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        sizes = {"q": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2, "gate": 3 * WIDTH, "up": 3 * WIDTH}
        for name, n in sizes.items():
            setattr(self, name, nn.Linear(WIDTH, n, bias=False))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        angle = torch.arange(64)[:, None] * torch.logspace(0, -3, WIDTH // HEADS // 2)
        self.register_buffer("angle", torch.cat((angle, angle), 1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (
            m(h).view(b, t, -1, d // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def turned(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        angle = self.angle[: x.shape[2]]
        return x * angle.cos() + torch.cat((-right, left), -1) * angle.sin()


class Layers(nn.Module):
    def __init__(self, block: type[nn.Module], n: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def all_time() -> float:
    """Seconds of all threads, and of processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def times(
    block: type[nn.Module], n: int, options: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    """Milliseconds by kind of graph (inference, forward, backward): all, and the thread alone."""
    found: dict[str, tuple[float, float]] = {}
    compile_graph: Callable[..., Program] = road.compile_graph
    clocks = all_time, time.thread_time

    def timed(*args: Any, **kwargs: Any) -> Program:
        start = [clock() for clock in clocks]
        made = compile_graph(*args, **kwargs)
        whole, own = (clock() - s for clock, s in zip(clocks, start, strict=True))
        found[made.record.kind] = (whole * 1e3, own * 1e3)
        return made

    road.compile_graph = timed
    try:
        with tempfile.TemporaryDirectory() as cache:
            for train in (False, True):
                torch._dynamo.reset()
                given = {**options, "cache_dir": cache}
                run = torch.compile(Layers(block, n), backend="plait", options=given)
                with torch.set_grad_enabled(train):
                    y = run(torch.randn(2, 32, WIDTH))
                if train:
                    y.sum().backward()
    finally:
        road.compile_graph = compile_graph
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=(8, 32))
    parser.add_argument("--cuda-graphs", action="store_true", help="programs that are recorded")
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    options = {"cuda_graphs": a.cuda_graphs}
    few, many = a.layers
    columns = f"{few} layers, ms | {many} layers, ms | quotient"
    print(f"| block | graph | {columns} | own: {columns} |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for block in (Gpt2Block, LlamaBlock):
        block.forward = torch.compiler.nested_compile_region(block.forward)  # type: ignore[method-assign]
        times(block, 2, options)  # what is loaded once
        rounds = watched(f"{block.__name__}, rounds", range(3))
        runs = [[times(block, n, options) for n in (few, many)] for _ in rounds]
        for kind in runs[0][0]:
            row = f"| {block.__name__} | {kind}"
            for clock in (0, 1):
                a, b = (min(run[k][kind][clock] for run in runs) for k in (0, 1))
                row += f" | {a:.0f} | {b:.0f} | {b / a:.2f}"
            print(row, "|", flush=True)


if __name__ == "__main__":
    main()
