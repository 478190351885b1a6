"""One at a time where many would do the same: a lock for each key.

A lock is a byte of a file, and belongs to whoever opened the file: threads of a process exclude
each other as processes do, and a holder that dies, in whatever way, leaves it free. Nothing is
written to the file, and it is never removed. Where it cannot be opened, or its filesystem has no
locks, nobody waits.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.errors import warn_once
from plait.runtime.process import pause

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def turn(file: Path, key: str, seconds: float, doing: str) -> Iterator[bool]:
    """For a block that one process or thread runs at a time for each key.

    file: holds the locks of all keys, and is made if it is missing
    seconds: how long to wait; the block then runs beside the other's, and is given False
    doing: what the other does, for a warning
    """
    try:
        handle = os.open(file, _FLAGS, 0o644)
    except OSError:
        yield True
        return
    at = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 2
    try:
        yield _locked(handle, at, seconds, doing)
    finally:
        with suppress(OSError):
            # Closing is not enough: a child that was forked inside has it open.
            _lock(handle, fcntl.F_UNLCK, at)
        os.close(handle)


def _locked(handle: int, at: int, seconds: float, doing: str) -> bool:
    """Takes the lock of a byte. False if another has it for that long."""
    start = time.monotonic()
    while True:
        try:
            _lock(handle, fcntl.F_WRLCK, at)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return True  # a filesystem without locks
        else:
            return True
        waited = time.monotonic() - start
        if waited >= seconds:
            return False
        if waited > seconds / 4:
            warn_once(f"plait waits for another process that {doing}")
        pause(min(0.1, 0.005 + waited / 10))


def _lock(handle: int, how: int, at: int) -> None:
    """Raises OSError, EAGAIN or EACCES if another has the lock."""
    lock = struct.pack("@hhqqi4x", how, os.SEEK_SET, at, 1, 0)  # struct flock
    fcntl.fcntl(handle, fcntl.F_OFD_SETLK, lock)
