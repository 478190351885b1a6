"""One at a time where many would build the same: the locks, and who waits for whom."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from plait.compile import compile_texts
from plait.config import Config
from plait.errors import CacheWarning, ToolchainError
from plait.graph.captured import Captured
from plait.runtime.cache import cache_key, get_or_build
from plait.runtime.store import LIBRARIES, Store, sealed
from plait.runtime.toolchain import Toolchain, find_toolchain
from plait.runtime.turns import turn

SOURCE = 'extern "C" long answer() { return 42; }'


def is_free(file: Path, key: str = "key") -> bool:
    with turn(file, key, 0, "holds it") as mine:
        return mine


def forked(work: Callable[[Callable[[], None]], None]) -> int:
    """A child that does this, once it has called what it is given."""
    reads, writes = os.pipe()
    write = os.write

    def tell() -> None:
        write(writes, b"x")
        signal.pause()

    child = os.fork()
    if child == 0:
        try:
            work(tell)
        finally:
            os._exit(1)
    os.close(writes)
    assert os.read(reads, 1) == b"x", "the child failed"
    os.close(reads)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_one_has_a_key_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with turn(file, "key", 0, "holds it") as mine:
        assert mine and is_free(file, "another") and not is_free(file)
        with (
            pytest.warns(UserWarning, match="waits for another process that holds it"),
            turn(file, "key", 0.05, "holds it") as mine,
        ):
            assert not mine
    assert is_free(file) and file.stat().st_size == 0


def test_whoever_waits_comes_next(tmp_path: Path) -> None:
    file, order = tmp_path / "lock", []

    def wait() -> bool:
        with turn(file, "key", 60, "holds it") as mine:
            order.append("second")
            return mine

    with ThreadPoolExecutor(1) as pool:
        with turn(file, "key", 0, "holds it"):
            second = pool.submit(wait)
            order.append("first")
        assert second.result(timeout=60) and order == ["first", "second"]


@pytest.mark.stress
def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    file = tmp_path / "lock"

    def hold(tell: Callable[[], None]) -> None:
        with turn(file, "key", 0, "holds it"):
            tell()

    child = forked(hold)
    assert not is_free(file)
    kill(child)
    assert is_free(file)


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with turn(file, "key", 0, "holds it"):
        handles = [p for p in Path("/proc/self/fd").iterdir() if p.resolve() == file]
        kept = [int(p.name) for p in handles]
        child = subprocess.Popen(["sleep", "60"], pass_fds=kept)  # has what a forked child has
    try:
        assert len(kept) == 1 and is_free(file)
    finally:
        child.kill()
        child.wait()


def test_nobody_waits_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_free(tmp_path / "no folder" / "lock")
    (tmp_path / "lock").symlink_to(tmp_path / "other")
    assert is_free(tmp_path / "lock") and not (tmp_path / "other").exists()

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    with turn(tmp_path / "real", "key", 0, "holds it"):
        monkeypatch.setattr(fcntl, "fcntl", refused)
        assert is_free(tmp_path / "real")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, libraries with what they hold."""
    done: list[str] = []
    real = Toolchain.compile

    def counted(self: Toolchain, source: str, path: Path, *rest: object) -> None:
        real(self, source, path, *rest)  # type: ignore[arg-type]
        done.append(source)

    monkeypatch.setattr(Toolchain, "compile", counted)
    return done


def built_by_threads(cfg: Config, n: int = 4) -> list[bool]:
    """Threads that build one library as processes do. Whether each found it."""
    tools, start = find_toolchain(cfg), threading.Barrier(n)

    def build() -> bool:
        start.wait(60)
        return get_or_build(SOURCE, tools, cfg).hit

    with ThreadPoolExecutor(n) as pool:
        return [r.result(timeout=60) for r in [pool.submit(build) for _ in range(n)]]


def test_one_of_many_builds(tmp_path: Path, compiles: list[str]) -> None:
    assert sorted(built_by_threads(Config(cache_dir=str(tmp_path)))) == [False, True, True, True]
    assert compiles == [SOURCE]


def test_each_builds_on_request_or_where_nothing_can_be_written(
    tmp_path: Path, compiles: list[str]
) -> None:
    tools = find_toolchain(Config())
    cfg = Config(cache_dir=str(tmp_path), build_once=False)
    with Store.of(cfg, LIBRARIES).turn(cache_key(SOURCE, tools)):
        assert not get_or_build(SOURCE, tools, cfg).hit
    (tmp_path / "file").touch()
    cfg = replace(cfg, cache_dir=str(tmp_path / "file"), build_once=True)
    with pytest.warns(CacheWarning, match="cannot write kernels"):
        assert built_by_threads(cfg, 2) == [False, False]
    assert compiles == [SOURCE] * 3


def test_whoever_waited_in_vain_builds(tmp_path: Path, compiles: list[str]) -> None:
    """The one before had no luck; each says so itself."""
    cfg, source = Config(cache_dir=str(tmp_path)), "this is not C++"
    for _ in range(2):
        with pytest.raises(ToolchainError, match="refused a kernel"):
            get_or_build(source, find_toolchain(cfg), cfg)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not get_or_build(SOURCE, find_toolchain(cfg), cfg).hit


def failing(code: int) -> Callable[..., int]:
    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing half is left, others do not wait, and each has what it built."""
    store, key, write = Store(tmp_path / "tuned", ".json", waits=True), "0" * 64, os.write

    def full(file: int, data: bytes) -> int:
        if Path(f"/proc/self/fd/{file}").resolve().is_relative_to(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(CacheWarning, match=r"cannot write kernels .*No space left on device"):
        made, hit = store.once(key, lambda: store.find(key), lambda: store.put(key, b"{}"))
    assert not hit and made.read() == sealed(b"{}") and not store.files()
    assert is_free(tmp_path / "tuned" / "lock", f"{key}.json")


def test_a_folder_to_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is found, and nobody waits for what cannot be written."""
    store = Store(tmp_path / "tuned", ".json", waits=True)
    there = store.put("0" * 64, b"{}").path
    open_ = os.open

    def read_only(path: str, flags: int, *rest: object, **more: object) -> int:
        if flags & (os.O_CREAT | os.O_RDWR) and Path(path).is_relative_to(tmp_path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open_(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", read_only)
    for name in ("utime", "mkdir"):
        monkeypatch.setattr(os, name, failing(errno.EROFS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.read("0" * 64) == b"{}" and store.read("1" * 64) is None
        with store.turn("1" * 64) as first, store.turn("1" * 64) as second:
            assert first and second
    with pytest.warns(CacheWarning, match=r"cannot write kernels .*Read-only file system"):
        made = store.put("1" * 64, b"[]")
    assert made.read() == sealed(b"[]") and [f.path for f in store.files()] == [there]


def test_ranks_want_the_same_kernels() -> None:
    """Neither a device's number nor a graph's name is part of what is built."""

    def jobs(device: str, name: str) -> object:
        with FakeTensorMode():
            x = torch.empty(64, 1000, device=device)
            graph = make_fx(lambda x: (x.softmax(-1), x.exp().sum(0)), tracing_mode="fake")(x)
        captured = Captured(graph, name, "inference")
        return compile_texts(captured, Config(gpu_arch="sm_90"))[1].sources["cuda"].units

    first = jobs("cuda:0", "forward_0")
    assert first and first == jobs("cuda:3", "forward_7")


@pytest.mark.stress
def test_a_process_killed_while_it_writes_leaves_no_entry(tmp_path: Path) -> None:
    store, key, whole = Store(tmp_path / "tuned", ".json", waits=True), "0" * 64, os.write

    def write(tell: Callable[[], None]) -> None:
        def half(file: int, data: bytes) -> int:
            whole(file, data[: len(data) // 2])
            tell()
            return 0

        os.write = half  # type: ignore[assignment]
        store.once(key, lambda: store.find(key), lambda: store.put(key, b"{}" * 100))

    kill(forked(write))
    (left,) = store.files()
    assert not left.is_entry and 0 < left.nbytes < 250
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.once(key, lambda: store.read(key), lambda: b"made") == (b"made", False)
