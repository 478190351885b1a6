"""Warm starts and the files of the user's own modules: any edit of one is a compile."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest

from plait.capture.warm import sources
from plait.compat.frame_facts import NotKept
from tests import warm as processes

MODULE = "own_module_of_the_test"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that is loaded, and was written an hour ago."""
    file = tmp_path / f"{MODULE}.py"
    write(file, "NUMBER = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    invalidate_caches()
    import_module(MODULE)
    yield file
    del sys.modules[MODULE]


def write(file: Path, text: str) -> None:
    file.write_text(text)
    then = time.time() - 3600 - len(text)
    os.utime(file, (then, then))


def test_an_edit_is_another_file(module: Path) -> None:
    kept = sources.own_sources()
    assert MODULE in kept
    sources.require_sources(kept)
    write(module, "NUMBER = 4  # which nothing else would see\n")
    with pytest.raises(NotKept, match=f"the file of the module {MODULE} is another one"):
        sources.require_sources(kept)
    write(module, "NUMBER = 3\n")
    sources.require_sources(kept)


def test_a_module_that_is_gone_is_missed(module: Path) -> None:
    kept = sources.own_sources()
    module.unlink()
    with pytest.raises(NotKept, match="not loaded"):
        sources.require_sources(kept)
    assert MODULE not in sources.own_sources()


def test_what_was_written_since_may_not_be_what_runs(module: Path) -> None:
    before = sources.own_sources()[MODULE]
    os.utime(module)
    late = sources.own_sources()[MODULE]
    assert late != before and late.startswith(before)


def test_libraries_are_compared_by_what_ran_of_them() -> None:
    kept = sources.own_sources()
    tops = {name.partition(".")[0] for name in kept}
    assert not tops & {"torch", "plait", "json", "numpy", "pytest"}
    assert __name__ in kept


PROGRAM = """
import sys
import torch
from plait.capture.warm.frames import outcomes
import helper
model = helper.Net()
compiled = torch.compile(model, backend="plait")
x = torch.ones(3)
assert torch.equal(compiled(x), model(x)), (compiled(x), model(x))
print([o.how for o in outcomes])
"""
HELPER = """
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1
"""


@pytest.mark.stress
def test_processes_start_warm_until_a_file_is_edited(tmp_path: Path) -> None:
    program, helper = tmp_path / "program.py", tmp_path / "helper.py"
    write(program, PROGRAM)
    write(helper, HELPER)
    root = str(Path(__file__).parent.parent)
    env = os.environ | {"PLAIT_WARM_START": "1", "PLAIT_CACHE_DIR": str(tmp_path / "cache")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))

    def run() -> str:
        done = processes.run(program, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run() == "['kept']"
    assert run() == "['warm']"
    write(helper, HELPER + "# a remark\n")
    assert run() == "['kept']"
    write(helper, HELPER)
    assert run() == "['warm']"  # its entry is there still
