"""The native core (regions, arenas) as a C++ program of its own: threads given and refused,
failures, memory bounds."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_core(tmp_path: Path):
    core = ROOT / "native" / "core"
    sources = [ROOT / "tests" / "native_core.cpp", core / "region.cpp", core / "arena.cpp"]
    program = tmp_path / "native_core"
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-g1",
        "-pthread",
        "-fsanitize=undefined",
        "-I",
        str(ROOT / "native"),
    ]
    subprocess.run([*command, "-o", str(program), *map(str, sources)], check=True, timeout=120)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr
