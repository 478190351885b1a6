"""What may end or disturb a compile: Ctrl-C, no memory, a fork, the end of the interpreter; and
many of them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import plait
from plait.runtime.cubin_pool import CubinPool
from plait.runtime.process import run, workers
from plait.runtime.toolchain import find_toolchain
from tests import warm

ROOT = Path(__file__).parent.parent

SLOW_COMPILER = """#!/bin/bash
case "$*" in *--version*) exec {real} "$@";; esac
if [ -e {folder}/slow ]; then
    sleep 600 &
    echo "$$ $!" > {folder}/started.new
    mv {folder}/started.new {folder}/started
    wait
fi
exec {real} "$@"
"""

INTERRUPTED = """
    import signal, sys, time
    from pathlib import Path
    import torch, plait

    # A shell's background jobs are born with it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(sys.argv[1])
    f = lambda x: (x * 2).sin() + 1
    x = torch.randn(100)
    (folder / "slow").touch()
    try:
        torch.compile(f, backend="plait", options={{"wrapper": {wrapper!r}}})(x)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    (folder / "slow").unlink()
    torch.testing.assert_close(torch.compile(f, backend="plait")(x), f(x))
    torch.testing.assert_close(torch.compile(lambda x: f(x) + 1, backend="plait")(x), f(x) + 1)
    print("compiled", flush=True)
"""


def run_text(code: str, folder: Path, **env: str) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        "PLAIT_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
        **env,
    }
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True)


def runs_well(code: str, folder: Path) -> None:
    env = {**os.environ, "PLAIT_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    done = warm.run("-c", textwrap.dedent(code), str(folder), env=env)
    assert done.returncode == 0, done.stderr[-4000:]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def slow_compiler(folder: Path) -> str:
    path = folder / "cxx"
    path.write_text(
        SLOW_COMPILER.format(real=find_toolchain(plait.Config()).compiler, folder=folder)
    )
    path.chmod(0o755)
    return str(path)


def wait_for(path: Path, child: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline and child.poll() is None, child.communicate()
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.stress
@pytest.mark.parametrize("wrapper", ["native", "cpp"])
def test_ctrl_c_in_the_middle_of_a_compile(wrapper: str, tmp_path: Path) -> None:
    """The compiler ends with all that it started, nothing half is left, and the next compile
    works."""
    child = run_text(
        INTERRUPTED.format(wrapper=wrapper), tmp_path, PLAIT_CXX=slow_compiler(tmp_path)
    )
    pids = [int(pid) for pid in wait_for(tmp_path / "started", child).split()]
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors[-4000:]
    assert output.split() == ["interrupted", "compiled"]
    assert not any(map(runs, pids))
    entries = [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert len(entries) >= 2 and not [n for n in entries if n.startswith(".new")]


@pytest.mark.stress
def test_the_interpreter_ends_while_a_thread_compiles(tmp_path: Path) -> None:
    """And while programs live that were compiled before."""
    code = """
        import sys, threading, time
        from pathlib import Path
        import torch, plait

        folder, x = Path(sys.argv[1]), torch.randn(100, requires_grad=True)
        kept = [torch.compile(lambda x, k=k: (x * k).sin(), backend="plait") for k in range(3)]
        [f(x).sum().backward() for f in kept]
        (folder / "slow").touch()
        late = torch.compile(lambda x: x.cos() + 5, backend="plait")
        thread = threading.Thread(target=late, args=(x,), daemon=True)
        thread.start()
        while not (folder / "started").exists():
            time.sleep(0.01)
        print("end", flush=True)
    """
    child = run_text(code, tmp_path, PLAIT_CXX=slow_compiler(tmp_path))
    pids = [int(pid) for pid in wait_for(tmp_path / "started", child).split()]
    output, errors = child.communicate(timeout=120)
    assert (child.returncode, output) == (0, "end\n"), errors[-4000:]
    assert "Traceback" not in errors and not any(map(runs, pids))


def test_the_interpreter_ends_with_live_programs(tmp_path: Path) -> None:
    """Of every wrapper."""
    code = """
        import torch, plait
        x = torch.randn(100, requires_grad=True)
        kept = [
            torch.compile(lambda x: (x * 2).sin(), backend="plait", options={"wrapper": wrapper})
            for wrapper in ("native", "python", "cpp", "fx")
        ]
        [f(x).sum().backward() for f in kept]
        g = plait.compile(lambda x: x.cos(), (torch.randn(9),))
        print("end", flush=True)
    """
    child = run_text(code, tmp_path)
    output, errors = child.communicate(timeout=300)
    assert (child.returncode, output) == (0, "end\n"), errors[-4000:]


@pytest.mark.stress
def test_a_forked_child_runs_and_compiles(tmp_path: Path) -> None:
    code = """
        import os, torch, plait
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        x = torch.randn(100)
        f = lambda x: (x * 2).sin() + 1
        compiled = torch.compile(f, backend="plait")
        compiled(x)
        child = os.fork()
        if child == 0:
            torch.testing.assert_close(compiled(x), f(x))
            g = lambda x: f(x) * 3
            torch.testing.assert_close(torch.compile(g, backend="plait")(x), g(x))
            torch.testing.assert_close(plait.compile(g, (x,))(x), g(x))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        torch.testing.assert_close(compiled(x), f(x))
        h = lambda x: f(x) * 4
        torch.testing.assert_close(torch.compile(h, backend="plait")(x), h(x))
    """
    runs_well(code, tmp_path)


def start_a_pool() -> None:
    pool = CubinPool(1)
    pool.start()
    pool.stop()


@pytest.mark.stress
@pytest.mark.parametrize("start", [lambda: run(["true"], 60), start_a_pool])
def test_a_forked_child_keeps_no_start_waiting(
    start: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it wait for a thread that it lacks."""
    starts, forked, stopped = threading.Event(), threading.Event(), tmp_path / "stopped"
    fork_exec = subprocess._fork_exec

    def slowly(*args):
        starts.set()
        forked.wait(0.5)  # for a fork that does not wait for this start
        return fork_exec(*args)

    monkeypatch.setattr(subprocess, "_fork_exec", slowly)
    with workers(1) as pool:
        started = pool.submit(start)
        assert starts.wait(60)
        child = os.fork()
        if child == 0:
            try:
                pool.stop()
                stopped.touch()
                time.sleep(300)  # longer than anybody below waits
            finally:
                os._exit(0)
        forked.set()
        try:
            started.result(timeout=60)
            deadline = time.monotonic() + 60
            while not stopped.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.parametrize("step", [
    "plait.runtime.store._write", "plait.runtime.cache.in_scratch", "plait.compile.make_kernels",
    "plait.compile._wrap", "plait.runtime.process._Children.start", "plait.runtime.load.Program",
])  # fmt: skip
def test_no_memory_in_the_middle_of_a_compile(step: str, tmp_path: Path) -> None:
    """A clean error or a fallback with the right answer; the next compile works."""
    code = f"""
        import importlib, sys, unittest.mock
        import torch, plait
        importlib.import_module("plait.capture.backend")
        module, _, name = {step!r}.rpartition(".")
        try:
            owner = importlib.import_module(module)
        except ImportError:
            module, _, inner = module.rpartition(".")
            owner = getattr(importlib.import_module(module), inner)
        x, f = torch.randn(100), lambda x: (x * 2).sin() + 1
        with unittest.mock.patch.object(
            owner, name, side_effect=MemoryError("none left")
        ) as called:
            try:
                torch.testing.assert_close(torch.compile(f, backend="plait")(x), f(x))
            except Exception as error:
                assert isinstance(error, (plait.PlaitError, MemoryError)), repr(error)
                assert "none left" in str(error), repr(error)
        assert called.called
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(f, backend="plait")(x), f(x))
    """
    runs_well(code, tmp_path)
    assert not list((tmp_path / "cache").rglob(".new*"))


def facts() -> tuple[int, int]:
    """Open files, and maps of kernel libraries."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), sum(
        "/kernels/" in line or "plait_" in line for line in maps
    )


@pytest.mark.stress
@pytest.mark.parametrize("rounds", [30, pytest.param(2000, marks=pytest.mark.slow)])
def test_programs_that_are_dropped_leave_nothing(rounds: int, tmp_path: Path) -> None:
    """Programs are freed, their libraries closed, open files and maps of libraries as many as
    before."""
    x = torch.randn(64)
    options = {"cache_dir": str(tmp_path)}
    freed = []

    def one(k: int) -> None:
        torch._dynamo.reset()
        f = lambda x: (x * 2).sin() + k % 7
        if k % 2:
            compiled = torch.compile(f, backend="plait", options=options)
        else:
            compiled = plait.compile(f, (x,), options=options)
        torch.testing.assert_close(compiled(x), f(x))
        if k % 2:  # the others have no weak references: their libraries are looked at
            freed.append(weakref.ref(compiled))

    for k in range(14):
        one(k)
    torch._dynamo.reset()
    gc.collect()
    before = facts()
    for k in range(rounds):
        one(k)
    torch._dynamo.reset()
    gc.collect()
    assert not [r for r in freed if r() is not None]
    assert facts() == before
