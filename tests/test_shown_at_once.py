"""The plugin that prints a failure when it happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CASES = """
from pathlib import Path

def test_one():
    assert 1 + 1 == 3, "the first failure"

def test_two():
    assert "the first failure" in Path({log!r}).read_text(), "nothing was printed yet"
"""


@pytest.mark.parametrize("more", [(), ("-n", "1")], ids=["one process", "workers"])
def test_a_failure_is_printed_before_the_next_test(more: tuple[str, ...], tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "test_cases.py").write_text(CASES.format(log=str(log)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.shown_at_once",
        "-p",
        "no:randomly",
        *more,
        str(tmp_path),
    ]
    wait = (
        "import time; time.sleep(1)\n" if more else ""
    )  # a worker's report takes a moment to arrive
    if wait:
        text = (tmp_path / "test_cases.py").read_text()
        (tmp_path / "test_cases.py").write_text(
            text.replace("def test_two():\n", f"def test_two():\n    {wait}")
        )
    with log.open("w") as out:
        subprocess.run(
            [*command, "--rootdir", str(tmp_path), "-c", "/dev/null"],
            cwd=ROOT,
            stdout=out,
            stderr=out,
            check=False,
        )
    text = log.read_text()
    assert "1 failed, 1 passed" in text, text
    assert text.count("the first failure") >= 2, "at once, and in the summary"
