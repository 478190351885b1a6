"""Random whole graphs against eager; a failure prints a program to paste and run (`python -m tests.fuzz_graphs SEED`
looks at one seed)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tests.fuzz_graphs
from tests.fuzz_graphs import check, generate


@pytest.mark.parametrize("seed", range(24))
def test_random_graphs(seed: int) -> None:
    check(generate(seed), dynamic=seed % 3 == 2, backward=seed % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1400, 20))
def test_many_random_graphs(first: int) -> None:
    for seed in range(first, first + 20):
        for backward in (False, True):
            check(generate(seed), dynamic=seed % 3 == 2, backward=backward)


@pytest.mark.parametrize("seed", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_a_failure_prints_a_program_that_fails(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object) -> None:
        raise AssertionError("plait is further off")

    with monkeypatch.context() as patch:
        patch.setattr(tests.fuzz_graphs, "_compare", wrong)
        with pytest.raises(AssertionError) as error:
            check(generate(seed), dynamic=seed == 5, backward=True)
    what, _, program = str(error.value).partition("\n\n")
    assert "plait is further off" in what

    file = tmp_path / "repro.py"
    file.write_text(program)
    run = [sys.executable, str(file)]
    root = Path(__file__).parent.parent
    env = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "PLAIT_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr  # nothing is wrong: the failure was made up

    monkeypatch.setattr(tests.fuzz_graphs, "_compare", wrong)
    with pytest.raises(AssertionError, match="plait is further off"):
        exec(compile(program, str(file), "exec"), {})
