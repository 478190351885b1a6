"""Built libraries of CPU kernels: from the store on disk, or built now.

The loader does not mind the checksum that follows the shared object in an entry's file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from plait.config import Config
from plait.runtime.store import Built, Store, in_scratch, key_of
from plait.runtime.toolchain import Toolchain, ToolchainMissing, find_toolchain


def cache_key(source: str, toolchain: Toolchain) -> str:
    """The name of a library. The order of the maths table is part of the source."""
    return key_of((source, *toolchain.flags, toolchain.compiler, toolchain.version))


def get_or_build(source: str, toolchain: Toolchain, cfg: Config) -> Built:
    """The shared object of a source. Raises ToolchainError if the compiler refuses it, ToolchainMissing if no compiler
    works or nothing can be written."""
    store = Store(Path(cfg.cache_dir) / "kernels", ".so")
    key = cache_key(source, toolchain)
    found = store.find(key)
    if found is not None:
        return Built(found, True)

    def build(scratch: Path) -> bytes:
        with tempfile.TemporaryDirectory(prefix="plait-", dir=scratch) as folder:
            library = Path(folder) / "kernels.so"
            toolchain.compile(source, library)
            return library.read_bytes()

    try:
        return Built(store.put(key, in_scratch(build)), False)
    except ToolchainMissing:  # it answers, but cannot compile: the next one is asked, if there is one
        return get_or_build(source, find_toolchain(cfg), cfg)
    except OSError as error:
        raise ToolchainMissing(f"no folder to build kernels in ({error.strerror})", hint="another TMPDIR") from error
