"""One peer, one program, one fresh process, on a GPU: obeys commands from gpu.py, as worker.py does
from run.py.

Commands: ["ready"], ["first"], ["time", seconds, batch], ["own", batch], ["profile"], ["memory"],
["check"], ["quit"]. The device is idle before and after each. Usage: gpu_worker.py CASE PEER
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import statistics
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from models import GPU_CASES
from peers import GPU_PEERS, renamed
from torch import Tensor
from worker import Worker, run_worker

HERE = Path(__file__).resolve().parent


class GpuWorker(Worker):
    """As Worker; times are medians, and the truth is the program in float64."""

    guards: Callable[[], Any] | None = None
    bare: BareLaunches | None = None

    def ready(self) -> dict[str, Any]:
        """Has run the program as it is, which loads the libraries that every peer calls."""
        self._outcome(self._bind(self.module))
        torch.cuda.synchronize()
        return {"import_s": self.import_s}

    def first(self) -> dict[str, Any]:
        """Prepares and makes the first call; the clock stops when its result is on the device."""
        self.records = _observed_records(self.peer.name)
        begin = time.perf_counter()
        run = self.peer.prepare(self.module, self.inputs)
        prepared = time.perf_counter()
        self._bind(run)()
        torch.cuda.synchronize()
        first_s = time.perf_counter() - (prepared if self.peer.lazy else begin)
        self.call = self._bind(run)
        answer = {"wrap_s": prepared - begin, "first_s": first_s}
        if self.records:
            launches, calls = self._instructions("Launch"), self._instructions("CallExtern")
            answer |= {"launches": len(launches), "calls": len(calls)}
        if self.records and self.peer.lazy:
            answer["stages"] = self._stages(first_s)
        return answer

    def time(self, seconds: float, batch: int = 1) -> dict[str, Any]:
        """us: a call among calls that follow each other, by CUDA events. host_us: what the CPU
        takes for one of `batch` calls, so few that none waits for room in the driver's queue."""
        call = self.call
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def wall_us(n: int) -> float:
            torch.cuda.synchronize()
            begin.record()
            for _ in repeat(None, n):
                call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e3 / n

        for _ in range(5):  # a mode may record its first calls
            call()
        gc.collect()
        gc.disable()
        n = max(2, int(2e4 / wall_us(5)))
        wall, host = [], []
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop or len(wall) < 3:
            wall.append(wall_us(n))
            host += [_host_us(call, batch) for _ in range(5)]
        gc.enable()
        return {"us": statistics.median(wall), "host_us": statistics.median(host)}

    def own(self, batch: int) -> dict[str, Any]:
        """own_us: what a call takes above Dynamo's guards. bare_ns: what a launch takes where only
        the driver is called, for the same kernels with arguments like theirs. own_bare: own_us a
        kernel, in bare launches. The three are timed in turn, `batch` calls at a time, since the
        speed of a CPU may change by the second."""
        self.guards = self.guards or self._bind(
            GPU_PEERS["guards"].prepare(renamed(self.module, "renamed"), self.inputs)
        )
        self.bare = self.bare or BareLaunches(self._instructions("Launch"))
        self.guards()
        own, bare = [], []
        for _ in range(200):
            guards_us, call_us = _host_us(self.guards, batch), _host_us(self.call, batch)
            own.append(call_us - guards_us)
            bare.append(self.bare.time_ns(batch))
        ratios = [us * 1e3 / self.bare.n / ns for us, ns in zip(own, bare, strict=True)]
        middle = statistics.median
        return {"own_us": middle(own), "bare_ns": middle(bare), "own_bare": middle(ratios)}

    def profile(self) -> dict[str, Any]:
        """kernels: what the device runs in one call, copies included. busy_us: for how long. top:
        what took longest, [name, times a call, us a call]."""
        from torch.profiler import ProfilerActivity, profile

        calls = 3
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
        ) as found:
            for _ in range(calls):
                self.call()
            torch.cuda.synchronize()
        times: Counter[str] = Counter()
        us: Counter[str] = Counter()
        for event in found.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
                times[event.name] += 1
                us[event.name] += event.time_range.elapsed_us()
        top = [[name, times[name] / calls, took / calls] for name, took in us.most_common(25)]
        return {
            "kernels": sum(times.values()) / calls,
            "busy_us": sum(us.values()) / calls,
            "top": top,
        }

    def memory(self) -> dict[str, Any]:
        """The most that lived at once during a call, and the most that the allocator had from the
        device for it."""
        self.guards = self.bare = None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.call()
        torch.cuda.synchronize()
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }

    def check(self) -> dict[str, Any]:
        """Distances from the float64 result, of this peer by now and of eager: the worst among the
        results and, of a training step, the modules' gradients, each relative and in the 2-norm."""
        twin = copy.copy(self)
        twin.module = copy.deepcopy(self.module).double()
        twin.inputs = tuple(x.double() if x.is_floating_point() else x for x in self.inputs)
        torch.backends.mha.set_fastpath_enabled(False)
        truth = twin._outcome(twin._bind(twin.module))
        torch.backends.mha.set_fastpath_enabled(True)
        eager, own = self._outcome(self._bind(self.module)), self._outcome(self.call)
        answer = {"error": _distance(own, truth), "eager_error": _distance(eager, truth)}
        del twin, truth, eager, own
        torch.cuda.empty_cache()
        return answer

    def _outcome(self, call: Callable[[], Any]) -> list[Tensor]:
        """What a call computes: results and gradients."""
        found = call()
        results = list(found) if isinstance(found, list | tuple) else [found]
        if self.case.train:
            results += self._gradients()
            self.module.zero_grad()
        return results

    def _instructions(self, kind: str) -> list[Any]:
        """Those of plait's programs, in order."""
        return [i for r in self.records for i in r.wrapper.body if type(i).__name__ == kind]

    def _stages(self, first_s: float) -> dict[str, float]:
        """Seconds of the first call, by who spent them; plait's steps by their names."""
        from torch._dynamo.utils import compile_times

        names, rows = compile_times(repr="csv", aggregate=True)
        spent = {name: float(s) for name, s in zip(names, rows, strict=True)}
        frame, back_end = (
            spent.get("_compile.compile_inner", 0.0),
            spent.get("OutputGraph.call_user_compiler", 0.0),
        )
        steps: Counter[str] = Counter()
        for r in self.records:
            steps.update({k: ms / 1e3 for k, ms in r.times_ms.items() if "/" not in k})
        return {
            "Dynamo": frame - back_end,
            "AOTAutograd": back_end - sum(steps.values()),
            **steps,
            "the call": first_s - frame,
        }


class BareLaunches:
    """The launches of a program, made by the driver alone. Each buffer is memory of its own, larger
    than any here."""

    def __init__(self, launches: Sequence[Any]) -> None:
        from plait.runtime.cubin import Cubin

        cache = Path(os.environ["PLAIT_CACHE_DIR"])
        cubins = {
            c.symbol: c
            for f in (cache / "cubins").rglob("*.cubin")
            for c in [Cubin.from_bytes(f.read_bytes())]
        }
        memory: dict[str, Tensor] = defaultdict(lambda: torch.zeros(1 << 16, device="cuda"))
        self.kept: list[Any] = [cubins, memory]
        given = (_Given * len(launches))()
        for g, launch in zip(given, launches, strict=True):
            c = cubins[launch.kernel]
            addresses = (ctypes.c_uint64 * len(launch.args))(
                *(memory[a].data_ptr() for a in launch.args)
            )
            self.kept.append(addresses)
            g.image, g.symbol, g.grid = c.image, c.symbol.encode(), launch.grid
            g.warps, g.shared, g.n_arguments, g.arguments = (
                c.num_warps,
                c.shared,
                len(addresses),
                addresses,
            )
        self.n = len(launches)
        self.library = self._library(cache / "bare_launch.so")
        self.sequence = self.library.bare_prepare(given, ctypes.c_size_t(self.n))
        if not self.sequence:
            raise RuntimeError("the driver did not take plait's kernels: see the log")

    def time_ns(self, batch: int) -> float:
        """A launch, where the sequence is enqueued `batch` times."""
        torch.cuda.synchronize()
        took: float = self.library.bare_ns(ctypes.c_void_p(self.sequence), batch)
        if took < 0:
            raise RuntimeError("the driver refused a launch")
        return took / batch / self.n

    def _library(self, path: Path) -> ctypes.CDLL:
        native = HERE.parent / "native"
        core = native / "core"
        driver = (core / "cuda.cpp", *(core / "drivers").glob("*.cpp"))
        sources = [str(f) for f in (HERE / "bare_launch.cpp", *driver)]
        flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-I", str(native)]
        subprocess.run(["g++", *flags, "-o", str(path), *sources, "-ldl"], check=True)
        library = ctypes.CDLL(str(path))
        library.bare_prepare.restype, library.bare_ns.restype = ctypes.c_void_p, ctypes.c_double
        return library


class _Given(ctypes.Structure):
    _fields_ = (
        ("image", ctypes.c_char_p),
        ("symbol", ctypes.c_char_p),
        ("grid", ctypes.c_uint32),
        ("warps", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("n_arguments", ctypes.c_uint32),
        ("arguments", ctypes.POINTER(ctypes.c_uint64)),
    )


def _host_us(call: Callable[[], Any], batch: int) -> float:
    """What one of `batch` calls takes until it is enqueued."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in repeat(None, batch):
        call()
    return (time.perf_counter() - start) * 1e6 / batch


def _observed_records(peer: str) -> list[Any]:
    """A list to which every graph that plait compiles in this process will be added."""
    records: list[Any] = []
    if peer.startswith("plait"):
        from plait.wrapper.program import observers

        observers.set((records.append,))
    return records


def _distance(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    pairs = zip(found, truth, strict=True)
    return max(((a.double() - b).norm() / b.norm().clamp(min=1e-300)).item() for a, b in pairs)


if __name__ == "__main__":
    run_worker(GpuWorker, GPU_CASES, GPU_PEERS)
