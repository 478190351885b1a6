"""plait's operators on a GPU, without one: C++ launches them, and Triton's interpreter runs what
was launched on the memory of the GPU that fake_gpu.cpp plays. See operators.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.fakes import fake_gpu

ROOT = Path(__file__).parents[2]
TRITON = Path(sys.prefix) / "triton"
OPS = ROOT / "plait" / "lib" / "libplait_ops.so"


@pytest.mark.skipif(not OPS.exists(), reason="libplait_ops is not built")
@pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_operators(tmp_path: Path, every: int) -> None:
    """Of every so many cases."""
    driver, runtime = tmp_path / "libcuda.so.1", tmp_path / "libtorch_cuda.so"
    fake_gpu(driver, runtime, "fake_aten.cpp")
    run = ("-m", "pytest", "-q", "-p", "no:xdist", "-x", "triton_launch/tests/operators.py")
    search = os.pathsep.join((str(ROOT), str(TRITON)))
    env = {
        **os.environ,
        "FAKE_GPU": str(tmp_path),
        "EVERY": str(every),
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": search,
    }
    done = warm.run(*run, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr

    # What an interpreter takes, the compiler may refuse: one of each kernel becomes a real one.
    launched: dict[str, list[str]] = {}
    for stub in sorted(tmp_path.glob("*_kernel_*")):
        launched.setdefault(stub.read_text().partition(" ")[0], []).append(stub.read_text())
    assert len(launched) == 13
    signatures = [all_of[-1] for all_of in launched.values()]
    kernels = ROOT / "triton_launch" / "ops" / "kernels.py"
    command = ("-m", "plait.tools.pack", kernels, "-o", tmp_path / "pack", "--signatures")
    env = {**os.environ, "PYTHONPATH": search, "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = warm.run(*command, *signatures, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
