"""Matrix products through a cuBLASLt that computes on the host from its descriptors: layouts,
strides, batches, biases, workspace, threads; and what large ones are cut into."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLAGS = ["g++", "-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-I", str(ROOT / "native")]


def test_products(tmp_path: Path) -> None:
    """Beside the library that torch's own depends on there is another one, under a name that torch
    might ask for."""
    tests, program = ROOT / "tests", tmp_path / "program"
    other, library, torch = (
        tmp_path / f"lib{name}" for name in ("cublasLt.so.13", "fake.so", "torch_cuda.so")
    )
    shared, fake = ("-shared", "-fPIC", "-o"), str(tests / "fake_blaslt.cpp")
    needs = (
        f"-L{tmp_path}",
        "-Wl,--no-as-needed,-rpath,$ORIGIN,-soname,libtorch_cuda.so",
        "-lfake",
    )
    sources = (str(tests / "native_blaslt.cpp"), str(ROOT / "native" / "core" / "blaslt.cpp"))
    for args in (
        (*shared, str(other), "-Wl,-soname,libcublasLt.so.13", fake),
        (*shared, str(library), "-Wl,-soname,libfake.so", fake),
        (*shared, str(torch), "-x", "c++", "/dev/null", *needs),
        ("-fsanitize=undefined,address", "-o", str(program), *sources, "-ldl", "-lpthread"),
    ):
        subprocess.run([*FLAGS, *args], check=True, timeout=120)
    done = subprocess.run(
        [program, other, library, torch], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("both\n0 of ")
    alone = subprocess.run([program, other], capture_output=True, text=True, timeout=120)
    assert alone.returncode == 0, alone.stdout + alone.stderr


@pytest.mark.slow  # under sanitizers
def test_parts(tmp_path: Path) -> None:
    """What a product is cut into adds up to it, with aligned rows, wherever that is to be had."""
    program = tmp_path / "program"
    sources = (
        str(ROOT / "tests" / "native_parts.cpp"),
        str(ROOT / "native" / "core" / "parts.cpp"),
    )
    subprocess.run(
        [*FLAGS, "-fsanitize=undefined,address", "-o", str(program), *sources],
        check=True,
        timeout=120,
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
