"""Kernels and plans as Python-like text for people: what was fused, in which order it runs, where buffers lie.

In: the data of `schedule/plan.py`. Out: text, the same for equal plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.ir.loops import Alias, Assert, Extern, Item, Mutate
from plait.ir.sizes import Expr
from plait.ir.symtext import Scope
from plait.ir.text import Body, buffer_type, extent_text, op_lines
from plait.schedule.plan import Kernel, MemoryPlan, Plan, Reduce, Step, Store


def plan_text(plan: Plan) -> str:
    """Memory, then every step, then what was not fused and why."""
    scope = Scope(frozenset(plan.buffers))
    lines = [*_memory(plan.memory, scope), ""]
    for step, frees in zip(plan.steps, plan.frees, strict=True):
        lines += [*step_lines(step, scope), *([f"free({', '.join(frees)})"] if frees else []), ""]
    lines += [f"# not fused: {r.a} and {r.b}: {r.reason.text}" for r in plan.refusals]
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
