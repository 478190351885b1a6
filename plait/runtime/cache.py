"""Built kernel libraries on disk, by content: source, flags, compiler and plait version name the file.

An entry is one file, a shared object followed by a checksum, written beside its place and renamed into it:
processes that build the same library
at once both succeed, and a process that has loaded a file keeps it. Entries are checked when read; a damaged
one is built again with a warning.
The folder is kept below a size by dropping what was used longest ago. Where it cannot be written, libraries go
to a folder of this process.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import plait
from plait.config import Config
from plait.runtime.toolchain import Toolchain

MAX_BYTES = 512 << 20
"""Size of the folder above which old entries are dropped."""
_MAGIC = b"plait-so-1"
_TRAILER = len(_MAGIC) + hashlib.sha256().digest_size


class CacheWarning(UserWarning):
    """A cache entry was damaged, or the cache folder cannot be used."""


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel library on disk. hit: it was there already."""

    path: Path
    hit: bool


def cache_key(source: str, toolchain: Toolchain) -> str:
    """The name of a library: hex digest of everything that it depends on. The order of the maths table is
    part of the source."""
    parts = (source, *toolchain.flags, toolchain.compiler, toolchain.version, plait.__version__)
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def get_or_build(source: str, toolchain: Toolchain, cfg: Config) -> Built:
    """The shared object of a source: from the cache, or built now. Raises ToolchainError if the compiler
    refuses the source."""
    folder = Path(cfg.cache_dir).expanduser() / "kernels"
    key = cache_key(source, toolchain)
    path = folder / key[:2] / f"{key}.so"
    state = _check(path)
    if state == "good":
        _touch(path)
        return Built(path, True)
    if state == "damaged":
        warnings.warn(
            f"plait: damaged cache entry {path} is built again", CacheWarning, stacklevel=2
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _build(source, toolchain, path)
    except OSError as error:
        path = _own_folder() / f"{key}.so"
        warnings.warn(
            f"plait: cannot write kernels to {folder} ({error}); nothing is cached",
            CacheWarning,
            stacklevel=2,
        )
        _build(source, toolchain, path)
        return Built(path, False)
    if key.startswith("0"):  # looking through the folder takes time: one build in sixteen does
        trim(folder, MAX_BYTES)
    return Built(path, False)


def _build(source: str, toolchain: Toolchain, path: Path) -> None:
    handle, name = tempfile.mkstemp(prefix=".new-", suffix=".so", dir=path.parent)
    os.close(handle)
    fresh = Path(name)
    try:
        toolchain.compile(source, fresh)
        data = fresh.read_bytes()
        with fresh.open("ab") as out:  # the loader does not mind bytes after the object
            out.write(_MAGIC + hashlib.sha256(data).digest())
        fresh.chmod(0o755)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)


def _check(path: Path) -> str:
    """'good', 'damaged' or 'missing'."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError:
        return "damaged"
    body, trailer = data[:-_TRAILER], data[-_TRAILER:]
    return "good" if trailer == _MAGIC + hashlib.sha256(body).digest() else "damaged"


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


def trim(folder: Path, max_bytes: int) -> None:
    """Drops the entries used longest ago until the folder holds at most max_bytes. Other processes may do
    so at the same time."""
    entries: list[tuple[float, int, Path]] = []
    for path in folder.glob("*/*.so"):
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
