"""CUDA graphs without a GPU: tests/recordings.py in a process of its own, where torch and the
driver are given one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TORCH = Path(torch.__file__).parent


def fake_gpu_flags() -> list[str]:
    """How libraries are compiled that give torch a GPU."""
    includes = (ROOT / "native", TORCH / "include", TORCH / "include/torch/csrc/api/include")
    flags = ["g++", "-std=c++20", "-O1", "-Wall", "-shared", "-fPIC", *(f"-I{p}" for p in includes)]
    return [*flags, f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has a GPU of its own")
def test_recordings(tmp_path: Path) -> None:
    driver, runtime = tmp_path / "libcuda.so.1", tmp_path / "libtorch_cuda.so"
    for path, *args in (
        (driver, str(ROOT / "tests" / "fake_gpu.cpp"), "-lc10", "-ltorch_cpu"),
        (runtime, "-x", "c++", "-Wl,--no-as-needed", str(os.devnull), "-x", "none", str(driver)),
    ):
        build = [*fake_gpu_flags(), f"-Wl,-soname,{path.name}", "-o", str(path), *args]
        subprocess.run(build, check=True, timeout=300)
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/recordings.py"]
    env = {
        **os.environ,
        "FAKE_GPU": str(tmp_path),
        "LD_PRELOAD": str(driver),
    }  # before torch asks for a GPU
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
