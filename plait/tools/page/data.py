"""A report as plain data: dicts, lists, text and numbers, as docs/report.md describes them.

In: records of compiles, and what else was noted. Out: what `json.dumps` takes. Nothing is computed
before somebody asks for it; all of it is linear in the size of the programs.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import plait
from plait.capture.dynamo import Break
from plait.capture.recompiles import Recompile, advice
from plait.devices import facts_of
from plait.errors import Fallback
from plait.ir.calls import Extern, ExternArg, ListArg, TensorArg, all_programs
from plait.ir.dtypes import DType
from plait.ir.effects import loop_outs
from plait.ir.expr import Size
from plait.ir.loops import Buffer, Loop
from plait.schedule.cost import Hints, buffer_nbytes, hint, hint_numel
from plait.schedule.plan import Kernel, Plan, Step, kernels_of
from plait.schedule.text import kernel_text, refused_pairs, space_text
from plait.tools.page.findings import findings
from plait.tools.page.kernels import accesses_of, operations_of
from plait.tools.page.lives import Life, alive, lives_of, peaks
from plait.tools.page.reasons import meaning
from plait.tools.report import input_words, kind_of, named
from plait.wrapper import instructions as ins
from plait.wrapper.program import CompileRecord
from plait.wrapper.text import line

MANY = 16  # buffers of a peak
SCHEMA = 2
"""Goes up where a key goes away or changes its meaning."""

Data = dict[str, Any]


def break_data(b: Break) -> Data:
    """Why Dynamo ended a graph before its function's end."""
    return {
        "where": b.where,
        "cause": b.cause,
        "hints": list(b.hints),
        "lines": _user_lines([b.where]),
    }


def recompile_data(r: Recompile) -> Data:
    """What Dynamo compiled again, and the guards that had failed."""
    guards = [{"text": g.text, "where": g.where, "advice": advice(g.text)} for g in r.guards]
    return {
        "function": r.function,
        "number": r.number,
        "guards": guards,
        "lines": _user_lines(
            [*re.findall(r"[^ (]+:\d+", r.function), *(g.where for g in r.guards)]
        ),
    }


def graph_data(g: CompileRecord) -> Data:
    """One graph: what came in, what was made of it, how long that took."""
    steps = [
        {**made, "program": n, "module": "" if n else made["module"]}  # names are of the first
        for n, plan in enumerate(all_programs(g.plan))
        for s in plan.steps
        if (made := _step(s, plan, g)) is not None
    ]
    _link(steps, g)
    return {
        "name": g.name,
        "kind": g.kind,
        "target": g.target,
        "aten_ops": g.aten_ops,
        "times_ms": {step: round(ms, 3) for step, ms in g.times_ms.items()},
        "cache_hit": g.cache_hit,
        "frozen": g.frozen,
        "wrapper_reason": g.wrapper_reason,
        "inputs": _inputs(g),
        "results": _results(g),
        "steps": steps,
        "kernel_sources": _kernel_sources(g),
        "refusals": (refused := _refusals(g, steps)),
        "meanings": {r["kind"]: meaning(r["reason"]) for r in refused},
        "ladder": [_fallback(f) for f in g.ladder],
        "tuned": list(g.tuned),
        "programs": _programs(g),
        "why_untimed": "",
        "process": None,
        "lines": _user_lines(o["where"] for s in steps for o in s["origin"]),
    }


def report_data(
    graphs: Iterable[Data], breaks: Iterable[Data], recompiles: Iterable[Data], **more: Any
) -> Data:
    """The whole of a report. more: the other keys, as far as there is anything."""
    empty = {"note": "", "left_to_eager": [], "starts": [], "meanwhile": [], "given_up": []}
    made = {
        "schema": SCHEMA,
        "plait": plait.__version__,
        "torch": torch.__version__,
        "graphs": list(graphs),
        # One for all sizes, and for all functions around it.
        "breaks": list({(b["where"], b["cause"]): b for b in breaks}.values()),
        "recompiles": list(recompiles),
        "copy_ns": {},
        "product_flops": {},
        **empty,
        **more,
    }
    return {**made, "findings": findings(made)}


# --------------------------------------------------------------------------------------- the steps
def _step(s: Step, plan: Plan, g: CompileRecord) -> Data | None:
    """A kernel or a call; None for steps that do no work."""
    neither: Data = {
        "why": "", "fell_back": False, "parts": [], "space": "", "loops": "", "accesses": [],
        "estimate_ns": 0, "time_ns": None, "roofline": None, "precision": "",
    }  # fmt: skip
    if isinstance(s, Kernel):
        accesses = accesses_of(s)
        return {
            **neither,
            "what": "kernel",
            "kind": "reduction" if any(n.rvars for n in s.nests) else "pointwise",
            "name": s.name,
            "device": s.device,
            "origin": [_origin(o) for o in s.origin],
            "module": g.module_of(s.outs),
            "reads": [a.buffer for a in accesses if not a.writes],
            "writes": list(s.outs),
            "parts": [n.name for n in s.nests],
            "space": " and ".join(space_text(n) for n in s.nests),
            "loops": kernel_text(s),
            "accesses": [asdict(a) for a in accesses],
            "read_nbytes": sum(a.nbytes for a in accesses if not a.writes),
            "written_nbytes": sum(a.nbytes for a in accesses if a.writes),
            "operations": operations_of(s),
            "estimate_ns": hint(s.work_ns, s.hint_of) if facts_of(s.device).is_host else 0,
        }
    if not isinstance(s, Extern):
        return None
    hints = plan.program.hints
    operands = list(_tensors(s.operands))
    operations = hint(s.flops, hints)
    made = [plan.buffers[name] for name in s.made if name in plan.buffers]
    chosen = "PyTorch's own operator, by choice: its library is the fastest that plait knows"
    if s.kernel is not None:
        chosen = "a kernel that is no loop nest of the graph, but written for this operator"
    elif s.control is not None:
        chosen = f"runs subprograms {', '.join(map(str, s.control.programs))}"
    elif s.callable_index >= 0:
        chosen = "called from Python"
    elif s.op.startswith("plait::"):
        chosen = "an operator of plait's own"
    return {
        **neither,
        "what": "call" if s.kernel is None else "kernel",
        "kind": _kind_of_call(s.op, operations),
        "name": s.kernel.name if s.kernel is not None else s.op,
        "device": made[0].device if made else "",
        "origin": [_origin(o) for o in s.origin],
        "module": g.module_of(s.made),
        "reads": list(dict.fromkeys(a.buf for a in operands)),
        "writes": list(s.made),
        "why": g.fallback_reasons.get(s.op, "no rule") if s.fallback else chosen,
        "fell_back": s.fallback,
        "read_nbytes": sum(_operand_nbytes(a, plan, hints) for a in operands),
        "written_nbytes": sum(buffer_nbytes(b, hints) for b in made),
        "operations": operations,
        "precision": str(_dtype(operands[0], plan)) if operations and operands else "",
    }


def _kind_of_call(op: str, operations: int) -> str:
    """What a call does, in a word."""
    if "convolution" in op:
        return "convolution"
    if "attention" in op:
        return "attention"
    return "product" if operations else "operator"


def _tensors(values: Iterable[ExternArg]) -> Iterator[TensorArg]:
    for v in values:
        if isinstance(v, TensorArg):
            yield v
        elif isinstance(v, ListArg):
            yield from _tensors(v.items)


def _operand_nbytes(a: TensorArg, plan: Plan, hints: Hints) -> int:
    sizes = [n for n, stride in zip(a.shape, a.strides, strict=True) if stride != 0]
    return hint_numel(sizes, hints) * _dtype(a, plan).nbytes


def _dtype(a: TensorArg, plan: Plan) -> DType:
    return a.dtype or plan.buffers[a.buf].dtype


def _origin(text: str) -> Data:
    """A line of the user's and the operator there."""
    where, _, op = text.rpartition(" ")
    return {"where": where, "op": op}


def _fallback(f: Fallback) -> Data:
    return {"rung": f.rung, "what": f.what, "reason": f.reason, "where": f.where}


def _inputs(g: CompileRecord) -> list[Data]:
    words = input_words(g)
    return [
        {"name": i.name, "text": line(i), "is": words.get(i.name, "")} for i in g.wrapper.inputs
    ]


def _results(g: CompileRecord) -> list[Data]:
    """What a program returns: a buffer each; "" for what is none."""
    values = [i.values for i in g.wrapper.body if isinstance(i, ins.Return)]
    returned = values[-1] if values else ()
    names = named(g.result_names, len(returned))
    return [
        {"name": v.name if isinstance(v, ins.Ref) else "", "is": name}
        for v, name in zip(returned, names, strict=True)
    ]


def _refusals(g: CompileRecord, steps: Sequence[Data]) -> list[Data]:
    """What was not fused. A part of a pair is a kernel, a nest of one, or what one computes, of
    which there may be no buffer: that is found by its source line and operator."""
    at: dict[str, int] = {}
    made: dict[tuple[str, str], int] = {}
    for k, s in enumerate(steps):
        for name in (s["name"], *s["parts"], *s["writes"]):
            at.setdefault(name, k)
        for o in s["origin"]:
            made.setdefault((o["where"], o["op"]), k)
    for op in (op for p in all_programs(g.plan) for op in p.program.ops):
        if isinstance(op, Loop) and op.origin:
            last = _origin(op.origin[-1])
            if (found := made.get((last["where"], last["op"]))) is not None:
                for name in loop_outs(op):
                    at.setdefault(name, found)
    return [
        {
            "pair": (parts := pair.split(" and ")),
            "steps": [at.get(name) for name in parts],
            "reason": reason,
            "kind": kind_of(reason),
        }
        for p in all_programs(g.plan)
        for pair, reason in refused_pairs(p)
    ]


# ------------------------------------------------------------------------------------ the programs
def _programs(g: CompileRecord) -> list[Data]:
    """The programs of a graph, its own first."""
    if g.target == "eager":
        return []
    buffers: dict[str, Buffer] = {}
    for plan in all_programs(g.plan):
        buffers.update(plan.buffers)
    hints = g.plan.program.hints
    return [_program(p, buffers, hints) for p in all_programs(g.wrapper)]


def _program(p: ins.WrapperProgram, buffers: Mapping[str, Buffer], hints: Hints) -> Data:
    lives = lives_of(p, buffers, hints)
    held = alive(lives, len(p.body))
    arenas = [hint(i.nbytes, hints) for i in p.body if isinstance(i, ins.Arena)]
    return {
        "name": p.name,
        "instructions": [line(i) for i in p.body],
        "buffers": [{**asdict(x), "type": _type(buffers.get(x.name))} for x in lives],
        "views": {i.name: i.base for i in p.body if isinstance(i, ins.View)},
        "held_nbytes": held,
        "peaks": [_peak(k, held[k], lives) for k in peaks(held)],
        "arena_nbytes": sum(arenas),
        "partitions": [
            {"at": at, "recorded": i.recorded, "reason": i.reason}
            for at, i in enumerate(p.body)
            if isinstance(i, ins.Partition)
        ],
    }


def _peak(at: int, nbytes: int, lives: Sequence[Life]) -> Data:
    """The largest buffers that are alive after an instruction."""
    there = [x for x in lives if x.counts and x.born <= at < x.dies]
    largest = sorted(there, key=lambda x: (-x.nbytes, x.name))[:MANY]
    return {"at": at, "nbytes": nbytes, "buffers": [x.name for x in largest]}


def _type(b: Buffer | None) -> str:
    return "" if b is None else f"{b.dtype}[{_sizes(b.shape)}] @ ({_sizes(b.strides)})"


def _sizes(sizes: Sequence[Size]) -> str:
    return ", ".join(map(str, sizes))


def _link(steps: Sequence[Data], g: CompileRecord) -> None:
    """Adds to each step the instruction that runs it, where there is one: program and place."""
    places: dict[tuple[int, str, tuple[str, ...]], list[int]] = {}
    for n, p in enumerate(all_programs(g.wrapper)):
        for at, i in enumerate(p.body):
            if isinstance(i, ins.Launch):
                places.setdefault((n, i.kernel, tuple(i.outs)), []).append(at)
            elif isinstance(i, ins.CallExtern | ins.CallPython | ins.CallPrograms):
                into = i.into if isinstance(i, ins.CallExtern) else ()
                made = tuple(o for o in i.outs if o is not None)
                places.setdefault((n, "", made or tuple(into)), []).append(at)
    for s in steps:
        name = s["name"] if s["what"] == "kernel" else ""
        found = places.get((s["program"], name, tuple(s["writes"])))
        s["instruction"] = found.pop(0) if found else None


# ------------------------------------------------------------------------------------ source texts
_DEFINED = re.compile(r'^(?:extern "C" i64 |def )(\w+)\(.*[^;\n]$', re.MULTILINE)


def _kernel_sources(g: CompileRecord) -> dict[str, str]:
    """The generated source by kernel; under "" what all of them share."""
    names = {k.name for k in kernels_of(g.plan)} | {
        s.kernel.name
        for p in all_programs(g.plan)
        for s in p.steps
        if isinstance(s, Extern) and s.kernel is not None
    }
    text = g.kernel_source
    # A kernel's text begins after the empty line before it: decorators stand above its name.
    starts = [(text.rfind("\n\n", 0, m.start()) + 1, m[1]) for m in _DEFINED.finditer(text)]
    starts = [(at, name) for at, name in starts if name in names]
    found = {"": text[: starts[0][0] if starts else len(text)].strip()}
    for (at, name), (end, _) in pairwise([*starts, (len(text), "")]):
        found.setdefault(name, text[at:end].strip())
    return found


def _user_lines(places: Iterable[str]) -> dict[str, str]:
    """The text of the user's lines, by "file.py:31", where one loaded module has such a file."""
    found: dict[str, str] = {}
    files: dict[str, set[str]] = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            files.setdefault(Path(path).name, set()).add(path)
    for path in linecache.cache:  # cells of a notebook
        files.setdefault(Path(path).name, {path})
    for where in dict.fromkeys(places):
        name, _, number = where.partition(":")
        paths = files.get(name, set())
        if len(paths) == 1 and number.isdecimal():
            found[where] = linecache.getline(next(iter(paths)), int(number)).strip()
    return {where: text for where, text in found.items() if text}
