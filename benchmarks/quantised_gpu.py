"""Quantised models' patterns on a GPU (`quantised.py`): plait's time against eager's and Inductor's
on the device, in CUDA graphs of calls whose inputs are too many for the cache.

Groups: `chains` (norms, activations and what quantises them), `weights` (8 and 4 bits, multiplied
with few and many rows), `both` (quantised activations, too) and `experts`. Peers: eager; plait,
inductor; plait-tuned, inductor-tuned (max-autotune); and of chains copy, a copy of as many bytes as
a chain reads and writes.
Errors are distances from float64, where results are codes times scales.
Usage: quantised_gpu.py [GROUPS or NAMES...] [--peers LIST] [--jobs N] [--seconds N]: N processes
compile side by side, one at a time is timed on a device. Each row is printed as it is done, and a
table at the end, which comes after so many seconds at the latest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from on_device import Turns, compiled, least_us, raced, write_row
from quantised import CASES, Random, distance, in_float64
from table import render
from torch import Tensor
from torch.utils._pytree import tree_leaves

COPY = "copy"
PEERS = ("eager", "inductor", "inductor-tuned", "plait", "plait-tuned")
CALLS = 16
COLD_NBYTES = 160 << 20  # of inputs that a round of calls reads: more than any cache holds
_FEW, _MANY = (1, 16, 64), (1024, 4096)
_WEIGHTS = [name for name in CASES if name.endswith(("weights", "before"))]
_CHAINS = [name for name in CASES if "to " in name]
ROWS: dict[str, list[tuple[str, int, int, int]]] = {
    "chains": [(name, m, 0, k) for name in _CHAINS for m, k in ((8192, 4096), (256, 4096))],
    "weights": [(name, m, 4096, 4096) for name in _WEIGHTS for m in (*_FEW, *_MANY)],
    "both": [
        (name, m, 4096, 4096)
        for name in ("int8", "fp8", "rms norm, fp8", "fp8 blocks")
        for m in (32, *_MANY)
    ],
    "experts": [
        (name, m, 1024, 2048)
        for name in ("routing", "experts", "experts, added")
        for m in (16, 4096)
    ],
}
"""Program, rows, columns and length of sums of each row of the tables."""


def title(row: tuple[str, int, int, int]) -> str:
    name, *sizes = row
    return f"{name} {'x'.join(str(n) for n in sizes if n)}"


def nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


class Race:
    """One row: its inputs and its peers."""

    def __init__(self, row: tuple[str, int, int, int]) -> None:
        self.name, m, n, k = row
        self.case = CASES[self.name]
        first = self.case.inputs(Random("cuda"), m, n, k)
        copies = max(1, min(12, -(-COLD_NBYTES // nbytes(first))))
        self.inputs = [first] + [
            self.case.inputs(Random("cuda", seed), m, n, k) for seed in range(1, copies)
        ]

    def call(self, peer: str) -> Callable[[list[Tensor]], Any]:
        """A peer as a function of the inputs, called once. Dynamo's memory is of a code object:
        each has one of its own."""
        if peer == COPY:
            made = self.case.fn(*self.inputs[0])
            size = (nbytes(self.inputs[0]) + nbytes(tree_leaves(made))) // 2
            pairs = [
                torch.empty(2, size, dtype=torch.uint8, device="cuda") for _ in self.inputs[:4]
            ]
            turns = itertools.cycle(pairs)

            def copy(args: list[Tensor]) -> Any:
                source, target = next(turns)
                return target.copy_(source)

            return copy
        run = compiled(self.case.fn, peer)
        run(*self.inputs[0])
        return lambda args: run(*args)

    def error(self, call: Callable[[list[Tensor]], Any]) -> float:
        """Distance of the results from float64."""
        given = self.inputs[0]
        exact = self.case.fn(*map(in_float64, given))
        return distance(self.name, call(given), exact)


@torch.no_grad()
def work(names: Sequence[str], peers: Sequence[str], folder: Path) -> None:
    """Compiles rows and times them, one after the other."""
    turns = Turns(folder)
    for row in (r for rows in ROWS.values() for r in rows if title(r) in names):
        torch.compiler.reset()
        torch.cuda.empty_cache()
        calls: dict[str, Callable[[list[Tensor]], Any]] = {}
        with turns.compiling():
            race = Race(row)
            for peer in (*peers, *([COPY] if row in ROWS["chains"] else [])):
                try:
                    calls[peer] = race.call(peer)
                except Exception as failed:  # noqa: BLE001 - a peer's, too: the row says so
                    text = f"{type(failed).__name__}: {failed}".splitlines()[0]
                    print(f"{title(row)}: {peer} failed: {text[:200]}", file=sys.stderr)
            errors: dict[str, float] = {
                p: race.error(calls[p]) for p in ("eager", "plait") if p in calls
            }
        with turns.timing():
            us = least_us(calls, race.inputs, CALLS)
        found = {peer: (us[peer], errors.get(peer, 0.0)) for peer in calls}
        write_row(folder, {"name": title(row), "found": found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=list(ROWS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(json.loads(args.work), args.peers.split(","), Path(args.what[0]))
        return
    chosen = {
        group: [
            title(r) for r in rows if any(w == group or fnmatch(title(r), w) for w in args.what)
        ]
        for group, rows in ROWS.items()
    }
    names = [name for some in chosen.values() for name in some]
    peers = args.peers.split(",")
    found = raced(__file__, names, args, lambda name, row: row_of(name, row, peers)[0])
    table, ratios = [], []
    for group, some in chosen.items():
        better = []
        for name in some:
            cells, ratio = row_of(name, found.get(name, {}), peers)
            table.append(cells)
            better += [ratio] if ratio > 0 else []
        if better:
            mean = math.exp(sum(map(math.log, better)) / len(better))
            ratios.append(f"{group}: geometric mean {mean:.2f}, least {min(better):.2f}")
    heads = ("µs on the device", *peers, "best other / plait", "copy / plait", "error / eager's")
    print(render(heads, table), *ratios, sep="\n")


def row_of(
    name: str, found: dict[str, tuple[float, float]], peers: Sequence[str]
) -> tuple[list[str], float]:
    """A row of the table, and how many times plait's time the best other takes."""
    ours = min((us for p, (us, _) in found.items() if p.startswith("plait")), default=math.nan)
    others = [us for p, (us, _) in found.items() if not p.startswith(("plait", COPY))]
    ratio = min(others, default=math.nan) / ours
    times = [f"{found[p][0]:.1f}" if p in found else "" for p in peers]
    copy = f"{found[COPY][0] / ours:.2f}" if COPY in found else ""
    errors = [found[p][1] for p in ("eager", "plait") if p in found]
    worse = f"{errors[1] / errors[0]:.2f}" if len(errors) == 2 and errors[0] else ""
    return [name, *times, f"{ratio:.2f}", copy, worse], ratio


if __name__ == "__main__":
    main()
