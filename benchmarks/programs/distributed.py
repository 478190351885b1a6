"""Training steps on several ranks: eager, Inductor and plait one after the other in one run.

    python benchmarks/programs/distributed.py [--device cpu] [--only fsdp] [--width 1024]

Six transformer blocks, 8 x 512 tokens a rank, autocast to bfloat16, AdamW. ddp: replicas, graphs
split at buckets; fsdp: FSDP2, each block compiled; fsdp-whole: the model compiled; tensor: products
split over the ranks. Prints the median time of a step on rank 0; on GPUs the peak of allocated
memory in its forward pass, its backward pass and the optimizer, and what lives between these.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

PROGRAMS: dict[str, Any] = {}  # for programs_race.py, which has one process: none
PEERS = ("eager", "inductor", "plait")
WARM, TIMED = 5, 20


class Block(nn.Module):
    """Attention and two products, each behind a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (m(h).unflatten(-1, (-1, 64)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def compiled(peer: str, fn: Any) -> Any:
    return fn if peer == "eager" else torch.compile(fn, backend=peer)


def ddp(model: nn.Sequential, peer: str) -> Any:
    ids = [dist.get_rank()] if dist.get_backend() == "nccl" else None
    return compiled(peer, nn.parallel.DistributedDataParallel(model, device_ids=ids))


def _sharded(model: nn.Sequential) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def fsdp(model: nn.Sequential, peer: str) -> Any:
    for block in _sharded(model):
        if peer != "eager":
            block.compile(backend=peer)
    return model


def fsdp_whole(model: nn.Sequential, peer: str) -> Any:
    return compiled(peer, _sharded(model))


def tensor(model: nn.Sequential, peer: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    columns, rows = ("q", "k", "v", "up"), ("out", "down")
    plan = {n: ColwiseParallel() for n in columns} | {n: RowwiseParallel() for n in rows}
    for block in model:
        parallelize_module(block, mesh, plan)
    return compiled(peer, model)


STEPS: dict[str, Callable[[nn.Sequential, str], Any]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "fsdp-whole": fsdp_whole,
    "tensor": tensor,
}


class Memory:
    """MiB on a GPU at the ends of the parts of steps, and the peaks in them."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.ends: dict[str, int] = {}
        self.peaks: dict[str, int] = {}

    def start(self) -> None:
        if self.on:
            torch.cuda.reset_peak_memory_stats()

    def end(self, part: str) -> None:
        if self.on:
            self.ends[part] = torch.cuda.memory_allocated() >> 20
            peak = torch.cuda.max_memory_allocated() >> 20
            self.peaks[part] = max(peak, self.peaks.get(part, 0))
            self.start()

    def text(self) -> str:
        parts = (f"{part} {peak} (then {self.ends[part]})" for part, peak in self.peaks.items())
        return f"{max(self.peaks.values(), default=0):6} MiB: {', '.join(parts)}" if self.on else ""


def race(name: str, peer: str, width: int, tokens: int, device: str) -> tuple[float, Memory, float]:
    """Milliseconds a step, memory after warming up, and the loss after all steps."""
    gpu = device != "cpu"
    torch._dynamo.reset()
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(6))).to(device)
    fn = STEPS[name](model, peer)
    # torch 2.11 takes no list of tensors of which only some are distributed.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=name != "tensor")
    # Tensors in parallel: one batch for all ranks, else one each.
    torch.manual_seed(0 if name == "tensor" else dist.get_rank())
    x = torch.randn(8, tokens, width, device=device)
    times, loss, memory = [], x, Memory(gpu)
    for k in range(WARM + TIMED):
        dist.barrier()
        if k <= WARM:
            gc.collect()  # what the peer before has left
            memory = Memory(gpu)
            memory.start()
        start = time.perf_counter()
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = fn(x).float().square().mean()
        memory.end("forward")
        loss.backward()
        memory.end("backward")
        optimizer.step()
        optimizer.zero_grad()
        memory.end("step")
        if gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[WARM:]), memory, loss.item()


def rank_main(args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    device = "cpu" if args.device == "cpu" else f"cuda:{args.rank}"
    if args.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(args.rank)
    dist.init_process_group(
        "gloo" if args.device == "cpu" else "nccl",
        init_method=f"file://{args.meet}",
        rank=args.rank,
        world_size=args.ranks,
    )
    for name in args.only or STEPS:
        for peer in args.peers:
            ms, memory, loss = race(name, peer, args.width, args.tokens, device)
            line = f"{name:12} {peer:9} {ms:9.2f} ms   loss {loss:.5f} {memory.text()}"
            if args.rank == 0:
                print(line, flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=tuple(STEPS))
    parser.add_argument("--peers", nargs="*", default=PEERS)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--meet", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        rank_main(args)
        return
    root = Path(__file__).parent.parent.parent
    path = os.pathsep.join((str(root), os.environ.get("PYTHONPATH", "")))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--meet", f"{folder}/meet"]
        ranks = [
            subprocess.Popen([*command, "--rank", str(k)], env={**os.environ, "PYTHONPATH": path})
            for k in range(args.ranks)
        ]
        sys.exit(max(abs(rank.wait()) for rank in ranks))


if __name__ == "__main__":
    main()
