"""The legality of Plans: what kernel targets and the wrapper may rely on.

Comes in: a Plan. Raises InternalError that names the kernel or step and the rule that it breaks;
gives back nothing. Costs one walk over all nodes, so the pipeline runs it in tests and when
debugging. Overlaps in memory are checked on instructions, by `wrapper/verify.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from plait.errors import InternalError
from plait.ir.effects import unwritten
from plait.ir.expr import Atom, Size, atom_of, free_symbols, numel
from plait.ir.loops import Load, Mutate, Node, exprs_of, is_arg, walk
from plait.ir.reductions import REDUCTIONS
from plait.schedule.deps import extent
from plait.schedule.kernels import all_nodes, inner_nodes
from plait.schedule.memory import touched
from plait.schedule.plan import (
    PART,
    SEGMENTED,
    Kernel,
    Plan,
    Reduce,
    Store,
    column_programs,
    segment_axes,
    stmt_roots,
)


def verify_plan(plan: Plan) -> None:
    """Checks the whole plan. Raises InternalError."""
    for nested in plan.programs:
        verify_plan(nested)
    program = plan.program
    known = {*program.given, *unwritten(program)}
    gone: dict[str, int] = {}
    names: set[str] = set()
    for k, (step, dying) in enumerate(zip(plan.steps, plan.frees, strict=True)):
        if isinstance(step, Kernel):
            if step.name in names:
                raise InternalError(f"two kernels are called {step.name}")
            names.add(step.name)
            _check_parts(step)
            for nest in step.nests:
                _KernelVerifier(nest, plan).run()
        read, made = touched(step)
        known.update(made)
        for name in (*read, *made):
            if name in gone:
                raise InternalError(f"step {k} uses {name}, which step {gone[name]} freed")
            if name not in known:
                raise InternalError(f"step {k} reads {name}, which nothing has made yet")
            if name not in plan.buffers:
                raise InternalError(f"step {k} uses {name}, which the plan does not describe")
        if isinstance(step, Mutate):
            _check_in_place(step, plan)
        elif not isinstance(step, Kernel):
            _check_layouts((*read, *made), plan, f"step {k}")
        gone.update((name, k) for name in dying)
    for name in program.returned:
        if name not in known or name in gone:
            raise InternalError(f"output {name} does not exist at the end")
    _check_layouts(program.returned, plan, "the result")


def _check_layouts(names: Iterable[str], plan: Plan, where: str) -> None:
    """What anything but a kernel sees of a buffer was settled before the schedule, which may choose
    no other layout; kernels see what the plan says (see _KernelVerifier.run)."""
    for name in names:
        new, old = plan.buffers[name], plan.program.buffers[name]
        if (new.dtype, new.shape, new.strides, new.device) != (
            old.dtype,
            old.shape,
            old.strides,
            old.device,
        ):
            raise InternalError(f"{where} sees {name} as {old}, kernels as {new}")


def _check_in_place(step: Mutate, plan: Plan) -> None:
    """A buffer that is computed in the memory of the input that it replaces lies there as the input
    does."""
    new, old = plan.buffers[step.source], plan.buffers[step.target]
    taken = plan.memory.in_place.get(step.source) == step.target
    if taken and (new.dtype, new.shape, new.strides) != (old.dtype, old.shape, old.strides):
        raise InternalError(f"{step.source} is computed in {step.target} and lies otherwise")


def _check_parts(kernel: Kernel) -> None:
    """The contract of a kernel of several nests."""
    parts = kernel.parts
    if not parts:
        return
    if len(parts) < 2 or kernel.stmts or any(p.parts for p in parts):
        raise InternalError(f"{kernel.name}: its parts are not several plain kernels")
    for of in ("args", "outs", "sizes"):
        if set(getattr(kernel, of)) != {a for p in parts for a in getattr(p, of)}:
            raise InternalError(f"{kernel.name}: its {of} are not those of its parts")
    for p in parts:
        loaded = {n.attr.buf for n in all_nodes(p.stmts) if isinstance(n.attr, Load)}
        for q in parts:
            both = loaded & set(q.outs) if q is not p else set()
            if both:
                raise InternalError(f"{p.name} loads {min(both)}, which {q.name} makes beside it")


class _KernelVerifier:
    """The contract of one kernel (see plan.Kernel)."""

    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        self.kernel, self.plan = kernel, plan
        self.vars = {atom_of(v) for v in kernel.vars}
        self.rvars = {atom_of(v) for v in kernel.rvars}
        self.nodes = all_nodes(kernel.stmts)
        self.inner = inner_nodes(self.nodes, kernel.rvars, kernel.stmts)

    def fail(self, what: str) -> InternalError:
        return InternalError(f"{self.kernel.name}: {what}")

    def run(self) -> None:
        k = self.kernel
        args = [b.name for b in k.args]
        if len(set(args)) != len(args):
            raise self.fail("an argument occurs twice")
        if len({b.device for b in k.args}) > 1:
            raise self.fail("its arguments are on several devices")
        if any(self.plan.buffers.get(b.name) != b for b in k.args):
            raise self.fail("an argument's layout is not the plan's")
        if set(k.outs) != {s.buf for s in k.stmts if isinstance(s, Store)} or not k.outs:
            raise self.fail(f"outs {k.outs} are not what it stores")
        if len(self.vars | self.rvars) != len(k.vars) + len(k.rvars):
            raise self.fail("two axes have one variable")
        done: set[str] = set()
        for s in k.stmts:
            self.check_nodes(stmt_roots(s), done, set(args))
            if isinstance(s, Reduce):
                self.reduce(s, done)
            else:
                self.store(s)
        self.check_sizes()

    def check_nodes(self, roots: tuple[Node, ...], done: set[str], args: set[str]) -> None:
        for n in walk(roots):
            if n.op == "acc" and n.attr not in done:
                raise self.fail(f"{n.attr} is used before it is reduced")
            if isinstance(n.attr, Load):
                if n.attr.buf not in args:
                    raise self.fail(f"it loads {n.attr.buf}, which is no argument")
                if len(n.attr.index) != len(self.plan.buffers[n.attr.buf].shape):
                    raise self.fail(f"{n.attr} has another rank than its buffer")

    def reduce(self, s: Reduce, done: set[str]) -> None:
        if s.running and len(self.rvars) != 1:
            raise self.fail(f"{s.name} runs over {len(self.rvars)} axes")
        if s.segment and not (s.kind in SEGMENTED and self.is_segment(s.segment)):
            raise self.fail(f"{s.name} is over segments of {s.segment} points")
        if not self.rvars or s.kind not in REDUCTIONS:
            raise self.fail(f"{s.name} cannot be reduced by {s.kind}")
        if s.name in done:
            raise self.fail(f"{s.name} is reduced twice")
        done.update(s.name + part for part in REDUCTIONS[s.kind].parts)

    def is_segment(self, n: int) -> bool:
        """Whether rows are cut into segments of n points."""
        cut = n > 1 and n & (n - 1) == 0
        return cut and numel(map(extent, self.kernel.rvars)) % n == 0

    def store(self, s: Store) -> None:
        if len(s.index) != len(self.plan.buffers[s.buf].shape):
            raise self.fail(f"{s.buf} is stored with another rank than it has")
        if s.value.dtype != self.plan.buffers[s.buf].dtype:
            raise self.fail(f"{s.buf} is stored as {s.value.dtype}")
        if s.segment:
            inside = segment_axes(self.kernel.rvars, s.segment)
            plain = s.full and s.mode == "store" and s.mask is None and not s.index_args
            if not plain or inside is None or {*map(atom_of, inside)} & _symbols(s.index):
                raise self.fail(f"{s.buf} is no result of segments of {s.segment} points")
        if s.full:
            if not self.rvars:
                raise self.fail(f"{s.buf} is stored at full level, but nothing is reduced")
            if s.mode == "sum":
                n = column_programs([s])
                mine = (
                    n is not None
                    and n == column_programs(self.kernel.stmts)
                    and not self.vars & _symbols(s.index)
                )
                if s.mask or s.index_args or not mine:
                    raise self.fail(f"{s.buf} is no sum over a program's rows")
            return
        if any(r in self.inner for r in stmt_roots(s)) or self.rvars & _symbols(s.index):
            raise self.fail(f"{s.buf} is stored at outer level from values inside")

    def check_sizes(self) -> None:
        k = self.kernel
        exprs: list[Size] = [extent(v) for v in (*k.vars, *k.rvars)]
        for n in self.nodes:
            exprs += exprs_of(n)
        for s in k.stmts:
            exprs += s.index if isinstance(s, Store) else ()
        known = {atom_of(a).name for a in k.sizes}
        known.update(a.name for a in self.vars | self.rvars)
        for a in _symbols(tuple(exprs)):
            if a.name not in known and a.name != PART and not is_arg(a):
                raise self.fail(f"nothing tells it the value of {a.name}")


def _symbols(exprs: tuple[Size, ...]) -> set[Atom]:
    return {a for e in exprs for a in free_symbols(e)}
