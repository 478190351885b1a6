"""Kernels and plans as text: what was fused and why not more, in which order it runs, where buffers
lie.

In: the data of `schedule/plan.py`. Out: Python-like text that reads back (`read_plan(plan_text(p),
p.program) == p`, `read_kernel(kernel_text(k)) == k`), or a summary with one line a kernel or call;
the same for equal plans. A kernel is a function of its loop variables, inner ones after `*`: `m =
max(t0)` reduces over all inner points, `y[i0] = store(t1)` writes, with full=True at every inner
point.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from plait.ir.body_text import Body, BodyReader, ends_with, origin_lines, params_text, py_word
from plait.ir.calls import Extern
from plait.ir.expr import Expr, Size
from plait.ir.expr.text import (
    Scope,
    flag_of,
    is_element,
    is_subprogram,
    keywords,
    name_of,
    name_text,
    positional,
    said,
    subprogram_lines,
    text_of,
    tuple_text,
    word,
    wrong,
)
from plait.ir.loops import Buffer, LoopProgram
from plait.ir.text import OpReader, buffer_line, op_lines
from plait.schedule.cost import hint
from plait.schedule.deps import extent
from plait.schedule.plan import (
    Form,
    Kernel,
    MemoryPlan,
    Plan,
    Reason,
    Reduce,
    Refusal,
    Step,
    Stmt,
    Store,
)


def plan_text(plan: Plan) -> str:
    """Buffers and memory, then every step, then what was not fused and why (the program is a text
    of its own). The plan of each subprogram stands in a function behind it."""
    scope = _scope(tuple(s for s in plan.steps if isinstance(s, Kernel)), frozenset(plan.buffers))
    lines = [buffer_line(b, scope) for b in plan.buffers.values()]
    lines += [*_memory(plan.memory, scope), ""]
    for step, frees in zip(plan.steps, plan.frees, strict=True):
        lines += [*step_lines(step, scope), *([f"free({_names(frees)})"] if frees else []), ""]
    lines += [f"# {line}" for line in refusal_lines(plan)]
    lines += [f"refused({r.a!r}, {r.b!r}, {r.reason.text!r})" for r in plan.refusals]
    for k, nested in enumerate(plan.programs):
        lines += subprogram_lines(k, plan_text(nested))
    return "\n".join([*scope.lines, "", *lines]).strip() + "\n"


def kernel_text(k: Kernel) -> str:
    """One kernel with its buffers."""
    scope = _scope((k,), frozenset(b.name for b in k.args))
    lines = [*(buffer_line(b, scope) for b in k.args), "", *kernel_lines(k, scope)]
    return "\n".join([*scope.lines, "", *lines]).lstrip() + "\n"


def read_plan(text: str, program: LoopProgram) -> Plan:
    """The plan of a program that a text describes. Raises TextError or SyntaxError, with the
    line."""
    return _read_plan(ast.parse(text).body, program)


def _read_plan(statements: Sequence[ast.stmt], program: LoopProgram) -> Plan:
    reader = _PlanReader()
    nested = iter(program.programs)
    programs: list[Plan] = []
    for s in statements:
        if is_subprogram(s):
            programs.append(_read_plan(s.body, next(nested)))
        elif not isinstance(s, ast.Pass):
            reader.statement(s)
    memory = MemoryPlan(reader.arena_nbytes, reader.offsets, reader.in_place)
    steps, frees = tuple(reader.steps), tuple(reader.frees)
    refusals = tuple(reader.refusals)
    return Plan(program, steps, frees, reader.ops.buffers, memory, refusals, tuple(programs))


def read_kernel(text: str) -> Kernel:
    """The one kernel that a text describes. Raises TextError or SyntaxError, with the line."""
    reader = _PlanReader()
    tree = ast.parse(text)
    for s in tree.body:
        reader.statement(s)
    if len(reader.steps) != 1 or not isinstance(reader.steps[0], Kernel):
        raise wrong(tree, "one kernel")
    return reader.steps[0]


# ------------------------------------------------------------------------------------------ writing
def _scope(kernels: Sequence[Kernel], buffers: frozenset[str]) -> Scope:
    nests = [n for k in kernels for n in k.nests]
    return Scope(buffers | {str(v) for n in nests for v in (*n.vars, *n.rvars)})


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(name_text, names))


def _memory(m: MemoryPlan, scope: Scope) -> list[str]:
    lines = [f"arena({scope.size(m.arena_nbytes)})"] if m.arena_nbytes != 0 or m.offsets else []
    lines += [f"place({name_text(name)}, {scope.size(at)})" for name, at in m.offsets.items()]
    return lines + [f"reuse({name_text(b)}, {name_text(old)})" for b, old in m.in_place.items()]


def step_lines(step: Step, scope: Scope) -> list[str]:
    """One step of a plan."""
    return kernel_lines(step, scope) if isinstance(step, Kernel) else op_lines(step, scope)


def _form_sizes(form: Form) -> tuple[Size, ...]:
    return form.symbol, form.pick, form.at


def kernel_lines(k: Kernel, scope: Scope) -> list[str]:
    """A kernel as a function of its loop variables, the statements in order; its parts stand in
    it."""
    facts = [
        *map(name_text, (b.name for b in k.args)),
        f"writes={tuple_text(list(map(name_text, k.outs)))}",
        *([f"sizes={scope.sizes(k.sizes)}"] if k.sizes else []),
        *([f"hints={scope.sizes(k.hints)}"] if k.hints else []),
        *([f"lengths={scope.sizes(k.lengths)}"] if k.lengths else []),
        *([f"work_ns={scope.size(k.work_ns)}"] if k.work_ns != 0 else []),
        *([f"form={scope.sizes(_form_sizes(k.form))}"] if k.form else []),
        *([f"{w}=True" for w, on in (("sequential", k.sequential), ("alike", k.alike)) if on]),
    ]
    body = Body(scope, (*k.vars, *k.rvars))
    for s in k.stmts:
        body.lines.append(_reduce(s, body) if isinstance(s, Reduce) else _store(s, body))
    for part in k.parts:
        body.lines += kernel_lines(part, scope)
    head = f"def {k.name}({params_text(k.vars, k.rvars, body)}):"
    lines = [*origin_lines(k.origin), *(body.lines or ["..."])]
    return [f"@kernel({', '.join(facts)})", head, *(f"    {s}" for s in lines)]


def _reduce(s: Reduce, body: Body) -> str:
    value = body.value(s.value)
    running = ", running=True" if s.running else ""
    more = f"{running}{_segment(s)}{'' if s.down is None else f', down={s.down}'}"
    return f"{name_text(s.name)} = {py_word(s.kind)}({value}{more})"


def _store(s: Store, body: Body) -> str:
    value = body.value(s.value)
    facts = [value, *body.given(s.index, s.index_args, s.mask)]
    facts += [f"{w}=True" for w, on in (("full", s.full), ("atomic", s.atomic)) if on]
    given = f"{', '.join(facts)}{_segment(s)}"
    return f"{name_text(s.buf)}[{body.inner.index(s.index)}] = {s.mode}({given})"


def _segment(s: Stmt) -> str:
    return f", segment={s.segment}" if s.segment else ""


# ------------------------------------------------------------------------------------------ reading
class _PlanReader:
    """Takes the statements of a plan's text one after the other."""

    def __init__(self) -> None:
        self.ops = OpReader()
        self.arena_nbytes: Size = 0
        self.offsets: dict[str, Size] = {}
        self.in_place: dict[str, str] = {}
        self.steps: list[Step] = []
        self.frees: list[tuple[str, ...]] = []
        self.refusals: list[Refusal] = []

    def statement(self, s: ast.stmt) -> None:
        if self.ops.header(s):
            return
        if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and self.fact(s.value):
            return
        self.steps.append(self.step(s))
        self.frees.append(())

    def fact(self, call: ast.Call) -> bool:
        """Takes a statement about memory or about what was not fused; False for any other."""
        match word(call):
            case "arena":
                self.arena_nbytes = self.ops.symbols.size(positional(call, 0))
            case "place":
                at = self.ops.symbols.size(positional(call, 1))
                self.offsets[name_of(positional(call, 0))] = at
            case "reuse":
                self.in_place[name_of(positional(call, 0))] = name_of(positional(call, 1))
            case "free" if self.frees:
                self.frees[-1] = tuple(name_of(e) for e in call.args)
            case "refused":
                a, b, why = (text_of(positional(call, k)) for k in range(3))
                self.refusals.append(Refusal(a, b, Reason(why)))
            case _:
                return False
        return True

    def step(self, s: ast.stmt) -> Step:
        if isinstance(s, ast.FunctionDef):
            return self.kernel(s)
        op = self.ops.op(s)
        if isinstance(op, Step):
            return op
        raise wrong(s, "a kernel or a call")

    def kernel(self, s: ast.FunctionDef) -> Kernel:
        if len(s.decorator_list) != 1 or word(s.decorator_list[0]) != "kernel":
            raise wrong(s, "@kernel(...)")
        head = s.decorator_list[0]
        assert isinstance(head, ast.Call), head
        facts = keywords(
            head, ("writes", "sizes", "hints", "lengths", "work_ns", "form", "sequential", "alike")
        )
        body = BodyReader(self.ops.symbols, s.args)
        origin, lines = body.split_origin(s.body)
        parts = tuple(self.kernel(line) for line in lines if isinstance(line, ast.FunctionDef))
        lines = lines if not parts else []
        stmts = [made for line in lines if (made := _statement(line, body)) is not None]
        sizes = self.ops.symbols.sizes(facts["sizes"]) if "sizes" in facts else ()
        hints, lengths = (
            tuple(k for k in self.ops.symbols.sizes(facts[of]) if isinstance(k, int))
            if of in facts
            else ()
            for of in ("hints", "lengths")
        )
        work_ns = self.ops.symbols.size(facts["work_ns"]) if "work_ns" in facts else 0
        args = tuple(self.buffer(e) for e in head.args)
        outs = _names_of(facts["writes"]) if "writes" in facts else ()
        sequential = flag_of(head, "sequential")
        return Kernel(
            s.name, body.vars, body.rvars, tuple(stmts), args, outs,
            tuple(e for e in sizes if isinstance(e, Expr)), sequential, work_ns, origin, parts,
            hints, flag_of(head, "alike"), lengths, form=self.form(facts.get("form")),
        )  # fmt: skip

    def form(self, e: ast.expr | None) -> Form | None:
        if e is None:
            return None
        picked, pick, at = self.ops.symbols.sizes(e)
        if not isinstance(picked, Expr) or not isinstance(at, int):
            raise wrong(e, "a symbol, what it is, and a number")
        return Form(pick, picked, at)

    def buffer(self, e: ast.expr) -> Buffer:
        name = name_of(e)
        if name not in self.ops.buffers:
            raise wrong(e, "a buffer that is declared above")
        return self.ops.buffers[name]


def _names_of(e: ast.expr) -> tuple[str, ...]:
    if not isinstance(e, ast.Tuple):
        raise wrong(e, "a tuple of names")
    return tuple(name_of(x) for x in e.elts)


def _statement(s: ast.stmt, body: BodyReader) -> Stmt | None:
    """A statement of a kernel, or None for a line that only names a value."""
    match s:
        case ast.Assign(targets=[left], value=end):
            kind, call = ends_with(end)
            value = body.value(positional(call, 0))
            segment = body.symbols.size(keywords(call).get("segment", ast.Constant(0)))
            if not isinstance(segment, int):
                raise wrong(call, "a number of points")
            if is_element(left):
                args, mask = body.given(call)
                index = body.symbols.index(left.slice)
                full, atomic = flag_of(call, "full"), flag_of(call, "atomic")
                return Store(
                    name_of(left.value), index, value, full, kind, args, mask, atomic, segment
                )  # fmt: skip
            running, down = flag_of(call, "running"), said(call, "down")
            return Reduce(name_of(left), kind, value, running, segment, down)
        case ast.Expr(value=ast.Constant(value=v)) if v is ...:
            return None
        case _:
            body.line(s)
            return None


# ---------------------------------------------------------------------------------------- summaries
def summary_lines(plan: Plan) -> list[str]:
    """One line a kernel or call."""
    return [line for step in plan.steps if (line := step_summary(step))]


def step_summary(step: Step) -> str:
    """What a kernel reads and writes, its space and its estimated work; how a call came about; ''
    for other steps."""
    if isinstance(step, Extern):
        return f"extern {step.op}: {'fell back' if step.fallback else 'by choice'}"
    if not isinstance(step, Kernel):
        return ""
    reads = [b.name for b in step.args if b.name not in step.outs]
    spaces = " and ".join(map(space_text, step.nests))
    flow = f"{', '.join(reads) or 'nothing'} -> {', '.join(step.outs)}"
    if step.parts:
        flow += f" by {' and '.join(n.name for n in step.parts)}"
    time = time_text(hint(step.work_ns, step.hint_of))
    return f"kernel {step.name}: {flow}; {spaces} points, about {time} on one core"


def space_text(k: Kernel) -> str:
    """The sizes of a nest's loops: `64x512 over 128`, the reduced ones at the end."""
    return _space(k.vars) + (f" over {_space(k.rvars)}" if k.rvars else "")


def _space(vars_: Sequence[Expr]) -> str:
    return "x".join(str(extent(v)) for v in vars_) or "1"


def time_text(ns: int) -> str:
    """A time in words: `3.2 us`."""
    return f"{ns / 1e3:.1f} us" if ns >= 1000 else f"{ns} ns"


def refused_pairs(plan: Plan) -> list[tuple[str, str]]:
    """("a and b", reason) of everything that was not fused; a buffer stands for the kernel that
    computes it."""
    maker: dict[str, str] = {}
    for k in (n for s in plan.steps if isinstance(s, Kernel) for n in s.nests):
        maker.update({s.name: k.name for s in k.stmts if isinstance(s, Reduce)})
        maker.update(dict.fromkeys(k.outs, k.name))
    pairs: dict[tuple[str, str], None] = {}
    for r in plan.refusals:
        a, b = maker.get(r.a, r.a), maker.get(r.b, r.b)
        if a != b:  # refused at first, fused in the end by another road
            pairs[f"{a} and {b}", r.reason.text] = None
    return list(pairs)


def refusal_lines(plan: Plan) -> list[str]:
    """What was not fused, one line a reason."""
    by_reason: dict[str, list[str]] = {}
    for pair, reason in refused_pairs(plan):
        by_reason.setdefault(reason, []).append(pair)
    return [f"not fused: {', '.join(pairs)}: {reason}" for reason, pairs in by_reason.items()]
