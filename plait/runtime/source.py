"""Source text that runs from memory: tracebacks, and Triton, find its lines for as long as what it
made lives."""

from __future__ import annotations

import itertools
import linecache
import weakref
from typing import Any

_serial = itertools.count()


def executed(text: str, stem: str, scope: dict[str, Any], name: str) -> Any:
    """What a text that is executed in `scope` calls `name`. stem: of the file that it seems to be
    in."""
    filename = f"<plait {stem} {next(_serial)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    scope["__file__"] = filename
    exec(compile(text, filename, "exec"), scope)
    made = scope[name]
    weakref.finalize(made, linecache.cache.pop, filename, None).atexit = False
    return made
