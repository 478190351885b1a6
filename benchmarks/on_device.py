"""What races on a GPU share: a peer as a compiled function, how long its calls take, and processes
that compile side by side and are timed one at a time."""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import types
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from plait.log import progress

T = TypeVar("T")
REPLAYS = 8


def compiled(fn: Callable[..., Any], peer: str) -> Callable[..., Any]:
    """A function by a peer: eager, a back end of torch.compile, or one with "-tuned" behind it.
    Each peer gets code of its own: Dynamo counts the compiles of a code object, and stops."""
    if peer == "eager":
        return fn
    fn = types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    backend, _, tuned = peer.partition("-")
    options: dict[str, Any] = {"mode": "max-autotune-no-cudagraphs"} if tuned else {}
    if backend == "plait" and tuned:
        options = {"options": {"autotune": True}}
    return torch.compile(fn, backend=backend, dynamic=False, **options)


def least_us(
    peers: Mapping[str, Callable[[T], Any]], given: Sequence[T], calls: int
) -> dict[str, float]:
    """Microseconds on the device of a call of each peer, the least mean of a recorded round of
    calls, which take one argument after the other. The peers' rounds alternate: a device that has
    become hot is slower for all."""
    stream = torch.cuda.Stream()
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, call in peers.items():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for x in given:
                call(x)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], stream=stream):
            for n in range(calls):
                call(given[n % len(given)])
    best = dict.fromkeys(peers, math.inf)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best[name] = min(best[name], begin.elapsed_time(end) * 1e3 / calls)
    return best


class Turns:
    """Turns of processes at a device: many compile side by side, and may measure what they compile;
    then one is timed, alone. folder: of the race."""

    def __init__(self, folder: Path) -> None:
        name = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        # Who is about to compile waits behind who is about to time: else timing would starve.
        self.gate, self.device = folder / f"gate {name}", folder / f"device {name}"

    @contextmanager
    def compiling(self) -> Iterator[None]:
        with _locked(self.gate, fcntl.LOCK_EX):
            held = self.device.open("w")
            fcntl.flock(held, fcntl.LOCK_SH)
        with held:
            yield

    @contextmanager
    def timing(self) -> Iterator[None]:
        with _locked(self.gate, fcntl.LOCK_EX), _locked(self.device, fcntl.LOCK_EX):
            yield


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("w") as held:
        fcntl.flock(held, how)
        yield


ROWS = "rows"
"""The file in a race's folder to which its processes write: a line of JSON for each row."""


def write_row(folder: Path, row: object) -> None:
    """Tells the race of a row that is done."""
    with (folder / ROWS).open("a") as out:
        out.write(json.dumps(row) + "\n")


def rows_of(
    command: Callable[[int, str], Sequence[str]], jobs: int, seconds: float
) -> Iterator[Any]:
    """Rows of so many processes, as they are done, for so long; each process has one of the GPUs.
    command: of a process, by its number and the race's folder."""
    end, n_devices = time.monotonic() + seconds, torch.cuda.device_count()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n_devices)))).split(",")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        (Path(folder) / ROWS).touch()
        running = [
            subprocess.Popen(
                command(k, folder),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": shown[k % len(shown)]},
            )
            for k in range(jobs)
        ]
        with (Path(folder) / ROWS).open() as rows:
            goes_on = True
            while goes_on:
                goes_on = time.monotonic() < end and any(p.poll() is None for p in running)
                yield from map(json.loads, rows)
                time.sleep(0.2)
        for process in running:
            process.kill()


def raced(
    script: str, names: Sequence[str], args: Namespace, row_of: Callable[[str, Any], Sequence[str]]
) -> dict[str, Any]:
    """What processes of a script find of rows, by their names: of those that are done in time. Each
    is printed as it is done. args: peers, separated by commas, jobs and seconds. row_of: the cells
    of a row."""

    def command(k: int, folder: str) -> list[str]:
        mine = json.dumps(names[k :: args.jobs])
        return [sys.executable, script, folder, "--peers", args.peers, "--work", mine]

    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    found = {}
    with progress("rows", len(names), prints=True) as one_more:
        for row in rows_of(command, min(args.jobs, len(names)), args.seconds):
            found[row["name"]] = row["found"]
            print(" | ".join(row_of(row["name"], row["found"])), flush=True)
            one_more()
    return found
