"""Runs a module of tests as several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def passes(module: str, processes: int, meet: Path, *more: str) -> None:
    """Every rank says that it passed. The module gets its rank, their number, a file to meet by,
    and more."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(k), str(processes), str(meet), *more],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k in range(processes)
    ]
    try:
        told = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks) and all("passed\n" in t for t in told), (
        "\n".join(told)
    )
