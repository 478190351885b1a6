"""What plait's own files come to: part of the key of all that a warm start takes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from plait.runtime.store import Store, key_of

_SUFFIXES = (".py", ".so")
_SETTLED_NS = 2_000_000_000
"""A file that was changed later than so long ago may change again without a new time: file systems
keep times as coarse as two seconds."""


@cache
def digest_of(home: Path, store: Store) -> str:
    """A digest of the sources and libraries below a folder, which a process looks up by their
    sizes and times of change: reading them takes a third of a warm start. store: of DIGESTS."""
    facts = sorted(_facts(str(home)))
    here = replace(store, remote=None)  # times are those of this machine
    key = key_of((str(home), repr(facts)))
    if (kept := here.read(key)) is not None:
        return kept.decode()
    digest = hashlib.sha256()
    for path, *_ in facts:
        digest.update(path.removeprefix(str(home)).encode() + Path(path).read_bytes())
    if max(changed for *_, changed in facts) < time.time_ns() - _SETTLED_NS:
        with suppress(OSError):  # the next process reads them, too
            here.write(key, digest.hexdigest().encode())
    return digest.hexdigest()


def _facts(folder: str) -> Iterator[tuple[str, int, int, int, int]]:
    """Path, number, size and times of change of each file, the later one last."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _facts(entry.path) if entry.name != "__pycache__" else ()
            elif entry.name.endswith(_SUFFIXES):
                found = entry.stat()
                first, last = sorted((found.st_mtime_ns, found.st_ctime_ns))
                yield entry.path, found.st_ino, found.st_size, first, last
