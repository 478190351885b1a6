"""What plait's own files come to is looked up by their sizes and times, and read where it must."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.capture.warm import own_files
from plait.config import Config
from plait.runtime.store import DIGESTS, Store

OLD = time.time() - 3600


class Tree:
    """Some files, and how many of them a digest read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.reads = folder / "home", 0
        self.store = Store.of(Config(cache_dir=str(folder / "cache")), DIGESTS)
        (self.home / "room" / "__pycache__").mkdir(parents=True)
        for name in ("a.py", "room/b.py", "room/c.so", "room/__pycache__/b.pyc", "notes.txt"):
            (self.home / name).write_text("one")
        # A file's time of change cannot be set: the clock goes on instead.
        monkeypatch.setattr(own_files, "time", SimpleNamespace(time_ns=lambda: self.now))
        self.now = time.time_ns() + 10 * own_files._SETTLED_NS
        read = Path.read_bytes

        def counted(path: Path) -> bytes:
            self.reads += self.home in path.parents
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", counted)

    def digest(self) -> tuple[str, int]:
        """What a new process finds, and the files that it reads."""
        own_files.digest_of.cache_clear()
        self.reads = 0
        return own_files.digest_of(self.home, self.store), self.reads


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_files_are_read_once(tree: Tree) -> None:
    found, reads = tree.digest()
    assert reads == 3 and tree.digest() == (found, 0)


def _written_as_long(home: Path) -> None:
    (home / "a.py").write_text("two")
    os.utime(home / "a.py", (OLD, OLD))  # as an unpacked archive has it


def _replaced(home: Path) -> None:
    (home / "new").write_text("two")
    os.utime(home / "new", (OLD, OLD))
    (home / "new").rename(home / "room" / "c.so")


@pytest.mark.parametrize(
    "change",
    [
        _written_as_long,
        _replaced,
        lambda home: (home / "room" / "b.py").write_text("longer"),
        lambda home: (home / "room" / "b.py").unlink(),
        lambda home: (home / "room" / "b.py").rename(home / "room" / "d.py"),
        lambda home: (home / "room" / "new.py").write_text(""),
    ],
)
def test_a_change_is_another_digest(change: Callable[[Path], object], tree: Tree) -> None:
    old, _ = tree.digest()
    change(tree.home)
    found, reads = tree.digest()
    assert found != old and reads


def test_what_is_no_source_changes_nothing(tree: Tree) -> None:
    found, _ = tree.digest()
    (tree.home / "notes.txt").write_text("two")
    (tree.home / "room" / "__pycache__" / "a.pyc").write_text("two")
    assert tree.digest() == (found, 0)


def test_the_same_files_elsewhere_are_the_same(tree: Tree, tmp_path: Path) -> None:
    """Machines share caches."""
    found, _ = tree.digest()
    shutil.copytree(tree.home, tmp_path / "other")
    assert own_files.digest_of(tmp_path / "other", tree.store) == found


def test_a_file_that_may_change_unseen_is_read_again(tree: Tree) -> None:
    tree.now = time.time_ns()
    assert tree.digest()[1] == tree.digest()[1] == 3
    tree.now += 10 * own_files._SETTLED_NS
    assert tree.digest()[1] == 3 and tree.digest()[1] == 0


def test_without_a_folder_files_are_read(tree: Tree, tmp_path: Path) -> None:
    found, _ = tree.digest()
    (tmp_path / "file").write_text("")
    tree.store = Store.of(Config(cache_dir=str(tmp_path / "file")), DIGESTS)
    assert tree.digest() == tree.digest() == (found, 3)
