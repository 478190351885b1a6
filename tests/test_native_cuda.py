"""The kernel launcher against a driver that writes down what it is told; its structures against
NVIDIA's header."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEADER = Path(sys.prefix) / "triton" / "triton" / "backends" / "nvidia" / "include" / "cuda.h"
CORE = ROOT / "native" / "core"
DRIVER = [CORE / "cuda.cpp", *sorted((CORE / "drivers").glob("*.cpp"))]
"""The driver's sources."""
FLAGS = ["g++", "-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-I", str(ROOT / "native")]

SAID = """\
error: no CUDA driver: /nowhere/libcuda.so: cannot open shared object file: \
No such file or directory
error: plain: a grid of 2147483648 programs is more than the device takes
error: plain: out of luck (719)
error: all: a grid of 268435456 programs is more than the device takes
error: all: needs 232960 bytes of shared memory, the device has 232448
error: missing: named symbol not found (500)
error: short: the compiled kernel has not the 3 parameters that plait launches it with
error: long: the compiled kernel has not the 3 parameters that plait launches it with
error: garbage: out of luck (200)
"""
DONE = """\
launch plain grid 7 1 1 block 128 1 1 shared 0 stream 5 extra 0 first 42
launch plain grid 1 1 1 block 128 1 1 shared 0 stream 13 extra 0 first 42
unload plain
set all 9 100
set all 8 231936
set all 14 1
launch all grid 48 1 1 block 256 1 1 shared 100000 stream 0 extra 0 first 42 \
attribute 6 1 0 0 attribute 2 1 0 0 attribute 4 16 1 1 attribute 5 1 0 0
node 22 of 21: all grid 48 1 1 block 256 1 1 shared 100000 extra 0 kernel 0 context 0 first 42
set all 9 100
set all 8 231936
set all 14 1
launch all grid 48 1 1 block 256 1 1 shared 100000 stream 0 extra 0 first 42 \
attribute 2 1 0 0 attribute 4 16 1 1 attribute 5 1 0 0
unload all
unload all
unload other
unload short
unload long
unload all
"""


def build(*args: str) -> None:
    subprocess.run([*FLAGS, *args], check=True, timeout=120)


def test_launches(tmp_path: Path) -> None:
    tests = ROOT / "tests"
    driver, program, log = tmp_path / "libfake.so", tmp_path / "program", tmp_path / "log"
    build("-shared", "-fPIC", "-o", str(driver), str(tests / "fake_cuda.cpp"))
    sources = (tests / "native_cuda.cpp", *DRIVER)
    build("-fsanitize=undefined", "-o", str(program), *map(str, sources))
    done = subprocess.run(
        [program, driver],
        env={**os.environ, "FAKE_CUDA_LOG": str(log)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == SAID
    assert log.read_text() == DONE


@pytest.mark.skipif(
    not HEADER.exists(), reason="no Triton beside the environment, which brings cuda.h"
)
def test_structures_are_the_drivers(tmp_path: Path) -> None:
    fields = {
        "gridDimX": "grid_x", "gridDimZ": "grid_z", "blockDimX": "block_x", "blockDimZ": "block_z",
        "sharedMemBytes": "shared", "hStream": "stream", "attrs": "attributes",
        "numAttrs": "n_attributes",
    }  # fmt: skip
    ids = {
        "COOPERATIVE": "cooperative", "CLUSTER_DIMENSION": "cluster_dimension",
        "CLUSTER_SCHEDULING_POLICY_PREFERENCE": "cluster_policy",
        "PROGRAMMATIC_STREAM_SERIALIZATION": "serialization",
    }  # fmt: skip
    sides = {
        "XInBytes": "x",
        "MemoryType": "memory_type",
        "Device": "device",
        "Array": "array",
        "Height": "height",
    }
    lines = [
        f'#include "{HEADER}"',
        '#include "core/cuda.h"',
        "#include <cstddef>",
        "using namespace plait::cuda;",
        "static_assert(sizeof(Config) == sizeof(CUlaunchConfig));",
        "static_assert(sizeof(NodeParams) == sizeof(CUDA_KERNEL_NODE_PARAMS_v2));",
        "static_assert(offsetof(NodeParams, parameters) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, "
        "kernelParams));",
        "static_assert(sizeof(CopyParams) == sizeof(CUDA_MEMCPY3D));",
        "static_assert(offsetof(CopyParams, nbytes) == offsetof(CUDA_MEMCPY3D, WidthInBytes));",
        "static_assert(offsetof(CopyParams, depth) == offsetof(CUDA_MEMCPY3D, Depth));",
        *(
            f"static_assert(offsetof(CopyParams, {side}) + offsetof(CopyParams::Side, {b}) == "
            f"offsetof(CUDA_MEMCPY3D, {cuda}{a}));"
            for side, cuda in (("from", "src"), ("to", "dst"))
            for a, b in sides.items()
        ),
        "static_assert(sizeof(Attribute) == sizeof(CUlaunchAttribute));",
        "static_assert(offsetof(Attribute, value) == offsetof(CUlaunchAttribute, value));",
        *(
            f"static_assert(offsetof(Config, {b}) == offsetof(CUlaunchConfig, {a}));"
            for a, b in fields.items()
        ),
        *(
            f"static_assert(int(Attribute::{b}) == int(CU_LAUNCH_ATTRIBUTE_{a}));"
            for a, b in ids.items()
        ),
        "static_assert(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == 8);",
        "static_assert(CU_CLUSTER_SCHEDULING_POLICY_SPREAD == 1);",
    ]
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(lines) + "\n")
    build("-fsyntax-only", str(source))
