"""Files on disk by content: what is built once and used by every process.

An entry is one file, its content followed by a checksum, written beside its place and renamed into
it: processes that build the same entry at once both succeed, and a process that has opened a file
keeps it. Entries are checked when read, and what is handed out is the open file that was checked; a
damaged one is reported missing, with a warning. The checksum has no key: it finds accidents. What
keeps attackers out is whose the folder and its files are (`trust.py`). The folder is kept below a
size by dropping what was used longest ago. Where it cannot be written or is not trusted, or lies
where libraries cannot be loaded from, entries go to a folder of this process. Of processes that
want an entry at the same time one builds it, and the others wait (`turns.py`). Entries may lie in
an object store besides (`remote.py`).
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import plait
from plait.config import Config
from plait.errors import CacheWarning, warn_once
from plait.runtime.trust import NOBODY_ELSE, Entry, Library, Trust, Untrusted, trust_of
from plait.runtime.turns import turn

if TYPE_CHECKING:
    from plait.runtime.remote import Mirror

T = TypeVar("T")

# Chosen, not measured: far above what a build takes.
WAIT_S = 60.0
"""How long to wait for another process that builds the same entry."""
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MAGIC = b"plait-so-1"
_NEW = ".new-"
_TRAILER = len(_MAGIC) + hashlib.sha256().digest_size


KEY = re.compile("[0-9a-f]{64}")


def key_of(parts: Iterable[str]) -> str:
    """The name of an entry: hex digest of everything that it depends on, and of plait's version."""
    digest = hashlib.sha256()
    for part in (*parts, plait.__version__):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of entries. No two have both folder and suffix in common.

    name: for people
    folder: below the cache's
    suffix: of their files, such as '.so'
    doc: what they are
    """

    name: str
    folder: str
    suffix: str
    doc: str


LIBRARIES = Kind("libraries", "kernels", ".so", "kernels and programs in C++")
OBJECTS = Kind("objects", "kernels", ".o", "what many libraries have in common")
PACKS = Kind("packs", "kernels", ".cubins", "the GPU kernels of a graph")
CUBINS = Kind("cubins", "cubins", ".cubin", "single GPU kernels")
TUNED = Kind("tuned", "tuned", ".json", "which version of a GPU kernel is fastest")
STARTS = Kind("starts", "warm", ".frame", "what came of compiled functions, for warm starts")
BACKWARDS = Kind("backwards", "warm", ".backward", "backward programs of warm starts")
DIGESTS = Kind("digests", "warm", ".digest", "what plait's own files come to")
KINDS = (LIBRARIES, OBJECTS, PACKS, CUBINS, TUNED, STARTS, BACKWARDS, DIGESTS)


@dataclass(frozen=True, slots=True)
class Listed:
    """A file in a store. used: when it was last, in seconds since 1970."""

    path: Path
    nbytes: int
    used: float

    @property
    def is_entry(self) -> bool:
        """Else it is being written, or whoever wrote it was killed."""
        return not self.path.name.startswith(_NEW)


def drop_oldest(files: Iterable[Listed], max_bytes: int) -> list[Listed]:
    """Removes the files used longest ago until the others have at most max_bytes, and gives those
    removed. Other processes may do so at the same time; what is somebody else's to remove stays."""
    files = sorted(files, key=lambda f: (f.used, f.path.name))
    total, dropped = sum(f.nbytes for f in files), []
    for file in files:
        if total <= max_bytes:
            break
        with suppress(PermissionError, IsADirectoryError):
            file.path.unlink(missing_ok=True)
            dropped.append(file)
            total -= file.nbytes
    return dropped


@dataclass(frozen=True, slots=True)
class Built:
    """An entry that holds kernels. library: the open file. hit: it was there already."""

    library: Library
    hit: bool

    @property
    def path(self) -> Path:
        """Where it lies, for people."""
        return Path(str(self.library))

    def read(self) -> bytes:
        """What was built."""
        assert isinstance(self.library, Entry), self.library
        return content(self.library)


def content(entry: Entry) -> bytes:
    """What an entry holds, without its checksum."""
    return entry.read()[:-_TRAILER]


def sealed(data: bytes) -> bytes:
    """An entry's file."""
    return data + _MAGIC + hashlib.sha256(data).digest()


def unsealed(data: bytes) -> bytes | None:
    """What an entry's file holds; None if it is damaged."""
    body = data[:-_TRAILER]
    return body if data[-_TRAILER:] == _MAGIC + hashlib.sha256(body).digest() else None


@dataclass(frozen=True)
class Store:
    """Entries of one kind.

    folder: '~' stands for the home folder
    suffix: of their files, such as '.so'
    trust: whose files are taken
    max_bytes: above which old entries are dropped
    waits: for another process that builds the same entry
    remote: where else entries are looked for, and written
    """

    folder: Path
    suffix: str
    trust: Trust = NOBODY_ELSE
    max_bytes: int = Config.cache_mb << 20
    waits: bool = False
    remote: Mirror | None = None

    @staticmethod
    def of(cfg: Config, kind: Kind) -> Store:
        """The entries of one kind in the folder that cfg names."""
        assert kind in KINDS, f"{kind} is no row of KINDS"
        folder = Path(cfg.cache_dir) / kind.folder
        mb, waits, remote = cfg.cache_mb, cfg.build_once, None
        if cfg.cache_remote:
            from plait.runtime.remote import mirror_of  # few use it

            remote = mirror_of(cfg.cache_remote)
        return Store(folder, kind.suffix, trust_of(cfg.trust), mb << 20, waits, remote)

    def find(self, key: str) -> Entry | None:
        """The file of an entry (its content, then the checksum), or None; a damaged entry, or one
        that others could have written, counts as missing."""
        return self._find(key) or self._fetch(key)

    def _find(self, key: str) -> Entry | None:
        try:
            if not _may_load(self.path(key)):
                return None
            found = self.open(key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Untrusted as error:
            self.reject(error)
            return None
        except OSError:
            warn_once(f"plait builds a damaged cache entry in {self.folder} again", CacheWarning)
            return None
        _touch(found)
        return found

    def _fetch(self, key: str) -> Entry | None:
        """An entry that lies elsewhere, as one of ours."""
        data = None if self.remote is None else self.remote.get(self._place(key))
        if self.remote is None or data is None:
            return None
        body = unsealed(data)
        if body is None:
            warn_once(f"plait builds a damaged entry of {self.remote.url} again", CacheWarning)
            return None
        with suppress(OSError):  # no folder of this machine can be written
            return self._keep(key, body)
        return None

    def open(self, key: str) -> Entry:
        """The file of an entry, which is no use of it. Raises Untrusted, FileNotFoundError,
        NotADirectoryError, and OSError for a damaged one."""
        path = self.path(key)
        self.trust.check_folder(path.parent)
        found = self.trust.open(path)
        if unsealed(found.read()) is None:
            raise OSError(errno.EIO, "its checksum is wrong")
        return found

    def read(self, key: str) -> bytes | None:
        """The content of an entry, or None."""
        found = self.find(key)
        return None if found is None else content(found)

    def put(self, key: str, data: bytes) -> Entry:
        """Writes an entry and gives its file. A folder that cannot be used is a warning, and an
        error (OSError) only if no other folder of this machine can be."""
        self._send(key, data)
        return self._keep(key, data)

    def offer(self, key: str, data: bytes) -> None:
        """Writes an entry that this process does not need. Raises OSError where the folder cannot
        be used."""
        self._send(key, data)
        self._written(key, data)

    def _send(self, key: str, data: bytes) -> None:
        if self.remote is not None:
            self.remote.put(self._place(key), sealed(data))

    def _keep(self, key: str, data: bytes) -> Entry:
        try:
            return self._written(key, data)
        except Untrusted as error:
            self.reject(error)
        except OSError as error:
            text = (
                f"plait cannot write kernels to {self.folder} ({error.strerror}): this process "
                "builds its own"
            )
            warn_once(text, CacheWarning)
        return in_scratch(lambda scratch: self._put_aside(_own_folder(scratch), key, data))

    def _written(self, key: str, data: bytes) -> Entry:
        made = self.write(key, data)
        # Looking through the folder takes time: one build in sixteen does.
        if key.startswith("0"):
            drop_oldest(self.files(), self.max_bytes)
        return made

    def reject(self, error: Untrusted) -> None:
        """Warns that the folder, or an entry in it, is not used."""
        text = (
            f"plait does not use what is in {self.folder} ({error.strerror}): this process builds "
            "its own"
        )
        warn_once(text, CacheWarning)

    def write(self, key: str, data: bytes) -> Entry:
        """Writes an entry and gives its file. Raises Untrusted, OSError."""
        path = self.path(key)
        make_folder(path.parent)
        self.trust.check_folder(path.parent)
        return _write(path, data)

    def once(self, key: str, find: Callable[[], T | None], make: Callable[[], T]) -> tuple[T, bool]:
        """What find gives, or else what make does, which has to write the entry: of processes that
        want it at once, one makes it. And whether it was found."""
        found = find()
        if found is None:
            with self.turn(key) if self.waits else nullcontext():
                found = find()  # by now
                if found is None:
                    return make(), False
        return found, True

    def turn(
        self, key: str, seconds: float = WAIT_S, doing: str = "builds the same kernels"
    ) -> AbstractContextManager[bool]:
        """For a block that one process or thread runs at a time for a key; see turns.turn."""
        try:
            folder = self.folder.expanduser()
            make_folder(folder)
            self.trust.check_folder(folder)
        except (OSError, RuntimeError):  # there may be no home
            return nullcontext(True)
        return turn(folder / "lock", key + self.suffix, seconds, doing)

    def files(self) -> list[Listed]:
        """All that lies in the folder, in no order."""
        found = []
        for path in self.folder.expanduser().glob(f"*/*{self.suffix}"):
            with suppress(FileNotFoundError):
                facts = path.lstat()
                found.append(Listed(path, facts.st_size, facts.st_mtime))
        return found

    def _place(self, key: str) -> str:
        """Of an entry, below the folder of caches."""
        return f"{self.folder.name}/{key[:2]}/{key}{self.suffix}"

    def path(self, key: str) -> Path:
        """Where an entry lies. Raises FileNotFoundError where there is no home."""
        try:
            return self.folder.expanduser() / key[:2] / f"{key}{self.suffix}"
        except RuntimeError as error:
            raise FileNotFoundError(errno.ENOENT, str(error)) from None

    def _put_aside(self, folder: Path, key: str, data: bytes) -> Entry:
        path = folder / f"{key}{self.suffix}"
        return _write(path, data)


def make_folder(folder: Path) -> None:
    """Makes a folder and those on the way to it that are missing, as the umask says but never so
    that others can write. Raises OSError."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(0o755, exist_ok=True)


def in_scratch(work: Callable[[Path], T]) -> T:
    """work(folder) for the first folder for short-lived files in which it raises no OSError."""
    failure: OSError | None = None
    for make in (tempfile.gettempdir, lambda: "/dev/shm", lambda: "/var/tmp"):
        try:
            return work(Path(make()))
        except OSError as error:
            failure = failure or error
    assert failure is not None, "no folder was tried"
    raise failure


def _may_load(path: Path) -> bool:
    """No library loads where the filesystem of its folder lets nothing be executed. Raises
    OSError."""
    return path.suffix != ".so" or not os.statvfs(path.parent).f_flag & os.ST_NOEXEC


def _write(path: Path, data: bytes) -> Entry:
    if not _may_load(path):
        raise PermissionError(errno.EACCES, "mounted noexec")
    fresh = path.with_name(f"{_NEW}{secrets.token_hex(8)}{path.suffix}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    entry = Entry(path, os.open(fresh, flags, 0o755 if path.suffix == ".so" else 0o644))
    try:
        mode = os.fstat(entry.file).st_mode
        if mode & _OTHERS:  # a folder's own rules may say more than the mode above and the umask
            os.fchmod(entry.file, mode & ~_OTHERS)
        rest = memoryview(sealed(data))
        while rest:
            rest = rest[os.write(entry.file, rest) :]
        if path.is_dir() and not path.is_symlink():  # whoever made it, it is no entry
            shutil.rmtree(path)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)
    return entry


def _touch(entry: Entry) -> None:
    try:
        os.utime(entry.file)
    except OSError:
        return  # read-only cache: its order of use is not ours to keep


@lru_cache
def _own_folder(scratch: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="plait-kernels-", dir=scratch))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
