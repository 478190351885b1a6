"""Ranks of a process group choose alike.

Versions of a kernel round differently, so ranks that chose by clocks of their own would drift
apart. What the first of them chooses holds for all: the key-value store in which they met
remembers it. Nobody waits for another rank, which may compile something else or nothing.
"""

from __future__ import annotations

import torch.distributed as dist


def several() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def first_choice(key: str, mine: int) -> int | None:
    """What the first rank that was asked for this key chose: `mine`, if it is this one. None where
    that cannot be known."""
    try:
        store = dist.distributed_c10d._get_default_store()
        return int(store.compare_set(f"plait/{key}", "", str(mine)))
    except (RuntimeError, ValueError):  # the store's host is gone, or it cannot compare
        return None
