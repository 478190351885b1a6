"""The name "plait" in torch's table of back ends, looked up by several threads at once.

`lookup_backend` of torch asks whether a name has been loaded, loads its entry point and registers
what comes of it, all without a lock: of threads that look a name up for the first time at once,
all but one are refused ("duplicate name"). They all wait for the import of `backend.py`, which
calls this file first; from then on the name may be registered again.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.backends import registry

NAME = "plait"


class _Loaded(dict[str, Any]):
    """Back ends that were loaded. Ours is never said to be among them, so that whoever looks it up
    loads and registers it once more: the same function, a few microseconds a lookup."""

    def __contains__(self, name: object) -> bool:
        return name != NAME and super().__contains__(name)


def allow_again() -> None:
    """Lets the name be registered any number of times."""
    before = registry._COMPILER_FNS
    if not isinstance(before, _Loaded):
        registry._COMPILER_FNS = made = _Loaded(before)
        made.update(before)  # another thread may have registered one meanwhile
