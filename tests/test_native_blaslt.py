"""Matrix products through a cuBLASLt that computes on the host from its descriptors: layouts, strides, batches, biases,
workspace, threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLAGS = ["g++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-I", str(ROOT / "native")]


def test_products(tmp_path: Path) -> None:
    tests, library, program = ROOT / "tests", tmp_path / "libfake.so", tmp_path / "program"
    shared = ("-shared", "-fPIC", "-o", str(library), str(tests / "fake_blaslt.cpp"))
    sources = (str(tests / "native_blaslt.cpp"), str(ROOT / "native" / "core" / "blaslt.cpp"))
    for args in (shared, ("-fsanitize=undefined,address", "-o", str(program), *sources, "-ldl", "-lpthread")):
        subprocess.run([*FLAGS, *args], check=True, timeout=120)
    done = subprocess.run([program, library], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("both\n0 of ")
