"""Kernels and plans as text for people: what was fused and why not more, in which order it runs, where buffers lie.

In: the data of `schedule/plan.py`. Out: whole plans in Python-like text, or a summary with one line a kernel or call;
the same for equal plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.ir.loops import Alias, Assert, Extern, Item, Mutate
from plait.ir.sizes import Expr, Size
from plait.ir.symtext import Scope
from plait.ir.text import Body, buffer_type, extent_text, op_lines
from plait.schedule.plan import Kernel, MemoryPlan, Plan, Reduce, Step, Store


def plan_text(plan: Plan) -> str:
    """Memory, then every step, then what was not fused and why."""
    scope = Scope(frozenset(plan.buffers))
    lines = [*_memory(plan.memory, scope), ""]
    for step, frees in zip(plan.steps, plan.frees, strict=True):
        lines += [*step_lines(step, scope), *([f"free({', '.join(frees)})"] if frees else []), ""]
    lines += [f"# {line}" for line in refusal_lines(plan)]
    return "\n".join([*scope.lines, *lines]).rstrip() + "\n"


def _memory(m: MemoryPlan, scope: Scope) -> list[str]:
    lines = [f"arena({scope.size(m.arena_nbytes)} bytes)"] if m.offsets else []
    lines += [f"{name} at byte {scope.size(at)}" for name, at in m.offsets.items()]
    return lines + [f"{name} in the memory of {old}" for name, old in m.in_place.items()]


def step_lines(step: Step, scope: Scope) -> list[str]:
    """One step of a plan."""
    match step:
        case Kernel():
            return kernel_lines(step, scope)
        case Extern() | Alias() | Item() | Assert() | Mutate():
            return op_lines(step, scope)


def kernel_lines(k: Kernel, scope: Scope) -> list[str]:
    """A kernel as a loop nest: outer variables, then its statements; `full` ones run at every inner point too."""
    args = [f"{b.name}: {buffer_type(b, scope)}" for b in k.args] + [str(s) for s in k.sizes]
    lines = [f"def {k.name}(", *(f"    {a}," for a in args), "):"]
    if k.origin:
        lines.append(f'    """{"; ".join(k.origin)}"""')
    order = "in row-major order" if k.sequential else "in any order"
    lines.append(f"    for {_points(k.vars, scope)}:  # {order}, {scope.size(k.work_ns)} ns")
    if k.rvars:
        lines.append(f"        # inner: {_points(k.rvars, scope)}")
    body = Body(scope, (*k.vars, *k.rvars))
    for s in k.stmts:
        body.lines.append(_reduce(s, body) if isinstance(s, Reduce) else _store(s, body))
    return [*lines, *(f"        {s}" for s in body.lines)]


def _points(vars_: Sequence[Expr], scope: Scope) -> str:
    return ", ".join(extent_text(v, scope) for v in vars_) or "one point"


def _reduce(s: Reduce, body: Body) -> str:
    value = body.value(s.value)
    return f"{s.name} = {'running ' if s.running else ''}{s.kind}({value})"


def _store(s: Store, body: Body) -> str:
    value, where = body.value(s.value), body.mask(s.mask)
    at = body.index(s.index, s.index_args)
    sign = "=" if s.mode == "store" else f"{s.mode}="
    facts = [w for w, on in (("full", s.full), ("atomic", s.atomic)) if on]
    return f"{s.buf}[{at}] {sign} {value}{where}" + (f"  # {', '.join(facts)}" if facts else "")


# ---------------------------------------------------------------------------------------------- summaries
def summary_lines(plan: Plan) -> list[str]:
    """One line a kernel or call."""
    return [line for step in plan.steps if (line := step_summary(step))]


def step_summary(step: Step) -> str:
    """What a kernel reads and writes, its space and its estimated work; how a call came about; '' for other steps."""
    if isinstance(step, Extern):
        return f"extern {step.op}: {'fell back' if step.fallback else 'by choice'}"
    if not isinstance(step, Kernel):
        return ""
    reads = [b.name for b in step.args if b.name not in step.outs]
    inner = f" over {_space(step.rvars)}" if step.rvars else ""
    flow = f"{', '.join(reads) or 'nothing'} -> {', '.join(step.outs)}"
    return f"kernel {step.name}: {flow}; {_space(step.vars)}{inner} points, about {_time(step.work_ns)} on one core"


def _space(vars_: Sequence[Expr]) -> str:
    return "x".join(str(v.symbol.extent) for v in vars_ if v.symbol is not None) or "1"


def _time(work_ns: Size) -> str:
    return (
        f"{work_ns / 1e3:.1f} us"
        if isinstance(work_ns, int) and work_ns >= 1000
        else f"{work_ns} ns"
    )


def refusal_lines(plan: Plan) -> list[str]:
    """What was not fused, one line a reason; a buffer stands for the kernel that computes it."""
    maker: dict[str, str] = {}
    for k in plan.steps:
        if isinstance(k, Kernel):
            maker.update({s.name: k.name for s in k.stmts if isinstance(s, Reduce)})
            maker.update(dict.fromkeys(k.outs, k.name))
    by_reason: dict[str, dict[str, None]] = {}
    for r in plan.refusals:
        a, b = maker.get(r.a, r.a), maker.get(r.b, r.b)
        if a != b:  # refused at first, fused in the end by another road
            by_reason.setdefault(r.reason.text, {})[f"{a} and {b}"] = None
    return [f"not fused: {', '.join(pairs)}: {reason}" for reason, pairs in by_reason.items()]
