"""Built libraries of CPU kernels: from the store on disk, or built now.

The loader does not mind the checksum that follows the shared object in an entry's file. What does
not load is no library, whatever its checksum says: it is neither stored nor taken.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

from plait.config import Config
from plait.errors import warn_once
from plait.runtime.store import Built, CacheWarning, Store, in_scratch, key_of
from plait.runtime.toolchain import (
    Toolchain,
    ToolchainFailed,
    ToolchainMissing,
    find_toolchain,
    flaw_of,
)


def cache_key(source: str, toolchain: Toolchain) -> str:
    """The name of a library. The order of the maths table is part of the source."""
    return key_of((source, *toolchain.flags, toolchain.compiler, toolchain.version))


def get_or_build(
    source: str, toolchain: Toolchain, cfg: Config, symbols: Collection[str] = ()
) -> Built:
    """The shared object of a source. symbols: what must be in it.

    Raises ToolchainError if the compiler refuses it, ToolchainMissing if no compiler works or
    nothing can be written, ToolchainFailed if a compiler that works makes no library of it."""
    store = Store.of(cfg, "kernels", ".so")
    key = cache_key(source, toolchain)
    found = store.find(key)
    if found is not None:
        flaw = flaw_of(found.name, symbols)
        if not flaw:
            return Built(found, True)
        warn_once(
            f"plait builds a cache entry in {store.folder} again that does not load ({flaw})",
            CacheWarning,
        )

    def build(scratch: Path) -> bytes:
        with tempfile.TemporaryDirectory(prefix="plait-", dir=scratch) as folder:
            library = Path(folder) / "kernels.so"
            toolchain.compile(source, library, symbols, cfg.compiler_seconds)
            return library.read_bytes()

    try:
        return Built(store.put(key, in_scratch(build)), False)
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
