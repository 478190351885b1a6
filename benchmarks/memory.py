"""Peak memory of one call: what PyTorch's CPU allocator hands out, and the blocks of plait's arena
pool.

Serves the workers of races and tests/test_memory.py. Imports nothing of plait, whose arenas count
where it is loaded.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import torch
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _EventType,
    _ExperimentalConfig,
)


def peak(call: Callable[[], object]) -> tuple[int, int]:
    """Peak of a call that has been made before, and how much of it is arenas, which count for the
    whole call; in bytes."""
    for _ in range(2):
        call()
    gc.collect()
    arena = 0
    if (load := sys.modules.get("plait.runtime.load")) is not None:
        load.trim_arenas()
        idle = load.arena_stats()["held_bytes"]
        call()
        arena = load.arena_stats()["held_bytes"] - idle
    return allocator_peak(call) + arena, arena


def allocator_peak(call: Callable[[], object]) -> int:
    """The most bytes that one call had from the CPU allocator at once. What was there before does
    not count, even if the call frees it; what it returns counts to the end."""
    config = ProfilerConfig(
        ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig()
    )
    activities = {ProfilerActivity.CPU}
    torch.autograd._prepare_profiler(config, activities)
    torch.autograd._enable_profiler(config, activities, {RecordScope.USER_SCOPE})
    try:
        kept = call()
    finally:
        result = torch.autograd._disable_profiler()
    del kept
    found, todo = [], list(result.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        tag, fields = event.typed
        if tag == _EventType.Allocation:
            found.append((event.start_time_ns, len(found), fields.ptr, fields.alloc_size))
    sizes: dict[int, int] = {}
    held = most = 0
    # The tree holds events of one moment in the order in which they came; the stack reversed it.
    for _, _, ptr, nbytes in sorted(found, key=lambda e: (e[0], -e[1])):
        held -= sizes.pop(ptr, 0)
        if nbytes > 0:
            sizes[ptr] = nbytes
            held += nbytes
            most = max(most, held)
    return most
