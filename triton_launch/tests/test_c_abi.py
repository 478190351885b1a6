"""Triton kernels from C (plait/triton_c.h): a C program's launches against a driver that writes
down what it is told, and the same library called from Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.runtime.cubin import Cubin, pack
from triton_launch.tests.test_jit import HERE, INCLUDES, LIBRARY, ROOT, SOURCES, build

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="libplait_core is not built")

# Function, signature, and of each kernel its specialization, options and the bytes of its
# parameters.
KINDS = "*fp32:D,i32,u64:D,fp32,u1,=None,(i32:D,(fp32,=1),u1),=@twice,=fp16,='a%20b',=5"
KINDS_BYTES = "10 0 8 4 8 4 1 4 4 1"
OPTIONS = "a=0.5;b='x';enable_fp_fusion=False;launch_pdl=True;num_warps=8;z=None"
KERNELS = {
    "kinds": (
        "enable_fp_fusion=True;num_warps=4\np|||\ni|||\nn|||\nf|||\nb|||\nnone|||\nt|||\nfn||c|\nkind||c|\nmode||c|\nc|||",
        {f"{KINDS}|": KINDS_BYTES, f"{KINDS}|{OPTIONS}": KINDS_BYTES},
    ),
    "one": ("num_warps=4\nx|||", {"*fp32:D|": "3 0", "i32|": "3 0 4"}),
    "scratch": ("num_warps=4\nx|||", {"*fp32:D|": "3 0"}),
    "two": ("num_warps=4\nx|||", {"*fp32:D|": "3 0", "*fp32|": "3 0"}),
    "tuned": (
        "num_warps=4\nx|||\nn|||\nBLOCK||c|\n#s\n@autotune|n|x||\n+BLOCK=64\n+BLOCK=128;num_warps=8",
        {"*fp32:D,i32:D,=64|": "4 0 8 4", "*fp32:D,i32:D,=128|num_warps=8": "4 0 8 4"},
    ),
    "described": ("\nd|||", {"tensordesc<fp32[16,32]>|": "12 0 8 8 8 8 8 1 4 4 8 8"}),
    "texts": (
        "\nx|||\nmode||c|",
        {"fp32,='a'|": "3 0 4", "fp32,='b'|": "3 0 4", "(i32),='a'|": "3 0 4"},
    ),
}
BOUND = """\
fine
fine
enter one one *fp32:D warps 4 grid 7 on 3
fine
fine
fine
fine
2 a bound argument may only be set to a value of its own kind, and to no text or tuple: \
bind again [] [] -1
2 there is no argument of that index [] [] -1
fine
fine
fine
fine
allocate 700 by 128 on 0
fine
fine
fine
one *fp32:D
scratch *fp32:D
29
fine
one 29
fine
fine
fine
one *fp32:D
scratch *fp32:D
two *fp32:D
two *fp32
fine
fine
fine
1 4 4 [two *fp32:D, before]
"""
TUNED = """\
fine
1 kernel tuned: no configuration is known for this key: \
a pack's table may have 'tuned @tuned0 n=1024;@types=(fp32);@gpu='Fake%20GPU' -> BLOCK=64'
  key: n=1024;@types=(fp32);@gpu='Fake%20GPU' [tuned] [] -1
fine
1 kernel tuned: @triton.autotune resets or restores x, whose length is not known: \
pass a dense tensor or plait::triton::Pointer{data, dtype, nbytes} [tuned] [] -1
fine
fine
fine
fine
1 kernel tuned: its grid's function failed: kernel tuned: a grid asks for nothing, \
which is no parameter
  specialization: *fp32:D,i32:D,=128 [tuned] [] -1
2 there is no such policy [] [] -1
"""
DESCRIBED = """\
fine
1 kernel described: argument 0 (d), a tensor descriptor: its last stride is not 1
  specialization: tensordesc<fp32[16,32]> [described] [tensordesc<fp32[16,32]>] 0
2 a descriptor is NULL, or has a field that means nothing [] [] -1
2 a descriptor is NULL, or has a field that means nothing [] [] -1
"""
ERRORS = """\
fine
1 kernel nowhere: it is not in {pack} [nowhere] [] -1
1 kernel (all of a pack): cannot read kernel file /nowhere [(all of a pack)] [] -1
2 a text, or where a result goes, is NULL [] [] -1
2 a text, or where a result goes, is NULL [] [] -1
2 the kernel, the configuration or the arguments are NULL [] [] -1
2 the kernel, the configuration or the arguments are NULL [] [] -1
2 the kernel, the configuration or the arguments are NULL [] [] -1
1 kernel one: argument 0 (x) is missing [one] [] 0
1 kernel one: it takes 1 arguments [one] [] -1
2 too many arguments [] [] -1
fine
1 kernel one: there is no parameter y [one] [] -1
2 an argument has no known dtype [] [] -1
2 an argument is of no known kind [] [] -1
2 an argument has a field that means nothing [] [] -1
2 a tuple has more elements than follow it [] [] -1
2 an argument inside a tuple has a name [] [] -1
2 an argument's text is NULL [] [] -1
1 kernel one: argument 0 (x): a string, dtype or function is passed only to a tl.constexpr \
parameter [one] [] 0
2 the configuration is of no known version [] [] -1
2 a text, or where a result goes, is NULL [] [] -1
2 an option is None, a number, a bool or a text [] [] -1
2 a text, or where a result goes, is NULL [] [] -1
2 a text, or where a result goes, is NULL [] [] -1
2 the options are NULL [] [] -1
2 a text, or where a result goes, is NULL [] [] -1
2 a text, or where a result goes, is NULL [] [] -1
fine
2 the nodes that it is behind are NULL [] [] -1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the driver, the pack and the program."""
    folder = tmp_path_factory.mktemp("c")
    build(
        "-shared", "-fPIC", "-o", folder / "libcuda.so.1", ROOT / "tests" / "fake_cuda.cpp", "-ldl"
    )
    kernels = {}
    for function, (_, compiled) in KERNELS.items():
        scratch = (100, 128) if function == "scratch" else (0, 1)
        for key, image in compiled.items():
            n_warps = 8 if key.endswith("num_warps=8") else 4
            cubin = Cubin(
                f"{function} {image}".encode(),
                function,
                n_warps,
                1,
                0,
                scratch,
                (0, 1),
                False,
                False,
            )
            kernels[f"{function}|{key}|90"] = cubin
    (folder / "kernels.pack").write_bytes(
        pack(kernels, {f: text for f, (text, _) in KERNELS.items()})
    )
    rpath = f"-Wl,-rpath,{LIBRARY.parent}"
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", *INCLUDES]
    command += ["-o", folder / "c_abi", HERE / "c_abi.c", LIBRARY, rpath, "-pthread"]
    subprocess.run(command, check=True, timeout=120)
    return folder


def run(folder: Path, case: str, **more: str) -> str:
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), **more}
    command = [folder / "c_abi", folder / "kernels.pack", case]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "ThreadSanitizer" not in done.stderr, done.stdout + done.stderr
    return done.stdout


def logged(folder: Path, case: str) -> tuple[str, list[str]]:
    """What the program says, and what the driver was told."""
    log = folder / f"log-{case}"
    said = run(folder, case, FAKE_CUDA_LOG=str(log), FAKE_CUDA_WORDS="1")
    return said, [line for line in log.read_text().splitlines() if not line.startswith("retain")]


def test_kinds_of_arguments(folder: Path) -> None:
    said, done = logged(folder, "kinds")
    assert said == "fine\n" * 4
    words = "10 fffffffd 8000000000000000 40200000 1 20 3fc00000 0 0 0"
    head = "launch kinds grid 2 3 4 block 128 1 1 shared 0 stream 5 extra 0 first 16"
    assert done == [f"{head} {words}"] * 2


def test_bound_launches_hooks_and_scratch_memory(folder: Path) -> None:
    said, done = logged(folder, "bound")
    assert said == BOUND
    head = "grid 7 1 1 block 128 1 1 shared 0 stream"
    assert done == [
        f"launch one {head} 3 extra 0 first 32 20 0 0",
        f"launch one {head} 4 extra 0 first 32 20 0 0",
        f"launch one {head} 4 extra 0 first 64 40 0 0",
        "add to 9 behind 1 3: one grid 7 1 1 block 128 first 64",
        f"node 77 of 11: one {head[:-7]} extra 0 kernel 0 context 0 first 64",
        f"launch scratch {head} 0 extra 0 first 32 20 800 0",
        f"launch one {head} 0 extra 0 first 32 20 0 0",
    ]  # fmt: skip


def test_what_decorators_choose(folder: Path) -> None:
    said, done = logged(folder, "tuned")
    assert said == TUNED
    launched = [" ".join(line.split()[3:8]) for line in done if line.startswith("launch tuned ")]
    few, many = "16 1 1 block 128", "8 1 1 block 256"
    assert len(launched) > 8 and {*launched[:-3]} == {few, many} and launched[-3:] == [many] * 3
    assert (
        done[-1]
        == "launch tuned grid 8 1 1 block 256 1 1 shared 0 stream 6 extra 0 first 16 10 400 0 0"
    )
    assert "fill 0 4096 on 5" in done  # what is reset is as long as it was said to be


def test_descriptors(folder: Path) -> None:
    said, done = logged(folder, "described")
    assert said == DESCRIBED
    words = "200 64 40 50 1 1 64 40 50 1 0 0"
    assert done == [
        f"launch described grid 1 1 1 block 128 1 1 shared 0 stream 0 extra 0 first 512 {words}"
    ]


def test_errors(folder: Path) -> None:
    said, done = logged(folder, "errors")
    assert said == ERRORS.format(pack=folder / "kernels.pack")
    assert [line.split()[1] for line in done] == ["one"]


def test_threads_allocate_nothing_on_a_hit(folder: Path) -> None:
    assert run(folder, "threads") == "0 0 0 0\n"


@pytest.mark.slow
def test_threads_race_for_nothing(folder: Path, tmp_path: Path) -> None:
    command = ["gcc", "-fsanitize=thread", "-Dmalloc=counted", *INCLUDES, "-c"]
    subprocess.run([*command, "-o", tmp_path / "c.o", HERE / "c_abi.c"], check=True, timeout=120)
    build("-O0", "-fsanitize=thread", "-o", tmp_path / "c_abi", tmp_path / "c.o", *SOURCES)
    for name in ("libcuda.so.1", "kernels.pack"):
        (tmp_path / name).symlink_to(folder / name)
    assert run(tmp_path, "threads") == "0 0 0 0\n"


IN_PYTHON = """\
import ctypes, sys

class Argument(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint8) for n in ("kind", "dtype", "constant", "varies")] + [
        ("reserved", ctypes.c_uint8 * 4), ("name", ctypes.c_char_p), ("value", ctypes.c_uint64),
        ("n", ctypes.c_uint64)]

class Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_uint32), ("cooperative", ctypes.c_uint8), ("pdl", ctypes.c_uint8),
        ("reserved", ctypes.c_uint16), ("grid", ctypes.c_int64 * 3), ("stream", ctypes.c_void_p),
        ("options", ctypes.c_int16 * 4), ("others", ctypes.c_void_p), ("grid_of", ctypes.c_void_p),
        ("user", ctypes.c_void_p)]

class Error(ctypes.Structure):
    _fields_ = [
        (n, ctypes.c_char_p) for n in ("message", "kernel", "specialization", "traceback")
    ] + [("argument", ctypes.c_int32)]

library = ctypes.CDLL(sys.argv[1])
library.plait_triton_last_error.restype = ctypes.POINTER(Error)
kernel = ctypes.c_void_p()
assert library.plait_triton_abi() >= 1
assert library.plait_triton_from_pack(sys.argv[2].encode(), b"one", ctypes.byref(kernel)) == 0
config = Config(ctypes.sizeof(Config), grid=(6, 1, 1), stream=2)
argument = Argument(kind=1, dtype=12, name=b"x", value=48)
launch = library.plait_triton_launch
assert launch(kernel, ctypes.byref(config), ctypes.byref(argument), ctypes.c_size_t(1)) == 0
argument.value = 4
assert launch(kernel, ctypes.byref(config), ctypes.byref(argument), ctypes.c_size_t(1)) == 1
error = library.plait_triton_last_error().contents
print(error.message.decode(), error.kernel, error.specialization, error.argument)
"""


def test_from_python(folder: Path) -> None:
    log, packed = folder / "log-python", folder / "kernels.pack"
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_LOG": str(log)}
    command = [sys.executable, "-c", IN_PYTHON, LIBRARY, packed]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    why = (
        f"kernel one: not in {packed} for sm_90: pack it with 'one *fp32' and --arch 90\n  "
        "specialization: *fp32"
    )
    assert done.stdout == f"{why} b'one' b'*fp32' -1\n"
    assert log.read_text().endswith(
        "launch one grid 6 1 1 block 128 1 1 shared 0 stream 2 extra 0 first 48\n"
    )
