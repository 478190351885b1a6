"""Faults that were mended, put back one at a time: the graph fuzzer finds each of them.

A patch of tests/mutants is applied to a copy of plait. From a seed on, as many programs as its
budget says are run with the copy; the first that fails has to pass with plait as it is.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fuzz.pool import ROOT, Worker

FAILED = ("fault", "crash", "hang")


MUTANTS = {
    "results_are_trusted": 105,
    "lone_updates_once": 56,
    "empty_loops_read": 838,
    "views_by_dtype_at_the_start": 53,
    "mixed_dtypes_computed": 197,
    "tangents_are_dropped": 395,
    "replaced_parameters_stay": 84,
    "remainders_of_large_quotients": 305,
    "assigned_buffers_stay": 550,
    "buffers_are_read_late": 532,
    "rounds_are_not_counted": 120,
}
"""Every patch, and the first seed whose program shows it. The tests of every day begin there."""
OF_FLOW = ("rounds_are_not_counted",)
"""Those that programs of control flow show."""
BUDGET = 1000


def mutated(name: str, folder: Path) -> Path:
    """A folder with a copy of plait that has this patch, and the tests."""
    shutil.copytree(ROOT / "plait", folder / "plait")  # with what Python compiled of it
    (folder / "tests").symlink_to(ROOT / "tests")
    patch = ROOT / "tests" / "mutants" / f"{name}.patch"
    done = subprocess.run(
        ["git", "apply", "--verbose", str(patch)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{name} applies no longer; write it anew:\n{done.stderr}"
    for line in patch.read_text().splitlines():
        if line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/")
            assert (folder / file).read_text() != (ROOT / file).read_text(), (
                f"{name}: {file} is as before"
            )
    return folder


def test_every_patch_is_used() -> None:
    assert {p.stem for p in (ROOT / "tests" / "mutants").glob("*.patch")} == set(MUTANTS)


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["near", "whole"]
)
def test_the_fuzzer_finds(name: str, whole: bool, tmp_path: Path) -> None:
    """In as many programs as the budget says, from the first seed on."""
    worker = Worker(root=mutated(name, tmp_path), cache=str(tmp_path / "cache"))
    subject = "flow" if name in OF_FLOW else ""
    seeds = range(BUDGET) if whole else range(MUTANTS[name], MUTANTS[name] + 2)
    try:
        for seed in seeds:
            found = worker.ask({"seed": seed, "subject": subject})
            if found["kind"] in FAILED and passes_unmutated(seed, subject, tmp_path / "other"):
                return
    finally:
        worker.close()
    pytest.fail(f"none of {len(seeds)} programs shows {name}")


def passes_unmutated(seed: int, subject: str, cache: Path) -> bool:
    worker = Worker(cache=str(cache))
    found = worker.ask({"seed": seed, "subject": subject})
    worker.close()
    return found["kind"] not in FAILED
