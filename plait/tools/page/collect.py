"""Gathers, while a program runs, what is compiled, broken off, compiled again and timed.

A `Collector` listens in all threads of its process and hands on what it hears at once, as `Event`s;
`told` makes plain data of one, and `assemble` a report of these, of several processes too. While it
listens nothing starts warm, since what is to be seen has to be compiled, and programs time their
kernels at their first call.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from plait.capture import dynamo
from plait.capture.recompiles import of_process
from plait.capture.warm.frames import outcomes
from plait.devices import facts_of
from plait.runtime.timing import KernelTime, gpu_ns
from plait.tools.page import data
from plait.tools.report import given_up
from plait.wrapper.program import CompileRecord, observers_of_process, timers

_DATA: dict[str, Callable[[Any], Any]] = {
    "graph": data.graph_data,
    "break": data.break_data,
    "recompile": data.recompile_data,
    "times": lambda times: times,
    "start": lambda outcome: outcome.line,
    "eager": str,
    "given up": str,
}


@dataclass(frozen=True)
class Event:
    """process: its number. kind: a row of _DATA. of: what that row takes, or the data that it
    gives."""

    process: int
    kind: str
    of: Any


def told(event: Event) -> Event:
    """The same as plain data. Takes a while for large graphs, so nobody does it in a compile who
    need not."""
    return replace(event, of=_DATA[event.kind](event.of))


class Collector:
    """Tells `sink` of everything from `start` to `stop`."""

    def __init__(self, sink: Callable[[Event], None]) -> None:
        self.sink = sink
        self._known: dict[str, list[object]] = {}
        self._given_up: list[str] = []

    def start(self, anew: bool = True) -> None:
        """Listens from now on. anew: what the process knows by now is not told."""
        self._known = {kind: list(found) if anew else [] for kind, found in self._noted().items()}
        self._given_up = given_up() if anew else []
        observers_of_process.append(self._graph)
        timers.append(self._times)

    def stop(self) -> None:
        """Listens no more."""
        observers_of_process.remove(self._graph)
        timers.remove(self._times)
        self._news()
        for line in given_up():
            if line not in self._given_up:
                self.sink(Event(os.getpid(), "given up", line))

    def _noted(self) -> Mapping[str, Iterable[Any]]:
        """What the process keeps lists of."""
        return {
            "break": dynamo.breaks,
            "recompile": of_process.found,
            "start": outcomes,
            "eager": dynamo.left_to_eager,
        }

    def _news(self) -> None:
        for kind, found in self._noted().items():
            known = {id(x) for x in self._known[kind]}
            for x in (x for x in list(found) if id(x) not in known):
                self._known[kind].append(x)  # kept, so that no other object gets its number
                self.sink(Event(os.getpid(), kind, x))

    def _graph(self, record: CompileRecord) -> None:
        self._news()
        self.sink(Event(os.getpid(), "graph", record))

    def _times(self, name: str, launches: Sequence[KernelTime], why_not: str) -> None:
        ns = [t.best_ns for t in launches]
        self.sink(Event(os.getpid(), "times", {"graph": name, "launches": ns, "why_not": why_not}))


def assemble(events: Sequence[Event], note: str = "") -> data.Data:
    """The report that events come to, which are plain data."""
    several = len({e.process for e in events}) > 1
    of: dict[str, list[Any]] = {}
    graphs: dict[tuple[int, str], data.Data] = {}
    for e in events:
        if e.kind == "graph":
            graph = graphs[e.process, e.of["name"]] = dict(e.of)
            graph["process"] = e.process if several else None
            if any(s["what"] == "kernel" for s in graph["steps"]):
                graph["why_untimed"] = "no call of it was seen"
        elif e.kind != "times":
            of.setdefault(e.kind, []).append(e.of)
    for e in events:  # a program is timed before or after it is told of
        if e.kind == "times" and (named := graphs.get((e.process, e.of["graph"]))):
            _set_times(named, e.of)
    timed = [s for g in graphs.values() for s in g["steps"] if s.get("time_ns")]
    copy_ns = {device: copy_times(device) for device in sorted({s["device"] for s in timed})}
    for s in timed:
        nbytes = s["read_nbytes"] + s["written_nbytes"]
        s["roofline"] = round(copied_ns(nbytes, copy_ns[s["device"]]) / s["time_ns"], 3)
    return data.report_data(
        graphs.values(),
        of.get("break", []),
        of.get("recompile", []),
        note=note,
        starts=list(dict.fromkeys(of.get("start", []))),
        left_to_eager=of.get("eager", []),
        given_up=of.get("given up", []),
        copy_ns=copy_ns,
    )


def _set_times(graph: data.Data, times: data.Data) -> None:
    """A graph's kernels get their times, which come in the order of the launches."""
    graph["why_untimed"] = times["why_not"]
    instructions = graph["programs"][0]["instructions"]  # what has subprograms is not timed
    launches = [at for at, text in enumerate(instructions) if text.startswith("launch(")]
    ns_of = dict(zip(launches, times["launches"], strict=not times["why_not"]))
    for s in graph["steps"]:
        s["time_ns"] = ns_of.get(s["instruction"])


def copied_ns(nbytes: int, copy_ns: Mapping[str, int]) -> float:
    """How long a copy takes that moves so many bytes, by the times of others."""
    moved, ns = min((int(n), ns) for n, ns in copy_ns.items() if int(n) >= min(nbytes, 1 << 28))
    return ns * nbytes / moved if nbytes > 1 << 12 else ns


def copy_times(device: str) -> dict[str, int]:
    """How long a GPU, or one core, takes to copy memory: bytes moved, half of them read and half
    written, to nanoseconds; the best of several for each power of two from 4 KiB to 256 MiB."""
    copy = _host_copy(_LARGEST) if facts_of(device).is_host else _gpu_copy(_LARGEST, device)
    sizes = [1 << bits for bits in range(11, _LARGEST.bit_length())]
    return {str(2 * n): min(copy(n) for _ in range(5 if n > 1 << 24 else 15)) for n in sizes}


_LARGEST = 1 << 27


def _host_copy(largest: int) -> Callable[[int], int]:
    a, b = ((ctypes.c_char * largest).from_buffer(bytearray(largest)) for _ in range(2))

    def copy(n: int) -> int:
        start = time.perf_counter_ns()
        ctypes.memmove(a, b, n)
        return time.perf_counter_ns() - start

    return copy


def _gpu_copy(largest: int, device: str) -> Callable[[int], int]:
    a, b = (torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(2))

    def copy(n: int) -> int:
        with torch.cuda.device(device):
            return gpu_ns(lambda: a[:n].copy_(b[:n]))

    return copy
