"""CUDA graphs as torch makes them: recording with torch's memory pools and random numbers; the executor does the rest.

Each recording has a pool of memory of its own; those of a device are made on one stream.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import cache
from typing import Any

import torch


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

    def end(self) -> int:
        """Ends the recording and returns its cudaGraphExec_t. Raises RuntimeError where something in it could not be
        recorded."""
        self._end()
        self._graph.instantiate()
        return self._graph.raw_cuda_graph_exec()

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
            generator = torch.cuda.default_generators[self._device]
            generator.graphsafe_set_state(generator.clone_state())  # the old state waits for an end that never came
            raise
        finally:
            self._leave()

    def replay(self) -> None:
        """Runs the recording with new random numbers from torch's generator."""
        self._graph.replay()
