"""An object store beside the folder of caches: what the folder lacks is read from it, and what was
built is written to it behind the user's back.

Entries are machine code that this process runs, and object stores do not say who wrote what:
whoever can write there can run code as you. So a store is used only if the option `cache_remote`
names it. Comes in: names such as `kernels/3f/3f...90.so`. Goes out: entries' files, whose checksums
the caller tests. Whatever goes wrong is one warning, and the process goes on without the store.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Protocol, TypeVar

from plait.errors import CacheWarning, warn_once
from plait.runtime.process import Workers

T = TypeVar("T")
# Chosen, not measured.
GET_S = 10.0
"""How long a compile waits for an answer."""
FLUSH_S = 10.0
"""How long the end of the process waits for what is still being written."""
READERS = 4


class Remote(Protocol):
    """What an object store has to have. Threads call it at the same time; it may raise anything."""

    def get(self, name: str) -> bytes | None:
        """What was put there last under a name, or None."""

    def put(self, name: str, data: bytes) -> None:
        """Writes it whole or not at all, if it can."""

    def list(self) -> Iterable[str]:
        """All names."""


SCHEMES: dict[str, Callable[[str], Remote]] = {}
"""What opens a URL of a scheme that a user has registered (`plait.extend.remote_cache`)."""


class _Files:
    """Any file system that fsspec knows."""

    def __init__(self, url: str) -> None:
        self.files, root = import_module("fsspec").core.url_to_fs(url)
        self.root = root.rstrip("/")

    def get(self, name: str) -> bytes | None:
        try:
            found: bytes = self.files.cat_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return None
        return found

    def put(self, name: str, data: bytes) -> None:
        path = f"{self.root}/{name}"
        self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.files.pipe_file(path, data)

    def list(self) -> Iterable[str]:
        names: list[str] = self.files.find(self.root)
        return [name.removeprefix(self.root).lstrip("/") for name in names]


def _opened(url: str) -> Remote:
    scheme = url.partition("://")[0]
    if scheme in ("http", "ftp"):
        raise ValueError("whoever is on the way could change what it gives")
    return SCHEMES.get(scheme, _Files)(url)


class Mirror:
    """An object store that never fails: no answer is the answer that nothing is there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._opening = threading.Lock()
        self._readers, self._writer = Workers(READERS), Workers(1)
        self._missing: set[str] = set()
        self._last: Future[None] | None = None
        self._gone = False

    @cached_property
    def _remote(self) -> Remote:
        return _opened(self.url)

    def _open(self) -> Remote:
        with self._opening:  # by threads of ours: what it imports and asks takes time
            return self._remote

    def get(self, name: str) -> bytes | None:
        """What lies there under a name, or None."""
        if self._gone or name in self._missing:
            return None

        def get() -> bytes | None:
            data = self._open().get(name)
            if data is not None and not isinstance(data, bytes):
                raise TypeError(f"it gave a {type(data).__name__}")
            return data

        found = self._answer(get)
        if found is None:
            self._missing.add(name)
        return found

    def put(self, name: str, data: bytes) -> None:
        """Begins to write it."""

        def put() -> None:
            try:
                if not self._gone:
                    self._open().put(name, data)
            except Exception as error:  # noqa: BLE001  (somebody else's code, and a network)
                self._fail(error)

        if not self._gone:
            self._last = self._writer.submit(put)

    def list(self) -> list[str]:
        """The names of all that lies there."""
        return self._answer(lambda: [*self._open().list()]) or []

    def flush(self, seconds: float = FLUSH_S) -> None:
        """Waits for what is being written."""
        if self._last is not None and wait([self._last], seconds).not_done:
            self._fail(TimeoutError(f"not all was written within {seconds:g} s"))

    def _answer(self, ask: Callable[[], T]) -> T | None:
        try:
            return self._readers.submit(ask).result(GET_S)
        except TimeoutError as error:
            text = str(error) or f"no answer within {GET_S:g} s"
            self._fail(TimeoutError(text))
        except Exception as error:  # noqa: BLE001  (somebody else's code, and a network)
            self._fail(error)
        return None

    def _fail(self, error: Exception) -> None:
        self._gone = True
        why = f"{type(error).__name__}: {error}"
        warn_once(f"plait goes on without the cache at {self.url} ({why})", CacheWarning)


@lru_cache
def mirror_of(url: str) -> Mirror:
    """The one of this process."""
    made = Mirror(url)
    _mirrors.append(made)
    return made


_mirrors: list[Mirror] = []


def _forget() -> None:
    """A fork has none of the threads."""
    mirror_of.cache_clear()
    _mirrors.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _flush() -> None:
    for mirror in _mirrors:
        mirror.flush()
