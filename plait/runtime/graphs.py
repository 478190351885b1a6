"""CUDA graphs as torch makes them: recording with torch's memory pools and random numbers; the executor does the rest.

Each recording has a pool of memory of its own; those of a device are made on one stream. What is not recorded, and why,
is said once a program and kept for `plait.explain`.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from plait.log import logger

SHARE = 2
"""The recordings of a device may hold one part in so many of its memory."""
SPARE_NBYTES = 256 << 20
"""Unused memory of torch's allocator from which on it is given back before recording, for a pool takes none of it."""

refusals: dict[str, dict[int, str]] = {}
"""Program -> number of a part -> why it, or some call of it, is not recorded though it was to be."""


def refused(program: str, part: int, why: str) -> None:
    """Notes a refusal; the first one of a program is a warning."""
    if program not in refusals:
        logger.warning("%s: part %d runs without a CUDA graph: %s", program, part, why)
    refusals.setdefault(program, {}).setdefault(part, why)


@cache
def _stream(device: int) -> Any:
    """Where a device's work is recorded: of the streams with priority, which hardly anyone else takes."""
    new_stream: Any = torch.cuda.Stream
    return new_stream(device, priority=-1)


class Capture:
    """From its making until `end`, what this thread puts on the current stream is recorded instead of run."""

    def __init__(self, device: int) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        # A workspace that cuBLAS keeps must not lie in the pool of a recording that may go.
        torch._C._cuda_clearCublasWorkspaces()
        self._outer = torch.cuda.current_stream(device)
        if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > SPARE_NBYTES:
            torch.cuda.empty_cache()
        self._reserved = torch.cuda.memory_reserved(device)
        self._collects = gc.isenabled()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # whose nodes the executor patches
        torch.cuda.set_stream(_stream(device))
        gc.disable()  # what dies in a collection may wait for the device
        try:
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._leave()
            raise
        self._records = True

    def _leave(self) -> None:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.set_stream(self._outer)
        if self._collects:
            gc.enable()

    def end(self) -> tuple[int, int, int]:
        """Ends the recording and returns its cudaGraphExec_t, the bytes of its pool, and how many all recordings of the
        device may hold. Raises RuntimeError where something in it could not be recorded."""
        self._end()
        self._graph.instantiate()
        nbytes = max(torch.cuda.memory_reserved(self._device) - self._reserved, 0)
        limit = torch.cuda.get_device_properties(self._device).total_memory // SHARE
        return self._graph.raw_cuda_graph_exec(), nbytes, limit

    def abort(self) -> None:
        """Ends a recording that failed, in `end` or before; nothing of it remains."""
        if self._records:
            with suppress(RuntimeError):  # that it failed is known
                self._end()

    def _end(self) -> None:
        self._records = False
        try:
            self._graph.capture_end()
        except RuntimeError:
            # torch stops at the first thing that a broken recording refuses; the rest is undone here.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device, self._pool)
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(self._device, self._pool)
            generator = torch.cuda.default_generators[self._device]
            generator.graphsafe_set_state(generator.clone_state())  # the old state waits for an end that never came
            raise
        finally:
            self._leave()

    def replay(self) -> None:
        """Runs the recording with new random numbers from torch's generator."""
        self._graph.replay()
