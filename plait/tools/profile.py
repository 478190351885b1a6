"""`plait.profile(fn, *args)`: where the time of a call goes, by module, by source line, kernel by
kernel, and what the host does between kernels.

In: a function or module with example arguments. Out: a `Profile`: numbers, text, and a trace for
chrome://tracing or Perfetto with source lines. torch.profiler takes the times. Every launch and
every call of an operator is a range there, in the order of the program's instructions; the k-th
range is the k-th instruction, whose lines and module are known. Which program it is, the range
around it says. On a GPU the time of an instruction is the device's, and what the host spends on its
launch is a gap.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from plait.capture.backend import plait_backend
from plait.capture.export import record_of
from plait.capture.recompiles import Recompiles
from plait.capture.sources import check_callable
from plait.config import Config
from plait.errors import UserError
from plait.ir.calls import all_programs
from plait.tools.explain import edges_of, fresh_caller, now, run_backward
from plait.wrapper.instructions import CallExtern, Launch, Note, Partition
from plait.wrapper.program import CompileRecord, observers_of_process

MANY = 25  # rows of one table in the text
_CALL = "plait: a call"
_GUARDS = ("TorchDynamo Cache Lookup", "Pregraph bytecode")
_WAITS = re.compile(r"Synchronize|^aten::(item|_local_scalar_dense|nonzero)$|^cudaMemcpy$")
_ALLOCATES = re.compile(r"^aten::(empty|resize_)|^cudaMalloc")
_REGION = "Torch-Compiled Region: "
_BACKWARD = re.compile(r"(Plait|CompiledFunction)Backward")
_PROGRAM = re.compile(f"^{_REGION}|^{_BACKWARD.pattern}$|^CompiledFunction$")
OUTSIDE = "outside of submodules"  # code of the module itself, or of a function
NO_LINE = "no line known"  # as where torch's layers are called by torch alone
LAUNCHING, AUTOGRAD, PYTHON = "launching", "autograd", "Python"
"""What a program does between its instructions, and on a GPU in them; what PyTorch's engine of
gradients does; what is left of a call."""


@dataclass(frozen=True)
class Instruction:
    """A launch or a call of an operator, of one program.

    graph: the program's name.
    name: the kernel's symbol or the operator.
    lines: source lines and ATen operators that it comes from.
    module: the path of the module whose code it is, "" where none is known.
    """

    graph: str
    name: str
    lines: tuple[str, ...]
    module: str


@dataclass(frozen=True)
class Row:
    """What one thing takes in a call, in microseconds, and how often it runs in it."""

    what: str
    us: float
    times: float


@dataclass(frozen=True)
class Profile:
    """Times of a call, in microseconds, the mean of some. `print(profile)` shows `text`.

    calls: how many were measured.
    wall_us: from the beginning of a call to its end, the backward pass with it if there is one.
    steps: instructions that ran, in order, with the time and the number of runs in a call.
    gaps: what the host does besides, by kind; on a GPU this is beside the device's time.
    on_gpu: any kernel ran on a GPU; then steps have the device's times.
    events: torch.profiler's, as its trace has them, with lines and modules.
    """

    calls: int
    wall_us: float
    steps: tuple[tuple[Instruction, float, float], ...]
    gaps: tuple[Row, ...]
    on_gpu: bool
    events: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @property
    def by_kernel(self) -> list[Row]:
        """By kernel or operator, what takes most first."""
        return _rows((i.name, us, n) for i, us, n in self.steps)

    @property
    def by_line(self) -> list[Row]:
        """By source line: a kernel's time is shared evenly by the lines that it comes from."""
        shares: list[tuple[str, float, float]] = []
        for i, us, n in self.steps:
            places = [p for p in dict.fromkeys(map(_place, i.lines)) if p] or [NO_LINE]
            shares += ((p, us / len(places), n) for p in places)
        return _rows(shares)

    @property
    def by_module(self) -> list[Row]:
        """By module; those that differ in a number alone are one: `h.*.mlp`, not `0` and `1`."""
        return _rows((_pattern(i.module) or OUTSIDE, us, n) for i, us, n in self.steps)

    @property
    def text(self) -> str:
        """The tables."""
        busy = sum(us for _, us, _ in self.steps)
        where = "on the GPU" if self.on_gpu else "in kernels and operators"
        lines = [f"a call takes {_time(self.wall_us)}, {_time(busy)} of it {where}"]
        tables = {
            "modules": self.by_module, "source lines": self.by_line,
            "kernels and operators": self.by_kernel, "the host, besides": list(self.gaps),
        }  # fmt: skip
        for title, rows in tables.items():
            lines += ["", f"{title}:"] if rows else []
            lines += [_line(r, self.wall_us) for r in rows[:MANY]]
            if len(rows) > MANY:
                left = sum(r.us for r in rows[MANY:])
                lines.append(f"  {_time(left):>10}  {len(rows) - MANY} more")
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """The same as data, times in microseconds a call."""
        return {
            "calls": self.calls, "wall_us": self.wall_us, "on_gpu": self.on_gpu,
            "steps": [
                {"graph": i.graph, "name": i.name, "lines": list(i.lines), "module": i.module,
                 "us": us, "times": n}
                for i, us, n in self.steps
            ],
            "gaps": [{"what": r.what, "us": r.us, "times": r.times} for r in self.gaps],
        }  # fmt: skip

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace, for chrome://tracing or ui.perfetto.dev: ranges of instructions have
        their source lines and module among their arguments."""
        Path(path).write_text(json.dumps(self.events))


def profile(
    fn: Callable[..., Any],
    *args: Any,
    calls: int = 5,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    quiet: bool = False,
    **kwargs: Any,
) -> Profile:
    """Compiles fn, calls it with these arguments three times, and then `calls` times under
    torch.profiler; prints the tables and returns them. Where a result needs gradients that fn does
    not take itself, the backward pass belongs to a call, and no `.grad` changes.

    options, mode: as for torch.compile. What plait.compile returned is called as it is. What a CUDA
    graph replays has no ranges: profile without `reduce-overhead`. Raises UserError for wrong
    arguments, and what fn raises."""
    cfg = Config.from_env().with_options(options, mode)
    check_callable(fn, "plait.profile")
    record = record_of(fn)
    if cfg.cuda_graphs or record and any(isinstance(i, Partition) for i in record.wrapper.body):
        why = "plait.profile of CUDA graphs, which run without a word to a profiler"
        hint = "profile without the mode; torch.profiler shows their kernels by name"
        raise UserError(why, hint=hint)
    if type(calls) is not int or calls < 1:
        raise UserError(f"plait.profile of {calls!r} calls", hint="calls=5")
    with programs() as records:
        # A back end of its own, so that nothing starts warm: programs that an earlier process made
        # tell nobody of themselves.
        backend = partial(plait_backend, options=options, mode=mode, recompiles=Recompiles())
        compiled = torch.compile(fresh_caller(getattr(fn, "_orig_mod", fn)), backend=backend)
        if record is not None:
            records.append(record)
            compiled = record_function(_REGION)(fn)

        edges: list[Any] = []

        def call() -> None:
            since = now()
            result = compiled(*args, **kwargs)
            edges[:] = edges or edges_of(result, since)
            run_backward(result, edges)
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        for _ in range(2):
            call()
        kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
        for times in (1, calls):  # the first call that a process profiles is slow
            with torch_profile(activities=kinds, acc_events=True) as taken:
                for _ in range(times):
                    with record_function(_CALL):
                        call()
    found = profile_of(taken, records, calls)
    if not quiet:
        print(found.text)
    return found


@contextmanager
def programs() -> Iterator[list[CompileRecord]]:
    """The records of what all threads compile inside, for `profile_of`."""
    records: list[CompileRecord] = []
    observers_of_process.append(records.append)
    try:
        yield records
    finally:
        observers_of_process.remove(records.append)


def profile_of(taken: Any, records: Sequence[CompileRecord], calls: int) -> Profile:
    """The profile of what a torch.profiler.profile has taken of programs with these records, over
    so many calls: torch.profiler's hook.

    records: from `programs()`. taken: with acc_events=True."""
    events = sorted(
        (e for e in taken.events() if e.device_type == DeviceType.CPU),
        key=lambda e: (e.time_range.start, -e.time_range.end),
    )
    named = _matched(events, records)
    on_gpu = any(e.device_time_total for e in named)
    took: dict[Instruction, list[float]] = defaultdict(list)
    order: dict[tuple[int, int], Instruction] = {}
    for e, (place, instruction) in named.items():
        took[instruction].append(e.device_time_total if on_gpu else e.time_range.elapsed_us())
        order.setdefault(place, instruction)
    steps = tuple(
        (i, sum(took[i]) / calls, len(took[i]) / calls)
        for i in dict.fromkeys(order[k] for k in sorted(order))
    )
    spans = [e for e in events if e.name == _CALL]
    wall = sum(e.time_range.elapsed_us() for e in spans) / calls
    if events and not spans:  # somebody else's calls, with what is between them
        last = max(e.time_range.end for e in events)
        wall = (last - min(e.time_range.start for e in events)) / calls
    gaps = _gaps(events, named, on_gpu, wall, calls)
    return Profile(calls, wall, steps, gaps, on_gpu, _trace_of(taken, named))


# ------------------------------------------------------------------------- ranges and instructions
def instructions_of(record: CompileRecord) -> list[Instruction]:
    """The launches and calls of a program and its subprograms, in order."""
    found: list[Instruction] = []
    for program in all_programs(record.wrapper):
        note = ""
        for i in program.body:
            made: Sequence[str | None]
            match i:
                case Note(text):
                    note = text
                    continue
                case Launch(kernel=name, outs=made):
                    pass
                case CallExtern():
                    name, made = i.op.partition(".")[0], (*i.outs, *i.into)
                case _:
                    continue
            # Subprograms count their buffers anew.
            module = record.module_of(made) if program is record.wrapper else ""
            found.append(Instruction(record.name, name, _lines(note), module))
    return found


def _matched(
    events: Sequence[Any], records: Sequence[CompileRecord]
) -> dict[Any, tuple[tuple[int, int], Instruction]]:
    """Each range that is an instruction of a program: which one, by program and place. Ranges
    within one belong to it."""
    programs = [instructions_of(r) for r in records]
    names = {i.name for p in programs for i in p}
    runs, inside = _runs(events, records), defaultdict[Any, list[Any]](list)  # by thread
    anywhere = [p for p, r in enumerate(records) if not r.compile_id and r.kind != "backward"]
    repeats = [not r.compile_id or len([*all_programs(r.wrapper)]) > 1 for r in records]
    at = dict.fromkeys(range(len(programs)), 0)
    current = 0
    found: dict[Any, tuple[tuple[int, int], Instruction]] = {}
    ends: dict[Any, float] = {}  # of the instruction that a thread is in
    for e in events:
        ranges = inside[e.thread]
        while ranges and ranges[-1].time_range.end <= e.time_range.start:
            ranges.pop()
        if e in runs:
            ranges.append(e)
            at |= dict.fromkeys(runs[e], 0)
        if e.name not in names or e.time_range.start < ends.get(e.thread, 0):
            continue
        here = [*(runs[ranges[-1]] if ranges else ()), *anywhere]
        for p in sorted(here, key=lambda p: p != current):
            # Branches that were not taken, and views that are no calls, are passed over.
            later = range(at[p], len(programs[p]))
            again = range(at[p] if repeats[p] else 0)
            k = next((k for k in (*later, *again) if programs[p][k].name == e.name), None)
            if k is not None:
                found[e] = ((p, k), programs[p][k])
                current, at[p] = p, k + 1
                ends[e.thread] = e.time_range.end
                break
    return found


def _runs(events: Sequence[Any], records: Sequence[CompileRecord]) -> dict[Any, list[int]]:
    """The programs that run in a range, by their places among the records. Dynamo's ranges have the
    name of the compile; backward passes are numbered as their forward passes ran."""
    backward = {r.name.partition("_")[2]: p for p, r in enumerate(records) if r.kind == "backward"}
    passes = [e for e in events if _BACKWARD.fullmatch(e.name)]
    runs = {e: [*backward.values()] for e in passes}
    ran: list[str] = []
    for e in (e for e in events if e.name.startswith(_REGION)):
        made = [(p, r) for p, r in enumerate(records) if _REGION + r.compile_id == e.name]
        runs[e] = [p for p, r in made if r.kind != "backward"]
        ran += [r.name.partition("_")[2] for _, r in made if r.kind == "forward"]
    if len(ran) == len(passes) and backward.keys() >= {*ran}:  # else some had no backward pass
        passes.sort(key=lambda e: e.sequence_nr)
        runs |= {e: [backward[n]] for e, n in zip(passes, ran, strict=True)}
    return runs


def _lines(note: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in note.split(";"))))


def _place(line: str) -> str:
    """`model.py:31` of `model.py:31 aten.exp.default`, "" of an operator alone."""
    return line.rpartition(" ")[0]


def _pattern(module: str) -> str:
    return module if module.isdecimal() else re.sub(r"\b\d+\b", "*", module)


# --------------------------------------------------------------------------------------------- gaps
def _gaps(
    events: Sequence[Any], named: Mapping[Any, object], on_gpu: bool, wall: float, calls: int
) -> tuple[Row, ...]:
    """What a call spends outside of instructions on a CPU; on a GPU launches are in it, too. A
    range that has others in it counts without these."""
    sums: dict[str, list[float]] = defaultdict(list)
    inside: dict[Any, list[_Range]] = defaultdict(list)  # by thread, the innermost last

    def end(ranges: list[_Range]) -> None:
        r = ranges.pop()
        sums[r.kind].append(r.us - r.others_us)

    for e in (e for e in events if e.name != _CALL):
        ranges = inside[e.thread]
        while ranges and ranges[-1].end <= e.time_range.start:
            end(ranges)
        outer = ranges[-1] if ranges else None
        kind = (LAUNCHING if on_gpu else "") if e in named else _kind_of(e.name, outer)
        if kind is None or (outer is not None and outer.is_whole):
            continue
        us = e.time_range.elapsed_us()
        if outer is not None:
            outer.others_us += us
        is_whole = e in named or kind not in (LAUNCHING, AUTOGRAD)
        ranges.append(_Range(kind, e.time_range.end, us, is_whole))
    for ranges in inside.values():
        while ranges:
            end(ranges)
    busy = sum(map(sum, sums.values())) / calls
    rows = [Row(k, sum(v) / calls, len(v) / calls) for k, v in sums.items() if k]
    rows += [Row(PYTHON, wall - busy, 1)] if wall > busy else []
    return tuple(sorted(rows, key=lambda r: -r.us))


@dataclass
class _Range:
    """A range that a thread is in. others_us: of ranges in it that count for themselves. is_whole:
    none in it does."""

    kind: str
    end: float
    us: float
    is_whole: bool
    others_us: float = 0.0


def _kind_of(name: str, outer: _Range | None) -> str | None:
    """What the host does in a range; None: what it does in the one around it."""
    if name in _GUARDS:
        return "guards"
    if _WAITS.search(name):
        return "waiting for the device"
    if _ALLOCATES.search(name):
        return "allocating"
    if _PROGRAM.search(name):
        return LAUNCHING
    if name.startswith("autograd::engine") and (outer is None or outer.kind != AUTOGRAD):
        return AUTOGRAD
    if name.startswith("aten::") and (outer is None or outer.kind == LAUNCHING):
        return "operators outside of programs"
    return None


# -------------------------------------------------------------------------------------- the trace
def _trace_of(taken: Any, named: Mapping[Any, tuple[object, Instruction]]) -> dict[str, Any]:
    """torch.profiler's trace, whose ranges of instructions have lines and modules."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        taken.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_text())
    ranges = sorted(named.items(), key=lambda pair: pair[0].time_range.start)
    waiting: dict[str, list[Instruction]] = defaultdict(list)
    for e, (_, instruction) in reversed(ranges):
        waiting[e.name].append(instruction)
    spans = [t for t in trace["traceEvents"] if t.get("ph") == "X" and t.get("name") in waiting]
    ends: dict[Any, float] = {}
    for t in sorted(spans, key=lambda t: float(t["ts"])):
        thread = (t.get("pid"), t.get("tid"))
        if t.get("cat") == "kernel" or float(t["ts"]) < ends.get(thread, 0.0):
            continue
        if waiting[t["name"]]:
            i = waiting[t["name"]].pop()
            lines = {"source": list(i.lines), "module": i.module, "graph": i.graph}
            t["args"] = {**t.get("args", {}), **lines}
            ends[thread] = float(t["ts"]) + float(t["dur"])
    return trace


# ---------------------------------------------------------------------------------------- the text
def _rows(shares: Iterable[tuple[str, float, float]]) -> list[Row]:
    us: dict[str, float] = defaultdict(float)
    times: dict[str, float] = defaultdict(float)
    for what, t, n in shares:
        us[what] += t
        times[what] += n
    rows = (Row(what, t, times[what]) for what, t in us.items())
    return sorted(rows, key=lambda r: (-r.us, r.what))


def _line(r: Row, wall: float) -> str:
    share = f"{100 * r.us / wall:5.1f} %" if wall else ""
    return f"  {_time(r.us):>10} {share}  {r.times:6.4g} x  {r.what}"


def _time(us: float) -> str:
    return f"{us / 1000:.2f} ms" if us >= 1000 else f"{us:.1f} us"
