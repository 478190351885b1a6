"""Triton kernels of the user, in graphs on a CPU: see tests/user_triton.py. Triton is not imported
by this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRITON = Path(sys.prefix) / "triton"


@pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")
@pytest.mark.parametrize("program", ["user_triton", "user_triton_as_gpu"])
def test_kernels_of_the_user_run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.{program}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{TRITON}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stdout.endswith("passed all\n"), (
        done.stdout + done.stderr[-4000:]
    )
