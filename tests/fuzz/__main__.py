"""`python -m tests.fuzz --count N --state FILE --jobs 2`: a long run that goes on where it stopped.

The state file holds the next seed, how many programs ended how, how many there were of each class,
and every failure with its program; `--shrink FILE` shrinks the failures of a state file to repros,
`--seed N` looks at one program, `--report FILE` prints the tables. `--flow` makes programs of
control flow, `--networks` of layers in a row. `--device cuda` compares with eager on a GPU;
`--device interpreted` compiles the same programs for a GPU without one: Triton's interpreter runs
their kernels on CPU tensors, and eager is that of the CPU, which divides by a number where a GPU
multiplies by its reciprocal: the last bits of such quotients differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from plait.log import progress, watched
from tests.fuzz.make import SUBJECTS, generate
from tests.fuzz.pool import Worker
from tests.fuzz.program import Program

BAD = ("fault", "crash", "hang", "checker", "generator")


def run(
    count: int,
    state: Path | None,
    jobs: int,
    first: int,
    device: str,
    seconds: float,
    subject: str = "",
) -> dict[str, Any]:
    """Runs programs until there were `count`, or the seconds are over; returns the state."""
    data: dict[str, Any] = {
        "next": first,
        "kinds": {},
        "classes": {},
        "failures": [],
        "seconds": 0.0,
        "graphs": 0,
    }
    if state is not None and state.exists():
        data = json.loads(state.read_text())
    start, before = time.time(), data["seconds"]
    kinds, classes = Counter(data["kinds"]), Counter(data["classes"])
    seeds = iter(range(data["next"], first + count))
    done: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue()
    lock = threading.Lock()

    def work(cache: str) -> None:
        worker = Worker(cache=cache, device=device)
        while time.time() - start < seconds:
            with lock:
                seed = next(seeds, None)
            if seed is None:
                break
            done.put((seed, worker.ask({"seed": seed, "device": device, "subject": subject})))
        worker.close()
        done.put(None)

    def save(next_seed: int) -> None:
        data.update(
            next=next_seed, kinds=dict(kinds), classes=dict(sorted(classes.items())),
            seconds=before + time.time() - start,
        )  # fmt: skip
        if state is not None:
            part = state.with_suffix(".part")
            part.write_text(json.dumps(data, indent=1))
            part.replace(state)

    with (
        tempfile.TemporaryDirectory(prefix="plait-fuzz-") as cache,
        progress("programs", first + count - data["next"], prints=True) as one_more,
    ):
        threads = [threading.Thread(target=work, args=(cache,), daemon=True) for _ in range(jobs)]
        for t in threads:
            t.start()
        left, last = jobs, data["next"] - 1
        while left:
            item = done.get()
            if item is None:
                left -= 1
                continue
            seed, found = item
            last = max(last, seed)
            one_more()
            kinds[found["kind"]] += 1
            data["graphs"] += found.get("graphs", 0)
            classes.update(found["classes"] if found["kind"] in ("ok", "refused") else ())
            if found["kind"] in (*BAD, "torch"):
                data["failures"].append({"seed": seed, **found, "classes": []})
            if found["kind"] in BAD:
                print(f"seed {seed}: {found['what'][:300]}", flush=True)
            if sum(kinds.values()) % 50 == 0:
                save(last + 1)
                _trim(Path(cache))
        save(last + 1)
    return data


def _trim(cache: Path) -> None:
    """Built kernels of programs that are done fill a disk."""
    old = time.time() - 300
    for path in cache.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a program that ends takes its files away
            if path.is_file() and path.stat().st_mtime < old:
                path.unlink()


def report(data: dict[str, Any]) -> str:
    """The tables as Markdown."""
    total = sum(data["kinds"].values())
    lines = [
        f"{total} programs, {data['graphs']} graphs compiled, {data['seconds']:.0f} s",
        "",
        "| end | programs |",
        "| --- | ---: |",
    ]
    lines += [f"| {k} | {n} |" for k, n in sorted(data["kinds"].items())]
    lines += ["", "| class | programs |", "| --- | ---: |"]
    lines += [f"| {k} | {n} |" for k, n in sorted(data["classes"].items())]
    return "\n".join(lines)


def look(seed: int, device: str, subject: str) -> int:
    """Prints one program, runs it in a process of its own, and shrinks it if it fails."""
    from tests.fuzz.shrink import shrink

    worker = Worker(device=device)
    found = worker.ask({"seed": seed, "device": device, "subject": subject})
    p = generate(seed, device, subject)
    print(p.source(), found["kind"], found["what"], sep="\n")
    if found["kind"] in ("fault", "crash", "hang", "torch"):
        print(shrink(p, found, worker).repro())
    worker.close()
    return int(found["kind"] in BAD)


def shrink_all(state: Path, folder: Path, device: str, subject: str) -> None:
    """Writes one repro a distinct failure of a state file."""
    from tests.fuzz.shrink import shrink, signature

    data = json.loads(state.read_text())
    folder.mkdir(exist_ok=True)
    worker, seen = Worker(), Counter[str]()
    for failure in watched("failures", data["failures"]):
        if failure["kind"] not in ("fault", "crash", "hang"):
            continue
        key = signature(failure)
        seen[key] += 1
        path = folder / f"{failure['seed']}.py"
        if seen[key] > 3 or path.exists():
            continue
        if not failure["program"]:
            failure["program"] = generate(failure["seed"], device, subject).dumps()
        p = Program.loads(failure["program"])
        small = shrink(p, failure, worker)
        path.write_text(f'"""{failure["what"][:1000]}"""\n{small.repro()}')
        print(failure["seed"], failure["what"][:160].replace("\n", " "), flush=True)
    worker.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu")
    for name in filter(None, SUBJECTS):
        parser.add_argument(f"--{name}", action="store_const", dest="subject", const=name)
    parser.set_defaults(subject="")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--shrink", type=Path)
    parser.add_argument("--repros", type=Path, default=Path("repros"))
    parser.add_argument("--report", type=Path)
    a = parser.parse_args()
    if a.seed is not None:
        return look(a.seed, a.device, a.subject)
    if a.shrink is not None:
        shrink_all(a.shrink, a.repros, a.device, a.subject)
        return 0
    if a.report is not None:
        print(report(json.loads(a.report.read_text())))
        return 0
    data = run(a.count, a.state, a.jobs, a.first, a.device, a.seconds, a.subject)
    print(report(data))
    return int(any(data["kinds"].get(k) for k in BAD))


if __name__ == "__main__":
    sys.exit(main())
