"""Built libraries of CPU kernels: from the store on disk, or built now.

The loader does not mind the checksum that follows the shared object in an entry's file. What does
not load is no library, whatever its checksum says: it is neither stored nor taken.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

from plait.config import Config
from plait.errors import CacheWarning, warn_once
from plait.runtime.process import Workers
from plait.runtime.store import LIBRARIES, OBJECTS, Built, Store, in_scratch, key_of
from plait.runtime.toolchain import (
    NEXT_UNIT,
    SHARED,
    Toolchain,
    ToolchainFailed,
    ToolchainMissing,
    find_toolchain,
    flaw_of,
)
from plait.runtime.trust import Entry


def cache_key(source: str, toolchain: Toolchain) -> str:
    """The name of a library. The order of the maths table is part of the source."""
    return key_of((source, *toolchain.flags, toolchain.compiler, toolchain.version))


def get_or_build(
    source: str, toolchain: Toolchain, cfg: Config, symbols: Collection[str] = ()
) -> Built:
    """The shared object of a source. symbols: what must be in it.

    Raises ToolchainError if the compiler refuses it, ToolchainMissing if no compiler works or
    nothing can be written, ToolchainFailed if a compiler that works makes no library of it."""
    store = Store.of(cfg, LIBRARIES)
    key = cache_key(source, toolchain)

    def find() -> Entry | None:
        found = store.find(key)
        flaw = flaw_of(found.name, symbols) if found is not None else ""
        if not flaw:
            return found
        warn_once(
            f"plait builds a cache entry in {store.folder} again that does not load ({flaw})",
            CacheWarning,
        )
        return None

    def make() -> Entry:
        units = source.split(NEXT_UNIT)
        own = NEXT_UNIT.join(u for u in units if not u.startswith(SHARED))
        objects = [object_of(u, toolchain, cfg) for u in units if u.startswith(SHARED)]
        data = _built(own, toolchain, cfg, "kernels.so", symbols, objects)
        return store.put(key, data)

    try:
        return Built(*store.once(key, find, make))
    except ToolchainFailed:
        raise
    except (
        ToolchainMissing
    ):  # it answers, but cannot compile: the next one is asked, if there is one
        return get_or_build(source, find_toolchain(cfg), cfg, symbols)
    except OSError as error:
        raise ToolchainMissing(
            f"no folder to build kernels in ({error.strerror})", hint="another TMPDIR"
        ) from error


def _built(
    source: str,
    toolchain: Toolchain,
    cfg: Config,
    name: str,
    symbols: Collection[str] = (),
    objects: Sequence[bytes] = (),
) -> bytes:
    """The content of a file of that name, which the compiler writes."""

    def build(scratch: Path) -> bytes:
        with tempfile.TemporaryDirectory(prefix="plait-", dir=scratch) as folder:
            made = Path(folder) / name
            toolchain.compile(source, made, symbols, cfg.compiler_seconds, objects)
            return made.read_bytes()

    return in_scratch(build)


def object_of(unit: str, toolchain: Toolchain, cfg: Config) -> bytes:
    """The object of a unit, built once by a process at a time. Raises as get_or_build does."""
    key = cache_key(unit, toolchain)
    with _turn:
        future = _objects.get(key)
        mine = future is None
        future = _objects.setdefault(key, Future())
    if mine:
        try:
            store = Store.of(cfg, OBJECTS)

            def make() -> bytes:
                made = _built(unit, toolchain, cfg, "unit.o")
                store.put(key, made)
                return made

            future.set_result(store.once(key, lambda: store.read(key), make)[0])
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with _turn:
                _objects.pop(key, None)
    return future.result()


def begin_objects(units: Sequence[str], cfg: Config) -> None:
    """Begins to build objects, which whoever needs them waits for."""
    try:
        toolchain = find_toolchain(cfg)
    except ToolchainMissing:
        return  # whoever needs them says so
    pool = Workers(1)
    for unit in units:
        pool.submit(object_of, unit, toolchain, cfg)
    pool.leave()


_turn = threading.Lock()
_objects: dict[str, Future[bytes]] = {}
"""Those that are being built."""


def _forget_builds() -> None:
    """A fork has none of the threads that build."""
    global _turn
    _turn = threading.Lock()
    _objects.clear()


os.register_at_fork(after_in_child=_forget_builds)
