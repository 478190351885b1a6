"""Gathers, while a program runs, what is compiled, broken off, compiled again and timed.

A `Collector` listens in all threads of its process and hands on what it hears at once, as `Event`s;
`told` makes plain data of one, and `assemble` a report of these, of several processes too. While it
listens nothing starts warm, since what is to be seen has to be compiled, and programs time their
kernels at their first call.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.capture import dynamo
from plait.capture.recompiles import of_process
from plait.capture.warm.frames import outcomes
from plait.compat import precision
from plait.runtime.timing import KernelTime
from plait.tools.page import data
from plait.tools.page.roofline import AS, library_of, set_rooflines
from plait.tools.report import given_up
from plait.wrapper.program import AS_PYTHON, CompileRecord, observers_of_process, timers

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
        dynamo.note_skipped()
        return {
            "break": dynamo.breaks(),
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
        times = {"graph": name, "ns": [t.best_ns for t in launches], "why_not": why_not}
        self.sink(Event(os.getpid(), "times", times | {"float32": precision.float32_flags()}))


def assemble(events: Sequence[Event], note: str = "") -> data.Data:
    """The report that events come to, which are plain data."""
    several = len({e.process for e in events}) > 1
    of: dict[str, list[Any]] = {}
    graphs: dict[tuple[int, str], data.Data] = {}
    for e in events:
        if e.kind == "graph":
            graph = graphs[e.process, e.of["name"]] = dict(e.of)
            graph["process"] = e.process if several else None
            if graph["steps"]:
                graph["why_untimed"] = "no call of it was seen"
        elif e.kind != "times":
            of.setdefault(e.kind, []).append(e.of)
    for e in events:  # a program is timed before or after it is told of
        if e.kind == "times" and (named := graphs.get((e.process, e.of["graph"]))):
            _set_times(named, e.of)
    measured = set_rooflines(s for g in graphs.values() for s in g["steps"])
    return data.report_data(
        graphs.values(),
        of.get("break", []),
        of.get("recompile", []),
        note=note,
        starts=list(dict.fromkeys(of.get("start", []))),
        left_to_eager=of.get("eager", []),
        given_up=of.get("given up", []),
        **measured,
    )


def _set_times(graph: data.Data, times: data.Data) -> None:
    """A graph's kernels and calls get their times, which come in the order of its instructions, and
    products of float32 what the process let its libraries make of them."""
    graph["why_untimed"] = times["why_not"]
    if not times["why_not"] and graph["wrapper_reason"] == AS_PYTHON:
        graph["wrapper_reason"] = ""  # for the times alone
    instructions = graph["programs"][0]["instructions"]  # what has subprograms is not timed
    timed = [at for at, text in enumerate(instructions) if _TIMED.match(text)]
    ns_of = dict(zip(timed, times["ns"], strict=not times["why_not"]))
    for s in graph["steps"]:
        s["time_ns"] = ns_of.get(s["instruction"])
        if s["precision"] == "f32":
            op = "conv" if s["kind"] == "convolution" else "matmul"
            made_of_it = times["float32"][f"{library_of(s['device'])} {op}"]
            s["precision"] += f"{AS}{made_of_it}" if made_of_it in ("tf32", "bf16") else ""


_TIMED = re.compile(r"(?:[^'()]* = )?(?:launch|call)\('")
