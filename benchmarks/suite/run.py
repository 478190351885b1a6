"""`make bench-suite`: races plait, eager and Inductor over the suite's models, piece by piece.

Each case has a process (worker.py), which compiles all variants. Many compile side by side; when
enough are ready, those that still compile are stopped, and the ready ones are timed, one at a time
a device, under a lock. `--minutes 8` ends in time: what is not ready by then stays open, and the
next command goes on there. On another machine, `--out FOLDER` writes what was measured to a folder
too, and `--merge FILES` adds it to the table here.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite import records as book
from benchmarks.suite.child import Child, Figures, devices, gpus
from benchmarks.suite.models import Case, cases, missing
from benchmarks.suite.page import write_page
from plait.log import progress

VARIANTS = ("plait", "plait-graphs", "inductor", "inductor-graphs")
TUNED = ("plait-max", "inductor-max")
ON_CPU = ("plait", "inductor")
now = time.monotonic


class Running:
    """A case that is being measured: its process, and what is known by now."""

    def __init__(self, case: Case, slot: int, wanted: Sequence[str], args: Any) -> None:
        self.case, self.slot, self.wanted, self.args = case, slot, wanted, args
        self.figures: dict[str, Figures] = {}
        self.state, self.starts, self.failed = "preparing", 0, ""
        self.start_at = now()
        cores = os.cpu_count() or 1
        threads = max(1, min(8, 2 * cores // args.together))  # not all compile all the time
        words = ["benchmarks.suite.worker", case.name, case.device]
        words += ["--small"] if case.small else []
        own = {"OMP_NUM_THREADS": str(threads)} if case.device == "cuda" else {}
        self.child = Child(words, case.device, slot, threads, **own)
        self.prepare()

    def prepare(self) -> None:
        """Has a process make everything ready that has not failed before it."""
        self.starts += 1
        self.current, self.began, self.stopped = "", now(), 0.0
        self.pauses: list[tuple[float, float]] = []
        wanted = [v for v in self.wanted if "failed" not in self.figures.get(v, {})]
        self.child.send("prepare", wanted)

    def ask(self, *command: Any, seconds: float) -> Figures:
        """The answer to a command; {"why": ...} if there is none."""
        self.child.send(*command)
        try:
            answer = self.child.events.get(timeout=seconds)
        except queue.Empty:
            return {"why": f"no answer to {command[0]} within {seconds:.0f} s"}
        return answer or {"why": f"died at {command[0]}: {self.child.last_words()}"}

    def look(self) -> None:
        """Takes in what has been said since, and how long nothing was."""
        while self.state in ("preparing", "counting"):
            try:
                event = self.child.events.get_nowait()
            except queue.Empty:
                break
            if event is None:
                self.lost(f"the process died {self.child.why()}")
            else:
                self.take(event)
        limit = self.args.limit * (2 if self.current.endswith("max") else 1)
        if self.state == "preparing" and now() - self.began > limit:
            self.lost(f"not ready within {limit} s")
        elif self.state == "counting" and now() - self.began > 60:
            self.end()

    def take(self, event: Figures) -> None:
        """One event of a worker."""
        kind, name = event["event"], event.get("variant", "")
        self.began = now()
        if kind == "begin":
            self.current = name
        elif kind == "ready":
            figures = event["figures"]
            start, stop = figures.pop("first")
            asleep = sum(max(0.0, min(b, stop) - max(a, start)) for a, b in self.pauses)
            # A second process finds the kernels of the first
            before = self.figures.get(name, {}).get("first_s")
            self.figures[name] = figures | {"first_s": before or stop - start - asleep}
        elif kind == "failed":
            self.fail(name, event["why"])
            self.current = ""
        elif kind == "prepared":
            self.state = "failed" if self.failed else "ready"
        elif kind == "count":
            for name, figures in event["figures"].items():
                self.figures[name] |= figures
            self.end()

    def fail(self, name: str, why: str) -> None:
        """What failed, in the table's words."""
        if name == "eager":
            self.failed = why
        self.figures[name] = self.figures.get(name, {}) | {"failed": why}

    def lost(self, why: str) -> None:
        """The process is gone or is to go: what it was at failed, and another does the rest."""
        self.end()
        if self.state == "counting":
            return
        if self.current or self.starts > len(self.wanted):
            self.fail(self.current or "eager", why)
        if self.failed:
            self.state = "failed"
        else:
            self.state = "preparing"
            self.child.start()
            self.prepare()

    def pause(self) -> None:
        self.child.signal(signal.SIGSTOP)
        self.stopped = now()

    def go_on(self) -> None:
        self.child.signal(signal.SIGCONT)
        self.pauses.append((self.stopped, now()))
        self.began += now() - self.stopped

    def end(self) -> None:
        """Ends the process and all that it started."""
        self.child.end()
        if self.state == "counting":
            self.state = "done"

    def record(self, key: Figures) -> book.Record:
        """Its row."""
        figures = dict(self.figures)
        eager = figures.get("eager", {})
        truth, distance = eager.pop("truth", ""), eager.pop("eager_error", None)
        model = self.case.model
        return {
            "case": self.case.name,
            "field": model.field,
            "note": model.note,
            "batch": self.case.batch,
            "truth": truth,
            "eager_error": distance,
            "variants": figures,
            "seconds": round(now() - self.start_at),
            "together": self.args.together,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **key,
            **({"failed": self.failed} if self.failed else {}),
        }


def time_ready(ready: Sequence[Running], args: argparse.Namespace) -> None:
    """Times cases, those of one device one after the other, those of several at once."""

    def one_device(slot: int) -> None:
        with lock("cpu" if args.device == "cpu" else gpus()[slot]):
            for case in (r for r in ready if r.slot == slot):
                answer = case.ask("time", args.seconds, args.rounds, seconds=150)
                for name, figures in answer.get("figures", {}).items():
                    case.figures[name] |= figures
                if "why" in answer:
                    for name, figures in case.figures.items():
                        if "failed" not in figures:
                            case.fail(name, answer["why"])

    threads = [threading.Thread(target=one_device, args=(s,)) for s in {r.slot for r in ready}]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Nobody else times on this device meanwhile, of another command either."""
    with (Path(tempfile.gettempdir()) / f"plait-suite-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Sweep:
    """Measures cases until all are done or the time is over."""

    def __init__(self, waiting: list[Case], args: argparse.Namespace, device: str) -> None:
        self.waiting, self.args, self.device = waiting, args, device
        self.running: list[Running] = []
        self.again: list[Case] = []  # found no memory beside others
        self.one_more: Callable[[], None] = lambda: None  # tells the bar of a case that has ended
        self.key = {
            "plait": book.sources(),
            "commit": commit(),
            "torch": torch.__version__,
            "device": device,
        }
        self.new: book.Records = {}
        self.have = book.read(book.path(device, args.results))
        self.kernels: dict[str, Figures] = {}  # what takes longest, to find causes with
        per_slot = -(-args.together // args.slots)
        self.close_at = now() + 60 * args.minutes - 20 - 6 * per_slot
        self.stop_starting_at = self.close_at - 60

    def run(self) -> None:
        with progress("cases", len(self.waiting), prints=True) as self.one_more:
            self._run()

    def _run(self) -> None:
        while self.waiting or self.running or self.again:
            if not self.waiting and not self.running:
                self.waiting, self.again = self.again, []
                self.args.together = self.args.slots
            closing = now() > self.close_at
            while self.waiting and self.may_start():
                self.start(self.waiting.pop(0))
            for case in self.running:
                case.look()
            self.turn(closing)
            self.collect()
            if now() > self.stop_starting_at and not self.running:
                break
            time.sleep(0.1)

    def may_start(self) -> bool:
        """Those that are ready make room for some that compile meanwhile."""
        together = self.args.together
        compiling = sum(r.state == "preparing" for r in self.running)
        room = compiling < together and len(self.running) < together * 3 // 2
        return (room or not self.running) and now() < self.stop_starting_at

    def start(self, case: Case) -> None:
        slots = [r.slot for r in self.running]
        slot = min(range(self.args.slots), key=slots.count)
        self.running.append(Running(case, slot, wanted(case, self.args), self.args))

    def turn(self, closing: bool) -> None:
        """Times what is ready, if it is enough, while what is not is asleep."""
        ready = [r for r in self.running if r.state == "ready"]
        busy = [r for r in self.running if r.state in ("preparing", "counting")]
        if closing:
            for case in busy:
                if case.state == "preparing":
                    case.end()
                    case.state = "open"
        preparing = [r for r in busy if r.state == "preparing"]
        if not ready or (preparing and len(ready) < self.args.together / 2):
            return
        asleep = [r for r in busy if r.child.process.poll() is None and r.state != "open"]
        for case in asleep:
            case.pause()
        time.sleep(0.3)
        start = now()
        time_ready(ready, self.args)
        for case in asleep:
            case.go_on()
        for case in ready:
            case.state, case.began = "counting", now()
            case.child.send("count")
        say(f"timed {len(ready)} cases in {now() - start:.0f} s, {len(asleep)} asleep")

    def collect(self) -> None:
        """Writes down what is done."""
        ended = [r for r in self.running if r.state in ("done", "failed", "open")]
        self.running = [r for r in self.running if r not in ended]
        for case in ended:
            case.end()
            if case.state != "open":
                self.keep(case)
            if case.case not in self.again:
                self.one_more()
            case.child.close()
        if any(case.state != "open" for case in ended):
            self.save()

    def keep(self, case: Running) -> None:
        top = {name: f.pop("top") for name, f in case.figures.items() if "top" in f}
        self.kernels[case.case.name] = top
        record = case.record({"spec": case.case.spec, **self.key})
        reasons = [f["failed"] for f in record["variants"].values() if "failed" in f]
        crowded = self.args.together > self.args.slots
        if crowded and any("out of memory" in r.lower() for r in reasons):
            say(f"{record['case']}: no memory beside others; once more at the end")
            self.again.append(case.case)
            return
        self.new[record["case"]] = record
        r = book.ratio(book.with_others(self.have.get(record["case"]), record))
        say(f"{record['case']}: {f'{r:.2f} x' if r else 'no ratio'}, {record['seconds']} s")
        for name, figures in record["variants"].items():
            if "failed" in figures:
                say(f"  {name} failed: {figures['failed']}")

    def save(self) -> None:
        table = book.path(self.device, self.args.results)
        book.write(table, book.merge(book.read(table), self.new))
        if self.args.out:
            book.write(book.path(self.device, self.args.out), self.new)
            (self.args.out / "kernels.json").write_text(json.dumps(self.kernels))


def wanted(case: Case, args: argparse.Namespace) -> tuple[str, ...]:
    """The variants of a case, but eager."""
    if args.modes:
        return tuple(args.modes.split(","))
    if case.device == "cpu":
        return ON_CPU
    return TUNED if args.autotune else VARIANTS


def choose(args: argparse.Namespace, device: str) -> list[Case]:
    """The cases that are open."""
    known = cases(args.device, args.small)
    for library in sorted({c.model.library for c in known.values() if missing(c.model.library)}):
        left = [c.name for c in known.values() if c.model.library == library]
        say(f"{library} is missing: {len(left)} cases are left out")
        known = {name: c for name, c in known.items() if name not in left}
    have = book.read(book.path(device, args.results))
    names = book.matching(list(known), args.only)
    if args.worst:
        return [known[n] for n in book.worst(have, args.worst) if n in names]
    key = {"plait": book.sources(), "torch": torch.__version__, "device": device}
    if args.autotune:
        names = [n for n in names if known[n].model.tuned]
    return [
        known[n]
        for n in names
        if args.again
        or (args.failed and n in have and book.failures(have[n]))
        or book.is_open(
            have.get(n), key | {"spec": known[n].spec}, args.changed, wanted(known[n], args)
        )
    ]


def say(text: str) -> None:
    print(text, flush=True)


def commit() -> str:
    asked = ["git", "--git-dir", str(book.ROOT / ".git"), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def versions() -> str:
    packages = ("torch", "triton", "transformers", "torchvision")
    found = []
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return ", ".join(found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--minutes", type=float, default=1e6, help="end in time; what is left stays open")
    add("--together", type=int, default=0, help="processes that compile side by side")
    add("--only", default="", help="cases, as patterns separated by commas: bert,*/train/*")
    add("--changed", action="store_true", help="also what was measured with another plait")
    add("--failed", action="store_true", help="also what failed")
    add("--worst", type=int, default=0, help="only the worst N rows, once more")
    add("--again", action="store_true", help="whatever was measured before")
    add(
        "--autotune",
        action="store_true",
        help="max-autotune alone, of models that are named for it",
    )
    add("--modes", default="", help="some modes alone, separated by commas: plait,inductor-graphs")
    add("--limit", type=float, default=240, help="seconds that a variant may take to be ready")
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=0.1, help="length of a round of one variant")
    add("--out", type=Path, help="folder for new results, and the kernels that take longest")
    add("--results", type=Path, default=book.RESULTS, help="folder of the table")
    add("--merge", type=Path, nargs="+", help="files of results to add to the tables")
    add("--page", action="store_true", help="write the pages and plots alone")
    add("--small", action="store_true", help="two layers and small batches: tests the harness")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.merge:
        for file in args.merge:
            new = book.read(file)
            for device in {record["device"] for record in new.values()}:
                table = book.path(device, args.results)
                some = {k: r for k, r in new.items() if r["device"] == device}
                book.write(table, book.merge(book.read(table), some))
    if args.merge or args.page:
        for table in sorted(args.results.glob("suite-*.json")):
            write_page(table)
        return
    if args.small and args.results == book.RESULTS:
        raise SystemExit("--small tests the harness, its figures are no results: give --results")
    device, args.slots = devices(args.device)
    cores = os.cpu_count() or 1
    per_slot = 1 if args.autotune else min(6, max(1, cores // args.slots // 2))
    args.together = args.together or args.slots * per_slot
    chosen = choose(args, device)
    say(f"{len(chosen)} cases are open on {args.slots} x {device}, {cores} cores; {versions()}")
    sweep = Sweep(list(chosen), args, device)
    sweep.run()
    say(f"measured {len(sweep.new)} of {len(chosen)}")
    table = book.path(device, args.results)
    if table.exists():
        write_page(table)


if __name__ == "__main__":
    main()
