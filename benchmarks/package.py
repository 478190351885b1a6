"""Packages raced against AOTInductor's: seconds to write one with cold caches, its size, seconds to
load it in a new process, microseconds a call from Python and, of plait's, from C++.

Usage: python benchmarks/package.py [--rounds N] [--only CASE,...] [--peers PEER;...] [--out NAME].
Every figure comes from a process of its own; the peers of a program take turns, and the least of
all rounds counts. What can be imported beforehand is imported before the clock starts. Writes
benchmarks/results/NAME.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.models import CASES
from benchmarks.table import render
from plait.log import watched

ROOT = Path(__file__).parent.parent
Made = tuple[nn.Module, tuple[Tensor, ...]]


def minilm() -> Made:
    """MiniLM-L6 with its real weights, 8 sentences of 32 tokens."""
    from examples.demo import load

    torch.manual_seed(0)
    return load()[0], (torch.randint(30522, (8, 32)), torch.ones(8, 32, dtype=torch.int64))


def resnet50() -> Made:
    """The usual ResNet-50 with random weights, an image of 224x224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ResNetForImageClassification(ResNetConfig(num_labels=1000))

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.model(x).logits
            return logits

    torch.manual_seed(0)
    return Logits().eval(), (torch.randn(1, 3, 224, 224),)


PROGRAMS: dict[str, tuple[str, Callable[[], Made]]] = {
    "tiny-mlp": ("16-32-4, batch 1", CASES["tiny-mlp"].make),
    "minilm": ("MiniLM-L6, 8 x 32 tokens", minilm),
    "gpt2": ("GPT-2 of 124M parameters, 1 x 128 tokens", CASES["gpt2"].make),
    "resnet50": ("ResNet-50, 1 image", resnet50),
}
PEERS = ("plait", "plait, fold", "aotinductor")


def prepared(peer: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What writes and what loads; all that they import is there."""
    if peer == "aotinductor":
        import torch._inductor
        import torch._inductor.compile_fx
        import torch._inductor.package

        def write(module: nn.Module, path: Path, inputs: tuple[Tensor, ...]) -> None:
            torch._inductor.aoti_compile_and_package(
                torch.export.export(module, inputs), package_path=str(path)
            )

        return write, lambda path: torch._inductor.aoti_load_package(str(path))
    from plait import load, package

    return lambda module, path, inputs: package(module, path, inputs, fold="fold" in peer), load


def write(peer: str, case: str, path: Path) -> dict[str, float]:
    """Writes a package beside what eager makes of the inputs."""
    with torch.no_grad():
        module, inputs = PROGRAMS[case][1]()
        torch.save((inputs, module(*inputs)), path.with_suffix(".pt"))
        to_file, _ = prepared(peer)
        start, cpu = time.perf_counter(), cpu_seconds()
        to_file(module, path, inputs)
        spent = {"write_s": time.perf_counter() - start, "write_cpu_s": cpu_seconds() - cpu}
        return {**spent, "mib": path.stat().st_size / 2**20}


def cpu_seconds() -> float:
    """Of this process and those that it waited for."""
    return sum(
        u.ru_utime + u.ru_stime
        for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def run(peer: str, case: str, path: Path) -> dict[str, float]:
    """Loads a package and calls it."""
    inputs, want = torch.load(path.with_suffix(".pt"))
    _, from_file = prepared(peer)
    with torch.no_grad():
        start = time.perf_counter()
        call = from_file(path)
        loaded = time.perf_counter()
        got = call(*inputs)
        first = time.perf_counter()
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        return {
            "load_s": loaded - start,
            "first_s": first - loaded,
            "us": best_us(lambda: call(*inputs)),
        }


def best_us(call: Callable[[], object]) -> float:
    """The best of many rounds of some milliseconds, for 3 seconds."""
    n, best = 1, float("inf")
    end = time.perf_counter() + 3
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        for _ in range(n):
            call()
        best = min(best, (time.perf_counter() - start) / n)
        n = max(1, int(0.005 / best))
    return best * 1e6


def in_process(*args: str, caches: str) -> dict[str, float]:
    """One step in a process of its own. caches: folder for what compilers keep."""
    places = {"PLAIT_CACHE_DIR": f"{caches}/plait", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
    env = {**os.environ, **places, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--step", *args], capture_output=True, text=True, env=env
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(args)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def build_caller(folder: Path) -> Path:
    """The program that calls packages from C++."""
    tools = {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    }
    cmake = [
        "cmake",
        "-S",
        str(ROOT / "benchmarks"),
        "-B",
        str(folder),
        "-G",
        "Ninja",
        f"-DPLAIT_PYTHON={sys.executable}",
    ]
    subprocess.run(
        [*cmake, f"-DCMAKE_PREFIX_PATH={ROOT}/plait/lib/cmake"], check=True, env=tools, stdout=2
    )
    subprocess.run(["cmake", "--build", str(folder)], check=True, env=tools, stdout=2)
    return folder / "package_call"


def from_cpp(caller: Path, path: str) -> float:
    """Microseconds of a call from C++."""
    done = subprocess.run([str(caller), path], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[0]) / 1e3


def race(case: str, rounds: int, caller: Path, peers: Sequence[str]) -> dict[str, dict[str, float]]:
    """Each peer's best figures."""
    best: dict[str, dict[str, float]] = {peer: {} for peer in peers}
    for _ in range(rounds):
        for peer in peers:
            with tempfile.TemporaryDirectory() as folder:
                path = f"{folder}/model.pt2"
                figures = in_process("write", peer, case, path, caches=folder)
                figures |= in_process("run", peer, case, path, caches=folder)
                if peer != "aotinductor":
                    figures["cpp_us"] = from_cpp(caller, path)
            best[peer] = {k: min(v, best[peer].get(k, v)) for k, v in figures.items()}
            print(case, peer, {k: round(v, 3) for k, v in figures.items()}, file=sys.stderr)
    return best


HEADS = ("", "write s", "CPU s", "MiB", "load ms", "first call ms", "call µs", "from C++ µs")


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def report(results: dict[str, dict[str, dict[str, float]]], args: argparse.Namespace) -> str:
    """All as Markdown."""
    lines = [
        "# Packages",
        "",
        f"- date: {datetime.date.today()}",
        f"- command: python {' '.join(['benchmarks/package.py', *sys.argv[1:]])}",
        f"- torch: {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}",
        f"- rounds: {args.rounds}, the least of all; every figure from a process of its own, "
        "caches cold",
        "",
    ]
    for case, peers in results.items():
        rows = [
            [
                peer, f"{r['write_s']:.2f}", f"{r['write_cpu_s']:.2f}", f"{r['mib']:.1f}",
                f"{r['load_s'] * 1e3:.1f}", f"{r['first_s'] * 1e3:.1f}", _us(r["us"]),
                _us(r["cpp_us"]) if "cpp_us" in r else "",
            ]
            for peer, r in peers.items()
        ]  # fmt: skip
        lines += [f"## {case}: {PROGRAMS[case][0]}", "", render(HEADS, rows), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", nargs=4, metavar=("STEP", "PEER", "CASE", "PATH"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PROGRAMS))
    parser.add_argument("--peers", default=";".join(PEERS))
    parser.add_argument("--out", default="package")
    args = parser.parse_args()
    if args.step:
        step, peer, case, path = args.step
        print(json.dumps({"write": write, "run": run}[step](peer, case, Path(path))))
        return
    with tempfile.TemporaryDirectory() as folder:
        caller = build_caller(Path(folder))
        results = {
            case: race(case, args.rounds, caller, args.peers.split(";"))
            for case in watched("programs", args.only.split(","))
        }
    text = report(results, args)
    (ROOT / "benchmarks" / "results" / f"{args.out}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
