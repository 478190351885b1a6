"""What races on a GPU share: a peer as a compiled function, and how long its calls take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
REPLAYS = 8


def compiled(fn: Callable[..., Any], peer: str) -> Callable[..., Any]:
    """A function by a peer: eager, a back end of torch.compile, or one with "-tuned" behind it."""
    if peer == "eager":
        return fn
    backend, _, tuned = peer.partition("-")
    options: dict[str, Any] = {"mode": "max-autotune-no-cudagraphs"} if tuned else {}
    if backend == "plait" and tuned:
        options = {"options": {"autotune": True}}
    return torch.compile(fn, backend=backend, dynamic=False, **options)


def least_us(call: Callable[[T], Any], given: Sequence[T], calls: int) -> float:
    """Microseconds on the device of a call, the least mean of a recorded round of calls, which take
    one argument after the other."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for x in given:
            call(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for n in range(calls):
                call(given[n % len(given)])
    best = math.inf
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / calls)
    return best
