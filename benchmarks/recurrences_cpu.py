"""Loops that Python wrote out, on a CPU: what the C++ compiler takes for their kernels, and a call.

    python -m benchmarks.recurrences_cpu [PROGRAM ...] [--steps 64] [--limits 150,300,600,1500]

Each program is compiled once for each limit of operations a kernel of steps (`Rates.step_nodes` of
`plait/devices.py`), with an empty cache. g++: CPU seconds of the compilers, what links their
objects among it. Calls are timed on one thread, the limits in turn; the least time counts.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import plait
from plait.devices import DEVICES
from plait.log import watched
from plait.schedule.plan import kernels_of

Program = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def lstm(steps: int) -> Program:
    """Two products a step, and a kernel of gates."""
    cell = torch.nn.LSTMCell(64, 64)

    def run(x: Tensor) -> Tensor:
        state, out = (torch.zeros(4, 64), torch.zeros(4, 64)), []
        for k in range(steps):
            state = cell(x[:, k], state)
            out.append(state[0])
        return torch.stack(out, 1)

    return run, (torch.randn(4, steps, 64),)


def gru(steps: int) -> Program:
    """Gates without products."""

    def run(x: Tensor) -> Tensor:
        h, out = torch.zeros(4, 256), torch.zeros(4, steps, 256)
        for k in range(steps):
            r, z, n = x[:, k].chunk(3, -1)
            z = torch.sigmoid(z + h)
            h = (1 - z) * torch.tanh(n + torch.sigmoid(r + h) * h) + z * h
            out[:, k] = h
        return out

    return run, (torch.randn(4, steps, 768),)


def wkv(steps: int) -> Program:
    """RWKV's weighted means."""

    def run(decay: Tensor, first: Tensor, key: Tensor, value: Tensor) -> Tensor:
        above, below, out = key[:, 0] * 0, key[:, 0] * 0, torch.zeros_like(key)
        top, decay = above - 1e38, -torch.exp(decay)
        for k in range(steps):
            here, now = key[:, k], torch.maximum(top, key[:, k] + first)
            a, b = torch.exp(top - now), torch.exp(here + first - now)
            out[:, k] = (a * above + b * value[:, k]) / (a * below + b)
            now = torch.maximum(top + decay, here)
            a, b = torch.exp(top + decay - now), torch.exp(here - now)
            above, below, top = a * above + b * value[:, k], a * below + b, now
        return out

    sizes = (768,), (768,), (4, steps, 768), (4, steps, 768)
    return run, tuple(torch.randn(s) for s in sizes)


def norm(steps: int) -> Program:
    """A mean of all values in each step."""

    def run(x: Tensor) -> Tensor:
        h, out = torch.zeros(4, 1024), torch.zeros_like(x)
        for k in range(steps):
            h = 0.9 * h + 0.1 * x[:, k]
            h = h / (1 + h.square().mean(-1, keepdim=True)).sqrt()
            out[:, k] = h
        return out

    return run, (torch.randn(4, steps, 1024),)


def mamba(steps: int) -> Program:
    """A state space whose states are multiplied by a vector of each step."""

    def run(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        h, out = torch.zeros(2, 256, 16), []
        for k in range(steps):
            h = a[:, :, k] * h + b[:, :, k]
            out.append((h @ c[:, k].unsqueeze(-1))[:, :, 0])
        return torch.stack(out, -1)

    rows = torch.rand(2, 256, steps, 16), torch.randn(2, 256, steps, 16)
    return run, (*rows, torch.randn(2, steps, 16))


PROGRAMS = {p.__name__: p for p in (lstm, gru, wkv, norm, mamba)}


def built(program: Program, limit: int) -> tuple[Any, float]:
    """A compiled program, and the CPU seconds of the C++ compiler."""
    facts = DEVICES["cpu"]
    DEVICES["cpu"] = replace(facts, rates=replace(facts.rates, step_nodes=limit))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PLAIT_CACHE_DIR"] = folder
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        call = plait.compile(*program)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return call, spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--limits", default="150,300,600,1500")
    args = parser.parse_args()
    limits = [int(n) for n in args.limits.split(",")]
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    print("program     limit  kernels  functions  g++, s  call, µs")
    for name in watched("programs", args.programs or PROGRAMS):
        program = PROGRAMS[name](args.steps)
        made = {limit: built(program, limit) for limit in limits}
        best = dict.fromkeys(made, float("inf"))
        for _ in range(200):
            for limit, (call, _) in made.items():
                start = time.perf_counter()
                call(*program[1])
                best[limit] = min(best[limit], time.perf_counter() - start)
        for limit, (call, seconds) in made.items():
            steps = kernels_of(call.record.plan)
            n = len({k.name for k in steps})
            us = 1e6 * best[limit]
            print(f"{name:10} {limit:6} {len(steps):8} {n:10} {seconds:7.2f} {us:9.1f}", flush=True)


if __name__ == "__main__":
    main()
