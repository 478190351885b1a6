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

ROOT = Path(__file__).parent.parent
RECIPE = re.compile(
    r"^### Recipe: (?P<name>.*?)$.*?```diff\n(?P<diff>.*?)```.*?```python\n(?P<check>.*?)```",
    re.DOTALL | re.MULTILINE,
)
RECIPES = {m["name"]: m for m in RECIPE.finditer((ROOT / "CONTRIBUTING.md").read_text())}
FILES = {"an operator": 2, "a pass on graphs": 2, "a wrapper target": 2, "a maker of GPUs": 3}
"""How many files each touches at most."""


def test_every_recipe_is_carried_out() -> None:
    assert set(RECIPES) == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_recipe(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    assert len(re.findall(r"^\+\+\+ ", recipe["diff"], re.MULTILINE)) <= FILES[name]
    for folder in ("plait", "native"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    before = _check(recipe["check"], tmp_path)
    assert before.returncode != 0, "the check passes without the change"
    applied = subprocess.run(
        ["git", "apply", "-"], cwd=tmp_path, input=recipe["diff"], text=True, capture_output=True
    )
    assert applied.returncode == 0, applied.stderr
    after = _check(recipe["check"], tmp_path)
    assert after.returncode == 0, after.stderr


# The copy is asked before an installed plait is.
_FIRST = """\
import sys

sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
import plait

assert plait.__file__.startswith(sys.path[0] or "."), plait.__file__
"""


def _check(code: str, tree: Path) -> subprocess.CompletedProcess[str]:
    """Runs the check of a recipe with the plait of a copy of the tree."""
    file = tree / "check.py"
    file.write_text(_FIRST + code)
    env = {**os.environ, "PYTHONPATH": "", "PLAIT_STRICT": "1"}
    return subprocess.run([sys.executable, file], cwd=tree, env=env, text=True, capture_output=True)
