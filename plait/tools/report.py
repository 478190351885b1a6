"""What was compiled, for people: the data that `plait.explain` returns and its text.

In: a `CompileRecord` of every graph. Out: counts, and a page that says for every graph which kernels were made of which
source lines, what was not fused and why, and what PyTorch's own operators do, by choice or for want of a rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.ir import sizes as sz
from plait.ir.loops import Extern
from plait.ir.sizes import Expr
from plait.schedule.plan import Kernel, Reduce
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
    head += (
        f"{_count(len(_externs(g)), 'extern call')}; {sum(g.times_ms.values()):.0f} ms to compile"
    )
    if g.cache_hit is not None:
        head += ", kernels from the cache" if g.cache_hit else ", kernels built"
    lines = [head, *(f"  {line}" for s in g.plan.steps for line in _step(s, g))]
    lines += [f"  {line}" for line in _refused(g)]
    return [*lines, f"  memory: {_memory(g)}"]


def _step(step: object, g: CompileRecord) -> list[str]:
    if isinstance(step, Kernel):
        reads = [b.name for b in step.args if b.name not in step.outs]
        space = "x".join(_extents(step.vars)) or "1"
        inner = f" over {'x'.join(_extents(step.rvars))}" if step.rvars else ""
        facts = f"{space}{inner} points, {_ns(step.work_ns)}"
        return [
            f"kernel {step.name}: {', '.join(reads) or 'nothing'} -> {', '.join(step.outs)}; {facts}",
            *(f"    {o}" for o in step.origin),
        ]
    if isinstance(step, Extern):
        why = "by choice"
        if step.fallback:
            why = f"fell back: {g.fallback_reasons.get(step.op, 'no lowering rule')}"
        return [f"extern {step.op}: {why}", *(f"    {o}" for o in step.origin)]
    return []


def _extents(vars_: Sequence[Expr]) -> list[str]:
    return [str(v.symbol.extent) for v in vars_ if v.symbol is not None]


def _ns(work: sz.Size) -> str:
    if isinstance(work, int):
        return (
            f"about {work / 1e3:.1f} us on one core"
            if work >= 1000
            else f"about {work} ns on one core"
        )
    return f"about {work} ns on one core"


def _refused(g: CompileRecord) -> list[str]:
    """What was not fused, one line a reason; buffers stand for the kernels that compute them."""
    maker: dict[str, str] = {}
    for k in g.plan.steps:
        if isinstance(k, Kernel):
            maker.update({s.name: k.name for s in k.stmts if isinstance(s, Reduce)})
            maker.update(dict.fromkeys(k.outs, k.name))
    by_reason: dict[str, dict[str, None]] = {}
    for r in g.plan.refusals:
        a, b = maker.get(r.a, r.a), maker.get(r.b, r.b)
        if a != b:  # refused at first, fused in the end by another road
            by_reason.setdefault(r.reason.text, {})[f"{a} and {b}"] = None
    return [f"not fused: {', '.join(pairs)}: {reason}" for reason, pairs in by_reason.items()]


def _memory(g: CompileRecord) -> str:
    allocs = sum(isinstance(i, Alloc) for i in g.wrapper.body)
    arena = g.plan.memory.arena_nbytes if g.plan.memory.offsets else 0
    room = f"{arena / 1024:.1f} KiB" if isinstance(arena, int) else f"{arena} bytes"
    placed, reused = len(g.plan.memory.offsets), len(g.plan.memory.in_place)
    tensors = "tensor" if placed == 1 else "tensors"
    return f"{placed} {tensors} in an arena of {room}, {reused} on the memory of another, {allocs} allocated"
