"""Whose cached files are loaded, what they may be, and that what is loaded is what was checked."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import importlib
import os
import re
import stat
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

import plait
from plait.config import Config
from plait.errors import CacheWarning
from plait.runtime import trust
from plait.runtime.cache import cache_key, get_or_build
from plait.runtime.package import PackageError
from plait.runtime.store import _MAGIC, Built, Store
from plait.runtime.toolchain import find_toolchain
from plait.runtime.trust import Trust, Untrusted, trust_of

SOURCE = 'extern "C" long answer() { return 42; }'
STRANGER = 4242
ROOT = Path(__file__).parent.parent


def config(folder: Path, **changes: object) -> Config:
    return dataclasses.replace(Config(), cache_dir=str(folder), **changes)  # type: ignore[arg-type]


def build(folder: Path, **changes: object) -> Built:
    return get_or_build(SOURCE, find_toolchain(Config()), config(folder, **changes), ("answer",))


def answer(built: Built) -> int:
    return int(ctypes.CDLL(trust.loadable(built.library)).answer())


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes a file or folder belong to somebody else, and says whom."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
        return STRANGER
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    return owner


def plant(folder: Path) -> Path:
    """A library at the place of SOURCE's, with a right checksum, that answers otherwise."""
    tools = find_toolchain(Config())
    path = folder / "kernels" / cache_key(SOURCE, tools)[:2] / f"{cache_key(SOURCE, tools)}.so"
    evil = get_or_build(SOURCE.replace("42", "666"), tools, config(folder))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(evil.path.read_bytes())
    path.chmod(0o755)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    made = tmp_path / "home" / "cache"
    made.mkdir(parents=True, mode=0o755)
    return made


def test_a_planted_library_is_run_without_the_check(cache: Path) -> None:
    """Else the tests below would show nothing."""
    plant(cache)
    assert answer(build(cache)) == 666


@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["entries", "kernels", "cache", "above"])
@pytest.mark.parametrize("how", ["group", "others", "owner"])
def test_what_others_can_write_is_not_used(
    cache: Path, which: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plant(cache)
    folder = path.parents[which]
    before = sorted(p.name for p in path.parent.iterdir())
    if how == "owner":
        give_away(folder, monkeypatch)
    else:
        folder.chmod(0o775 if how == "group" else 0o757)
    with pytest.warns(CacheWarning, match="does not use what is in .* PLAIT_TRUST") as caught:
        built = build(cache)
        again = build(cache)
    assert len(caught) == 1 and str(folder) in str(caught[0].message)
    assert not built.hit and answer(built) == answer(again) == 42
    assert sorted(p.name for p in path.parent.iterdir()) == before


@pytest.mark.parametrize("how", ["owner", "mode", "link"])
def test_a_file_of_others_is_not_used(
    cache: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plant(cache)
    if how == "owner":
        give_away(path, monkeypatch)
        if os.geteuid() != 0:
            pytest.skip("its folder is somebody else's too")
    elif how == "mode":
        path.chmod(0o777)
    else:
        evil = path.rename(cache / "evil.so")
        path.symlink_to(evil)
    with pytest.warns(CacheWarning):
        built = build(cache)
    assert not built.hit and answer(built) == 42
    assert (
        build(cache).hit
        and not path.is_symlink()
        and stat.S_IMODE(path.stat().st_mode) & 0o022 == 0
    )


def test_a_folder_below_a_sticky_one_is_used(tmp_path: Path) -> None:
    """As below /tmp; such a folder itself is none for entries."""
    sticky = tmp_path / "shared"
    sticky.mkdir()
    sticky.chmod(0o1777)
    mine = sticky / "mine"
    mine.mkdir(mode=0o700)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not build(mine).hit and build(mine).hit
    with pytest.raises(Untrusted, match="mode 1777"):
        Trust().check_folder(sticky)


def test_links_on_the_way_are_followed_if_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link, ring = tmp_path / "real", tmp_path / "link", tmp_path / "ring"
    real.mkdir(mode=0o755)
    link.symlink_to("real")
    ring.symlink_to(ring)
    Trust().check_folder(link)
    Trust().check_folder(link / ".." / "real")
    with pytest.raises(OSError, match="link to itself"):
        Trust().check_folder(ring)
    real.chmod(0o777)
    with pytest.raises(Untrusted, match=f"{real}, mode 0777"):
        Trust().check_folder(link)
    real.chmod(0o755)
    if os.geteuid() == 0:
        os.lchown(link, STRANGER, -1)
        with pytest.raises(Untrusted, match="belongs to user"):
            Trust().check_folder(link)


def test_an_option_names_further_owners_and_folders(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(cache)
    folder = built.path.parent
    owner = give_away(folder, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(cache, trust=str(owner)).hit
        assert build(cache, trust=f"/nowhere:{cache}").hit
        folder.chmod(0o777)
        built.path.chmod(0o777)
        assert build(cache, trust=str(cache)).hit
    with pytest.warns(CacheWarning, match="mode 0777"):
        assert not build(cache, trust=str(owner)).hit
    with monkeypatch.context() as env:
        env.setenv("PLAIT_TRUST", f"7:{cache}:8")
        assert trust_of(Config.from_env().trust) == Trust(
            frozenset((7, 8)), (str(cache), str(cache))
        )


def test_a_trusted_folder_may_lie_in_one_that_is_not(tmp_path: Path) -> None:
    (tmp_path / "open" / "shared").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(Untrusted):
        Trust().check_folder(tmp_path / "open" / "shared")
    trust_of(str(tmp_path / "open" / "shared")).check_folder(tmp_path / "open" / "shared")
    with pytest.raises(Untrusted):
        trust_of(str(tmp_path / "open" / "shared")).check_folder(
            tmp_path / "open" / "shared" / ".."
        )


@pytest.mark.parametrize(("umask", "folders", "files"), [
    (0o000, 0o755, 0o755), (0o002, 0o755, 0o755), (0o022, 0o755, 0o755), (0o077, 0o700, 0o700),
    (0o027, 0o750, 0o750),
])  # fmt: skip
def test_modes_are_those_of_the_umask(tmp_path: Path, umask: int, folders: int, files: int) -> None:
    old = os.umask(umask)
    try:
        built = build(tmp_path / "a" / "b")
        Store(tmp_path / "a" / "b" / "tuned", ".json").put("key", b"{}")
    finally:
        os.umask(old)
    made = {
        p: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "a", *(tmp_path / "a").rglob("*"))
    }
    assert {m for p, m in made.items() if p.is_dir()} == {folders}
    assert made.pop(built.path) == files
    assert {m for p, m in made.items() if p.is_file()} == {files & 0o666}
    assert build(tmp_path / "a" / "b").hit


def n_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_loaded_is_what_was_checked(cache: Path) -> None:
    """The file is exchanged after the check, and then gone; no descriptor stays open."""
    before, tools = n_open(), find_toolchain(Config())
    for how in ("exchanged", "gone"):
        for _ in range(3):
            built = build(cache)
            if how == "exchanged":
                evil = cache / "evil.so"
                evil.write_bytes(
                    get_or_build(
                        SOURCE.replace("42", "666"), tools, config(cache)
                    ).path.read_bytes()
                )
                evil.replace(built.path)
            else:
                built.path.unlink()
            assert answer(built) == 42
            built.path.unlink(missing_ok=True)
            del built
    assert n_open() == before


def test_names_of_open_files_are_all_different(cache: Path) -> None:
    """The loader takes two libraries of one name for one."""
    names = set()
    for k in range(20):
        entry = Store(cache, ".so").put(f"{k:064}", b"")
        assert Path(entry.name).read_bytes() == entry.read()
        names.add(entry.name)
        del entry
    assert len(names) == 20


def test_programs_run_what_was_checked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target loads the file that was checked, even if its name means another by then."""
    pipeline = importlib.import_module("plait.compile")

    real = pipeline._build

    def swapped(*args: object) -> object:
        built = real(*args)  # type: ignore[arg-type]
        for b in built.values():
            b.path.unlink()
            b.path.write_bytes(b"junk")
        return built

    monkeypatch.setattr(pipeline, "_build", swapped)
    x = torch.randn(100)
    for k, wrapper in enumerate(("native", "python", "cpp", "fx")):
        torch._dynamo.reset()
        options = {"cache_dir": str(cache / wrapper), "wrapper": wrapper}
        fn = torch.compile(lambda a, k=k: (a * 2 + k).sin(), backend="plait", options=options)
        torch.testing.assert_close(fn(x), (x * 2 + k).sin())


def make(kind: str, path: Path) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(path)


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "loop"])
def test_only_files_are_entries(cache: Path, kind: str) -> None:
    path = build(cache).path
    path.unlink()
    make(kind, path)
    with pytest.warns(CacheWarning, match="damaged cache entry"):
        assert answer(build(cache)) == 42
    assert build(cache).hit and path.is_file()


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_only_files_are_packages(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "model.plait")
    with pytest.raises(PackageError, match="no file"):
        plait.load(tmp_path / "model.plait")


@pytest.mark.parametrize("junk", [b"", b"\x7fELF", b"int x;"], ids=["empty", "cut", "text"])
def test_an_entry_that_does_not_load_is_a_miss(cache: Path, junk: bytes) -> None:
    """Its checksum may be right."""
    path = build(cache).path
    path.unlink()
    path.write_bytes(junk + _MAGIC + hashlib.sha256(junk).digest())
    with pytest.warns(CacheWarning, match="again that does not load"):
        assert answer(build(cache)) == 42
    assert build(cache).hit


def test_an_entry_that_lacks_a_kernel_is_a_miss(cache: Path) -> None:
    tools = find_toolchain(Config())
    other = get_or_build('extern "C" long other() { return 1; }', tools, config(cache))
    path = build(cache).path
    path.unlink()
    path.write_bytes(other.path.read_bytes())
    with pytest.warns(CacheWarning, match=re.escape("does not load (it lacks answer)")):
        assert answer(build(cache)) == 42


def test_cpp_has_the_same_rules(tmp_path: Path) -> None:
    """native/core/files.h, for what C++ programs keep."""
    tool = tmp_path / "tool"
    command = [
        "g++",
        "-std=c++20",
        "-I",
        str(ROOT / "native"),
        str(ROOT / "tests/native_trust.cpp"),
        "-o",
        str(tool),
    ]
    subprocess.run(command, check=True)
    good, link, pipe, sticky = (tmp_path / name for name in ("good", "link", "pipe", "sticky"))
    for folder in (good, pipe, sticky / "mine", good / "open" / "below"):
        folder.mkdir(parents=True)
    for folder in (good, good / "open" / "below", sticky, sticky / "mine"):
        (folder / "file").write_text("")
    os.mkfifo(pipe / "file")
    link.symlink_to("good/open")
    (tmp_path / "ring").symlink_to("ring")
    sticky.chmod(0o1777)
    (good / "open").chmod(0o777)
    (sticky / "file").chmod(0o666)
    names = (
        "good",
        "sticky",
        "sticky/mine",
        "link",
        "link/below",
        "good/../good",
        "ring",
        "nothing",
        "pipe",
        "good/file",
    )

    def found(given: str) -> dict[str, tuple[bool, bool]]:
        """Whether folder and file are taken: as C++ says, which Python has to say too."""
        env = {**os.environ, "PLAIT_TRUST": given}
        folders = [str(tmp_path / name) for name in names]
        lines = subprocess.run(
            [tool, *folders], env=env, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        told = {n: (line[2:] == "", line[0] == "1") for n, line in zip(names, lines, strict=True)}
        for name in names:
            assert told[name][0] == passes(trust_of(given), tmp_path / name), name
        return told

    def passes(who: Trust, folder: Path) -> bool:
        try:
            who.check_folder(folder)
        except OSError:
            return False
        return True

    plain = found("")
    assert {n for n, (folder, _) in plain.items() if folder} == {
        "good",
        "sticky/mine",
        "good/../good",
        "pipe",
    }
    assert {n for n, (_, file) in plain.items() if file} == {
        "good",
        "sticky/mine",
        "link/below",
        "good/../good",
    }
    assert found(f"1:{good / 'open'}")["link/below"] == (True, True)
    assert found(str(sticky))["sticky"] == (True, True)
