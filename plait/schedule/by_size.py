"""Reductions to few results whose length only a call tells, in two ways: whole, and in two stages.

Where the length is known, `split.py` has decided before fusion. Here a finished kernel stands
beside two that do the same: one reduces parts of the rows, which all of a device shares, the other
what they gave. A call takes one of both by its sizes (`plan.Form`). What it takes to be worth a
second kernel is the device's (`devices.Rates`), as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.devices import Rates, facts_of
from plait.ir import expr
from plait.ir.expr import Expr, Size, compare, contiguous_strides, numel, smax, symbol
from plait.ir.layouts import flat_index
from plait.ir.loops import Buffer, Load, Node, const, integer, loop_vars, node, walk
from plait.ir.record import inline
from plait.ir.reductions import REDUCTIONS
from plait.schedule.deps import extent, load_of
from plait.schedule.kernels import Names, content_text, make_kernel, origin_words
from plait.schedule.plan import Form, Kernel, Plan, Reduce, Step, Stmt, Store, stmt_roots


def split_by_size(plan: Plan, names: Names) -> Plan:
    """The plan with kernels in two ways. names: gives new ones theirs."""
    buffers = dict(plan.buffers)
    steps: list[Step] = []
    frees: list[tuple[str, ...]] = []
    for step, freed in zip(plan.steps, plan.frees, strict=True):
        made: list[Kernel] = []
        if isinstance(step, Kernel) and (parts := _parts(step)):
            made = _ways(step, parts, buffers, plan.program.hints, names)
        between = [b.name for k in made[1:2] for b in k.args if b.name not in plan.buffers]
        steps += made or [step]
        frees += [()] * (len(made) - 1) + [(*freed, *between)]
    return replace(plan, steps=tuple(steps), frees=tuple(frees), buffers=buffers)


def _parts(kernel: Kernel) -> tuple[int, int] | None:
    """Into how many parts its rows can be cut, and the fewest points of a part; None where they
    stay whole."""
    facts = facts_of(kernel.device)
    rates = facts.rates
    if facts.is_host or kernel.parts or kernel.checks or len(kernel.rvars) != 1:
        return None
    outer = numel(map(extent, kernel.vars))
    if isinstance(extent(kernel.rvars[0]), int) or not isinstance(outer, int):
        return None
    if not all(map(_can_be_cut, kernel.stmts)):
        return None
    along = _along_memory(kernel)
    units = outer if along else outer // rates.neighbours
    parts = rates.units // max(units, 1)
    if units >= rates.min_units or parts < 2:
        return None
    return parts, rates.min_along if along else rates.min_across


def _can_be_cut(s: Stmt) -> bool:
    """Whether it is a reduction whose partial results combine, of what no other one gives, or a
    store of results."""
    if isinstance(s, Store):
        return not s.full
    needs = any(n.op == "acc" for n in walk(stmt_roots(s)))
    return REDUCTIONS[s.kind].merges and not s.inner and not needs


def _along_memory(kernel: Kernel) -> bool:
    """Whether neighbours in memory are reduced together, and not neighbouring results."""
    buffers = {b.name: b for b in kernel.args}
    values = [s.value for s in kernel.stmts if isinstance(s, Reduce)]
    loads = [load_of(n) for n in walk(values) if n.op == "load"]
    flats = [flat_index(buffers[x.buf], x.index) for x in loads]
    return not any(expr.is_contiguous(e, expr.atom_of(v)) for e in flats for v in kernel.vars)


def _ways(
    kernel: Kernel,
    parts: tuple[int, int],
    buffers: dict[str, Buffer],
    hints: Mapping[str, int],
    names: Names,
) -> list[Kernel]:
    """The kernel, and the two that do the same."""
    count, least = parts
    made = _TwoStages(kernel, count, least, buffers)
    words = origin_words([kernel.origin])
    found = [kernel]
    for vars_, rvars, stmts in (made.first(), made.second()):
        k = make_kernel("", vars_, rvars, stmts, buffers, kernel.origin, hints)
        content = content_text(vars_, rvars, stmts, k.args)
        found.append(replace(k, name=names.new(words, content)))
    pick = _pick(kernel, facts_of(kernel.device).rates, least)
    picked = symbol(f"{kernel.name}_form", 0, 1)
    return [replace(k, form=Form(pick, picked, min(n, 1))) for n, k in enumerate(found)]


def _pick(kernel: Kernel, rates: Rates, least: int) -> Size:
    """1 where two stages are worth it: for as many bytes, and two parts."""
    length, outer = extent(kernel.rvars[0]), numel(map(extent, kernel.vars))
    assert isinstance(outer, int), f"{kernel.name} has results of unknown number"
    loads = [n for s in kernel.stmts if isinstance(s, Reduce) for n in walk((s.value,))]
    nbytes = max((n.dtype.nbytes for n in loads if n.op == "load"), default=1)
    units = outer if _along_memory(kernel) else outer // rates.neighbours
    enough = max(rates.split_nbytes, rates.unit_nbytes * max(units, 1)) // nbytes
    return compare("le", enough, outer * length) * compare("le", 2 * least, length)


class _TwoStages:
    """A kernel's statements over parts of its rows, and over what these give. The results of parts
    lie in new buffers, all of one part side by side.

    count: of parts. Each has as many points, and `least` at least: the last may have none.
    """

    def __init__(self, kernel: Kernel, count: int, least: int, buffers: dict[str, Buffer]) -> None:
        self.kernel, self.count = kernel, count
        self.reduces = [s for s in kernel.stmts if isinstance(s, Reduce)]
        outer = tuple(extent(v) for v in kernel.vars)
        self.shape = (count, *outer)
        self.length = extent(kernel.rvars[0])
        unit = 64  # elements: so that parts begin where vectors do
        self.rest = unit * smax(-(-least // unit), expr.ceildiv(self.length, unit * count))
        self.parts: dict[str, str] = {}
        for s in self.reduces:
            name = f"{s.name}_part"
            strides = contiguous_strides(self.shape)
            buffers[name] = Buffer(name, s.value.dtype, self.shape, strides, kernel.device)
            self.parts[s.name] = name

    def first(self) -> tuple[tuple[Expr, ...], tuple[Expr, ...], list[Stmt]]:
        """Axes and statements of the kernel that reduces parts."""
        vars_, rvars = loop_vars("i", self.shape), loop_vars("r", (self.rest,))
        stmts: list[Stmt] = []
        stmts += [replace(s, value=self._value(s, vars_, rvars[0])) for s in self.reduces]
        stmts += [Store(self.parts[s.name], vars_, _result(s), False) for s in self.reduces]
        return vars_, rvars, stmts

    def _value(self, s: Reduce, vars_: tuple[Expr, ...], r: Expr) -> Node:
        """A value at a point of a part: nothing to its result, behind the end of the row."""
        dtype = s.value.dtype
        at = vars_[0] * self.rest + r
        inside = node("lt", (integer(at), integer(self.length)))
        producer = {"body": (self.kernel.vars + self.kernel.rvars, s.value)}
        load = node("load", (inside,), Load("body", (*vars_[1:], at), True), dtype)
        nothing = const(REDUCTIONS[s.kind].identity(dtype), dtype)
        return node("where", (inside, inline(load, producer), nothing))

    def second(self) -> tuple[tuple[Expr, ...], tuple[Expr, ...], list[Stmt]]:
        """Axes and statements of the kernel that brings the parts together."""
        k, (r,) = self.kernel, loop_vars("r", (self.count,))
        stmts: list[Stmt] = []
        for s in k.stmts:
            if isinstance(s, Reduce):
                load = Load(self.parts[s.name], (r, *k.vars))
                s = replace(s, value=node("load", (), load, s.value.dtype))
            stmts.append(s)
        return k.vars, (r,), stmts


def _result(s: Reduce) -> Node:
    return node("acc", (), s.name, s.value.dtype)
