"""Finding the compiler and the vector instructions, and the cache of built kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import multiprocessing
import os
import shutil
import stat
import tempfile
import time
import types
import warnings
from pathlib import Path

import pytest
import torch

import plait
from plait.config import Config
from plait.errors import CacheWarning, ToolchainError, UserError
from plait.runtime import toolchain
from plait.runtime.cache import cache_key, get_or_build
from plait.runtime.store import Store, drop_oldest
from plait.runtime.toolchain import (
    ISAS,
    NEXT_UNIT,
    Toolchain,
    ToolchainMissing,
    check_isa,
    detect_isa,
    find_toolchain,
)

SOURCE = 'extern "C" long answer() { return 42; }'


def config(folder: Path, **changes: object) -> Config:
    return dataclasses.replace(Config(), cache_dir=str(folder), **changes)  # type: ignore[arg-type]


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def cpuinfo(folder: Path, flags: str) -> str:
    path = folder / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    return str(path)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu sse2 avx2 fma f16c avx512f avx512dq avx512bw avx512vl avx512_bf16", "avx512+bf16"),
        ("fpu sse2 avx2 fma f16c avx512_bf16", "avx2"),
        ("fpu sse2 avx2 fma f16c avx512f avx512dq avx512bw avx512vl", "avx512"),
        ("fpu sse2 avx2 fma f16c avx512f", "avx2"),
        ("fpu sse2 avx", "portable"),
    ],
)
def test_isa_is_the_widest_that_the_flags_allow(tmp_path: Path, flags: str, name: str) -> None:
    assert detect_isa("auto", cpuinfo(tmp_path, flags)).full_name == name


def test_isa_without_cpuinfo_is_portable(tmp_path: Path) -> None:
    assert detect_isa("auto", str(tmp_path / "nowhere")).name == "portable"


def test_isa_that_the_machine_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no avx512"):
        check_isa(Config(isa="avx512"), cpuinfo(tmp_path, "sse2"))
    check_isa(Config(isa="portable"), cpuinfo(tmp_path, "sse2 avx2 fma f16c"))
    assert (
        detect_isa("avx512", cpuinfo(tmp_path, "avx512_bf16")).full_name == "avx512"
    )  # to compile for another machine


def test_missing_compiler_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        ToolchainMissing, match=r"no C\+\+ compiler found \(tried c\+\+, g\+\+, clang\+\+\)"
    ):
        find_toolchain(Config())
    with pytest.raises(ToolchainMissing, match="tried no-such-compiler"):
        find_toolchain(config(tmp_path, cpp_compiler="no-such-compiler"))


def test_cxx_comes_before_the_usual_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "mycxx"
    fake.write_text("#!/bin/sh\necho my compiler 1.0\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", "mycxx")
    found = find_toolchain(Config())
    assert (found.compiler, found.version) == (str(fake), "my compiler 1.0")


def test_a_broken_compiler_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    assert find_toolchain(Config()).compiler != str(broken)


def write_compiler(path: Path, otherwise: str) -> str:
    """A program that answers --version and does something else for everything else."""
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) echo my compiler 1.0;; *) {otherwise};; esac\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("otherwise", ["echo no cc1plus >&2; exit 1", "exit 0"])
def test_a_compiler_that_only_answers_counts_as_missing(tmp_path: Path, otherwise: str) -> None:
    cfg = config(tmp_path, cpp_compiler=write_compiler(tmp_path / "broken c++", otherwise))
    x = torch.randn(16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(2):
            options = {"cpp_compiler": f"'{cfg.cpp_compiler}'", "cache_dir": cfg.cache_dir}
            compiled = plait.compile(lambda a, k=k: a.sin() + k, (x,), options=options)
            torch.testing.assert_close(compiled(x), x.sin() + k)
    first = next(w for w in caught if "runs every op as a call of ATen" in str(w.message))
    assert "broken c++' cannot compile" in str(first.message) and "\n" not in str(first.message)
    assert first.filename == __file__
    with pytest.raises(ToolchainMissing, match="cannot compile"):
        find_toolchain(cfg)


def test_the_next_compiler_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = write_compiler(tmp_path / "c++", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    found = find_toolchain(Config())
    assert found.compiler == broken
    assert answer(get_or_build(SOURCE, found, config(tmp_path)).path) == 42
    assert find_toolchain(Config()).compiler != broken


def test_a_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = find_toolchain(Config())
    named = find_toolchain(config(tmp_path, cpp_compiler=f"{plain.compiler} -O3 '-DANSWER=40 + 2'"))
    source = SOURCE.replace("42", "ANSWER")
    assert answer(get_or_build(source, named, config(tmp_path)).path) == 42
    assert cache_key(SOURCE, named) != cache_key(SOURCE, plain)
    monkeypatch.setenv("CXX", f"env {plain.compiler}")
    assert find_toolchain(Config()).compiler == f"{shutil.which('env')} {plain.compiler}"
    with pytest.raises(ToolchainMissing):
        find_toolchain(config(tmp_path, cpp_compiler="g++ 'open"))


def test_refused_source_shows_the_compilers_words(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"refused a kernel.*\n.*error"):
        get_or_build("this is not C++", find_toolchain(Config()), config(tmp_path))
    assert not list(tmp_path.rglob("*.so")), "a failed build must leave nothing behind"


def test_units_become_one_library(tmp_path: Path) -> None:
    called = 'extern "C" int half() { return 21; }\n'
    caller = 'extern "C" int half();\nextern "C" int answer() { return 2 * half(); }\n'
    tools, cfg = find_toolchain(Config()), config(tmp_path)
    assert answer(get_or_build(NEXT_UNIT.join((caller, called)), tools, cfg).path) == 42
    with pytest.raises(ToolchainError, match=r"refused a kernel.*\n.*error"):
        get_or_build(NEXT_UNIT.join((caller, called, "this is not C++")), tools, cfg)


def test_second_build_is_a_hit(tmp_path: Path) -> None:
    tools, cfg = find_toolchain(Config()), config(tmp_path)
    first, second = get_or_build(SOURCE, tools, cfg), get_or_build(SOURCE, tools, cfg)
    assert (first.hit, second.hit, first.path) == (False, True, second.path)
    assert answer(second.path) == 42


def test_key_depends_on_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = find_toolchain(Config())
    keys = {
        cache_key(SOURCE, tools),
        cache_key(SOURCE + " ", tools),
        cache_key(SOURCE, dataclasses.replace(tools, version="g++ 99")),
        cache_key(SOURCE, dataclasses.replace(tools, compiler="/elsewhere/g++")),
        cache_key(SOURCE, dataclasses.replace(tools, opt_level=3)),
        *(
            cache_key(SOURCE, dataclasses.replace(tools, isa=isa))
            for isa in ISAS.values()
            if isa != tools.isa
        ),
    }
    monkeypatch.setattr("plait.__version__", "0.0.0-other")
    keys.add(cache_key(SOURCE, tools))
    assert len(keys) == 8


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_damaged_entry_is_built_again_with_a_warning(tmp_path: Path, damage: str) -> None:
    tools, cfg = find_toolchain(Config()), config(tmp_path)
    path = get_or_build(SOURCE, tools, cfg).path
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[100] ^= 1
    path.unlink()
    path.write_bytes({"empty": b"", "cut": bytes(data[:-50]), "flipped": bytes(data)}[damage])
    with pytest.warns(CacheWarning, match="damaged cache entry"):
        again = get_or_build(SOURCE, tools, cfg)
    assert not again.hit
    assert answer(again.path) == 42
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_or_build(SOURCE, tools, cfg).hit


def test_folder_that_cannot_be_written_still_builds(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    with pytest.warns(CacheWarning, match="cannot write kernels"):
        built = get_or_build(SOURCE, find_toolchain(Config()), config(tmp_path))
    assert answer(built.path) == 42


def test_warnings_do_not_repeat_for_every_entry(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(3):
            get_or_build(f"{SOURCE}// {k}", find_toolchain(Config()), config(tmp_path))
    assert (
        len(caught) == 1 and caught[0].filename == __file__ and "\n" not in str(caught[0].message)
    )


def test_a_home_folder_that_does_not_exist_still_builds() -> None:
    with pytest.warns(CacheWarning, match="cannot write kernels to ~nouser/x"):
        built = get_or_build(SOURCE, find_toolchain(Config()), config(Path("~nouser/x")))
    assert answer(built.path) == 42


def test_a_folder_in_an_entrys_place_is_replaced(tmp_path: Path) -> None:
    tools, cfg = find_toolchain(Config()), config(tmp_path)
    path = get_or_build(SOURCE, tools, cfg).path
    path.unlink()
    path.mkdir()
    (path / "file").touch()
    with pytest.warns(CacheWarning, match="damaged cache entry"):
        assert get_or_build(SOURCE, tools, cfg).path == path
    assert get_or_build(SOURCE, tools, cfg).hit and answer(path) == 42


def mounted(monkeypatch: pytest.MonkeyPatch, *noexec: str) -> None:
    """Folders below these look as if mounted noexec."""

    def statvfs(path: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(f_flag=os.ST_NOEXEC if str(path).startswith(noexec) else 0)

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_no_library_is_loaded_from_a_noexec_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, cfg = find_toolchain(Config()), config(tmp_path)
    before = get_or_build(SOURCE, tools, cfg).path
    mounted(monkeypatch, str(tmp_path))
    with pytest.warns(CacheWarning, match="mounted noexec"):
        built = get_or_build(SOURCE, tools, cfg)
    assert not built.hit and built.path != before and answer(built.path) == 42
    mounted(monkeypatch, "/")
    with pytest.raises(ToolchainMissing, match=r"no folder to build kernels in \(mounted noexec\)"):
        get_or_build(SOURCE, tools, cfg)


def test_a_full_folder_for_temporary_files_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full takes no byte: every file made below this TMPDIR fails as on a full disk."""
    write = Path.write_text

    def write_text(path: Path, text: str) -> int:
        return write(Path("/dev/full") if path.is_relative_to(tmp_path / "full") else path, text)

    (tmp_path / "full").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    monkeypatch.setattr(Path, "write_text", write_text)
    built = get_or_build(SOURCE, find_toolchain(Config()), config(tmp_path))
    assert answer(built.path) == 42 and not list((tmp_path / "full").iterdir())


def _build_in_child(folder: str, results: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    built = get_or_build(SOURCE + "// race", find_toolchain(Config()), config(Path(folder)))
    results.put((str(built.path), answer(built.path), built.hit))


def test_of_processes_that_build_at_once_one_does(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [
        context.Process(target=_build_in_child, args=(str(tmp_path), results)) for _ in range(3)
    ]
    for child in children:
        child.start()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(timeout=60)
        assert child.exitcode == 0
    assert len({path for path, *_ in found}) == 1 and {number for _, number, _ in found} == {42}
    assert sorted(hit for *_, hit in found) == [False, True, True]
    assert [p.name for p in tmp_path.rglob("*.so")] == [Path(found[0][0]).name]


def test_trim_drops_what_was_used_longest_ago(tmp_path: Path) -> None:
    folder = tmp_path / "ab"
    folder.mkdir()
    now = time.time()
    for k in range(5):
        path = folder / f"{k}.so"
        path.write_bytes(bytes(100))
        os.utime(path, (now - 100 + k, now - 100 + k))
    drop_oldest(Store(tmp_path, ".so").files(), 250)
    assert sorted(p.name for p in folder.iterdir()) == ["3.so", "4.so"]
    drop_oldest(Store(tmp_path, ".so").files(), 250)
    assert len(list(folder.iterdir())) == 2


def test_a_hit_counts_as_use(tmp_path: Path) -> None:
    tools, cfg = find_toolchain(Config()), config(tmp_path)
    old = get_or_build(SOURCE, tools, cfg).path
    other = get_or_build(SOURCE + "// other", tools, cfg).path
    for path in (old, other):
        os.utime(path, (time.time() - 1000, time.time() - 1000))
    get_or_build(SOURCE, tools, cfg)
    get_or_build(SOURCE + "// third", tools, cfg)
    files = Store(tmp_path / "kernels", ".so").files()
    drop_oldest(files, old.stat().st_size * 2 + 100)
    assert old.exists()
    assert not other.exists()


def test_library_depends_on_nothing(tmp_path: Path) -> None:
    """A kernel library must load in any process: no undefined symbol but libc's."""
    path = tmp_path / "x.so"
    Toolchain(find_toolchain(Config()).compiler, "", toolchain.ISAS["portable"], 2).compile(
        SOURCE, path
    )
    assert b"libstdc++" not in path.read_bytes()


def test_files_that_are_not_ours_to_remove_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the folders that another user made in a cache for several."""
    store, unlink = Store(tmp_path, ".json", max_bytes=0), Path.unlink
    theirs = store.put("1" * 64, b"theirs").path

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path == theirs:
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert store.put("0" * 64, b"mine").read().startswith(b"mine")
    assert [f.path for f in store.files()] == [theirs]
