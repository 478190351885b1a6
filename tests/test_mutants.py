"""Faults that were mended, put back one at a time: the graph fuzzer finds each of them.

A patch of tests/mutants is applied to a copy of plait. From a seed on, as many programs as its budget
says are run with the copy; the first that fails has to pass with plait as it is.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fuzz.pool import ROOT, Worker

FAILED = ("fault", "crash", "hang")


@dataclass(frozen=True)
class Mutant:
    """first, budget: seeds from which on, and how many programs, the fuzzer may take."""

    name: str
    first: int
    budget: int


MUTANTS = (
    Mutant("lone_updates_once", 8, 60),
    Mutant("empty_loops_read", 58, 200),
    Mutant("views_by_dtype_at_the_start", 60, 200),
    Mutant("mixed_dtypes_computed", 330, 300),
)


def mutated(name: str, folder: Path) -> Path:
    """A folder with a copy of plait that has this patch, and the tests."""
    shutil.copytree(ROOT / "plait", folder / "plait", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").symlink_to(ROOT / "tests")
    patch = ROOT / "tests" / "mutants" / f"{name}.patch"
    done = subprocess.run(
        ["git", "apply", "--verbose", str(patch)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{name} applies no longer; write it anew:\n{done.stderr}"
    for line in patch.read_text().splitlines():
        if line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/")
            assert (folder / file).read_text() != (ROOT / file).read_text(), f"{name}: {file} is as before"
    return folder


def test_every_patch_is_used() -> None:
    assert {p.stem for p in (ROOT / "tests" / "mutants").glob("*.patch")} == {m.name for m in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_fuzzer_finds(mutant: Mutant, tmp_path: Path) -> None:
    worker = Worker(root=mutated(mutant.name, tmp_path), cache=str(tmp_path / "cache"))
    try:
        for seed in range(mutant.first, mutant.first + mutant.budget):
            found = worker.ask({"seed": seed})
            if found["kind"] in FAILED and passes_unmutated(seed, tmp_path / "other"):
                return
    finally:
        worker.close()
    pytest.fail(f"none of {mutant.budget} programs shows {mutant.name}")


def passes_unmutated(seed: int, cache: Path) -> bool:
    worker = Worker(cache=str(cache))
    found = worker.ask({"seed": seed})
    worker.close()
    return found["kind"] not in FAILED
