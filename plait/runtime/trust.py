"""Whose files are loaded: a cache holds machine code, and whoever can write there can run it as
you.

A folder is used if nobody but its user, root and those named by the option `trust` can change what
lies in it or put another in its place: every folder on the way to it belongs to one of them and is
not writable by its group or by others. Folders such as /tmp, where the sticky bit keeps people
from each other's files, may lie on the way, but hold no entries themselves.

Files are opened once, and what is read, checked and loaded is that open file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_HINT = "chmod go-w, or PLAIT_TRUST=<user ids and folders, ':' between them>"


class Untrusted(PermissionError):
    """Somebody else could have written a file, or could change it."""


@dataclass(frozen=True)
class Trust:
    """Who is trusted beside this process's user and root.

    owners: user ids. folders: with all that lies in them, whoever wrote it."""

    owners: frozenset[int] = frozenset()
    folders: tuple[str, ...] = ()

    def _owns(self, uid: int) -> bool:
        return uid in (os.geteuid(), 0) or uid in self.owners

    def check_folder(self, folder: Path) -> None:
        """Raises Untrusted, OSError where there is no such folder."""
        if any(folder.is_relative_to(f) for f in self.folders) and ".." not in folder.parts:
            return
        todo, at, n_links = deque(folder.absolute().parts[1:]), "/", 0
        self._check(at, os.lstat(at), not todo)
        while todo:
            part = todo.popleft()
            if part == "..":
                at = os.path.dirname(at)  # noqa: PTH120
                continue
            here = os.path.join(at, part)  # noqa: PTH118
            facts = os.lstat(here)
            if stat.S_ISLNK(facts.st_mode):
                n_links += 1
                if n_links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, f"{here} is a link to itself")
                if not self._owns(facts.st_uid):
                    raise Untrusted(errno.EPERM, f"link {here} belongs to user {facts.st_uid}")
                target = os.readlink(here)  # noqa: PTH115
                todo.extendleft(p for p in reversed(target.split("/")) if p not in ("", "."))
                at = "/" if target.startswith("/") else at
                continue
            self._check(here, facts, not todo)
            at = here

    def _check(self, folder: str, facts: os.stat_result, last: bool) -> None:
        if not stat.S_ISDIR(facts.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder")
        if any(Path(folder).is_relative_to(f) for f in self.folders):
            return
        if not self._owns(facts.st_uid):
            raise Untrusted(errno.EPERM, f"{folder} belongs to user {facts.st_uid} ({_HINT})")
        if facts.st_mode & _OTHERS and (last or not facts.st_mode & stat.S_ISVTX):
            mode = f"{stat.S_IMODE(facts.st_mode):04o}"
            raise Untrusted(errno.EPERM, f"others can write to {folder}, mode {mode} ({_HINT})")

    def open(self, path: Path) -> Entry:
        """The regular file at a path, which is no link.

        Raises Untrusted, FileNotFoundError, and OSError for anything but a file: without waiting
        for whoever writes to a pipe."""
        entry = Entry(path, os.open(path, _FLAGS))
        facts = os.fstat(entry.file)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, f"{path} is no regular file")
        if any(path.is_relative_to(folder) for folder in self.folders):
            return entry
        if not self._owns(facts.st_uid):
            raise Untrusted(errno.EPERM, f"{path} belongs to user {facts.st_uid}")
        if facts.st_mode & _OTHERS:
            raise Untrusted(errno.EPERM, f"others can write to {path}")
        return entry


NOBODY_ELSE = Trust()


@lru_cache
def trust_of(text: str) -> Trust:
    """What the option says: user ids and folders with ':' between them, '~' for the home folder."""
    words = [word for word in text.split(":") if word]
    folders = [os.path.expanduser(w) for w in words if not w.isdecimal()]  # noqa: PTH111
    return Trust(
        frozenset(int(w) for w in words if w.isdecimal()),
        (*map(os.path.abspath, folders), *map(os.path.realpath, folders)),
    )


class Entry:
    """A file that stays open until nobody refers to it: what is loaded is what was checked,
    whatever happens to its name. path: for people. file: its descriptor."""

    _serial = 0

    def __init__(self, path: Path, file: int) -> None:
        self.path, self.file = path, file
        Entry._serial += 1
        # The loader takes libraries of one name for one library, and descriptors are used again:
        # each has a spelling of its own, a bit of the serial number for each folder on the way.
        bits = "".join("/." if bit == "1" else "/" for bit in f"{Entry._serial:b}")
        self.name = f"/proc/self/fd{bits}/{file}"
        if not os.path.exists(self.name):  # no /proc  # noqa: PTH110
            self.name = str(path)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.file)

    def __str__(self) -> str:
        return str(self.path)

    def used(self) -> float:
        """When it was last asked for, in seconds since 1970."""
        return os.fstat(self.file).st_mtime

    def read(self) -> bytes:
        """All of the file."""
        return os.pread(self.file, os.fstat(self.file).st_size, 0)


Library = str | Entry
"""A file to load kernels from: its path, or an open one."""


def loadable(library: Library) -> str:
    """What the loader opens."""
    return library if isinstance(library, str) else library.name
