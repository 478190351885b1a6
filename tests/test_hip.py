"""Kernels and programs for AMD's GPUs, without one: what the driver is told against its own header
and against what code objects say of their kernels, and results against eager."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from plait.config import Config
from plait.kernel.triton.dialects import AMD, DIALECTS, GPUS, NVIDIA, gpu_of
from plait.kernel.triton.target import TritonTarget
from plait.runtime.cubin import Gpu
from tests.fakes import fake_gpu
from tests.gpu_rows import kernel_of
from tests.kernel_tools import emitted
from tests.test_native_cuda import DRIVER, FLAGS
from tests.test_triton_kernels import ROOT, TRITON, needs_triton, run

HEADERS = TRITON / "triton" / "backends" / "amd" / "include"
COMPILE = """
import sys
from dataclasses import replace
from pathlib import Path
from plait.config import Config
from plait.kernel.triton.dialects import GPUS
from plait.runtime.cubin_pool import CubinPool
from tests.test_cubin import JOB

folder, *names = sys.argv[1:]
pool = CubinPool(2)
jobs = [replace(JOB, gpu=GPUS[name]) for name in names]
for name, made in zip(names, pool.compile(jobs, Config(cache_dir=folder))):
    Path(folder, name).write_bytes(made.image)
    print(name, made.symbol, made.num_warps, made.shared)
pool.stop()
"""
SAID = """\
{gpu}
error: double: argument 1 has no address (1)
error: double: a grid of 2147483648 programs is more than the device takes
error: double: a block of {twice} threads, it was compiled for {threads} (1)
error: double: needs 70000 bytes of shared memory, the device has 65536
error: missing: no kernel missing (1)
error: double: no ELF file (1)
1
"""
WORDS = "global_buffer 4096 global_buffer 8192 by_value 1000 global_buffer 0 global_buffer 0"
DONE = f"""\
launch double 8 1 1 {{threads}} 1 1 0 stream 5: {WORDS}
node double 3 1 1 {{threads}} 1 1 0 stream 22: {WORDS}
unload
launch together double 1 1 1 {{threads}} 1 1 0 stream 0: {WORDS}
unload
unload
unload
unload
"""


def fake_driver(folder: Path) -> Path:
    """The library, in a folder of its own."""
    path = folder / "libamdhip64.so"
    source = str(ROOT / "tests" / "fake_hip.cpp")
    args = ("-isystem", str(HEADERS), "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o")
    subprocess.run([*FLAGS, *args, str(path), source], check=True, timeout=120)
    return path


def test_every_dialect_has_all_instructions() -> None:
    """But for those of floats of 8 bits and of TF32, which none uses that has no GPU with them."""
    for d in DIALECTS.values():
        for gpu in map(d.gpu, d.known):
            found = d.instructions(gpu)
            lacks = () if d.first_float8 is not None else ("e4m3", "e5m2")
            known = {
                n for n in NVIDIA.instructions(GPUS["sm_90"]) if n[-4:] not in (*lacks, "tf32")
            }
            assert {*found} - {"p_tf32"} == known
            assert ("p_tf32" in found) == (d is NVIDIA and gpu.arch >= 80)
    assert not any("asm" in text for text in AMD.instructions(GPUS["gfx942"]).values())


def test_a_device_may_be_newer_than_plait(monkeypatch: pytest.MonkeyPatch) -> None:
    """And torch for ROCm says "cuda", and which GPU it is."""
    found = {}
    for name in ("sm_90", "sm_99", "gfx942", "gfx1151"):
        monkeypatch.setattr("plait.kernel.triton.dialects.gpu_name", lambda device, name=name: name)
        found[name] = gpu_of("cuda:0", Config())
    assert found == {
        "sm_90": GPUS["sm_90"], "sm_99": Gpu("cuda", 99, 32, "cubin"),
        "gfx942": Gpu("hip", "gfx942", 64, "hsaco"), "gfx1151": Gpu("hip", "gfx1151", 32, "hsaco"),
    }  # fmt: skip
    monkeypatch.undo()
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert gpu_of("cuda:0", Config()) == GPUS["gfx942"]


@pytest.mark.parametrize("gpu, warps", [("gfx942", 8), ("gfx1100", 16), ("sm_80", 16)])
def test_a_block_has_as_many_threads_whatever_a_warp_is(gpu: str, warps: int) -> None:
    kernel = kernel_of("softmax", 4096)
    (job,) = emitted(TritonTarget(), [kernel], Config(gpu_arch=gpu)).units
    assert (job.num_warps, job.gpu.name, job.early) == (warps, gpu, False)


@needs_triton
def test_the_driver_is_told_what_it_wants(tmp_path: Path) -> None:
    """Of every GPU that has a name, the code object is its own."""
    names = run("-c", COMPILE, str(tmp_path), *AMD.known).splitlines()
    assert names == [f"{name} double 4 0" for name in AMD.known]
    driver, program, log = fake_driver(tmp_path), tmp_path / "program", tmp_path / "log"
    sources = (ROOT / "tests" / "native_hip.cpp", *DRIVER)
    flags = ("-fsanitize=undefined", "-o", str(program))
    subprocess.run([*FLAGS, *flags, *map(str, sources)], check=True, timeout=120)
    for name, gpu in zip(AMD.known, map(AMD.gpu, AMD.known), strict=True):
        log.unlink(missing_ok=True)
        done = subprocess.run(
            [program, driver, tmp_path / name, "4", "0"],
            env={**os.environ, "FAKE_HIP_LOG": str(log), "FAKE_HIP_ARCH": name},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        threads = 4 * gpu.lanes
        assert done.stdout == SAID.format(gpu=name, threads=threads, twice=2 * threads)
        assert log.read_text() == DONE.format(threads=threads)


@needs_triton
@pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None,
    reason="torch has a GPU of its own",
)
@pytest.mark.parametrize("gpu", ["gfx942", pytest.param("gfx1100", marks=pytest.mark.slow)])
def test_programs_are_launched(gpu: str, tmp_path: Path) -> None:
    """Packages are written, loaded and run through a driver that checks each launch."""
    env = {"PLAIT_CACHE_DIR": str(tmp_path / "cache")}
    run("-m", "tests.hip_programs", "write", str(tmp_path), gpu, **env)
    torch_gpu, runtime = tmp_path / "libfakegpu.so", tmp_path / "libtorch_hip.so"
    fake_gpu(torch_gpu, runtime)
    env |= {"LD_PRELOAD": f"{torch_gpu} {fake_driver(tmp_path)}", "FAKE_TORCH": str(runtime)}
    env |= {"FAKE_HIP_ARCH": gpu, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TRITON)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hip_programs", "run", str(tmp_path)],
        env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 programs, 12 kernels launched" in done.stdout
