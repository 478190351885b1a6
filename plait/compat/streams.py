"""Streams and events that graphs name by number.

For torch 2.11, `CALLERS_STREAM` may be None; for 2.11 and 2.12, `keep_streams` does something: both
can go with these.
"""

from __future__ import annotations

from torch._dynamo import graph_bytecode_inputs

from plait.compat.versions import BEFORE_2_13

CALLERS_STREAM: int | None = getattr(graph_bytecode_inputs, "CURRENT_STREAM_INDEX", None)
"""The caller's stream by number, as graphs name streams. None in torch 2.11, whose graphs lose
waits between them."""
_streams: dict[int, object] = {}


def keep_streams() -> None:
    """What graphs name by number, streams and events, lives as long as the process where torch
    leaves weak references to dead ones dangling (its pull request 183403): Dynamo has such
    references, and crashes when it drops one."""
    if not BEFORE_2_13:
        return
    found = (known() for known in graph_bytecode_inputs.index_to_external_object_weakref.values())
    _streams.update((id(x), x) for x in found if x is not None)
