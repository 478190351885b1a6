"""CUDA graphs without a GPU: tests/recordings.py in a process of its own, where torch and the
driver are given one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fakes import fake_gpu

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has a GPU of its own")
def test_recordings(tmp_path: Path) -> None:
    driver, runtime = tmp_path / "libcuda.so.1", tmp_path / "libtorch_cuda.so"
    fake_gpu(driver, runtime)
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/recordings.py"]
    env = {
        **os.environ,
        "FAKE_GPU": str(tmp_path),
        "LD_PRELOAD": str(driver),
    }  # before torch asks for a GPU
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
