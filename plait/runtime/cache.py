"""Built libraries of CPU kernels: from the store on disk, or built now.

The loader does not mind the checksum that follows the shared object in an entry's file.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from plait.config import Config
from plait.runtime.store import Store, key_of
from plait.runtime.toolchain import Toolchain


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel library on disk. hit: it was there already."""

    path: Path
    hit: bool


def cache_key(source: str, toolchain: Toolchain) -> str:
    """The name of a library. The order of the maths table is part of the source."""
    return key_of((source, *toolchain.flags, toolchain.compiler, toolchain.version))


def get_or_build(source: str, toolchain: Toolchain, cfg: Config) -> Built:
    """The shared object of a source. Raises ToolchainError if the compiler refuses it."""
    store = Store(Path(cfg.cache_dir).expanduser() / "kernels", ".so")
    key = cache_key(source, toolchain)
    found = store.find(key)
    if found is not None:
        return Built(found, True)
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        library = Path(folder) / "kernels.so"
        toolchain.compile(source, library)
        return Built(store.put(key, library.read_bytes()), False)
