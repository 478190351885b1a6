"""CUDA graphs as torch makes them: recording with torch's memory pools and random numbers; the
executor does the rest.

The recordings of a device are made on one stream and run one after another, so they share a pool of
memory for what lives no longer than a run of theirs. What outlives a run, such as tensors that are
saved for a backward pass, lies in a pool of the recording's own. What is not recorded, and why, is
said once a program and kept for `plait.explain`.
"""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch

from plait.log import logger

# Bounds on memory: chosen, not measured (tests/test_gpu_graphs.py).
SHARE = 2
"""The recordings of a device may hold one part in so many of its memory."""
SPARE_NBYTES = 256 << 20
"""Unused memory of torch's allocator from which on it is given back before recording, for a pool
takes none of it."""

refusals: dict[str, dict[int, str]] = {}
"""Program -> number of a part -> why it, or some call of it, is not recorded though it was to
be."""


def refused(program: str, part: int, why: str) -> None:
    """Notes a refusal; the first one of a program is a warning."""
    if program not in refusals:
        logger.warning("%s: part %d runs without a CUDA graph: %s", program, part, why)
    refusals.setdefault(program, {}).setdefault(part, why)


@cache
def _stream(device: int) -> Any:
    """Where a device's work is recorded: of the streams with priority, which hardly anyone else
    takes."""
    new_stream: Any = torch.cuda.Stream
    return new_stream(device, priority=-1)


class _Pool:
    """Memory of torch's allocator that nothing else gets as long as this is there."""

    def __init__(self, device: int) -> None:
        self.device, self.id = device, torch.cuda.graph_pool_handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(device, self.id)
        torch._C._cuda_endAllocateToPool(device, self.id)
        finalize(self, torch._C._cuda_releasePool, device, self.id).atexit = False


def _nbytes(*pools: _Pool) -> list[int]:
    """What each pool has from its device."""
    # Of all memory: torch's look-up of one pool gives references to the numbers of its id away
    # that it does not own, and frees those above 256, which Python makes anew each time.
    snapshot: Any = torch.cuda.memory_snapshot
    found: Counter[tuple[int, int]] = Counter()
    for segment in snapshot():
        found[tuple(segment["segment_pool_id"])] += segment["total_size"]
    return [found[pool.id] for pool in pools]


# By device; goes with the last recording.
_shared: WeakValueDictionary[int, _Pool] = WeakValueDictionary()


def _shared_pool(device: int) -> _Pool:
    found = _shared.get(device)
    if found is None:
        found = _shared[device] = _Pool(device)
    return found


class Capture:
    """From its making until `end`, what this thread puts on the current stream is recorded instead
    of run. What it allocates serves other recordings as well, but for what is allocated after
    `keep(True)` and before `keep(False)`."""

    def __init__(self, device: int) -> None:
        backend: Any = torch.cuda.get_allocator_backend
        if backend() != "native":
            raise RuntimeError(
                f"recordings need the pools of PyTorch's own allocator, and this one is {backend()}"
            )
        self._device, self._kept = device, _Pool(device)
        self._pool = self._shared = _shared_pool(device)
        # A workspace that cuBLAS keeps must not lie in the pool of a recording that may go.
        torch._C._cuda_clearCublasWorkspaces()
        self._outer = torch.cuda.current_stream(device)
        if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > SPARE_NBYTES:
            torch.cuda.empty_cache()
        self._collects = gc.isenabled()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # whose nodes the executor patches
        torch.cuda.set_stream(_stream(device))
        gc.disable()  # what dies in a collection may wait for the device
        try:
            self._graph.capture_begin(pool=self._shared.id, capture_error_mode="thread_local")
        except BaseException:
            with suppress(RuntimeError):  # torch may not have come to this
                torch._C._cuda_endAllocateToPool(device, self._shared.id)
                torch._C._cuda_releasePool(device, self._shared.id)
            self._leave()
            raise
        self._records = True
        self._allocate_from(self._shared)  # whichever stream this thread records on

    def _leave(self) -> None:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.set_stream(self._outer)
        if self._collects:
            gc.enable()

    def keep(self, kept: bool) -> None:
        self._allocate_from(self._kept if kept else self._shared)

    def _allocate_from(self, pool: _Pool) -> None:
        torch._C._cuda_endAllocateToPool(self._device, self._pool.id)
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, pool.id)
        # The pool counts who holds it, and this is no holder.
        torch._C._cuda_releasePool(self._device, pool.id)
        self._pool = pool

    def stop(self) -> None:
        """Ends the recording: from now on nodes may be taken out of it. Raises RuntimeError where
        something in it could not be recorded."""
        self._end()

    def ready(self) -> None:
        """Makes the recording ready to run, and ends it before if need be. Raises RuntimeError
        where something in it could not be recorded."""
        if self._records:
            self._end()
        self._graph.instantiate()

    def end(self) -> tuple[int, int, int, int]:
        """As `ready`. Returns its cudaGraphExec_t, the bytes of its own memory and of what it
        shares with others, and how many all recordings of the device may hold."""
        self.ready()
        limit = torch.cuda.get_device_properties(self._device).total_memory // SHARE
        kept, shared = _nbytes(self._kept, self._shared)
        return self._graph.raw_cuda_graph_exec(), kept, shared, limit

    def abort(self) -> None:
        """Ends a recording that failed, in `ready` or before; nothing of it remains."""
        if self._records:
            with suppress(RuntimeError):  # that it failed is known
                self._end()

    def _end(self) -> None:
        self._records = False
        try:
            self._graph.capture_end()
        except RuntimeError:
            # torch stops at the first thing that a broken recording refuses; the rest is undone
            # here.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device, self._shared.id)
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(self._device, self._shared.id)
            generator = torch.cuda.default_generators[self._device]
            # The old state waits for an end that never came.
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            self._leave()

    def replay(self) -> None:
        """Runs the recording with new random numbers from torch's generator."""
        self._graph.replay()
