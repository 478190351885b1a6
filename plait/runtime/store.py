"""Files on disk by content: what is built once and used by every process.

An entry is one file, its content followed by a checksum, written beside its place and renamed into it: processes that
build the same entry at once both succeed, and a process that has opened a file keeps it. Entries are checked when read;
a damaged one is reported missing, with a warning. The folder is kept below a size by dropping what was used longest
ago. Where it cannot be written, or lies where libraries cannot be loaded from, entries go to a folder of this process.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import plait
from plait.errors import warn_once

T = TypeVar("T")

MAX_BYTES = 512 << 20
"""Size of a folder above which old entries are dropped."""
_MAGIC = b"plait-so-1"
_TRAILER = len(_MAGIC) + hashlib.sha256().digest_size


class CacheWarning(UserWarning):
    """A cache entry was damaged, or the cache folder cannot be used."""


def key_of(parts: Iterable[str]) -> str:
    """The name of an entry: hex digest of everything that it depends on, and of plait's version."""
    digest = hashlib.sha256()
    for part in (*parts, plait.__version__):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Built:
    """An entry that holds kernels. hit: it was there already."""

    path: Path
    hit: bool

    def read(self) -> bytes:
        """What was built. Raises OSError if it was dropped meanwhile."""
        return self.path.read_bytes()[:-_TRAILER]


@dataclass(frozen=True)
class Store:
    """Entries of one kind. folder: '~' stands for the home folder. suffix: of their files, such as '.so'."""

    folder: Path
    suffix: str

    def find(self, key: str) -> Path | None:
        """The file of an entry (its content, then the checksum), or None; a damaged entry counts as missing."""
        try:
            path = self._path(key)
            _check_loads(path)
        except OSError:
            return None
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            data = b""
        body, trailer = data[:-_TRAILER], data[-_TRAILER:]
        if trailer != _MAGIC + hashlib.sha256(body).digest():
            warn_once(f"plait builds a damaged cache entry in {self.folder} again", CacheWarning)
            return None
        _touch(path)
        return path

    def read(self, key: str) -> bytes | None:
        """The content of an entry, or None."""
        path = self.find(key)
        return None if path is None else path.read_bytes()[:-_TRAILER]

    def put(self, key: str, data: bytes) -> Path:
        """Writes an entry and gives its file. A folder that cannot be used is a warning, and an error (OSError) only if
        no other folder of this machine can be."""
        try:
            path = self._path(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            _check_loads(path)
            _write(path, data)
        except OSError as error:
            text = f"plait cannot write kernels to {self.folder} ({error.strerror}): this process builds its own"
            warn_once(text, CacheWarning)
            return in_scratch(lambda scratch: self._put_aside(_own_folder(scratch), key, data))
        if key.startswith("0"):  # looking through the folder takes time: one build in sixteen does
            self.trim(MAX_BYTES)
        return path

    def trim(self, max_bytes: int) -> None:
        """Drops the entries used longest ago until the folder holds at most max_bytes. Other processes may do so at
        the same time."""
        entries: list[tuple[float, int, Path]] = []
        for path in self.folder.expanduser().glob(f"*/*{self.suffix}"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            entries.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries, key=lambda e: (e[0], e[2].name)):
            if total <= max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _path(self, key: str) -> Path:
        try:
            return self.folder.expanduser() / key[:2] / f"{key}{self.suffix}"
        except RuntimeError as error:
            raise FileNotFoundError(errno.ENOENT, str(error)) from None

    def _put_aside(self, folder: Path, key: str, data: bytes) -> Path:
        path = folder / f"{key}{self.suffix}"
        _check_loads(path)
        _write(path, data)
        return path


def in_scratch(work: Callable[[Path], T]) -> T:
    """work(folder) for the first folder for short-lived files in which it raises no OSError."""
    failure: OSError | None = None
    for make in (tempfile.gettempdir, lambda: "/dev/shm", lambda: "/var/tmp"):
        try:
            return work(Path(make()))
        except OSError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _check_loads(path: Path) -> None:
    """Raises OSError for a library where the filesystem of its folder lets nothing be executed."""
    if path.suffix == ".so" and os.statvfs(path.parent).f_flag & os.ST_NOEXEC:
        raise PermissionError(errno.EACCES, "mounted noexec")


def _write(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=".new-", suffix=path.suffix, dir=path.parent)
    fresh = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data + _MAGIC + hashlib.sha256(data).digest())
        fresh.chmod(0o755)
        if path.is_dir() and not path.is_symlink():  # whoever made it, it is no entry
            shutil.rmtree(path)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        return  # read-only cache: its order of use is not ours to keep


@lru_cache
def _own_folder(scratch: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="plait-kernels-", dir=scratch))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
