"""`make bench-gpu`: plait, eager and Inductor on one GPU, in groups of a few minutes each.

Every peer runs every program in a process of its own (gpu_worker.py). In the group `launch` the
first calls are made one process at a time, and their times count; in the others they are made at
once (first.py measures first calls). Then the processes are timed in turn, round after round. A
full run of a group writes benchmarks/results/gpu-GROUP.json and .md; one with --only, --race or
--quick prints, and writes with --out NAME.
Usage: gpu.py GROUP [--only CASES] [--race PEERS] [--cpp] [--profile] [--quick] [--out NAME]
"""

from __future__ import annotations

import argparse
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from claims import MIB
from gpu_claims import check_gpu_claims
from machine import machine
from models import GPU_CASES, Case
from peers import GPU_PEERS, Peer
from run import Process, Result, chosen, say, write
from table import claims_table, render

from plait.log import watched

LEGEND = """\
first: the first call of a process, with fresh caches, everything imported and every library \
loaded before the clock starts; call: among calls that follow each other, \
by CUDA events; CPU: what
the calling thread takes while the device has room in its queue; own: of that, \
above Dynamo's guards; kernels, busy:
what the device runs in a call, and for how long; peak: most bytes alive at once, \
parameters included; reserved: what
the allocator holds for that; error: distance from the float64 result, as a multiple of eager's."""


@dataclass(frozen=True)
class Group:
    """alone: first calls are made one at a time. batch: calls between two waits for the device
    where CPU time is measured. together: programs whose processes live at once. own: programs where
    plait's own part of the CPU time is measured."""

    cases: tuple[str, ...]
    peers: tuple[str, ...]
    alone: bool = False
    batch: int = 1
    together: int = 2
    own: tuple[str, ...] = ()


ALL = ("eager", "plait", "plait-graphs", "inductor", "inductor-graphs")
GROUPS = {
    "launch": Group(
        ("chain", "sum128", "gate", "tiny-mlp"),
        (
            "eager",
            "guards",
            "plait",
            "plait.compile",
            "plait-graphs",
            "inductor",
            "inductor-graphs",
        ),
        alone=True,
        batch=8,
        together=4,
        own=("chain", "sum128", "gate"),
    ),
    "models": Group(("gpt2-8", "gpt2", "bert", "resnet50", "vit", "tf6"), ALL, together=3),
    "train": Group(("gpt2-train", "bert-train", "resnet50-train", "vit-train"), ALL),
}


class GpuProcess(Process):
    """A worker on the GPU."""

    script = "gpu_worker.py"


Workers = dict[tuple[str, str], GpuProcess]


def race(
    group: Group,
    cases: Sequence[Case],
    peers: Sequence[Peer],
    args: argparse.Namespace,
    folder: Path,
) -> Result:
    """All figures of some programs: {case: {peer: {...}}}."""
    results: Result = {case.name: {} for case in cases}
    workers = begin(group, cases, peers, results, folder)
    for number in range(args.rounds):
        say(f"{', '.join(results)}: round {number + 1} of {args.rounds}")
        for (case, peer), process in workers.items():
            figures = process.ask("time", args.seconds, group.batch)
            if case in group.own and peer in ("plait", "plait-graphs"):
                figures |= process.ask("own", group.batch)
            for key, value in figures.items():
                results[case][peer].setdefault(f"{key}_rounds", []).append(value)
    for (case, peer), process in workers.items():
        say(f"{case}: {peer}, memory and error")
        finish(results[case][peer], process, GPU_PEERS[peer], args.profile or group.alone)
    for process in workers.values():
        process.stop()
    return results


def begin(
    group: Group, cases: Iterable[Case], peers: Iterable[Peer], results: Result, folder: Path
) -> Workers:
    """Processes that have made their first calls; their times go into results. Those that failed
    are ended."""
    # As many compile at once as the group has processes: each with a few compilers of its own.
    env = {} if group.alone else {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
    pairs = [(case, peer) for case in cases for peer in peers if peer.trains or not case.train]
    workers = {
        (case.name, peer.name): GpuProcess(case, peer, folder / case.name / peer.name, env=env)
        for case, peer in pairs
    }
    say(f"{', '.join(dict.fromkeys(case for case, _ in workers))}: {len(workers)} processes")
    ready = dict(together(workers, "ready"))
    running = {name: process for name, process in workers.items() if "failed" not in ready[name]}
    for name, answer in one_by_one(running, "first") if group.alone else together(running, "first"):
        ready[name] = answer
    for (case, peer), answer in ready.items():
        into = results[case].setdefault(peer, {})
        times = {key: answer.pop(key, None) for key in ("first_s", "stages")}
        into |= (times if group.alone else {}) | {k: v for k, v in answer.items() if k not in into}
        if "failed" in answer:
            say(f"{case}: {peer} failed: {answer['failed']}")
            workers.pop((case, peer)).stop()
    return workers


def together(workers: Workers, command: str) -> Iterator[tuple[tuple[str, str], Result]]:
    """All at once."""
    for process in workers.values():
        process.send(command)
    for name, process in workers.items():
        yield name, process.answer()


def one_by_one(workers: Workers, command: str) -> Iterator[tuple[tuple[str, str], Result]]:
    """Each while the others sleep."""
    for name, process in workers.items():
        say(f"{name[0]}: {name[1]}, {command} call")
        yield name, process.ask(command)


def finish(figures: Result, process: GpuProcess, peer: Peer, profile: bool) -> None:
    """The median of the rounds (of CPU time the best: whatever disturbs it adds to it), and what is
    measured once."""
    for key in [key for key in figures if key.endswith("_rounds")]:
        values = sorted(figures[key])
        figures[key.removesuffix("_rounds")] = values[
            0 if key == "host_us_rounds" else len(values) // 2
        ]
    if not peer.computes:
        return
    figures |= process.ask("memory")
    if peer.name != "eager":
        figures |= process.ask("check")
    if profile:
        figures |= process.ask("profile")


def case_table(case: Case, peers: Result) -> str:
    """One program: a row a peer, and a line for what cannot be a column."""
    heads = (
        "",
        "first s",
        "call µs",
        "CPU µs",
        "own µs",
        "eager / it",
        "it / plait",
        "kernels",
        "busy µs",
        "peak MiB",
        "reserved MiB",
        "error",
    )
    base, ours = (peers.get(p, {}).get("us") for p in ("eager", "plait"))
    rows, notes = [], []
    for peer, r in peers.items():
        if "failed" in r:
            notes.append(f"{peer} failed: {r['failed']}")
        us, error = r.get("us"), r.get("error")
        cells = (
            (r.get("first_s") if peer not in ("eager", "guards") else None, 2),
            (us, 1),
            (r.get("host_us"), 1),
            (r.get("own_us"), 1),
            (base / us if base and us else None, 2),
            (us / ours if ours and us else None, 2),
            (r.get("kernels"), 0),
            (r.get("busy_us"), 0),
            (r["peak_bytes"] / MIB if "peak_bytes" in r else None, 0),
            (r["reserved_bytes"] / MIB if "reserved_bytes" in r else None, 0),
            (error / r["eager_error"] if error is not None and r["eager_error"] else None, 2),
        )
        rows.append(
            [peer, *("" if value is None else f"{value:.{digits}f}" for value, digits in cells)]
        )
    plait = peers.get("plait", {})
    if "launches" in plait:
        bare = f", {plait['bare_ns']:.0f} ns a bare launch" if "bare_ns" in plait else ""
        notes.append(
            f"plait: {plait['launches']} kernels of its own, {plait['calls']} calls of "
            f"PyTorch's{bare}"
        )
    if stages := plait.get("stages"):
        parts = ", ".join(f"{name} {s:.2f}" for name, s in stages.items() if s >= 0.005)
        notes.append(f"plait's first call, s: {parts}")
    if top := plait.get("top"):
        notes += [f"- {us:8.1f} µs, {times:.0f} x {name[:100]}" for name, times, us in top[:12]]
    return "\n".join([f"## {case.name}: {case.about}", "", render(heads, rows), "", *notes])


def gpu() -> Result:
    """The machine's GPU and what drives it."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = (
        subprocess.run(asked, capture_output=True, text=True, check=False)
        .stdout.strip()
        .splitlines()
    )
    packages = ("triton", "transformers", "torchvision")
    return {"gpu": found[0] if found else "none", **{p: metadata.version(p) for p in packages}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("group", choices=(*GROUPS, "kernels"))
    parser.add_argument("--only", default="", help="programs, separated by commas")
    parser.add_argument("--race", default="", help="peers, separated by commas")
    parser.add_argument(
        "--cpp",
        action="store_true",
        help="also Inductor's C++ wrapper, which compiles for a minute",
    )
    parser.add_argument("--profile", action="store_true", help="count kernels in every group")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--out", help="name of the files written to benchmarks/results")
    args = parser.parse_args()
    if args.group == "kernels":
        sys.argv = ["kernels_gpu.py"]
        runpy.run_path(str(Path(__file__).parent / "kernels_gpu.py"), run_name="__main__")
        return
    args.rounds, args.seconds = (2, 0.1) if args.quick else (7, 0.15)
    group = GROUPS[args.group]
    cases = chosen(args.only or ",".join(group.cases), GPU_CASES, "program")
    peers = chosen(
        args.race or ",".join(group.peers + (("inductor-cpp",) if args.cpp else ())),
        GPU_PEERS,
        "peer",
    )

    facts = machine(f"python benchmarks/gpu.py {' '.join(sys.argv[1:])}")
    wanted = ("date", "commit", "torch", "command", "python")
    about = {k: facts[k] for k in wanted if facts[k]} | gpu()
    print("\n".join(f"- {k}: {v}" for k, v in about.items()), flush=True)
    start = time.monotonic()
    results: Result = {}
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
        for start_at in watched("groups", range(0, len(cases), group.together)):
            some = cases[start_at : start_at + group.together]
            found = race(group, some, peers, args, Path(folder))
            results |= found
            for case in some:
                print("\n" + case_table(case, found[case.name]), flush=True)
    about["seconds"] = round(time.monotonic() - start)
    claims = check_gpu_claims(args.group, results)
    met = sum(c["verdict"] == "met" for c in claims)
    print(
        f"\n{LEGEND}\n\n{claims_table(claims)}\n\ngoals: met {met} of {len(claims)} in "
        f"{about['seconds']} s"
    )
    out = args.out or ("" if args.only or args.race or args.quick else f"gpu-{args.group}")
    if out:
        tables = [case_table(case, results[case.name]) for case in cases]
        write(out, about, LEGEND, tables, results, claims)


if __name__ == "__main__":
    main()
