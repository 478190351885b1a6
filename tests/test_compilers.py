"""Compilers that hang, are killed, write junk or cannot be read: a limit, one more try, a
fallback."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import plait
from plait.config import Config
from plait.errors import ToolchainError
from plait.runtime import toolchain
from plait.runtime.cache import get_or_build
from plait.runtime.process import Stopped, run, workers
from plait.runtime.toolchain import ToolchainFailed, ToolchainMissing, find_toolchain
from plait.runtime.trust import loadable

SOURCE = 'extern "C" long answer() { return 42; }'


def compiler(folder: Path, does: str) -> str:
    """A compiler that does something else for all but the probe. $out: what it is to write. $n: of
    this run."""
    path = folder / "cxx"
    real = find_toolchain(Config()).compiler
    path.write_text(f"""#!/bin/bash
for last; do :; done
out=$last
case "$*" in *--version*) exec {real} "$@";; esac
for word; do case "$word" in *.cpp) source=$word;; esac; done
if grep -q plait_probe "$source"; then exec {real} "$@"; fi
n=$(cat {folder}/count 2>/dev/null || echo 0)
echo $((n + 1)) > {folder}/count
real() {{ exec {real} "$@"; }}
{does}
""")
    path.chmod(0o755)
    return str(path)


def config(folder: Path, does: str, **changes: object) -> Config:
    made = dataclasses.replace(
        Config(), cache_dir=str(folder / "cache"), cpp_compiler=compiler(folder, does)
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def n_runs(folder: Path) -> int:
    return int((folder / "count").read_text())


def build(cfg: Config) -> int:
    built = get_or_build(SOURCE, find_toolchain(cfg), cfg, ("answer",))
    return int(ctypes.CDLL(loadable(built.library)).answer())


def stored(folder: Path) -> list[Path]:
    return [p for p in (folder / "cache").rglob("*") if p.is_file() and p.name != "lock"]


JUNK = {
    "empty": ': > "$out"',
    "text": 'echo junk > "$out"',
    "cut": 'printf "\\x7fELF" > "$out"',
    "nothing": "exit 0",
    "other": 'echo "int other;" > "$out.c"; {} -shared "$out.c" -o "$out"',
}


@pytest.mark.parametrize("kind", JUNK)
def test_junk_is_not_stored(tmp_path: Path, kind: str) -> None:
    cfg = config(tmp_path, JUNK[kind].format(find_toolchain(Config()).compiler))
    with pytest.raises(ToolchainFailed, match="what it wrote does not load"):
        build(cfg)
    assert n_runs(tmp_path) == 2 and not stored(tmp_path)
    assert find_toolchain(cfg).compiler == cfg.cpp_compiler, "it works for others"


def test_a_second_try_may_do(tmp_path: Path) -> None:
    once = 'if [ $n = 0 ]; then echo junk > "$out"; exit 0; fi; real "$@"'
    assert build(config(tmp_path, once)) == 42 and n_runs(tmp_path) == 2


@pytest.mark.parametrize(
    "how",
    ["kill -9 $$", "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1"],
)
def test_one_killed_once_is_run_again(tmp_path: Path, how: str) -> None:
    assert build(config(tmp_path, f'if [ $n = 0 ]; then {how}; fi; real "$@"')) == 42
    assert n_runs(tmp_path) == 2


def test_one_killed_twice_falls_back(tmp_path: Path) -> None:
    with pytest.raises(ToolchainFailed, match="it was killed"):
        build(config(tmp_path, "kill -9 $$"))
    assert n_runs(tmp_path) == 2 and not stored(tmp_path)


def test_any_bytes_may_be_on_standard_error(tmp_path: Path) -> None:
    assert build(config(tmp_path, r'printf "\xff\xfe\x80" >&2; real "$@"')) == 42
    with pytest.raises(ToolchainError, match="refused a kernel:\n\ufffd\ufffd no") as caught:
        build(config(tmp_path, r'printf "\xff\xfe no" >&2; exit 1', cache_dir=str(tmp_path / "b")))
    assert not isinstance(caught.value, ToolchainMissing)


@pytest.mark.stress
def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    cfg = config(tmp_path, f"sleep 600 & echo $! > {tmp_path}/child; sleep 600", compiler_seconds=1)
    start = time.monotonic()
    with pytest.raises(ToolchainFailed, match=r"longer than 1 s \(PLAIT_COMPILER_SECONDS\)"):
        build(cfg)
    assert n_runs(tmp_path) == 1 and time.monotonic() - start < 60
    assert not runs(int((tmp_path / "child").read_text()))


def test_one_that_always_hangs_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c++"
    path.write_text('#!/bin/sh\ncase "$*" in *--version*) echo slow 1.0;; *) sleep 600;; esac\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    cfg = dataclasses.replace(Config(), cache_dir=str(tmp_path / "cache"), compiler_seconds=1)
    assert find_toolchain(cfg).compiler == str(path)
    assert build(cfg) == 42
    assert find_toolchain(cfg).compiler != str(path)


def test_one_that_does_not_tell_its_version_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c++"
    path.write_text("#!/bin/sh\nsleep 600\n")
    path.chmod(0o755)
    monkeypatch.setattr(toolchain, "PROBE_SECONDS", 1)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    assert find_toolchain(Config()).compiler != str(path)


@pytest.mark.parametrize("wrapper", ["native", "cpp"])
@pytest.mark.parametrize(
    "does", [JUNK["empty"], "kill -9 $$", "sleep 600"], ids=["junk", "killed", "hangs"]
)
def test_a_program_falls_back_with_one_warning(tmp_path: Path, does: str, wrapper: str) -> None:
    cfg = config(tmp_path, does)
    options = {
        "cpp_compiler": cfg.cpp_compiler, "cache_dir": cfg.cache_dir, "compiler_seconds": 1,
        "wrapper": wrapper,
    }  # fmt: skip
    x = torch.randn(16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = plait.compile(lambda a: a.sin() * 3 + 1, (x,), options=options)
        torch.testing.assert_close(compiled(x), x.sin() * 3 + 1)
    assert len([w for w in caught if "runs every op as a call of ATen" in str(w.message)]) == 1
    assert not stored(tmp_path)


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_block_that_fails_ends_its_compilers(tmp_path: Path) -> None:
    """Also one that had not started yet."""
    started = tmp_path / "started"
    command = ["sh", "-c", f"echo $$ > {started}.new; mv {started}.new {started}; exec sleep 600"]
    with pytest.raises(KeyboardInterrupt), workers(1) as pool:
        first, second = pool.submit(run, command, 600), pool.submit(run, command, 600)
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt
    for result in (first, second):
        with pytest.raises(Stopped):
            result.result(timeout=60)
    assert not runs(int(started.read_text()))


class StartsSlowly(subprocess.Popen):
    """The child runs for a while before its number is known."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        time.sleep(1)


@pytest.mark.stress
@pytest.mark.parametrize("popen", [subprocess.Popen, StartsSlowly])
def test_an_interrupted_run_ends_the_child(
    popen: type[subprocess.Popen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C where the main thread itself waits, also for the child's start."""
    monkeypatch.setattr(subprocess, "Popen", popen)
    started = tmp_path / "started"
    command = ["sh", "-c", f"echo $$ > {started}.new; mv {started}.new {started}; exec sleep 600"]

    main = threading.get_ident()

    def interrupt() -> None:
        while not started.exists():
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(command, 60)
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert not runs(int(started.read_text()))
