"""`make bench`: races plait, eager, Inductor, AOTInductor and the floors on this machine, and
prints the ratios.

Every peer runs in a process of its own. Compile times are taken one process at a time with fresh
caches; then the processes stay, asleep, and are timed in turn, round after round, so that a busy
moment of the machine hits them all. A full run writes benchmarks/results/cpu.json and cpu.md; one
with --only or --quick prints, and writes with --out NAME.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from claims import check_claims
from machine import ROOT, machine
from models import CASES, Case
from peers import PEERS, Peer
from table import LEGEND, case_table, claims_table

from plait.log import watched

HERE = Path(__file__).resolve().parent
Result = dict[str, Any]

COMPILES = (
    "plait",
    "plait.compile",
    "plait-freeze",
    "inductor",
    "inductor-cpp",
    "inductor-freeze",
    "aotinductor",
)


class Process:
    """A worker process and its caches' folder. env: more variables for it."""

    script = "worker.py"

    def __init__(
        self, case: Case, peer: Peer, cache: Path, *flags: str, env: Mapping[str, str] | None = None
    ) -> None:
        python = str(ROOT / peer.python / "bin" / "python") if peer.python else sys.executable
        folders = {
            "PLAIT_CACHE_DIR": cache / "plait",
            "TORCHINDUCTOR_CACHE_DIR": cache / "inductor",
            "TRITON_CACHE_DIR": cache / "triton",
        }
        env = {**os.environ, **{k: str(v) for k, v in folders.items()}, **(env or {})}
        (cache / "inductor").mkdir(parents=True, exist_ok=True)
        self.log = (cache / "worker.log").open("a+")
        self.child = subprocess.Popen(
            [python, str(HERE / self.script), case.name, peer.name, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=env,
            cwd=ROOT,
        )

    def ask(self, command: str, *args: object) -> Result:
        """The worker's answer; {"failed": why} if it has none."""
        self.send(command, *args)
        return self.answer()

    def send(self, command: str, *args: object) -> None:
        """Lets the worker begin, while others are at work too."""
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(json.dumps([command, *args]) + "\n")
            self.child.stdin.flush()

    def answer(self) -> Result:
        """What the worker has to say of the command that it was sent."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if line:
            return dict(json.loads(line))
        self.log.seek(0)
        last = self.log.read().strip().splitlines()[-1:] or ["no message"]
        return {"failed": f"worker died: {last[0]}"}

    def stop(self) -> None:
        """Ends the worker, kindly if it listens."""
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write('["quit"]\n')
            self.child.stdin.close()
        try:
            self.child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.child.kill()
        self.log.close()


def race(case: Case, peers: list[Peer], args: argparse.Namespace, folder: Path) -> Result:
    """All figures of one program: {peer: {...}}."""
    results: Result = {}
    ready: dict[str, Process] = {}
    for peer in peers:
        say(f"{case.name}: {peer.name}")
        process = Process(case, peer, folder / peer.name)
        results[peer.name] = process.ask("first")
        if "failed" in results[peer.name]:
            process.stop()
        else:
            ready[peer.name] = process
    for index in range(args.rounds):
        say(f"{case.name}: round {index + 1} of {args.rounds}")
        for name, process in ready.items():
            us = process.ask("time", args.seconds).get("us", float("inf"))
            results[name]["us"] = min(us, results[name].get("us", float("inf")))
    for name, process in ready.items():
        if PEERS[name].computes and not PEERS[name].python:
            results[name].update(process.ask("memory"))
        process.stop()
    for peer in peers:
        if peer.name in ready and peer.name in COMPILES:
            say(f"{case.name}: {peer.name} again")
            again = first(case, peer, folder / peer.name)
            results[peer.name]["warm_s"] = again.get("first_s")
            if not args.quick:
                fresh = folder / f"{peer.name}-next"
                after = first(case, peer, fresh, "--tiny-first")
                results[peer.name]["next_s"] = after.get("first_s")
    return results


def first(case: Case, peer: Peer, cache: Path, *flags: str) -> Result:
    """The first result of a fresh process that uses this cache."""
    process = Process(case, peer, cache, *flags)
    answer = process.ask("first")
    process.stop()
    return answer


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def chosen(text: str, known: dict[str, Any], what: str) -> list[Any]:
    names = [name.strip() for name in text.split(",") if name.strip()] or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown {what} {', '.join(unknown)}; one of {', '.join(known)}")
    return [known[name] for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="programs, separated by commas")
    parser.add_argument("--race", default="", help="peers, separated by commas")
    parser.add_argument("--peers", action="store_true", help="also onnxruntime and OpenVINO")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--rounds", type=int, help="rounds of timing")
    parser.add_argument("--seconds", type=float, help="length of a round of one peer")
    parser.add_argument("--out", help="name of the files written to benchmarks/results")
    args = parser.parse_args()
    args.rounds = args.rounds or (3 if args.quick else 7)
    args.seconds = args.seconds or (0.2 if args.quick else 0.5)
    cases = chosen(args.only, CASES, "program")
    peers = chosen(args.race, PEERS, "peer")
    if not args.race and not args.peers:
        peers = [peer for peer in peers if not peer.python]

    about = machine("python " + shlex.join(["benchmarks/run.py", *sys.argv[1:]]))
    results: Result = {}
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
        for case in watched("programs", cases):
            racing = [p for p in peers if p.trains or not case.train]
            results[case.name] = race(case, racing, args, Path(folder) / case.name)
            print("\n" + case_table(case.name, case.about, results[case.name]), flush=True)
    about["load_after"] = os.getloadavg()[0]
    claims = check_claims(results)
    print(f"\n{LEGEND}\n\n{claims_table(claims)}")
    out = args.out or ("" if args.only or args.race or args.quick else "cpu")
    if out:
        tables = [case_table(case.name, case.about, results[case.name]) for case in cases]
        write(out, about, LEGEND, tables, results, claims)


def write(
    name: str, about: Result, legend: str, tables: list[str], results: Result, claims: list[Result]
) -> None:
    """The results as data and as a page."""
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    data = {"machine": about, "results": results, "claims": claims}
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    page = [
        f"# Benchmarks, {about['date']}",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
    ]
    page += ["", claims_table(claims), "", legend]
    for table in tables:
        page += ["", table]
    (folder / f"{name}.md").write_text("\n".join(page) + "\n")
    print(f"\nwrote {folder / name}.json and .md")


if __name__ == "__main__":
    main()
