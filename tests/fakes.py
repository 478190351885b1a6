"""Libraries that give torch and the driver a GPU that is not there, compiled once for all tests.

An object file is kept below pytest's cache by what it is made of: a change of its source, of a
header, of the flags or of torch compiles it anew.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
TORCH = Path(torch.__file__).parent
_COMPILE = "g++ -std=c++20 -O0 -Wall -fPIC".split()
_LINK = ["g++", "-shared", f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}"]


def _headers() -> bytes:
    found = sorted(p for folder in ("native", "tests") for p in (ROOT / folder).rglob("*.h"))
    return b"".join(p.read_bytes() for p in found)


def compiled(name: str) -> Path:
    """tests/NAME as an object file."""
    source = ROOT / "tests" / name
    includes = (ROOT / "native", TORCH / "include", TORCH / "include/torch/csrc/api/include")
    command = [*_COMPILE, *(f"-I{p}" for p in includes)]
    told = f"{command} {torch.__version__}".encode()
    key = hashlib.sha256(told + source.read_bytes() + _headers()).hexdigest()[:16]
    folder = Path(os.environ["PLAIT_CACHE_DIR"]) / "fakes"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{source.stem}-{key}.o"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may do the same
            part = Path(own) / made.name
            subprocess.run([*command, "-c", "-o", part, source], check=True, timeout=300)
            part.replace(made)
    return made


def fake_gpu(driver: Path, runtime: Path, *more: str) -> None:
    """Writes the library that plays torch's GPU, with others of tests/ in it, and the one by whose
    name torch's CUDA or HIP part is looked for."""
    objects = [compiled(name) for name in ("fake_gpu.cpp", *more)]
    empty = ("-x", "c++", "-Wl,--no-as-needed", os.devnull, "-x", "none")
    for path, args in (
        (driver, (*objects, "-lc10", "-ltorch_cpu")),
        (runtime, (f"-L{driver.parent}", *empty, driver)),
    ):
        link = [*_LINK, f"-Wl,-soname,{path.name}", "-o", path, *args]
        subprocess.run(link, check=True, timeout=300)
