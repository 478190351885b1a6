"""What was compiled, for people: the data that `plait.explain` returns and its text.

In: a `CompileRecord` of every graph. Out: counts, and a page that says for every graph which kernels were made of which
source lines, what was not fused and why, and what PyTorch's own operators do, by choice or for want of a rule.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from plait.ir.loops import Extern
from plait.schedule.plan import Kernel, Step
from plait.schedule.text import refusal_lines, step_summary
from plait.wrapper.instructions import Alloc, Launch
from plait.wrapper.program import CompileRecord


@dataclass(frozen=True)
class Report:
    """The graphs that one call compiled, in order. `print(report)` shows `text`."""

    graphs: tuple[CompileRecord, ...] = field(default=())

    @property
    def kernels(self) -> int:
        """Kernel launches, all graphs together."""
        return sum(isinstance(i, Launch) for g in self.graphs for i in g.wrapper.body)

    @property
    def extern_calls(self) -> dict[str, int]:
        """Calls of PyTorch's own operators, by operator; those that fell back included."""
        return dict(Counter(e.op for g in self.graphs for e in _externs(g)))

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls for want of a lowering rule, by operator."""
        return dict(Counter(e.op for g in self.graphs for e in _externs(g) if e.fallback))

    @property
    def text(self) -> str:
        """The page."""
        head = (
            f"{_count(len(self.graphs), 'graph')}, {_count(self.kernels, 'kernel')}, "
            f"{_count(sum(self.extern_calls.values()), 'call')} of PyTorch's own operators, "
            f"{sum(self.fallbacks.values())} of them for want of a rule"
        )
        return "\n".join([head, *(line for g in self.graphs for line in ("", *_graph(g)))]) + "\n"

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def _externs(g: CompileRecord) -> list[Extern]:
    return [s for s in g.plan.steps if isinstance(s, Extern)]


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _graph(g: CompileRecord) -> list[str]:
    launches = sum(isinstance(i, Launch) for i in g.wrapper.body)
    head = f"{g.name}: {_count(g.aten_ops, 'ATen op')} -> {_count(launches, 'kernel')}, "
    head += f"{_count(len(_externs(g)), 'extern call')}; {_total_ms(g):.0f} ms to compile"
    if g.cache_hit is not None:
        head += ", kernels from the cache" if g.cache_hit else ", kernels built"
    lines = [head, *(f"  {line}" for s in g.plan.steps for line in _step(s, g))]
    lines += [f"  {line}" for line in refusal_lines(g.plan)]
    return [*lines, f"  memory: {_memory(g)}"]


def _step(step: Step, g: CompileRecord) -> list[str]:
    line = step_summary(step)
    if isinstance(step, Extern) and step.fallback:
        line += f": {g.fallback_reasons.get(step.op, 'no lowering rule')}"
    origin = step.origin if isinstance(step, (Kernel, Extern)) else ()
    return [line, *(f"    {o}" for o in origin)] if line else []


def _total_ms(g: CompileRecord) -> float:
    return sum(ms for step, ms in g.times_ms.items() if "/" not in step)  # "a/b" is a part of "a"


def _memory(g: CompileRecord) -> str:
    allocs = sum(isinstance(i, Alloc) for i in g.wrapper.body)
    arena = g.plan.memory.arena_nbytes if g.plan.memory.offsets else 0
    room = f"{arena / 1024:.1f} KiB" if isinstance(arena, int) else f"{arena} bytes"
    placed, reused = len(g.plan.memory.offsets), len(g.plan.memory.in_place)
    tensors = "tensor" if placed == 1 else "tensors"
    return f"{placed} {tensors} in an arena of {room}, {reused} on the memory of another, {allocs} allocated"
