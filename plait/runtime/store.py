"""Files on disk by content: what is built once and used by every process.

An entry is one file, its content followed by a checksum, written beside its place and renamed into it: processes that
build the same entry at once both succeed, and a process that has opened a file keeps it. Entries are checked when read;
a damaged one is reported missing, with a warning. The folder is kept below a size by dropping what was used longest
ago. Where it cannot be written, entries go to a folder of this process.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import plait

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


@dataclass(frozen=True)
class Store:
    """Entries of one kind. suffix: of their files, such as '.so'."""

    folder: Path
    suffix: str

    def find(self, key: str) -> Path | None:
        """The file of an entry (its content, then the checksum), or None; a damaged entry counts as missing."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            data = b""
        body, trailer = data[:-_TRAILER], data[-_TRAILER:]
        if trailer != _MAGIC + hashlib.sha256(body).digest():
            text = f"plait: damaged cache entry {path} is built again"
            warnings.warn(text, CacheWarning, stacklevel=3)
            return None
        _touch(path)
        return path

    def read(self, key: str) -> bytes | None:
        """The content of an entry, or None."""
        path = self.find(key)
        return None if path is None else path.read_bytes()[:-_TRAILER]

    def put(self, key: str, data: bytes) -> Path:
        """Writes an entry and gives its file. A folder that cannot be written is a warning, not an error."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, data)
        except OSError as error:
            text = f"plait: cannot write kernels to {self.folder} ({error}); nothing is cached"
            warnings.warn(text, CacheWarning, stacklevel=3)
            path = _own_folder() / path.name
            _write(path, data)
            return path
        if key.startswith("0"):  # looking through the folder takes time: one build in sixteen does
            self.trim(MAX_BYTES)
        return path

    def trim(self, max_bytes: int) -> None:
        """Drops the entries used longest ago until the folder holds at most max_bytes. Other processes may do so at
        the same time."""
        entries: list[tuple[float, int, Path]] = []
        for path in self.folder.glob(f"*/*{self.suffix}"):
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
        return self.folder / key[:2] / f"{key}{self.suffix}"


def _write(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=".new-", suffix=path.suffix, dir=path.parent)
    fresh = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data + _MAGIC + hashlib.sha256(data).digest())
        fresh.chmod(0o755)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        return  # read-only cache: its order of use is not ours to keep


@lru_cache(maxsize=1)
def _own_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="plait-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
