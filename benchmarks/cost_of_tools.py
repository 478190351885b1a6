"""What plait costs somebody who asks no tool for anything, in this tree and in the one of a commit
before them: importing it, the modules that a compile and a call load, the first call from warm
caches, and calls.

Both trees run in processes of their own, in alternation, so that a busy moment of the machine hits
both; the least of all rounds counts. The other tree is checked out beside this one for as long as
this takes. Its native parts are those that are built here, where no commit between the two changed
their sources; else they are built anew.

Usage: python -m benchmarks.cost_of_tools [--before COMMIT] [--rounds N] [--page]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.machine import ROOT, machine
from benchmarks.table import render
from plait.log import watched

BEFORE = "165155e8"  # the last commit without reports, profiles, numerics and what finds faults
PAGE = ROOT / "benchmarks" / "results" / "cost-of-tools.md"
WORKER = ROOT / "benchmarks" / "cost_worker.py"
NATIVE = ("native", "triton_launch/include", "triton_launch/src", "CMakeLists.txt")
ROWS = (
    ("import_cpu_ms", "import plait, CPU ms", 1),
    ("import_ms", "import plait, ms", 1),
    ("import_modules", "modules that this loads", 0),
    ("compile_modules", "modules that a compile and a call load", 0),
    ("first_cpu_ms", "first call from warm caches, CPU ms", 1),
    ("first_ms", "first call from warm caches, ms", 1),
    ("call_ns", "a call of torch.compile's, ns", 0),
    ("direct_ns", "a call of plait.compile's, ns", 0),
    ("training_ns", "a call and its backward pass, ns", 0),
)
"""Keys of a worker's answer, what they are, and digits after the point."""
Figures = dict[str, float]


def least(runs: Sequence[Figures]) -> Figures:
    """The least of each figure."""
    return {key: min(run[key] for run in runs) for key, _, _ in ROWS}


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The tree of a commit with its native parts."""
    with tempfile.TemporaryDirectory(prefix="plait-before-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT)]
        subprocess.run([*git, "worktree", "add", "-q", "--detach", tree, commit], check=True)
        try:
            changed = [*git, "diff", "--quiet", commit, "HEAD", "--", *NATIVE]
            if subprocess.run(changed, check=False).returncode == 0:
                shutil.copytree(ROOT / "plait" / "lib", tree / "plait" / "lib", dirs_exist_ok=True)
                for built in (ROOT / "plait").glob("_native*.so"):
                    shutil.copy(built, tree / "plait")
            else:
                subprocess.run(["./native/build-in-place", "2"], cwd=tree, check=True)
            yield tree
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", tree], check=True)


def in_process(tree: Path, cache: Path) -> Figures:
    """The figures of one process that finds plait in a tree. Raises CalledProcessError where it
    fails."""
    env = {**os.environ, "PYTHONPATH": str(tree), "PLAIT_CACHE_DIR": str(cache)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # imports are those of an installed package
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tree)],
        env=env, cwd=cache, check=True, stdout=subprocess.PIPE, text=True, timeout=600,
    )  # fmt: skip
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def page(about: dict[str, object], before: Figures, now: Figures, rounds: int) -> str:
    """What the table of results says."""
    rows = [
        [words, f"{before[key]:.{digits}f}", f"{now[key]:.{digits}f}",
         f"{now[key] - before[key]:+.{digits}f}", f"{now[key] / before[key]:.3f}"]
        for key, words, digits in ROWS
    ]  # fmt: skip
    return "\n".join(
        [
            "# What tools cost who does not ask for them",
            "",
            *(f"- {key}: {value}" for key, value in about.items()),
            "",
            f"The least of {rounds} processes each, in alternation. before: commit {BEFORE}, which "
            "has none of",
            "the tools; now: this tree. The model is a perceptron of two small layers, called in a "
            "loop.",
            "",
            render(("", "before", "now", "difference", "now / before"), rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    with checked_out(args.before) as tree, tempfile.TemporaryDirectory() as caches:
        trees = {"before": tree, "now": ROOT}
        runs: dict[str, list[Figures]] = {name: [] for name in trees}
        for k in watched("rounds", range(args.rounds + 1)):
            for name in (*trees,) if k % 2 else (*reversed(trees),):
                (cache := Path(caches) / name).mkdir(exist_ok=True)
                found = in_process(trees[name], cache)
                if k:  # the first one fills the caches
                    runs[name].append(found)
    about = machine("python -m benchmarks.cost_of_tools --page")
    text = page(about, least(runs["before"]), least(runs["now"]), args.rounds)
    print(text)
    if args.page:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
