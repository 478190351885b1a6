"""CUDA graphs as torch makes them: recording with torch's memory pools and random numbers; the executor does the rest.

All recordings of a device share one pool of memory and are made on one stream of their own.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import cache
from typing import Any

import torch


@cache
def _place(device: int) -> tuple[Any, Any]:
    """The pool and the stream of a device's recordings."""
    stream: Any = torch.cuda.Stream
    return torch.cuda.graph_pool_handle(), stream(device)


class Capture:
    """From its making until `end`, what this thread puts on the current stream is recorded instead of run."""

    def __init__(self, device: int) -> None:
        pool, stream = _place(device)
        self._outer = torch.cuda.current_stream(device)
        self._collects = gc.isenabled()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # whose nodes the executor patches
        torch.cuda.set_stream(stream)
        gc.disable()  # what dies in a collection may wait for the device
        try:
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        torch.cuda.set_stream(self._outer)
        if self._collects:
            gc.enable()

    def end(self) -> int:
        """Ends the recording and returns its cudaGraphExec_t. Raises RuntimeError where something in it could not be
        recorded."""
        try:
            self._graph.capture_end()
        finally:
            self._leave()
        self._graph.instantiate()
        return self._graph.raw_cuda_graph_exec()

    def abort(self) -> None:
        """Ends a recording that failed; nothing of it remains."""
        if torch.cuda.is_current_stream_capturing():
            with suppress(RuntimeError):  # that it failed is known
                self._graph.capture_end()
        self._leave()

    def replay(self) -> None:
        """Runs the recording with new random numbers from torch's generator."""
        self._graph.replay()
