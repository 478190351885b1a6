"""One case in one process: holds its model once, compiles every variant of it, and is timed when
its turn comes.

Obeys commands, one JSON value a line: ["prepare", variants], ["time", seconds, rounds], ["count"],
["quit"]; answers with events, one JSON object a line. Between two commands it sleeps.
Usage: python -m benchmarks.suite.worker CASE DEVICE [--small]
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.memory import peak
from benchmarks.peers import inductor, plait, renamed
from benchmarks.suite.models import Case, cases

Call = Callable[[], Any]
Figures = dict[str, Any]
PREPARE = {
    "plait": plait(),
    "plait-graphs": plait("reduce-overhead"),
    "inductor": inductor(),
    "inductor-graphs": inductor("reduce-overhead"),
    "plait-max": plait("max-autotune"),
    "inductor-max": inductor("max-autotune"),
}
MIB = 2**20
WARM_CALLS = 4  # a mode may record its second or third call
MOST_SECONDS = 20.0  # after them no round of timing starts
PROFILED = 3  # calls of which the least times count: others work beside them
VENDORS = re.compile(r"::|cutlass|cudnn|nvjet|gemm|^sm\d\d|splitK|flash|_c1_k1_|fft|^mem")
"""Kernels of NVIDIA's libraries and of PyTorch, and copies, by their names."""


class Program(nn.Module):
    """What is compiled: the model, and for a training step its loss: the model's own, the
    cross-entropy of classes, or the distance of its results from noise."""

    def __init__(self, case: Case, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.model, self.how = model, ""
        if not case.train:
            return
        if case.model.labels:
            self.how = "labels"
            return
        with torch.no_grad():
            first, *_ = results = copy.deepcopy(model)(*inputs)
        if first.dim() == 2 and first.shape[1] >= 100:
            self.how = "classes"
            self.register_buffer("target0", torch.randint(first.shape[1], first.shape[:1]))
            return
        self.how = "noise"
        for k, result in enumerate(results):
            self.register_buffer(f"target{k}", torch.randn_like(result))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.how == "labels":
            return self.model(*inputs, labels=inputs[0])
        results = self.model(*inputs)
        if self.how == "classes":
            return (F.cross_entropy(results[0], self.target0),)
        if self.how == "noise":
            losses = [F.mse_loss(x, self.get_buffer(f"target{k}")) for k, x in enumerate(results)]
            return (torch.stack(losses).sum(),)
        return results


class Warnings(logging.Handler):
    """What plait warns of from now on, such as a recording that is not possible."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []
        logging.getLogger("plait").handlers = [self]  # in the place of an earlier one

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())

    def lines(self) -> list[str]:
        """The first ones, cut."""
        return [text[:300] for text in self.records[:3]]


class Held:
    """A case with all its variants."""

    def __init__(self, case: Case) -> None:
        self.case, self.cuda = case, case.device == "cuda"
        torch.set_grad_enabled(case.train)
        model, self.inputs = case.build()
        self.program = Program(case, model, self.inputs).to(case.device).train(case.train)
        self.calls: dict[str, Call] = {}
        self.graphs: dict[str, int] = {}

    def eager(self) -> Figures:
        """The program as it is, and the truth that all are measured by."""
        call = self._bind(self.program)
        begin = time.monotonic()
        call()
        self._wait()
        first = (begin, time.monotonic())
        self.truth, exact = self._truth()
        self.eager_error = self._eager_error(call)
        self.calls["eager"] = call
        figures = {"first": first, "eager_error": self.eager_error, "truth": exact}
        return figures | self._memory(call, 0)

    def variant(self, name: str) -> Figures:
        """Compiles a variant, makes it warm, and compares what it computes. It has a code object of
        its own: Dynamo keeps what it compiles by code object."""
        held, said = self._held(), Warnings()
        counters = torch._dynamo.utils.counters
        counters.clear()
        torch._dynamo.utils.guard_failures.clear()
        begin = time.monotonic()
        call = self._bind(PREPARE[name](renamed(self.program, name), self.inputs))
        call()
        self._wait()
        first = (begin, time.monotonic())
        graphs = counters["stats"]["unique_graphs"]
        if graphs == 0:
            raise RuntimeError("the back end was not called: nothing was compiled")
        for _ in repeat(None, WARM_CALLS):
            call()
        self._wait()
        figures: Figures = {
            "first": first,
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values()),
            "skipped_recording": counters["inductor"]["cudagraph_skips"],
            "error": self._error(call),
        }
        figures |= self._memory(call, held)
        if said.lines():
            figures["said"] = said.lines()
        self.calls[name] = call
        self.graphs[name] = figures["graphs"]
        return figures

    def time(self, seconds: float, rounds: int) -> dict[str, Figures]:
        """The best time of a call, in ms, of each variant, timed in turn; nothing may be compiled
        meanwhile."""
        found: dict[str, Figures] = {name: {"rounds": []} for name in self.calls}
        counters = torch._dynamo.utils.counters
        for name, call in self.calls.items():
            self._try(found[name], name, call)
        counters.clear()
        gc.collect()
        gc.disable()
        stop = time.perf_counter() + MOST_SECONDS
        for _ in range(rounds):
            if time.perf_counter() > stop:
                break
            for name, call in self.calls.items():
                if "failed" not in found[name]:
                    self._try(found[name], name, call, seconds)
        gc.enable()
        if counters["stats"]["unique_graphs"]:
            raise RuntimeError("something was compiled while the clock ran")
        for figures in found.values():
            if figures["rounds"]:
                figures["ms"] = min(figures["rounds"])
        return found

    def count(self) -> dict[str, Figures]:
        """Kernels that the device runs in a call, copies included, for how long, and those that
        take longest: [name, times, us]."""
        return {name: self._kernels(call) for name, call in self.calls.items()}

    def _try(self, into: Figures, name: str, call: Call, seconds: float = 0.0) -> None:
        try:
            if seconds:
                into["rounds"].append(self._best_ms(call, seconds))
            else:
                for _ in repeat(None, WARM_CALLS if self.cuda else 1):
                    call()
                self._wait()
        except Exception as error:  # noqa: BLE001  (it is the variant's row)
            into["failed"] = reason(error)

    def _best_ms(self, call: Call, seconds: float) -> float:
        best, n, clock = math.inf, 1, time.perf_counter
        self._wait()
        stop = clock() + seconds
        while True:
            start = clock()
            for _ in repeat(None, n):
                call()
            self._wait()
            end = clock()
            best = min(best, (end - start) / n)
            if end - start < 0.02:
                n = max(n + 1, min(2 * n, 500))
            if end > stop:
                return best * 1e3

    def _bind(self, run: Callable[..., Any]) -> Call:
        """A call without arguments; of a training step, forward and backward with fresh
        gradients."""
        inputs = self.inputs
        if not self.case.train:
            return lambda: run(*inputs)
        parameters = list(self.program.parameters())

        def step() -> Any:
            for p in parameters:
                p.grad = None
            (loss,) = run(*inputs)
            loss.backward()
            return (loss.detach(),)

        return step

    def _outcome(self, call: Call, program: nn.Module) -> list[Tensor]:
        """Copies of what a call computes: results, and gradients as a vector a module. Alone, the
        gradient of a bias that changes nothing is all rounding."""
        found = [x.detach().clone() for x in call()]
        if self.case.train:
            for m in program.modules():
                own = [p.grad.flatten() for p in m.parameters(False) if p.grad is not None]
                found += [torch.cat(own)] if own else []
            program.zero_grad()
        return found

    def _truth(self) -> tuple[list[Tensor], str]:
        """What the program computes in float64, kept on the CPU; in float32 where float64 fails
        and the case's type is shorter."""
        short = self.case.dtype != "float32"
        for dtype in (torch.float64, torch.float32) if short else (torch.float64,):
            twin = copy.copy(self)
            try:
                twin.program = copy.deepcopy(self.program).to(dtype)
                twin.inputs = tuple(
                    x.to(dtype) if x.is_floating_point() else x for x in self.inputs
                )
                torch.backends.mha.set_fastpath_enabled(False)
                found = self._outcome(twin._bind(twin.program), twin.program)
                return [x.to("cpu", torch.float32 if short else dtype) for x in found], str(dtype)
            except Exception as error:  # noqa: BLE001  (says so in the row)
                why = f"none: {reason(error)[:120]}"
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
                del twin
                gc.collect()
                if self.cuda:
                    torch.cuda.empty_cache()
        return [], why

    def _error(self, call: Call) -> float | None:
        return self._distance(self._outcome(call, self.program))

    def _distance(self, found: list[Tensor]) -> float | None:
        """The distance from the truth: of each result relative and in the 2-norm, the root of the
        mean of their squares. 1e99: not finite where the truth is. None: there is no truth."""
        if not self.truth:
            return None
        squares = []
        for a, b in zip(found, self.truth, strict=True):
            exact = b.to(a.device)
            size = exact.norm().clamp(min=1e-30)
            squares.append(((a.to(exact.dtype) - exact).norm() / size).item() ** 2)
        mean = sum(squares) / len(squares)
        return math.sqrt(mean) if math.isfinite(mean) else 1e99

    def _eager_error(self, call: Call) -> float | None:
        """Eager's distance. In a training step in float32 the worst of eager and of three runs of
        it whose weights are moved by at most a unit in their last place: an activation near zero
        may fall on either side of it, and then a gradient jumps by a thousand times the rounding
        of anything else, in eager by luck or not."""
        errors = [self._error(call)]
        if self.case.train and self.case.dtype == "float32" and self.truth:
            kept = [p.detach().clone() for p in self.program.parameters()]
            for _ in range(3):
                with torch.no_grad():
                    for p, weight in zip(self.program.parameters(), kept, strict=True):
                        p.copy_(weight * (1 + 2.0**-23 * torch.randint_like(weight, -1, 2)))
                errors.append(self._error(call))
            with torch.no_grad():
                for p, weight in zip(self.program.parameters(), kept, strict=True):
                    p.copy_(weight)
        return max((e for e in errors if e is not None), default=None)

    def _memory(self, call: Call, held: int) -> Figures:
        """MiB that a call takes at its peak, above what lives between calls, with what the variant
        keeps for itself (recordings)."""
        if not self.cuda:
            return {"peak_mib": peak(call)[0] / MIB}
        keeps = self._held() - held if held else 0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self._wait()
        takes = torch.cuda.max_memory_allocated() - before
        return {"peak_mib": (takes + max(keeps, 0)) / MIB, "keeps_mib": keeps / MIB}

    def _held(self) -> int:
        """Bytes that the allocator has from the device, once all that is free is given back."""
        if not self.cuda:
            return 0
        gc.collect()
        for p in self.program.parameters():
            p.grad = None
        self._wait()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def _kernels(self, call: Call) -> Figures:
        from torch.profiler import ProfilerActivity, profile

        if not self.cuda:
            return {}
        call()
        self._wait()
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
        ) as found:
            for _ in repeat(None, PROFILED):
                call()
                self._wait()
        took: defaultdict[str, list[float]] = defaultdict(list)
        for e in sorted(found.events(), key=lambda e: e.time_range.start):
            if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation:
                took[e.name].append(e.time_range.elapsed_us())
        us = Counter({name: _least(some) for name, some in took.items()})
        times = {name: len(some) // PROFILED for name, some in took.items()}
        top = [[name[:100], times[name], round(t, 1)] for name, t in us.most_common(12)]
        vendors = sum(t for name, t in us.items() if VENDORS.search(name))
        return {
            "kernels": round(sum(map(len, took.values())) / PROFILED),
            "busy_ms": us.total() / 1e3,
            "vendors_ms": vendors / 1e3,
            "top": top,
        }

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def _least(us: Sequence[float]) -> float:
    """What the calls of one kernel take in a call of a program, in the quickest of PROFILED."""
    each = max(1, len(us) // PROFILED)
    return min(sum(us[k : k + each]) for k in range(0, len(us) - each + 1, each))


def reason(error: BaseException) -> str:
    """Its kind and its first lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:6])}"[:600]


class Replies:
    """Events, to the driver."""

    def __init__(self) -> None:
        self.to = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a library prints must not get between events

    def __call__(self, event: str, **more: Any) -> None:
        self.to.write(json.dumps({"event": event, **more}) + "\n")
        self.to.flush()


def prepare(case: Case, variants: Sequence[str], say: Replies) -> Held | None:
    """Makes every variant ready; one that fails is said to have failed."""
    say("begin", variant="eager")
    try:
        held = Held(case)
        say("ready", variant="eager", figures=held.eager())
    except Exception as error:  # noqa: BLE001  (it is the case's row)
        say("failed", variant="eager", why=reason(error))
        return None
    warm_up({name.split("-")[0] for name in variants}, case.device)
    for name in variants:
        say("begin", variant=name)
        try:
            say("ready", variant=name, figures=held.variant(name))
        except Exception as error:  # noqa: BLE001  (it is the variant's row)
            say("failed", variant=name, why=reason(error))
            error.__traceback__ = None
            held._wait()  # a device that is broken breaks the process: the driver starts another
    held._held()
    return held


def warm_up(backends: set[str], device: str) -> None:
    """What a back end does once a process is done before the clock of a first call starts."""
    for name in sorted(backends):
        tiny = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(device)
        x = torch.ones(4, 8, device=device)
        PREPARE[name](renamed(tiny, name), (x,))(x)


def main() -> None:
    name, device, *flags = sys.argv[1:]
    case = cases(device, "--small" in flags)[name]
    say = Replies()
    # Each variant has a code object of its own, but functions below a graph break are shared: their
    # limit is that of one program, for each; where it is hit all the same, it is an error.
    config: Any = torch._dynamo.config
    config.recompile_limit *= len(PREPARE)
    config.fail_on_recompile_limit_hit = True
    config.allow_rnn = True  # else Dynamo leaves recurrent modules to eager
    held: Held | None = None
    for line in sys.stdin:
        command, *args = json.loads(line)
        if command == "prepare":
            held = prepare(case, args[0], say)
            say("prepared")
        elif command == "quit" or held is None:
            break
        else:
            try:
                say(command, figures=getattr(held, command)(*args))
            except Exception as error:  # noqa: BLE001  (the driver writes it down)
                say(command, figures={}, why=reason(error))
    os._exit(0)  # nothing to tidy that is worth the time


if __name__ == "__main__":
    main()
