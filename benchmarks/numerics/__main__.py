"""`python -m benchmarks.numerics`: bits, errors and their cost, piece by piece.

Whose bits, how far from the truth, the same each time, the same in any batch, and what that costs,
over the models of benchmarks/suite; each command adds to one table.

A model and a type has a few processes (worker.py), which compile side by side; times are taken at
the end, by one process a device at a time, under a lock. `--minutes 8` ends in time, and the next
command goes on there. On another machine, `--out FILE` says where results go, and `--merge FILES`
adds them to the tables here and writes the page.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.numerics.page import write_page
from benchmarks.numerics.programs import JOBS, PARTS, Subject, accepted, subjects
from benchmarks.suite import records as book
from benchmarks.suite.child import Child, Figures, cpu_threads, devices
from benchmarks.suite.models import missing
from benchmarks.suite.run import commit, say
from plait.log import progress

now = time.monotonic
Parts = list[tuple[str, list[str]]]


class Running:
    """A process that measures parts of a subject."""

    def __init__(
        self, subject: Subject, parts: Parts, slot: int, together: int, limit: float
    ) -> None:
        self.subject, self.parts, self.slot, self.limit = subject, parts, slot, limit
        self.found: dict[str, dict[str, Figures]] = {}
        self.at, self.heard, self.ended = ("", ""), now(), False
        threads = max(1, (os.cpu_count() or 1) // together)
        lock = Path(tempfile.gettempdir()) / f"plait-numerics-{os.getpid()}-{slot}.lock"
        words = ["benchmarks.numerics.worker", subject.name, subject.device]
        words += ["small" if subject.small else "full", str(lock), json.dumps(parts)]
        self.child = Child(
            words, subject.device, slot, threads,
            OMP_NUM_THREADS=str(min(threads, cpu_threads())),
            CUBLAS_WORKSPACE_CONFIG=":4096:8",  # its default; deterministic sums ask for it
        )  # fmt: skip

    def look(self) -> None:
        """Takes in what has been said since, and whether nothing was for too long."""
        with contextlib.suppress(queue.Empty):
            while not self.ended:
                self.take(self.child.events.get_nowait())
        if not self.ended and now() - self.heard > self.limit:
            self.lost(f"not done within {self.limit:.0f} s")

    def take(self, event: Figures | None) -> None:
        """One event of the worker; None: it is gone."""
        self.heard = now()
        if event is None:
            self.lost(f"the process died {self.child.why()}")
        elif event["event"] == "done":
            self.ended = True
        else:
            part, name = self.at = event["part"], event["variant"]
            if event["event"] == "found":
                self.found.setdefault(part, {})[name] = event["figures"]
            elif event["event"] == "failed":
                self.found.setdefault(part, {})[name] = {"failed": event["why"]}

    def lost(self, why: str) -> None:
        """What it was at failed; what it had not begun stays open."""
        part, name = self.at if self.at[0] else (self.parts[0][0], "eager")
        self.found.setdefault(part, {}).setdefault(name, {"failed": why})
        self.ended = True

    def left(self) -> Parts:
        """What a process that was lost had not begun."""
        found = []
        for part, variants in self.parts:
            known = self.found.get(part, {})
            more = [v for v in variants if v not in known]
            if self.ended and self.found and more and "failed" not in known.get("eager", {}):
                found.append((part, more))
        return found


class Sweep:
    """What one command measures."""

    def __init__(self, chosen: list[Subject], args: argparse.Namespace, key: Figures) -> None:
        self.chosen, self.args, self.key = chosen, args, key
        self.plait, self.commit = book.sources(), commit()
        self.records = book.read(args.out)
        self.began = now()

    def run(self) -> None:
        """Everything but times side by side, then times."""
        *side_by_side, times = JOBS
        for jobs, together in ((side_by_side, self.args.together), ([times], self.args.timers)):
            waiting = [
                (s, parts) for job in jobs for s in self.chosen if (parts := self.open(s, job))
            ]
            say(f"{len(waiting)} processes to come, {together} at a time")
            with progress("processes", len(waiting), prints=True) as one_more:
                self.wave(waiting, together, one_more)

    def open(self, subject: Subject, job: tuple[str, ...]) -> Parts:
        """The variants of a job's parts that nothing is known of; with --changed, of this plait,
        and with --failed those that failed, too."""
        record = self.records.get(subject.name)
        known: dict[str, dict[str, Figures]] = {}
        if record and all(record[k] == v for k, v in self.key.items()):
            known = record["parts"]
        found = []
        for part, variants in subject.parts().items():
            if part not in job or (self.args.parts and part not in self.args.parts.split(",")):
                continue
            wanted = [v for v in variants if self.args.wants(v) and accepted(v)]
            left = [v for v in wanted if self.is_open(known.get(part, {}).get(v))]
            hopeless = "failed" in known.get(part, {}).get("eager", {}) and not self.args.failed
            if left and not hopeless:  # times are of one process
                found.append((part, wanted if part in JOBS[-1] else left))
        return found

    def is_open(self, figures: Figures | None) -> bool:
        if figures is None or (self.args.failed and "failed" in figures):
            return True
        return self.args.changed and figures["plait"] != self.plait

    def wave(
        self, waiting: list[tuple[Subject, Parts]], together: int, one_more: Callable[[], None]
    ) -> None:
        """Processes, so many at a time. One that is lost is followed by another of its subject."""
        running: list[Running] = []
        while waiting or running:
            late = now() - self.began > 60 * self.args.minutes
            while waiting and len(running) < together and not late:
                busy = [r.slot for r in running]
                slot = min(range(self.args.slots), key=busy.count)
                running.append(Running(*waiting.pop(0), slot, together, self.args.limit))
            for r in running:
                r.look()
            ended = [r for r in running if r.ended or late]
            running = [r for r in running if r not in ended]
            for r in ended:
                r.child.close()
                self.keep(r)
                say(f"{now() - self.began:5.0f} s  {r.subject.name}: {'; '.join(outline(r))}")
                if left := r.left():
                    waiting.append((r.subject, left))
                else:
                    one_more()
            if late:
                say(f"the time is up: {len(waiting)} processes have not ended or begun")
                return
            time.sleep(0.1)

    def keep(self, r: Running) -> None:
        """Adds what a process found to the table."""
        old = self.records.get(r.subject.name, {"parts": {}})
        if any(old.get(k) != v for k, v in self.key.items()):
            old = {"parts": {}}
        if not r.found:
            return
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        for variants in r.found.values():
            for figures in variants.values():
                figures |= {"plait": self.plait, "commit": self.commit, "date": date}
        model = r.subject.model
        self.records[r.subject.name] = {
            "case": r.subject.name,
            "field": model.field,
            "library": model.library,
            "date": date,
            "parts": both(old["parts"], r.found),
            **self.key,
        }
        book.write(self.args.out, self.records)


def outline(r: Running) -> Iterator[str]:
    """What was found, a part at a time, in few words."""
    for part, variants in r.found.items():
        words = []
        for name, f in variants.items():
            if "failed" in f:
                words.append(f"{name} failed ({f['failed'][:60]})")
            elif "ms" in f:
                words.append(f"{name} {f['ms']:.3g} ms" if f["ms"] else f"{name} no time")
            else:
                other = f["differ"]
                most = max(other.values()) if isinstance(other, dict) else other
                words.append(f"{name} {most / max(1, f['of']):.0%}" if most else f"{name} =")
        yield f"{part}: {', '.join(words)}"


def merge(files: list[Path], folder: Path) -> None:
    """Adds records of files to the tables of their devices: the later figures of each variant."""
    for file in files:
        new = book.read(file)
        for device in {r["device"] for r in new.values()}:
            table = path(device, folder)
            old = book.read(table)
            for case, record in new.items():
                if record["device"] == device:
                    old[case] = joined(old.get(case), record)
            book.write(table, old)


def joined(a: book.Record | None, b: book.Record) -> book.Record:
    """A record of both, if they are of the same program, else the later."""
    if a is None:
        return b
    a, b = sorted((a, b), key=lambda r: r["date"])
    if any(a[k] != b[k] for k in ("torch", "small")):
        return b
    return {**b, "parts": both(dated(a), dated(b))}


def dated(r: book.Record) -> dict[str, Any]:
    """A record's parts, of which each variant tells when it was measured."""
    return {
        part: {v: {"date": r["date"], **figures} for v, figures in variants.items()}
        for part, variants in r["parts"].items()
    }


def both(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The parts of two records, the later figures where both have some."""
    found: dict[str, Any] = {}
    for part in dict.fromkeys((*a, *b)):
        one, other = a.get(part, {}), b.get(part, {})
        found[part] = {**one, **other}
        for v in one.keys() & other.keys():
            found[part][v] = max(other[v], one[v], key=lambda f: str(f.get("date", "")))
    return found


def path(device: str, folder: Path = book.RESULTS) -> Path:
    return folder / f"numerics-{book.short(device)}.json"


def choose(args: argparse.Namespace) -> list[Subject]:
    """The subjects that a command is for."""
    known = subjects(args.device, args.small)
    names = book.matching(list(known), args.only)
    chosen = [known[n] for n in names if not missing(known[n].model.library)]
    k, n = map(int, args.shard.split("/"))
    return chosen[k::n]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--only", default="", help="subjects, as patterns separated by commas: bert,*/float32")
    add("--shard", default="0/1", help="K/N: every N-th subject, from the K-th")
    add("--parts", default="", help=f"some parts alone: {','.join(PARTS)}")
    add("--variants", default="", help="some alone, separated by commas; -NAME: all but these")
    add("--minutes", type=float, default=1e6, help="end in time; what is left stays open")
    add("--limit", type=float, default=240, help="seconds that a variant of a part may take")
    add("--together", type=int, default=0, help="processes side by side")
    add("--failed", action="store_true", help="also what failed")
    add("--changed", action="store_true", help="also what was measured with another plait")
    add("--small", action="store_true", help="two layers, short inputs, a batch of two")
    add("--out", type=Path, help="file of results, which a later command goes on with")
    add("--merge", type=Path, nargs="+", help="files of results to add to the tables")
    add("--page", action="store_true", help="write the page alone")
    args = parser.parse_args()
    named = [v for v in args.variants.split(",") if v]
    without = [v[1:] for v in named if v.startswith("-")]
    args.wants = lambda v: v not in without if without else (v in named or not named)
    return args


def main() -> None:
    args = arguments()
    if args.merge:
        merge(args.merge, book.RESULTS)
    if args.merge or args.page:
        write_page(sorted(book.RESULTS.glob("numerics-*.json")))
        return
    device, args.slots = devices(args.device)
    cores = os.cpu_count() or 1
    # On a CPU each has several threads, whose shares of the work follow the batch.
    most = cores if args.device == "cuda" else cores // cpu_threads()
    args.together = args.together or max(1, most)
    args.timers = args.slots * 2 if args.device == "cuda" else 1  # one compiles, one is timed
    args.out = args.out or path(device)
    chosen = choose(args)
    key = {"torch": torch.__version__, "device": device, "small": args.small}
    say(f"{len(chosen)} subjects on {args.slots} x {device}, {cores} cores, torch {key['torch']}")
    Sweep(chosen, args, key).run()


if __name__ == "__main__":
    main()
