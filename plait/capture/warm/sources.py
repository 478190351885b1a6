"""The files of the user's own modules. An entry is taken where each has the text that it had.

A trace may hold what an edit of any of these changes and no guard tells: a number that a decorator
was given, a default that a factory closes over. Functions and values that a trace did meet are
compared one by one (`prints.py`); this is the net below them, and asks nothing of how a value got
to where Dynamo read it. Modules of Python's library and of installed packages are left out: they
change by being installed anew, and what the trace ran of them is compared by its code.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from plait.compat.frame_facts import NotKept
from plait.compat.torch_functions import is_library_file

_BEGAN = time.time()
_INSTALLED = ("/site-packages/", "/dist-packages/")
_OURS = frozenset({"plait", "triton_launch"})  # entries are of one version of these


def own_sources() -> dict[str, str]:
    """What stands in the file of each module that is loaded, by its name."""
    loaded = ((name, _file_of(name)) for name in list(sys.modules))
    return {name: _digest(file) for name, file in loaded if file is not None and file.is_file()}


def require_sources(kept: Mapping[str, str]) -> None:
    """Raises NotKept where a module has another text, or is not loaded."""
    for name, digest in kept.items():
        file = _file_of(name)
        if file is None or not file.is_file():
            raise NotKept(f"the module {name} is not loaded")
        if _digest(file) != digest:
            raise NotKept(f"the file of the module {name} is another one")


def _file_of(name: str) -> Path | None:
    """The source file of a module of the user's; None for others."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or name.partition(".")[0] in _OURS:
        return None
    of_others = any(folder in file for folder in _INSTALLED) or is_library_file(file)
    return None if of_others else Path(file)


def _digest(file: Path) -> str:
    stat = file.stat()
    # What was written since this process began need not be what it runs: no other process has it.
    late = f" written at {stat.st_mtime_ns}" if stat.st_mtime > _BEGAN else ""
    return _digest_at(file, stat.st_mtime_ns, stat.st_size) + late


@lru_cache(maxsize=4096)
def _digest_at(file: Path, mtime_ns: int, nbytes: int) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]
