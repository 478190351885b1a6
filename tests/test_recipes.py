"""The recipes of CONTRIBUTING.md: each change applies to a copy of the tree, touches as few files
as promised, and passes its check there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parent.parent
RECIPE = re.compile(
    r"^### Recipe: (?P<name>.*?)$.*?```diff\n(?P<diff>.*?)```.*?```python\n(?P<check>.*?)```",
    re.DOTALL | re.MULTILINE,
)
RECIPES = {m["name"]: m for m in RECIPE.finditer((ROOT / "CONTRIBUTING.md").read_text())}
FILES = {
    "an operator": 2,
    "a pass on graphs": 2,
    "an instruction": 6,
    "a wrapper target": 2,
    "a maker of GPUs": 3,
}
"""How many files each touches at most, tests and what is generated aside."""


def test_every_recipe_is_carried_out() -> None:
    assert set(RECIPES) == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_recipe(name: str, tmp_path: Path) -> None:
    targets = ("python", "fx") if name == "an instruction" else ()  # the others need a build
    _copy(tmp_path)
    before = _run(RECIPES[name]["check"], tmp_path, *targets)
    assert before.returncode != 0, "the check passes without the change"
    _carry_out(name, tmp_path)
    after = _run(RECIPES[name]["check"], tmp_path, *targets)
    assert after.returncode == 0, after.stderr


def test_what_is_written_from_instructions_has_the_new_one(tmp_path: Path) -> None:
    _copy(tmp_path)
    _write_tables(tmp_path)
    row = re.search(r"^\| `Zero` \| `zero.*$", (tmp_path / INSTRUCTIONS).read_text(), re.MULTILINE)
    assert row and "`TRY(buf5.fill(plait_integer, 0));`" in row[0]


@pytest.mark.slow
def test_the_executor_runs_the_new_instruction(tmp_path: Path) -> None:
    _copy(tmp_path)
    _write_tables(tmp_path)
    build = tmp_path / "build"
    made_for = f"-DPython_EXECUTABLE={sys.executable}"
    subprocess.run(["cmake", "-S", tmp_path, "-B", build, "-G", "Ninja", made_for], check=True)
    subprocess.run(["cmake", "--build", build, "--target", "_native", "-j", "2"], check=True)
    (extension,) = (build / "native").glob("_native.*.so")
    shutil.copy(extension, tmp_path / "plait")
    done = _run(RECIPES["an instruction"]["check"], tmp_path)
    assert done.returncode == 0, done.stderr


INSTRUCTIONS = "docs/instructions.md"


def _copy(tree: Path) -> None:
    """With what Python compiled of it."""
    for folder in ("plait", "native", "tests"):
        shutil.copytree(ROOT / folder, tree / folder)


def _carry_out(name: str, tree: Path) -> None:
    """Applies the change of a recipe to a copy of the tree."""
    diff = RECIPES[name]["diff"]
    assert len(re.findall(r"^\+\+\+ b/(?!tests/)", diff, re.MULTILINE)) <= FILES[name]
    applied = subprocess.run(
        ["git", "apply", "-"], cwd=tree, input=diff, text=True, capture_output=True
    )
    assert applied.returncode == 0, applied.stderr


def _write_tables(tree: Path) -> None:
    """Adds the new instruction, and writes what is generated from all."""
    for name in ("docs", "triton_launch"):
        shutil.copytree(ROOT / name, tree / name)
    shutil.copy(ROOT / "CMakeLists.txt", tree)
    _carry_out("an instruction", tree)
    module = "import runpy\n\nrunpy.run_module('tests.instruction_table', run_name='__main__')\n"
    done = _run(module, tree)
    assert done.returncode == 0, done.stderr


# The copy is asked before an installed plait is.
_FIRST = """\
import sys

sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
import plait

assert plait.__file__.startswith(sys.path[0] or "."), plait.__file__
"""


def _run(code: str, tree: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs the check of a recipe with the plait of a copy of the tree."""
    file = tree / "check.py"
    file.write_text(_FIRST + code)
    env = {**os.environ, "PYTHONPATH": "", "PLAIT_STRICT": "1"}
    return warm.run(file, *args, env=env, cwd=tree)
