"""The executor built with AddressSanitizer and UBSan, beside the plain one.

`python -m tests.sanitized MODULE ARGUMENTS` runs a module with it, in the environment that
`environment(True)` gives.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "sanitized"
FLAGS = (
    "-O1 -g1 -fsanitize=address,undefined -fno-sanitize=vptr,pointer-overflow "
    "-fno-sanitize-recover=undefined"
)
OPTIONS = {
    "ASAN_OPTIONS": (
        "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=256:quarantine_size_mb=32"
    ),
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def build() -> Path:
    """The module; only what has changed is compiled (all of it takes some minutes)."""
    path = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if not (FOLDER / "build.ninja").exists():
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(FOLDER),
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Sanitized",
        ]
        configure += [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_CXX_FLAGS_SANITIZED={FLAGS}",
        ]
        subprocess.run(configure, check=True, env=path, stdout=subprocess.DEVNULL)
    subprocess.run(
        ["cmake", "--build", str(FOLDER), "--target", "_native", "-j", "2"], check=True, env=path
    )
    return next((FOLDER / "native").glob("_native.*.so"))


def environment(sanitized: bool) -> dict[str, str]:
    """Of a process that runs this module."""
    if not sanitized:
        return dict(os.environ)
    found = [_library(name) for name in ("libasan.so", "libubsan.so")]
    return {**os.environ, **OPTIONS, "LD_PRELOAD": ":".join(found), "PLAIT_SANITIZED": str(build())}


def _library(name: str) -> str:
    done = subprocess.run(
        ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def main() -> None:
    if path := os.environ.get("PLAIT_SANITIZED"):
        import torch  # noqa: F401 - its libraries have to be in the process before the module

        spec = importlib.util.spec_from_file_location("plait._native", path)
        assert spec is not None and spec.loader is not None
        module = sys.modules["plait._native"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
