"""One peer, one program, one fresh process: obeys commands from the driver, one JSON value a line
each way.

Commands: ["first"], ["time", seconds], ["memory"], ["quit"]. Between two commands the process
sleeps, so that many workers can be kept ready and timed in turn without disturbing each other.
Usage: worker.py CASE PEER [--tiny-first]
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, TextIO

import torch
from memory import peak
from models import CASES, Case, Sum8
from peers import PEERS, Peer
from torch import Tensor

Call = Callable[..., Any]


class Worker:
    """The state of one race: module, inputs and, after `first`, the call that is timed."""

    def __init__(self, case: Case, peer: Peer, tiny_first: bool) -> None:
        self.case, self.peer = case, peer
        start = time.perf_counter()
        for name in peer.modules:
            importlib.import_module(name)
        self.import_s = time.perf_counter() - start
        self.module, self.inputs = case.make()
        if tiny_first:  # the peer's once-a-process work, paid before the clock starts
            self._result(peer.prepare(Sum8(), (torch.ones(3, 3),) * 2), (torch.ones(3, 3),) * 2)

    def first(self) -> dict[str, Any]:
        """Prepares and makes the first call; the clock runs as peer.lazy says."""
        expected = self._eager()
        begin = time.perf_counter()
        run = self.peer.prepare(self.module, self.inputs)
        prepared = time.perf_counter()
        got = self._bind(run)()
        end = time.perf_counter()
        self.call = self._bind(run)
        return {
            "import_s": self.import_s,
            "wrap_s": prepared - begin if self.peer.lazy else 0.0,
            "first_s": end - (prepared if self.peer.lazy else begin),
            "error": self._error(got, expected) if self.peer.computes else None,
        }

    def time(self, seconds: float) -> dict[str, Any]:
        """The best mean time of a batch of calls, in µs; a batch takes at least 2 ms."""
        call, best, batch = self.call, float("inf"), 1
        clock = time.perf_counter
        gc.collect()
        gc.disable()
        stop = clock() + seconds
        while True:
            start = clock()
            for _ in repeat(None, batch):
                call()
            end = clock()
            best = min(best, (end - start) / batch)
            if end - start < 2e-3:
                batch *= 2
            elif end > stop:
                break
        gc.enable()
        return {"us": best * 1e6}

    def memory(self) -> dict[str, Any]:
        """Peak of the memory that one call holds, in bytes, and what of it is plait's arenas."""
        most, arena = peak(self.call)
        return {"peak_bytes": most, "arena_bytes": arena}

    def _bind(self, run: Call) -> Call:
        """A call without arguments; of a training step, forward and backward with fresh
        gradients."""
        inputs: tuple[Any, ...] = self.inputs
        if self.peer.python:
            inputs = tuple(x.numpy() for x in inputs)
        if not self.case.train:
            if len(inputs) == 1:
                (x,) = inputs
                return lambda: run(x)
            return lambda: run(*inputs)
        parameters = list(self.module.parameters())

        def step() -> Any:
            for p in parameters:
                p.grad = None
            loss = run(*inputs)
            loss.backward()
            return loss.detach()

        return step

    def _eager(self) -> list[Tensor]:
        return self._result(self.module, self.inputs)

    def _result(self, run: Call, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        if not (self.case.train and inputs is self.inputs):
            return [run(*inputs)]
        loss = self._bind(run)()
        return [loss, *self._gradients()]

    def _gradients(self) -> list[Tensor]:
        """The gradients, a vector a module: alone, that of a bias that changes nothing (of keys,
        whatever their scores are compared with) is all rounding, and its relative error means
        nothing."""
        own = (
            [p.grad.flatten() for p in m.parameters(False) if p.grad is not None]
            for m in self.module.modules()
        )
        return [torch.cat(gradients) for gradients in own if gradients]

    def _error(self, got: Any, expected: list[Tensor]) -> float:
        """The largest distance from eager, relative to eager's largest element."""
        found = [got]
        if self.case.train:
            found += self._gradients()
        worst = 0.0
        for a, b in zip(found, expected, strict=True):
            a = torch.as_tensor(a[0] if isinstance(a, list | tuple) else a)
            b = b[0] if isinstance(b, list | tuple) else b
            worst = max(worst, ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item())
        return worst


def serve(worker: Worker, replies: TextIO) -> None:
    """Answers commands until "quit" or the end of the input; an error is an answer too."""
    for line in sys.stdin:
        command, *args = json.loads(line)
        if command == "quit":
            return
        try:
            answer = getattr(worker, command)(*args)
        except Exception as error:  # noqa: BLE001  (it is handed to the driver, which prints it)
            answer = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def run_worker(kind: type[Worker], cases: Mapping[str, Case], peers: Mapping[str, Peer]) -> None:
    """The command line of a worker."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a peer prints must not get between the replies
    name, peer, *flags = sys.argv[1:]
    case = cases[name]
    torch.set_grad_enabled(case.train)
    serve(kind(case, peers[peer], "--tiny-first" in flags), replies)


if __name__ == "__main__":
    run_worker(Worker, CASES, PEERS)
