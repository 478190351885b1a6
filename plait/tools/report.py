"""What was compiled, for people: the data that `plait.explain` returns and its text.

In: a `CompileRecord` of every graph. Out: counts and two texts. `text` is a summary: what each
graph became, kernels of one source counted together, calls of PyTorch's own operators by choice or
for want of a rule, reasons against fusion counted by kind. `details` is a page a graph: which
kernels were made of which source lines, every refusal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.capture.dynamo import Break
from plait.capture.recompiles import Recompile
from plait.errors import Fallback, Rung
from plait.ir.calls import Extern, all_programs
from plait.ir.expr import free_symbols
from plait.runtime.graphs import refusals
from plait.schedule.cost import hint
from plait.schedule.plan import Kernel, Step, kernels_of
from plait.schedule.text import refusal_lines, refused_pairs, step_summary, time_text
from plait.tools.bits import bits_line, bits_of, rows_line
from plait.tools.page.lives import bytes_text, lives_of
from plait.wrapper.instructions import Launch, Partition, TensorInput, WrapperProgram
from plait.wrapper.partition import fixed_inputs, recorded_results
from plait.wrapper.program import CompileRecord

MANY = 30  # lines of one list in the summary
KERNELS = "kernels"  # the title of their section
MAX_NAMES = 8  # of one list in a line


@dataclass(frozen=True)
class Report:
    """The graphs that one call compiled, in order. `print(report)` shows `text`.

    broken: why Dynamo ended graphs before the function's end. note: what else there is to say, or
    "".
    given_up: parts of programs of this process that were to be CUDA graphs and, once they ran, were
    none, and why.
    left_to_eager: functions of this process that Dynamo compiles no more, since they were compiled
    too often, or a graph ended in a loop.
    recompiled: what Dynamo compiled again in this process, the last ones, in order.
    starts: with the option warm_start: which functions of this process started warm, which were
    kept for the next one, and why others were not.
    meanwhile: with the option while_building: graphs of this process that eager ran while their
    kernels were being built, how often, and what ended that."""

    graphs: tuple[CompileRecord, ...] = field(default=())
    broken: tuple[Break, ...] = field(default=())
    note: str = ""
    given_up: tuple[str, ...] = ()
    left_to_eager: tuple[str, ...] = ()
    recompiled: tuple[Recompile, ...] = ()
    starts: tuple[str, ...] = ()
    meanwhile: tuple[str, ...] = ()

    @property
    def breaks(self) -> tuple[str, ...]:
        """Why Dynamo ended a graph before the function's end, with the line, each once."""
        return tuple(dict.fromkeys(b.line for b in self.broken))

    @property
    def recompiles(self) -> tuple[str, ...]:
        """What Dynamo compiled again in this process, the guards that failed, and what would avoid
        it; the last ones, in order, each once."""
        return tuple(dict.fromkeys(r.line for r in self.recompiled))

    @property
    def ladder(self) -> tuple[Fallback, ...]:
        """What has no kernel, by graph: operators that are called, sizes that became numbers,
        graphs that eager runs; each with the reason. Every operator is there once a graph."""
        return tuple(step for g in self.graphs for step in g.ladder)

    @property
    def kernels(self) -> int:
        """Kernel launches, all graphs together."""
        return sum(map(_launches, self.graphs))

    @property
    def extern_calls(self) -> dict[str, int]:
        """Calls of PyTorch's own operators, by operator; those that fell back included."""
        return dict(Counter(e.op for g in self.graphs for e in _externs(g)))

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls for want of a lowering rule, by operator."""
        return dict(Counter(e.op for g in self.graphs for e in _externs(g) if e.fallback))

    @property
    def refusals(self) -> dict[str, int]:
        """Pairs that were not fused, by kind of reason: what is special about a pair is left
        out."""
        found = Counter(kind_of(reason) for g in self.graphs for _, reason in refused_pairs(g.plan))
        return dict(found.most_common())

    @property
    def text(self) -> str:
        """The summary."""
        lines = [*filter(None, [self.note]), self.head, ""]
        lines += [line for g in self.graphs for line in _graph_head(g)]
        for title, found in self.sections:
            lines += _section(title, found)
        return "\n".join(lines).rstrip() + "\n"

    @property
    def sections(self) -> list[tuple[str, Sequence[str]]]:
        """What the summary says below the graphs, by title, as far as there is anything."""
        calls = [e for g in self.graphs for e in _externs(g)]
        chosen = Counter(e.op for e in calls if e.kernel is None and not e.fallback)
        ours = Counter(e.kernel.name.partition(".")[0] for e in calls if e.kernel is not None)
        every: list[tuple[str, Sequence[str]]] = [
            ("graphs that eager runs", self._steps("eager")),
            ("sizes taken for numbers: others compile anew", self._steps("specialise")),
            ("operators written out as others", self._steps("operators")),
            ("graph breaks", [*dict.fromkeys(b.told for b in self.broken)]),
            ("compiled again in this process", self.recompiles[-MANY:]),
            ("warm starts of this process", self.starts[-MANY:]),
            ("run by eager while kernels were built", self.meanwhile[-MANY:]),
            ("functions that Dynamo leaves to eager from now on", self.left_to_eager),
            ("CUDA graphs given up while programs of this process ran", self.given_up),
            (KERNELS, [row.line for row in same_kernels(self.graphs)]),
            ("kernels of products and attention", _counted(ours)),
            ("tuned", [line for g in self.graphs for line in g.tuned]),
            ("PyTorch's own operators, by choice", _counted(chosen)),
            ("PyTorch's own operators, for want of a rule", self._fallbacks()),
            ("not fused", self._refusals()),
        ]
        return [(title, lines) for title, lines in every if lines]

    @property
    def graph_rows(self) -> list[tuple[str, ...]]:
        """A row a graph: its name, how many operators, kernels and calls, how long its compile
        took, and what else there is to say of it."""
        return [
            (
                g.name, str(g.aten_ops), str(_launches(g)), str(len(_externs(g))),
                f"{_total_ms(g):.0f} ms", "\n".join(line.strip() for line in _graph_head(g)[1:]),
            )
            for g in self.graphs
        ]  # fmt: skip

    @property
    def details(self) -> str:
        """A page a graph: kernels and calls in order with the lines they come from, refusals,
        memory."""
        return "\n\n".join("\n".join(_graph(g)) for g in self.graphs) + "\n"

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data, which docs/report.md describes; `plait.report` makes a page of
        the same."""
        from plait.tools.page import data

        return data.report_data(
            map(data.graph_data, self.graphs),
            map(data.break_data, self.broken),
            map(data.recompile_data, self.recompiled),
            note=self.note,
            left_to_eager=list(self.left_to_eager),
            starts=list(self.starts),
            meanwhile=list(self.meanwhile),
            given_up=list(self.given_up),
        )

    @property
    def head(self) -> str:
        """All graphs together, in a line."""
        aten = sum(g.aten_ops for g in self.graphs)
        return (
            f"{count(len(self.graphs), 'graph')}: {count(aten, 'ATen op')} -> "
            f"{count(self.kernels, 'kernel')}, {count(sum(self.extern_calls.values()), 'call')} "
            f"of PyTorch's own operators, {sum(self.fallbacks.values())} of them for want of a "
            f"rule; {count(sum(self.refusals.values()), 'pair')} not fused"
        )

    def _steps(self, rung: Rung) -> list[str]:
        return [f"{g.name}: {s.line}" for g in self.graphs for s in g.ladder if s.rung == rung]

    def _fallbacks(self) -> list[str]:
        why = {op: r for g in self.graphs for op, r in g.fallback_reasons.items()}
        rows = sorted(self.fallbacks.items(), key=lambda row: (-row[1], row[0]))
        return [f"{n} x {op}: {why[op]}" for op, n in rows]

    def _refusals(self) -> list[str]:
        examples: dict[str, str] = {}
        for g in self.graphs:
            for pair, reason in refused_pairs(g.plan):
                examples.setdefault(kind_of(reason), f"{pair}: {reason}")
        return [
            f"{count(n, 'pair')}: {kind} (such as {examples[kind]})"
            for kind, n in self.refusals.items()
        ]

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def _externs(g: CompileRecord) -> list[Extern]:
    """The calls of operators, those of subprograms too."""
    every = (s for p in all_programs(g.plan) for s in p.steps)
    return [s for s in every if isinstance(s, Extern) and s.control is None]


def _launches(g: CompileRecord) -> int:
    """How many launches the program and its subprograms have, each counted once."""
    return sum(isinstance(i, Launch) for p in all_programs(g.wrapper) for i in p.body)


def count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _counted(counts: Counter[str]) -> list[str]:
    return [f"{n} x {op}" for op, n in sorted(counts.items(), key=lambda row: (-row[1], row[0]))]


def named(names: Sequence[str], n: int) -> Sequence[str]:
    """The user's names of n inputs or results, which are known for all of them or for none."""
    return names if len(names) == n else [""] * n


def _section(title: str, lines: Sequence[str]) -> list[str]:
    """A titled list, cut where it is long."""
    rest = [f"... and {len(lines) - MANY} more"] if len(lines) > MANY else []
    return ["", f"{title}:", *(f"  {line}" for line in (*lines[:MANY], *rest))]


_ONE = re.compile(r"\b(?:buf|arg)\d+\b|\bplait_\w+|\([^()]*\)|\b\d+\b|\[[^][]*\]")
_BETWEEN = re.compile(r"^\S+ must run between them$")


def kind_of(reason: str) -> str:
    """A reason without the names, shapes and numbers of the pair."""
    if _BETWEEN.match(reason):
        what = "a call" if "::" in reason else "another loop"
        return f"{what} must run between them"
    return _ONE.sub("..", reason)


# -------------------------------------------------------------------------------------- the summary
def _graph_head(g: CompileRecord) -> list[str]:
    """What became of a graph: counts, time to compile, how it is called, sizes that vary,
    memory."""
    if g.target == "eager":
        return [f"{g.name}: {count(g.aten_ops, 'operator')}, run by eager"]
    head = f"{g.name}: {count(g.aten_ops, 'ATen op')} -> {count(_launches(g), 'kernel')}, "
    head += f"{count(len(_externs(g)), 'extern call')}; {_total_ms(g):.0f} ms to compile"
    if g.cache_hit is not None:
        head += ", kernels from the cache" if g.cache_hit else ", kernels built"
    lines = [head]
    if g.frozen:
        lines.append(f"  {g.frozen}")
    if g.wrapper_reason:
        lines.append(f"  called through AOTAutograd's wrapper: {g.wrapper_reason}")
    if g.numerics != "default":
        lines.append(f"  numerics {g.numerics!r}: {bits_line(g)}")
    if g.batch_invariant:
        lines.append(f"  {rows_line(g)}")
    if sizes := _dynamic(g):
        lines.append(f"  sizes that may vary: {', '.join(sizes)}")
    return [*lines, *recorded_lines(g.wrapper, input_words(g)), f"  memory: {_memory(g)}"]


def input_words(g: CompileRecord) -> dict[str, str]:
    """What the user calls the inputs of a program, by name, as far as that is known."""
    inputs = g.wrapper.inputs
    names = named(g.input_names, len(inputs))
    return {i.name: name for i, name in zip(inputs, names, strict=True) if name}


def recorded_lines(program: WrapperProgram, words: Mapping[str, str]) -> list[str]:
    """What of a program is replayed as CUDA graphs, what becomes of its inputs then, and why the
    rest is not. words: the user's names of inputs."""
    parts = [i for i in program.body if isinstance(i, Partition)]
    if not parts:
        return []
    free, fixed = fixed_inputs(program)
    direct, copied = recorded_results(program)
    lines = [
        f"  CUDA graphs: {count(sum(p.recorded for p in parts), 'part')} recorded; "
        f"{_inputs(free, words)} patched if moved, {_inputs(fixed, words)} that operators see "
        f"copied or recorded again; {count(len(direct), 'result')} written where it belongs, "
        f"{len(copied)} copied inside the graph"
    ]
    return lines + [f"    at every call: {p.reason}" for p in parts if p.reason]


def _inputs(names: Sequence[str], words: Mapping[str, str]) -> str:
    shown = [words.get(name, name) for name in names[:MAX_NAMES]]
    shown += ["..."] * (len(names) > MAX_NAMES)
    return count(len(names), "input") + f" ({', '.join(shown)})" * bool(names)


def _dynamic(g: CompileRecord) -> list[str]:
    """The symbols in the shapes of the inputs, with the ranges that the program was compiled
    for."""
    atoms = {
        a.name: a
        for i in g.wrapper.inputs
        if isinstance(i, TensorInput)
        for e in (*i.shape, *i.strides)
        for a in free_symbols(e)
    }
    return [
        f"{a.name} >= {int(a.lo)}" + (f" and <= {int(a.hi)}" if a.hi < 2**31 else "")
        for _, a in sorted(atoms.items())
    ]


def given_up() -> list[str]:
    """Parts of programs of this process that were to be CUDA graphs and are none, and why."""
    return [
        f"{name}, part {k}: {why}"
        for name, parts in refusals.items()
        for k, why in sorted(parts.items())
    ]


@dataclass(frozen=True)
class SameKernels:
    """Kernels of the same operators. n: launches. name: the kernel's, or what the names of several
    sources share. work_ns: of all, estimated on one core."""

    n: int
    name: str
    ops: str
    work_ns: int

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.n} x {self.name}: {self.ops}; about {time_text(self.work_ns)} on one core"


def same_kernels(graphs: Sequence[CompileRecord]) -> list[SameKernels]:
    """The kernels of all graphs, those of the same operators as one; the most work first."""
    alike: dict[tuple[str, str], list[Kernel]] = {}
    for g in graphs:
        for k in kernels_of(g.plan):
            alike.setdefault((k.name.rpartition("_")[0], _ops(k)), []).append(k)
    rows = []
    for (stem, ops), same in alike.items():
        sources = {k.name for k in same}
        name = same[0].name if len(sources) == 1 else f"{stem} ({len(sources)} different)"
        work = sum(hint(k.work_ns, k.hint_of) for k in same)
        rows.append((stem, SameKernels(len(same), name, ops, work)))
    rows.sort(key=lambda row: (-row[1].work_ns, row[0], row[1].ops))
    return [row for _, row in rows]


def _ops(k: Kernel) -> str:
    """The operators that went into a kernel, by name, in order."""
    names = dict.fromkeys(o.split()[-1].split(".")[1] for o in k.origin if "." in o.split()[-1])
    shown = list(names)[:8]
    return ", ".join(shown) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# -------------------------------------------------------------------------------------- the details
def _graph(g: CompileRecord) -> list[str]:
    lines = [
        *_graph_head(g),
        *(f"  {buf} is {name}" for buf, name in input_words(g).items()),
        *(f"  {s.rung}: {s.line}" for s in g.ladder if s.rung not in ("aten", "python")),
    ]
    for n, plan in enumerate(all_programs(g.plan)):
        lines += [f"  subprogram {n - 1}:"] if n else []
        lines += [f"  {line}" for s in plan.steps for line in _step(s, g)]
        lines += [f"  {line}" for line in refusal_lines(plan)]
    return lines


def _step(step: Step, g: CompileRecord) -> list[str]:
    line = step_summary(step)
    if isinstance(step, Extern) and step.fallback:
        line += f": {g.fallback_reasons[step.op]}"
    if isinstance(step, Kernel):
        line += f"; {bits_of(step, g)}"
    origin = step.origin if isinstance(step, (Kernel, Extern)) else ()
    return [line, *(f"    {o}" for o in origin)] if line else []


def _total_ms(g: CompileRecord) -> float:
    return sum(ms for step, ms in g.times_ms.items() if "/" not in step)  # "a/b" is a part of "a"


def _memory(g: CompileRecord) -> str:
    hints, plans, memory = g.plan.program.hints, [*all_programs(g.plan)], g.plan.memory
    buffers = {name: b for p in plans for name, b in p.buffers.items()}
    calls = [s for p in plans for s in p.steps if isinstance(s, Extern)]
    others = {out for s in calls if s.aliases or s.control for out in s.made}
    every = [x for p in all_programs(g.wrapper) for x in lives_of(p, buffers, hints)]
    arena, when = memory.arena_nbytes, " in the example" * bool(_dynamic(g))
    room = bytes_text(arena) if isinstance(arena, int) else f"{arena} bytes"
    placed, reused = len(memory.offsets), len(memory.in_place)
    parts = [f"{count(placed, 'tensor')} in an arena of {room}"] * bool(placed)
    parts += [f"{reused} on the memory of another"] * bool(reused)
    for where, what in (("own", "allocated"), ("call", "allocated by calls of operators")):
        found = [x.nbytes for x in every if x.where == where and x.name not in others]
        parts += [f"{len(found)} {what} ({bytes_text(sum(found))}{when})"] * bool(found)
    return ", ".join(parts) or "none"
