"""Races programs that are no models: `python benchmarks/programs_race.py [NAMES] [--device cuda]`.

Eager, plait and Inductor each run each program in a process of its own, with fresh caches; first
calls are made one after the other, then the processes are timed in turn, round after round. Prints
the seconds of the first call, the best time of a call, its ratio to the better of the others, and
for some programs the error of the results.
Modes "-graphs" (reduce-overhead) run on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODES = {"plait": ("plait", None), "inductor": ("inductor", None)}
# What Dynamo itself costs, before eager's code or before none; only where they are asked for.
NAMED = {"dynamo": ("eager", None), "guards": ("guards", None)}
GRAPHS = {
    "plait-graphs": ("plait", "reduce-overhead"), "inductor-graphs": ("inductor", "reduce-overhead")
}  # fmt: skip


def programs() -> dict[str, Any]:
    """Every program, by subject and name, of the subjects whose libraries are installed."""
    import programs as package

    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        try:
            subject = importlib.import_module(f"programs.{module.name}")
        except ModuleNotFoundError as error:
            print(f"programs.{module.name} left out: {error}", file=sys.stderr)
        else:
            found |= {f"{module.name}.{k}": f for k, f in subject.PROGRAMS.items()}
    return found


# -------------------------------------------------------------------------------------- the process
def work(name: str, peer: str, device: str) -> None:
    """Makes the first call at the first line of input, times calls at each further one."""
    import torch

    torch.manual_seed(0)
    program = programs()[name](device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    run = program.fn
    if peer == "fused":
        if program.fused is None:
            say({})  # it takes no part
            return
        run = program.fused()
    elif peer != "eager":
        backend, mode = {**MODES, **NAMED, **GRAPHS}[peer]
        backend = nothing if backend == "guards" else backend
        if program.part is None:
            run = torch.compile(run, backend=backend, mode=mode)
        else:
            program.part.compile(backend=backend, mode=mode)

    def call() -> Any:
        with contextlib.nullcontext() if program.grad else torch.no_grad():
            return run(*program.args)

    sys.stdin.readline()
    begin = time.perf_counter()
    found = call()
    wait()
    answer = {"first_s": time.perf_counter() - begin}
    if program.exact is not None:
        answer["error"] = program.exact(found)
    del found
    say(answer)
    for line in sys.stdin:
        say({"us": best_us(call, wait, float(line))})


def nothing(graph: Any, inputs: Any) -> Any:
    """A back end whose programs compute nothing and give no numbers, for programs that need none:
    a step of an optimizer."""
    (results,) = next(n.args for n in graph.graph.nodes if n.op == "output")
    return lambda *given: (None,) * len(results)


def best_us(call: Any, wait: Any, seconds: float) -> float:
    """The best mean of a batch of calls, in µs."""
    for _ in range(4):  # a mode may record its first calls
        call()
    wait()
    gc.collect()
    gc.disable()
    best, n, stop = float("inf"), 1, time.perf_counter() + seconds
    while True:
        begin = time.perf_counter()
        for _ in range(n):
            call()
        wait()
        end = time.perf_counter()
        best = min(best, (end - begin) / n)
        if end - begin < 5e-3:
            n *= 2
        elif end > stop:
            gc.enable()
            return best * 1e6


def say(answer: dict[str, Any]) -> None:
    """One line of JSON."""
    print(json.dumps(answer), file=sys.__stdout__, flush=True)


# --------------------------------------------------------------------------------------- the driver
class Peer:
    """A process."""

    def __init__(self, name: str, peer: str, device: str, cache: Path) -> None:
        folders = {"PLAIT_CACHE_DIR": "plait", "TORCHINDUCTOR_CACHE_DIR": "inductor",
                   "TRITON_CACHE_DIR": "triton"}  # fmt: skip
        cache.mkdir(parents=True)
        self.log = (cache / "log").open("w+")
        self.child = subprocess.Popen(
            [sys.executable, __file__, name, "--device", device, "--peer", peer],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env={**os.environ, **{k: str(cache / v) for k, v in folders.items()}},
        )  # fmt: skip

    def ask(self, line: str) -> dict[str, Any]:
        """The answer to a line; {} if there is none."""
        assert self.child.stdin is not None and self.child.stdout is not None, "no pipes"
        try:
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()
            return dict(json.loads(self.child.stdout.readline()))
        except (BrokenPipeError, json.JSONDecodeError):
            self.log.seek(0)
            print("   ", (self.log.read().strip().splitlines() or ["no answer"])[-1][:160])
            return {}


def race(
    names: list[str], device: str, peers: list[str], rounds: int, seconds: float, apart: bool
) -> None:
    """Races programs and prints a table of each. Calls are timed one after the other, beside
    processes that wait. apart: first calls are made one after the other too."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(64) as pool:
        cache = Path(folder)
        made = {n: {p: Peer(n, p, device, cache / str(k) / p) for p in peers}
                for k, n in enumerate(names)}  # fmt: skip
        if apart:
            first = {n: {p: x.ask("first") for p, x in made[n].items()} for n in names}
        else:
            asked = {n: {p: pool.submit(x.ask, "first") for p, x in made[n].items()} for n in names}
            first = {n: {p: x.result() for p, x in asked[n].items()} for n in names}
        for n in names:
            _time(n, made[n], first[n], rounds, seconds)


def _time(
    name: str, made: dict[str, Peer], first: dict[str, Any], rounds: int, seconds: float
) -> None:
    """Times the peers of a program in turn, ends them and prints the table."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        for p in [p for p in made if first[p]]:
            us = made[p].ask(str(seconds)).get("us")
            if us is not None:
                best[p] = min(us, best.get(p, us))
    for x in made.values():
        x.child.kill()
        x.child.wait()
    print(name, flush=True)
    for p, us in best.items():
        others = [v for k, v in best.items() if not k.startswith(p.partition("-")[0])]
        ratio = f"{us / min(others):.2f} x the best other" if others else ""
        error = f"   error {first[p]['error']:.1e}" if "error" in first[p] else ""
        print(
            f"    {p:16} first {first[p]['first_s']:6.2f} s   call {us:10.1f} us   {ratio}{error}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="programs (* stands for anything) or subjects; none: all"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--peers",
        default="",
        help="with commas, `dynamo` (which runs eager's code) and `guards` (which runs none) among "
        "them; none: all but these",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round")
    parser.add_argument(
        "--together", type=int, default=1,
        help="programs whose first calls are made side by side; 1: one call after the other",
    )  # fmt: skip
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        work(*args.names, args.peer, args.device)
        return
    from plait.log import watched  # a peer loads plait when its clock runs

    known = ["eager", "fused", *MODES, *(GRAPHS if args.device == "cuda" else ())]
    if args.peers:
        known = [p for p in (*known, *NAMED) if p in args.peers.split(",")]
    names = [n for n in programs() if not args.names or _is_meant(n, args.names)]
    for begin in watched("programs", range(0, len(names), args.together)):
        some, apart = names[begin : begin + args.together], args.together == 1
        race(some, args.device, known, args.rounds, args.seconds, apart)


def _is_meant(name: str, wanted: list[str]) -> bool:
    return name.partition(".")[0] in wanted or any(fnmatch(name, w) for w in wanted)


if __name__ == "__main__":
    main()
