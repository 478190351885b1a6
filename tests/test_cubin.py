"""The pool that compiles Triton kernels, with Triton in a folder of its own and no GPU.

The tests run in a process that has Triton on its path (see test_triton_kernels.py): `python -m tests.test_cubin NAME`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from plait.config import Config
from plait.errors import ToolchainError
from plait.runtime.cubin import Cubin, CubinPool, Job

ROOT = Path(__file__).parent.parent
TRITON = Path(sys.prefix) / "triton"
TEXT = """import triton
import triton.language as tl


@triton.jit
def double(p0, p1, n):
    x = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(p1 + x, tl.load(p0 + x, x < n) * 2, x < n)
"""
JOB = Job("double", TEXT, {"p0": "*fp32", "p1": "*fp32", "n": "i64"}, 90, 4, aligned=(0, 1))


def second_process_compiles_nothing(folder: Path) -> None:
    cfg = Config(cache_dir=str(folder))
    first = CubinPool(1)
    (made,) = first.compile([JOB], cfg)
    assert made.image[:4] == b"\x7fELF" and made.symbol == "double" and made.num_warps == 4
    first.stop()
    second = CubinPool(1)
    assert second.compile([JOB], cfg) == [made]
    assert not second._workers  # nothing was started for it
    assert Cubin.from_bytes(made.to_bytes()) == made


def equal_jobs_are_compiled_once(folder: Path) -> None:
    pool = CubinPool(2)
    one, two, other = pool.compile([JOB, JOB, replace(JOB, num_warps=8)], Config(cache_dir=str(folder)))
    assert one is two and other.num_warps == 8
    assert len(list(folder.glob("cubins/*/*.cubin"))) == 2
    pool.stop()


def alignment_is_used(folder: Path) -> None:
    pool = CubinPool(2)
    aligned, free = pool.compile([JOB, replace(JOB, aligned=())], Config(cache_dir=str(folder)))
    assert aligned.image != free.image
    pool.stop()


def refused_source(folder: Path) -> None:
    pool = CubinPool(1)
    cfg = Config(cache_dir=str(folder))
    with pytest.raises(ToolchainError, match=r"refused kernel double: [\s\S]*nothing_like_it"):
        pool.compile([replace(JOB, text=TEXT.replace("* 2", "* nothing_like_it"))], cfg)
    pool.compile([JOB], cfg)  # the worker goes on
    pool.stop()


def killed_worker_is_replaced(folder: Path) -> None:
    pool = CubinPool(1)
    pool.start()
    os.kill(pool._workers[0].process.pid, signal.SIGKILL)
    (made,) = pool.compile([JOB], Config(cache_dir=str(folder)))
    assert made.symbol == "double"
    pool.stop()


def stopped_pool_starts_again(folder: Path) -> None:
    pool = CubinPool(1)
    pool.compile([JOB], Config(cache_dir=str(folder / "a")))
    pool.stop()
    pool.compile([JOB], Config(cache_dir=str(folder / "b")))
    pool.stop()


def no_orphans(folder: Path) -> None:
    """A process that is killed leaves no worker behind, even while a forked child holds its pipes."""
    code = (
        "import os, sys, time\n"
        "from plait.runtime.cubin import pool\n"
        "pool().n_workers = 1\n"
        "pool().start()\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(30); os._exit(0)\n"
        "print(pool()._workers[0].process.pid, child, flush=True)\n"
        "time.sleep(30)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker, child = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    try:
        deadline = time.monotonic() + 20
        while _runs(worker):
            assert time.monotonic() < deadline, "the worker outlived its parent"
            time.sleep(0.1)
    finally:
        os.kill(child, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


CASES = {
    f.__name__: f
    for f in (
        second_process_compiles_nothing, equal_jobs_are_compiled_once, alignment_is_used, refused_source,
        killed_worker_is_replaced, stopped_pool_starts_again, no_orphans,
    )
}  # fmt: skip


@pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")
@pytest.mark.parametrize("name", CASES)
def test_pool(name: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(TRITON), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_cubin", name, str(tmp_path)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))
