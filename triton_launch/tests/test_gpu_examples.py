"""The programs of triton_launch/examples on a GPU: their kernels from a pack and compiled when
launched. Collected where torch has a CUDA device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from triton_launch.tests.test_cmake import EXAMPLES, ROOT, check, run

PYTHONPATH = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs and their pack."""
    folder = tmp_path_factory.mktemp("examples")
    plait = (sys.executable, "-m", "plait")
    found = run(*plait, "--cmake-dir", PYTHONPATH=PYTHONPATH).strip()
    run("cmake", "-S", EXAMPLES, "-B", folder, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={found}")
    run("cmake", "--build", folder)
    major, minor = torch.cuda.get_device_capability()
    wanted = ("--signatures", f"@{EXAMPLES / 'signatures.txt'}", "--arch", str(10 * major + minor))
    run(
        *plait,
        "pack",
        EXAMPLES / "kernels.py",
        "-o",
        folder / "kernels.pack",
        *wanted,
        PYTHONPATH=PYTHONPATH,
    )
    return folder


@pytest.mark.parametrize(
    "program, kernels", [("launch_cpp", ("add", "softmax")), ("launch_c", ("add",))]
)
def test_programs(built: Path, program: str, kernels: tuple[str, ...]) -> None:
    check(run(built / program, built / "kernels.pack"), *kernels)
    check(
        run(built / program, EXAMPLES / "kernels.py", sys.executable, PYTHONPATH=PYTHONPATH),
        *kernels,
    )
