"""`make bench-first`: how long it takes to the first result in a fresh process, with empty caches
(cold) and with those that a process before it has left (warm).

Imports are no part of the first call and have columns of their own; torch.compile() itself is. In a
round every way runs once cold and once warm, one process at a time, so that a busy moment of the
machine hits them all; the medians of the rounds count, and the least stand beside them. CPU s: what
all threads and the compilers of kernels took, which depends less on what else the machine does.

A full run writes benchmarks/results/first.json and first.md; one with --only or --race prints, and
with --out NAME puts its rows among those of that file. --show prints the page of a file.
Usage: python -m benchmarks.first [--only CASES] [--race WAYS] [--rounds N] [--cold N] [--out NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import judge
from benchmarks.first_worker import PACKAGE_WAYS, WAYS, Way
from benchmarks.machine import ROOT, machine
from benchmarks.table import claims_table, render
from plait.log import watched

Result = dict[str, Any]
Runs = list[dict[str, float]]
LIMIT_S = 900.0  # a process that takes longer has failed
PACKAGE = "minilm-package"
RESULTS = ROOT / "benchmarks" / "results"
HEADS = (
    "", "first s", "least", "CPU s", "Dynamo", "of it guards", "AOTAutograd", "own", "building",
    "first run", "import torch", "its front", "back end",
)  # fmt: skip
KEYS = (
    "Dynamo", "guards", "AOTAutograd", "own", "building", "run", "import torch", "import front",
    "import back end",
)  # fmt: skip
LEGEND = """\
Seconds. first: from torch.compile() to the first result, of a training step to its gradients; \
least: of all rounds; CPU: of all threads and child processes; Dynamo, AOTAutograd: without what \
they call; own: the stages of the back end (Inductor, warm: the load of what AOTAutograd's cache \
holds); building: compilers of kernels, and loading what they made, or a package; first run: what \
is left, the run of the program with what it loads on its first use. All but the least are \
medians. Imports are no part of the first call: torch; Dynamo and AOTAutograd, which torch.compile \
needs; plait or Inductor."""


# ---------------------------------------------------------------------------------------- processes
def ways_of(case: str, race: Sequence[str]) -> list[Way]:
    """Those that run."""
    found = PACKAGE_WAYS if case == PACKAGE else WAYS
    return [way for way in found.values() if not race or way.name in race]


def in_process(case: str, way: Way, folder: Path, package: str = "") -> Result:
    """The figures of one process with the caches of a folder, or {"failed": why}."""
    (folder / "inductor").mkdir(parents=True, exist_ok=True)
    env = {**os.environ, **way.env, "PYTHONPATH": str(ROOT), "PLAIT_STRICT": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # imports are those of an installed package
    for name in ("PLAIT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        env[name] = str(folder / name.split("_")[0].removeprefix("TORCH").lower())
    command = [sys.executable, "-m", "benchmarks.first_worker", case, way.name, package]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {LIMIT_S:.0f} s"}
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no message"]
        return {"failed": last[0][:300]}
    figures: Result = json.loads(done.stdout.splitlines()[-1])
    return figures


def write_package(way: Way, path: Path) -> str:
    """Writes MiniLM as this way loads it, with eager's answer beside it."""
    from benchmarks.package import in_process as step

    if not path.exists():
        step("write", way.name, "minilm", str(path), caches=str(path.parent))
    return str(path)


def measure(
    case: str, ways: Sequence[Way], args: argparse.Namespace, folder: Path
) -> Iterator[Result]:
    """By way, after each round: figures of its cold and its warm processes, or why it failed."""
    found: Result = {way.name: {"cold": [], "warm": []} for way in ways}
    for k in range(args.rounds):
        for way in ways:
            mine = found[way.name]
            caches = folder / f"{way.name}-{min(k, args.cold - 1)}"
            package = ""
            if case == PACKAGE:
                package = write_package(way, folder / f"{way.name}.pt2")
            for state in ("cold", "warm"):
                if state == "cold" and k >= args.cold or state == "warm" and not way.warm:
                    continue
                if "failed" in mine:
                    continue
                print(f"{case}: {way.name}, {state}, round {k + 1}", file=sys.stderr, flush=True)
                figures = in_process(case, way, caches, package)
                if "failed" in figures:
                    mine["failed"] = f"{state}: {figures['failed']}"
                else:
                    mine[state].append(figures)
        yield found


# -------------------------------------------------------------------------------------------- pages
def median(runs: Runs, key: str) -> float | None:
    values = [run[key] for run in runs if key in run]
    return statistics.median(values) if values else None


def row(name: str, runs: Runs) -> list[str]:
    firsts = [run["first_s"] for run in runs]
    values = [statistics.median(firsts), min(firsts), median(runs, "cpu_s")]
    values += [median(runs, key) for key in KEYS]
    return [name, *("" if v is None else f"{v:.3f}" for v in values)]


def case_table(case: str, about: Result, ways: Result) -> str:
    """A row for each way and state, and a line for plait's stages."""
    rows, notes = [], []
    for name, found in ways.items():
        for state in ("cold", "warm"):
            if runs := found[state]:
                rows.append(row(name if not found["warm"] else f"{name}, {state}", runs))
        if "failed" in found:
            notes.append(f"{name} failed, {found['failed']}")
    for name in ("plait", "plait-warm"):
        runs = ways.get(name, {}).get("warm", [])
        stages = sorted({k for run in runs for k in run if k.startswith("stage ")})
        spent = {k.removeprefix("stage "): 1e3 * (median(runs, k) or 0) for k in stages}
        parts = [f"{k} {ms:.0f}" for k, ms in sorted(spent.items(), key=lambda x: -x[1]) if ms >= 1]
        if parts:
            notes.append(f"{name}, warm, its steps in ms: {', '.join(parts)}")
    head = f"## {case}: {about['about']}"
    measured = f"{about['date']}, commit {about['commit']}, {about['rounds']} rounds"
    return "\n".join([head, "", measured, "", render(HEADS, rows), "", *notes]).rstrip()


def goals(results: Result) -> Iterator[tuple[str, float, float, str]]:
    """Figures that plait is meant to reach: (goal, measured, limit, unit)."""

    def runs(case: str, way: str, state: str) -> Runs:
        found: Runs = results.get(case, {}).get("ways", {}).get(way, {}).get(state, [])
        return found

    def ours(case: str, state: str) -> Runs:
        return runs(case, "plait-warm", state) or runs(case, "plait", state)

    for case, state, limit in (
        ("tf6", "warm", 0.15), ("gpt2-cuda", "warm", 0.5), ("gpt2-train-cuda", "warm", 0.8),
        ("llama-32", "warm", 1.0), ("gpt2", "cold", 2.6), ("gpt2-cuda", "cold", 2.6),
    ):  # fmt: skip
        first = median(ours(case, state), "first_s")
        if first is not None:
            yield f"{case}, {state}", first, limit, "s"
    for case in results:
        if not case.endswith("-train") or case == "gpt2-train":
            continue
        first = median(ours(case, "warm"), "first_s")
        theirs = median(runs(case, "inductor", "warm"), "first_s")
        if first is not None and theirs:
            yield f"{case}, warm, against Inductor with warm caches", first / theirs, 0.5, "x"
    load = median(runs(PACKAGE, "plait", "warm"), "building")
    if load is not None:
        yield "load of a MiniLM package", 1e3 * load, 3.0, "ms"
    deep, flat = (_own(runs(f"llama-{n}-regions", "plait", "cold")) for n in (32, 4))
    if deep and flat:
        yield (
            "32 layers as regions against 4, without Dynamo and AOTAutograd",
            deep / flat,
            1.3,
            "x",
        )
    compiled = [case for case in results if case != PACKAGE]
    found = (median(ours(case, "warm"), "import back end") for case in compiled)
    imports = [t for t in found if t is not None]
    if imports:
        yield "import of plait, beyond torch", statistics.median(imports), 0.1, "s"


def _own(runs: Runs) -> float | None:
    """Seconds of a first call without Dynamo and AOTAutograd."""
    kept = [{"own": r["first_s"] - r["Dynamo"] - r["AOTAutograd"]} for r in runs]
    return median(kept, "own")


def page(data: Result) -> str:
    """All as Markdown."""
    tables = [case_table(c, r["about"], r["ways"]) for c, r in data["results"].items()]
    facts = [f"- {key}: {value}" for key, value in data["machine"].items()]
    claims = claims_table(judge(goals(data["results"])))
    parts = ["# First calls", "\n".join(facts), claims, LEGEND, *tables]
    return "\n\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------- command line
def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def chosen(text: str) -> dict[str, str]:
    """Programs by name, and what they are."""
    from benchmarks.first_cases import CASES

    known = {name: case.about for name, case in CASES.items()}
    known[PACKAGE] = "MiniLM-L6 with its real weights, 8 x 32 tokens, written by plait.package"
    wanted = names(text) or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"unknown program {', '.join(unknown)}; one of {', '.join(known)}")
    return {name: known[name] for name in wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="programs, separated by commas")
    parser.add_argument("--race", default="", help=f"some of {', '.join(WAYS)}, aotinductor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", type=int, help="rounds that begin with empty caches; all")
    parser.add_argument("--out", default="", help="name of the files in benchmarks/results")
    parser.add_argument("--show", action="store_true", help="print what --out (first) holds")
    args = parser.parse_args()
    args.cold = min(args.cold or args.rounds, args.rounds)
    out = args.out or ("" if args.only or args.race or args.show else "first")
    file = RESULTS / f"{out or 'first'}.json"
    if args.show:
        print(page(json.loads(file.read_text())))
        return
    facts = machine(shlex.join(["python", "-m", "benchmarks.first", *sys.argv[1:]]))
    data: Result = {"machine": facts, "results": {}}
    if out and file.exists() and (args.only or args.race):
        data["results"] = json.loads(file.read_text())["results"]
    for case, what in watched("programs", chosen(args.only).items()):
        about = {"about": what, "date": facts["date"], "commit": facts["commit"]}
        older = data["results"].get(case, {}).get("ways", {}) if args.race else {}
        with tempfile.TemporaryDirectory(prefix="plait-first-") as folder:
            rounds = measure(case, ways_of(case, names(args.race)), args, Path(folder))
            for k, found in enumerate(rounds):
                about["rounds"] = k + 1
                data["results"][case] = {"about": about, "ways": older | found}
                if out:  # after each: a run may be ended
                    file.write_text(json.dumps(data, indent=1) + "\n")
                    file.with_suffix(".md").write_text(page(data))
        print("\n" + case_table(case, about, found) + "\n", flush=True)
    print(claims_table(judge(goals(data["results"]))))


if __name__ == "__main__":
    main()
