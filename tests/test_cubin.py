"""The pool that compiles Triton kernels, with Triton in a folder of its own and no GPU.

The tests run in a process that has Triton on its path (see test_triton_kernels.py): `python -m
tests.test_cubin NAME`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from plait.config import Config
from plait.errors import CacheWarning, RefusedKernel, ToolchainError
from plait.runtime import cubin_pool, triton_worker
from plait.runtime.cubin import SM_90, Cubin, Gpu, Job
from plait.runtime.cubin_pool import CubinPool, pool, start_early
from plait.runtime.store import CUBINS, Store
from plait.runtime.toolchain import ToolchainFailed

ROOT = Path(__file__).parent.parent
TRITON = Path(sys.prefix) / "triton"
TEXT = """import triton
import triton.language as tl


@triton.jit
def double(p0, p1, n):
    x = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(p1 + x, tl.load(p0 + x, x < n) * 2, x < n)
"""
JOB = Job("double", TEXT, {"p0": "*fp32", "p1": "*fp32", "n": "i64"}, SM_90, 4, aligned=(0, 1))


def second_process_compiles_nothing(folder: Path) -> None:
    cfg = Config(cache_dir=str(folder))
    first = CubinPool(1)
    (made,) = first.compile([JOB], cfg)
    assert made.image[:4] == b"\x7fELF" and made.symbol == "double" and made.num_warps == 4
    first.stop()
    second = CubinPool(1)
    assert second.compile([JOB], cfg) == [made]
    assert not second._threads  # nothing was started for it
    assert Cubin.from_bytes(made.to_bytes()) == made


def equal_jobs_are_compiled_once(folder: Path) -> None:
    pool = CubinPool(2)
    jobs = [JOB, JOB, replace(JOB, num_warps=8), replace(JOB, early=True)]
    one, two, other, early = pool.compile(jobs, Config(cache_dir=str(folder)))
    assert one is two and other.num_warps == 8 and early.pdl and not one.pdl
    assert len(list(folder.glob("cubins/*/*.cubin"))) == 3
    pool.stop()


def alignment_is_used(folder: Path) -> None:
    pool = CubinPool(2)
    whole = replace(JOB, text=TEXT.replace(", x < n", ""), num_warps=1)  # four elements a thread
    aligned, free = pool.compile([whole, replace(whole, aligned=())], Config(cache_dir=str(folder)))
    assert aligned.image != free.image
    pool.stop()


def subnormal_numbers_are_kept(folder: Path) -> None:
    """By the functions of Triton's library: `floor(-1e-45)` is -1, not 0."""
    plain = (
        "tl.floor(v)",
        "tl.ceil(v)",
        "libdevice.log1p(v)",
        "libdevice.atan2(v, v)",
        "libdevice.rsqrt(v)",
    )
    own = {
        "libdevice.fmod(v, 3.0)": {"rcp.approx.ftz.f32"},
        "libdevice.exp(v)": {"ex2.approx.ftz.f32"},
    }  # scaled
    library = "from triton.language.extra.cuda import libdevice\n\n\n@triton.jit"
    text = TEXT.replace("@triton.jit", library).replace(
        "tl.store(", "v = tl.load(p0 + x)\n    tl.store("
    )
    jobs = [
        replace(
            JOB,
            text=text.replace("tl.load(p0 + x, x < n) * 2", call),
            gpu=Gpu("cuda", 90, 32, "ptx"),
        )
        for call in (*plain, *own)
    ]
    pool = CubinPool(2)
    made = pool.compile(jobs, Config(cache_dir=str(folder)))
    for call, kernel in zip((*plain, *own), made, strict=True):
        found = set(
            re.findall(r"[a-z0-9.]+\.ftz\.[a-z0-9.]+", kernel.image.decode(errors="ignore"))
        )
        assert found <= own.get(call, set()), (call, found)
    pool.stop()


def ranks_share_jobs(folder: Path) -> None:
    """What one process compiles is no work for the others, who do the rest meanwhile."""
    cfg, compiled = Config(cache_dir=str(folder)), list[str]()
    jobs = [replace(JOB, text=f"{TEXT}# {k}\n") for k in range(6)]
    compile_, pools = cubin_pool._Process.compile, [CubinPool(1) for _ in range(3)]

    def counted(process: cubin_pool._Process, task: cubin_pool._Task) -> Cubin:
        compiled.append(task.key)
        return compile_(process, task)

    with (
        patch.object(cubin_pool._Process, "compile", counted),
        Store.of(cfg, CUBINS).turn(jobs[0].key()),  # as another process that is at this job
    ):
        results = [p.submit(jobs, cfg) for p in pools]
        others = [[r.result(timeout=60) for r in of_one[1:]] for of_one in results]
        assert others[0] == others[1] == others[2] and not any(r[0].done() for r in results)
        pools[2].stop()  # it waits no longer: whoever waits for it is told
        with pytest.raises(ToolchainError, match="the pool was stopped"):
            results[2][0].result(timeout=60)
        assert len(compiled) == 6
    with patch.object(cubin_pool._Process, "compile", counted):
        first, second = (of_one[0].result(timeout=60) for of_one in results[:2])
    assert first == second and sorted({*compiled}) == sorted(compiled[:5] + [jobs[0].key()])
    assert len(compiled) == 7
    for p in pools:
        p.stop()


def refused_source(folder: Path) -> None:
    pool = CubinPool(1)
    cfg = Config(cache_dir=str(folder))
    with pytest.raises(ToolchainError, match=r"refused kernel double: [\s\S]*nothing_like_it"):
        pool.compile([replace(JOB, text=TEXT.replace("* 2", "* nothing_like_it"))], cfg)
    pool.compile([JOB], cfg)  # the worker goes on
    pool.stop()


def killed_worker_is_replaced(folder: Path) -> None:
    pool = CubinPool(1)
    pool.compile([JOB], Config(cache_dir=str(folder)))
    assert pool._server is not None
    (worker,) = _children(pool._server.process.pid)
    os.kill(worker, signal.SIGKILL)
    (made,) = pool.compile([replace(JOB, num_warps=8)], Config(cache_dir=str(folder)))
    assert made.num_warps == 8 and not _runs(worker)  # its server may not have waited for it yet
    pool.stop()


def killed_server_is_replaced(folder: Path) -> None:
    pool = CubinPool(1)
    pool.compile([JOB], Config(cache_dir=str(folder)))
    assert pool._server is not None
    pool._server.process.kill()
    scratch = pool._server.folders
    (made,) = pool.compile([replace(JOB, num_warps=8)], Config(cache_dir=str(folder)))
    assert made.num_warps == 8 and not any(map(os.path.exists, scratch))
    pool.stop()


def deadly_job_is_tried_twice(folder: Path) -> None:
    """A source that ends whoever reads it is an error; what ended a worker once only is compiled by
    the next."""
    pool = CubinPool(1)
    cfg = Config(cache_dir=str(folder))
    with pytest.raises(ToolchainError, match="died twice"):
        pool.compile([replace(JOB, text="import os\nos._exit(1)\n")], cfg)
    mark = folder / "mark"
    once = (
        f"import os, pathlib\nmark = pathlib.Path({str(mark)!r})\nif not mark.exists(): "
        "mark.touch(), os._exit(1)\n"
    )
    (made,) = pool.compile([replace(JOB, text=once + TEXT)], cfg)
    assert mark.exists() and made.symbol == "double"
    pool.stop()


def stop_ends_a_job(folder: Path) -> None:
    """Whoever waits for a job when the pool is stopped is told, and no process is left."""
    pool = CubinPool(1)
    slow = replace(JOB, text="import time\ntime.sleep(60)\n")
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(pool.compile, [slow], Config(cache_dir=str(folder)))
        while pool._server is None or not _children(pool._server.process.pid):
            time.sleep(0.01)
        processes = [pool._server.process.pid, *_children(pool._server.process.pid)]
        pool.stop()
        with pytest.raises(ToolchainError):
            result.result(timeout=60)
    _all_end(processes)


def stopped_pool_starts_again(folder: Path) -> None:
    pool = CubinPool(1)
    pool.compile([JOB], Config(cache_dir=str(folder / "a")))
    pool.stop()
    pool.compile([JOB], Config(cache_dir=str(folder / "b")))
    pool.stop()


def no_orphans(folder: Path) -> None:
    """A process that is killed leaves no process and no file behind, even while a forked child
    holds its sockets."""
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from plait.config import Config\n"
        "from plait.runtime.cubin_pool import pool\n"
        "from tests.test_cubin import JOB\n"
        "pool().compile([JOB], Config(cache_dir=sys.argv[1]))\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(30); os._exit(0)\n"
        "print(pool()._server.process.pid, child, *pool()._server.folders, flush=True)\n"
        "time.sleep(30)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    line = parent.stdout.readline().split()
    server, child, scratch = int(line[0]), int(line[1]), line[2:]
    (worker,) = _children(server)
    assert all(map(os.path.exists, scratch))
    parent.kill()
    parent.wait()
    try:
        deadline = time.monotonic() + 20
        while _runs(server) or _runs(worker):
            assert time.monotonic() < deadline, "a process outlived its parent"
            time.sleep(0.1)
        assert not any(map(os.path.exists, scratch))
    finally:
        os.kill(child, signal.SIGKILL)


def forked_child_compiles(folder: Path) -> None:
    """A forked child has a pool of its own, and its end leaves the parent's running."""
    cfg = Config(cache_dir=str(folder))
    pool().compile([JOB], cfg)
    server = pool()._server
    child = os.fork()
    if child == 0:
        (made,) = pool().compile([replace(JOB, num_warps=8)], cfg)
        assert made.num_warps == 8 and pool()._server is not server
        sys.exit(0)  # runs what is registered for the end
    assert os.waitpid(child, 0)[1] == 0
    assert server is not None and server.process.poll() is None
    (made,) = pool().compile([replace(JOB, num_warps=2)], cfg)
    assert made.num_warps == 2 and pool()._server is server


def starts_early_beside_a_gpu(folder: Path) -> None:
    cubin_pool.DEVICE = folder / "nothing"
    start_early()
    assert not cubin_pool._pools
    cubin_pool.DEVICE = folder
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    start_early()
    assert not cubin_pool._pools
    del os.environ["CUDA_VISIBLE_DEVICES"]
    start_early()
    assert pool()._server is not None and "triton" not in sys.modules
    (made,) = pool().compile([JOB], Config(cache_dir=str(folder)))
    assert made.symbol == "double"


def no_process_can_be_started(folder: Path) -> None:
    """That is an error of the first kernel, not of the import."""
    cubin_pool.DEVICE = folder
    sys.executable = "/nothing/like/it"
    start_early()
    with pytest.raises(ToolchainError, match="kernel double"):
        pool().compile([JOB], Config(cache_dir=str(folder)))


def what_a_thread_meets_is_raised(folder: Path) -> None:
    """A full disk, or a warning that is an error: whoever waits is told, and what comes later is
    compiled."""
    (folder / "file").touch()
    warnings.simplefilter("error")
    pool = CubinPool(1)
    (result,) = pool.submit([JOB], Config(cache_dir=str(folder / "file")))
    with pytest.raises(CacheWarning):
        result.result(timeout=60)
    (made,) = pool.compile([JOB], Config(cache_dir=str(folder)))
    assert made.symbol == "double"
    with patch.object(cubin_pool, "_ask", side_effect=ValueError("no frame")):
        (result,) = pool.submit([replace(JOB, num_warps=8)], Config(cache_dir=str(folder)))
        with pytest.raises(ToolchainError, match=r"died twice \(no frame\)"):
            result.result(timeout=60)
    pool.compile([replace(JOB, num_warps=8)], Config(cache_dir=str(folder)))
    pool.stop()


def variables_of_the_compiler_count(folder: Path) -> None:
    """They are in the key, and have an effect however late they are set."""
    pool, cfg = CubinPool(1), Config(cache_dir=str(folder))
    job = replace(JOB, text=TEXT.replace("* 2", "* 2.5 + n"))

    def made(**env: str) -> Cubin:
        with patch.dict(os.environ, env):
            return pool.compile([job], cfg)[0]

    plain = made()
    changed = [
        made(TRITON_DEFAULT_FP_FUSION="0"),
        made(DISABLE_LLVM_OPT="1"),
        made(DISABLE_PTXAS_OPT="1"),
    ]
    assert len({c.image for c in (plain, *changed)}) == 4
    assert (
        made() == made(TRITON_CACHE_DIR="/x") == plain
        and len(list(folder.glob("cubins/*/*.cubin"))) == 4
    )
    with pytest.raises(ToolchainError, match="Unknown option"):
        made(PTXAS_OPTIONS="--nothing-like-it")
    with patch.dict(os.environ, TRITON_PTXAS_PATH=str(folder / "ptxas")):
        before = job.key()
        (folder / "ptxas").write_text("another")
        assert job.key() != before
    pool.stop()


def idle_processes_end(folder: Path) -> None:
    """A worker that has nothing to do, then the server; what comes afterwards starts new ones."""
    cubin_pool.IDLE_S, cubin_pool.SERVER_IDLE_S = 0.5, 1.0
    pool, cfg = CubinPool(1), Config(cache_dir=str(folder))
    (result,) = pool.submit([JOB], cfg)
    assert pool._threads  # they may be gone soon after the result is there
    result.result()
    server = pool._server
    assert server is not None
    deadline = time.monotonic() + 20
    while _runs(server.process.pid) or pool._threads:
        assert time.monotonic() < deadline, "a process waits for ever"
        time.sleep(0.1)
    assert not any(map(os.path.exists, server.folders))
    (made,) = pool.compile([replace(JOB, num_warps=8)], cfg)
    assert made.num_warps == 8 and pool._server is not server
    for k in range(8):  # while threads come and go
        time.sleep(0.5 - 0.01 * (k % 3))
        (result,) = pool.submit([replace(JOB, text=f"{TEXT}# {k}\n")], cfg)
        result.result(timeout=60)
    pool.stop()


def ranks_share_processors(folder: Path) -> None:
    with patch.object(os, "sched_getaffinity", return_value=set(range(32))):
        for ranks, n in (("", 16), ("1", 16), ("8", 4), ("100", 1), ("0", 16), ("x", 16)):
            with patch.dict(os.environ, LOCAL_WORLD_SIZE=ranks):
                assert CubinPool().n_workers == n


def the_end_does_not_wait(folder: Path) -> None:
    """Not for a server that does not answer."""
    pool = CubinPool(1)
    pool.compile([JOB], Config(cache_dir=str(folder)))
    assert pool._server is not None
    server, workers = pool._server, _children(pool._server.process.pid)
    os.kill(server.process.pid, signal.SIGSTOP)
    thread = threading.Thread(target=pool.stop, daemon=True)
    thread.start()
    thread.join(timeout=20)
    stopped = not thread.is_alive()
    if not stopped:
        server.process.kill()
    deadline = time.monotonic() + 20
    while any(map(_runs, workers)):
        assert time.monotonic() < deadline, "a worker outlived its server"
        time.sleep(0.01)
    assert stopped and not any(map(os.path.exists, server.folders))


def a_full_folder_is_passed_over(folder: Path) -> None:
    """Another has room; where nothing can be written, the error is told."""
    full, other = folder / "full", folder / "other"
    full.mkdir(), other.mkdir()
    usage = {full: 0, other: triton_worker.ROOM}
    with patch.object(
        shutil, "disk_usage", side_effect=lambda f: shutil._ntuple_diskusage(0, 0, usage[f])
    ):
        assert triton_worker.roomy([full, other]) == triton_worker.roomy([other, full]) == other
        usage[other] = 0
        assert triton_worker.roomy([full, other]) == other
    head, image = triton_worker.answer(json.loads(JOB.frame()), [folder / "nothing"])
    assert "FileNotFoundError" in head["error"] and image == b""
    head, image = triton_worker.answer(json.loads(JOB.frame()), [full])
    assert (
        image[:4] == b"\x7fELF" and head["facts"]["symbol"] == "double" and not list(full.iterdir())
    )


def job_that_hangs_is_ended(folder: Path) -> None:
    """With what it has started, such as an assembler; the next one is compiled."""
    pool, cfg = CubinPool(1), Config(cache_dir=str(folder), compiler_seconds=60)
    pool.compile([JOB], cfg)  # the server is up
    mark = folder / "mark"
    text = (
        "import os, pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(mark)!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(ToolchainFailed, match="kernel double took Triton longer than 3 s"):
        pool.compile([replace(JOB, text=text)], replace(cfg, compiler_seconds=3))
    _all_end([int(pid) for pid in mark.read_text().split()])
    (made,) = pool.compile([replace(JOB, num_warps=8)], cfg)
    assert made.num_warps == 8
    pool.stop()


def _all_end(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(_runs, pids)):
        assert time.monotonic() < deadline, "a process goes on"
        time.sleep(0.01)


def _children(pid: int) -> list[int]:
    stats = {int(p.name): p / "stat" for p in Path("/proc").iterdir() if p.name.isdigit()}
    return [k for k, stat in stats.items() if _facts(stat)[1:2] == [str(pid)]]


def _facts(stat: Path) -> list[str]:
    """State, parent and so on of a process; nothing if it is gone."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _runs(pid: int) -> bool:
    return _facts(Path(f"/proc/{pid}/stat"))[:1] not in ([], ["Z"])


def test_a_kernel_that_needs_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    """So that its call goes another way, whoever chose its tile. Of a GPU that is not known its
    driver says so."""
    made = Cubin(b"", "double", 4, 1, 300_000, (0, 1), (0, 1), False, False)
    cfg = Config(cache_dir=str(tmp_path))
    with (
        patch.object(CubinPool, "compile", lambda self, jobs, cfg: [made] * len(jobs)),
        patch.object(Job, "key", lambda self: self.gpu.name),  # the compiler's version is in it
    ):
        for gpu in (Gpu("cuda", 999, 32, "cubin"), Gpu("hip", "gfx942", 64, "hsaco")):
            cubin_pool.get_or_build_pack([replace(JOB, gpu=gpu)], cfg)
        with pytest.raises(RefusedKernel, match=r"300000 bytes.* sm_90 has 232448") as raised:
            cubin_pool.get_or_build_pack([JOB], cfg)
        assert raised.value.kernel == "double"
        made = replace(made, shared=232_448)
        cubin_pool.get_or_build_pack([JOB], cfg)


CASES = {
    f.__name__: f
    for f in (
        second_process_compiles_nothing, equal_jobs_are_compiled_once, alignment_is_used,
        ranks_share_jobs, refused_source, killed_worker_is_replaced, killed_server_is_replaced,
        deadly_job_is_tried_twice, stop_ends_a_job, subnormal_numbers_are_kept,
        stopped_pool_starts_again, no_orphans, forked_child_compiles, starts_early_beside_a_gpu,
        no_process_can_be_started, what_a_thread_meets_is_raised, variables_of_the_compiler_count,
        idle_processes_end, ranks_share_processors, the_end_does_not_wait,
        a_full_folder_is_passed_over, job_that_hangs_is_ended,
    )
}  # fmt: skip


@pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")
@pytest.mark.stress
@pytest.mark.parametrize("name", CASES)
def test_pool(name: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(TRITON), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_cubin", name, str(tmp_path)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))
