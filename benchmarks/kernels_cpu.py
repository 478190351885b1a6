"""Single ops and small chains, plait against eager and Inductor: `python -m benchmarks.kernels_cpu
[NAME ...]`.

Every case of `kernel_cases` is called through each side in turn, in blocks of a few milliseconds;
the best block counts (CPU time with one thread, wall clock with more). plait is `plait.compile`, so
that kernels are compared and not Dynamo's guards, which `--dynamo` adds as a column of their own.
Rows are sorted by plait/eager; MISSED marks those above 1.02 where eager takes 20 us or more. A
NAME may hold wildcards.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import plait
from benchmarks.kernel_cases import Case, cases
from plait.log import watched

FLOOR_US = 20.0
TOLERANCE = 1.02

Row = dict[str, Any]


def race(
    sides: dict[str, Callable[..., Any]], args: Sequence[torch.Tensor], seconds: float, threads: int
) -> dict[str, float]:
    """Microseconds a call: the best block of each side, blocks interleaved."""
    clock = time.process_time if threads == 1 else time.perf_counter
    best = dict.fromkeys(sides, float("inf"))
    counts: dict[str, int] = {}
    for name, fn in sides.items():
        fn(*args)
        start = time.perf_counter()
        fn(*args)
        counts[name] = max(1, int(0.003 / max(1e-6, time.perf_counter() - start)))
    end = time.perf_counter() + seconds * len(sides)
    while time.perf_counter() < end:
        for name, fn in sides.items():
            start = clock()
            for _ in range(counts[name]):
                fn(*args)
            best[name] = min(best[name], (clock() - start) / counts[name] * 1e6)
    return best


def measure(name: str, case: Case, peers: Sequence[str], seconds: float, threads: int) -> Row:
    """One row of the table. peers: 'dynamo' (plait under torch.compile), 'inductor'."""
    call, args = case

    def fn(*a: torch.Tensor) -> Any:
        return call(*a)

    torch._dynamo.reset()
    backends = {"dynamo": "plait", "inductor": "inductor"}
    with torch.no_grad():
        sides: dict[str, Callable[..., Any]] = {
            "eager": call,
            "plait": plait.compile(_with_arity(call, len(args)), args),
            **{p: torch.compile(fn, backend=backends[p], dynamic=False) for p in peers},
        }
        return {"name": name, **race(sides, args, seconds, threads)}


def _with_arity(call: Callable[..., Any], n: int) -> Callable[..., Any]:
    """call as a function whose signature names its arguments."""
    made: tuple[Callable[..., Any], ...] = (
        lambda: call(),
        lambda a: call(a),
        lambda a, b: call(a, b),
        lambda a, b, c: call(a, b, c),
    )
    return made[n]


def missed(row: Row) -> bool:
    """Whether plait is slower than eager where that counts."""
    return bool(row["eager"] >= FLOOR_US and row["plait"] > TOLERANCE * row["eager"])


def table(rows: Sequence[Row], peers: Sequence[str], threads: int) -> str:
    """All rows, worst first, and a summary."""
    head = f"{'threads ' + str(threads):24} {'eager us':>9} {'plait us':>9} {'/eager':>7}"
    lines = [head + "".join(f" {p:>9} {'plait/':>7}" for p in peers)]
    for r in sorted(rows, key=lambda r: -r["plait"] / r["eager"]):
        text = f"{r['name']:24} {r['eager']:9.1f} {r['plait']:9.1f} {r['plait'] / r['eager']:7.2f}"
        text += "".join(f" {r[p]:9.1f} {r['plait'] / r[p]:7.2f}" for p in peers)
        lines.append(text + ("  MISSED" if missed(r) else ""))
    lines.append(f"{sum(map(missed, rows))} of {len(rows)} missed")
    for p in peers:
        behind = sum(r["plait"] > TOLERANCE * r[p] for r in rows)
        lines.append(f"slower than {p}: {behind} of {len(rows)}")
    return "\n".join(lines)


def main() -> None:
    """Prints the table of each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--threads", nargs="*", type=int, default=[1])
    parser.add_argument("--inductor", action="store_true", help="race torch's own compiler too")
    parser.add_argument("--dynamo", action="store_true", help="plait under torch.compile too")
    parser.add_argument("--seconds", type=float, default=0.2, help="a side and case")
    parser.add_argument("--json", type=Path, help="append one JSON line a row")
    options = parser.parse_args()
    every = cases()
    names = [
        n for n in every if not options.names or any(fnmatch.fnmatch(n, p) for p in options.names)
    ]
    if not names:
        parser.error(f"no case is called {' or '.join(options.names)}")
    peers = [p for p in ("dynamo", "inductor") if getattr(options, p)]
    for threads in options.threads:
        torch.set_num_threads(threads)
        rows = []
        for name in watched("kernels", names):
            row = measure(name, every[name], peers, options.seconds, threads)
            rows.append(row)
            if options.json:
                with options.json.open("a") as out:
                    out.write(json.dumps({"threads": threads, **row}) + "\n")
        print(table(rows, peers, threads), flush=True)


if __name__ == "__main__":
    main()
