"""Prints what a thread does of a kernel: arguments, its share of the units, from unit to unit."""

from __future__ import annotations

from collections.abc import Callable

from plait.ir.expr import Atom, may_be_zero
from plait.kernel.cpu.expr import memory
from plait.kernel.cpu.plan_body import BodyPlan
from plait.kernel.cpu.share_work import Share, Unit, groups, units
from plait.kernel.cpu.values import Values
from plait.schedule.legalize.linear import extent


def print_arguments(v: Values, plan: BodyPlan, instead: str) -> None:
    """Sizes and buffers by name, and what ends the function at once. instead: the function to call
    where row buffers are too small."""
    nest = plan.vectors.nest
    for k in range(len(plan.kernel.sizes)):
        v.line(f"const i64 z{k} = syms[{k}];")
    for k, b in enumerate(plan.kernel.args):
        v.line(f"{memory(b.dtype)}* const b{k} = ({memory(b.dtype)}*)bufs[{k}];")
    if nest.keep_limit:
        points = v.integer(nest.row_points)
        v.line(f"if ({points} > {nest.keep_limit}) return {instead}(tid, nthreads, bufs, syms);")
    # Nothing below runs for a kernel without points, so that what reads may stand outside of loops.
    if maybe := [v.integer(n) for n in map(extent, nest.linear.vars) if may_be_zero(n)]:
        v.line(f"if ({' || '.join(f'{n} <= 0' for n in maybe)}) return 0;")


def print_share(v: Values, plan: BodyPlan) -> None:
    """lo, hi: the units of this thread."""
    nest, sharing = plan.vectors.nest, plan.sharing
    n_units = units(nest, sharing.unit, sharing.outer)
    if sharing.share is Share.COLUMNS:
        share = f"({v.integer(groups(nest))}) * {{}} / nthreads * {nest.step}"
        n = v.integer(extent(plan.vectors.axis))
        v.line(f"const i64 first = {share.format('tid')}, beyond = {share.format('(tid + 1)')};")
        v.line(f"const i64 end = beyond < {n} ? beyond : {n}, lo = 0, hi = {v.integer(n_units)};")
        v.line("if (first >= end) return 0;")
        return
    if sharing.share is Share.ALL:
        v.line("if (tid != 0) return 0;")
    if n_units == 1:
        v.line("const i64 lo = 0, hi = 1;")
        return
    v.line(f"const i64 units = {v.integer(n_units)};")
    match sharing.share:
        case Share.ALL:
            v.line("const i64 lo = 0, hi = units;")
        case Share.FIRST:
            rows = v.integer(extent(sharing.outer[0]))
            share = f"({rows}) * {{}} / nthreads * (units / ({rows}))"
            v.line(f"const i64 lo = {share.format('tid')}, hi = {share.format('(tid + 1)')};")
        case _:
            v.line("const i64 lo = units * tid / nthreads, hi = units * (tid + 1) / nthreads;")
    v.line("if (lo >= hi) return 0;")


def print_units(v: Values, plan: BodyPlan, print_unit: Callable[[str], None]) -> None:
    """The loop over the units of this thread. print_unit is given where the unit ends on the vector
    axis."""
    nest, unit, outer = plan.vectors.nest, plan.sharing.unit, plan.sharing.outer
    if outer or unit is Unit.VECTORS:
        v.line("i64 u = lo;")
    per_row = v.integer(groups(nest)) if unit is Unit.VECTORS else ""
    if outer:
        _first_unit(v, outer, per_row)
    elif per_row:
        v.line("i64 blk = lo;")
    room = (nest.keep_limit or nest.row_points) * nest.width
    for value, name in v.kept_names.items():
        v.line(f"alignas(64) {memory(value.dtype)} {name}[{room}];")
    with v.loop("while (u < hi) {" if outer else "{", outer):
        end = ""
        if unit is Unit.VECTORS:
            n, step = v.integer(extent(plan.vectors.axis)), nest.step
            v.line(f"const i64 last = blk + (hi - u) < {per_row} ? blk + (hi - u) : {per_row};")
            stop = f"last * {step} < {n} ? last * {step} : {n}" if step > 1 else "last"
            v.line(f"const i64 end = {stop};")
            v.line(f"i64 {v.names[plan.vectors.axis]} = blk * {step};")
            end = "end"
        elif unit is Unit.ROW:
            columns = plan.sharing.share is Share.COLUMNS
            v.line(f"i64 {v.names[plan.vectors.axis]} = {'first' if columns else '0'};")
            end = "end" if columns else v.integer(extent(plan.vectors.axis))
        print_unit(end)
        if outer:
            _next_unit(v, outer, "u += last - blk; blk = 0;" if per_row else "++u;")


def _first_unit(v: Values, outer: tuple[Atom, ...], per_row: str) -> None:
    """The loop variables of unit u."""
    rest = "rest" if per_row or len(outer) > 1 else "u"
    if per_row:
        v.line(f"i64 blk = u % ({per_row}), rest = u / ({per_row});")
    elif len(outer) > 1:
        v.line("i64 rest = u;")
    for a in outer[:0:-1]:
        n = v.integer(extent(a))
        v.line(f"i64 {v.names[a]} = rest % ({n}); rest /= ({n});")
    v.line(f"i64 {v.names[outer[0]]} = {rest};")


def _next_unit(v: Values, outer: tuple[Atom, ...], step: str) -> None:
    v.line(step)
    text = ""
    for a in outer[:0:-1]:
        x = v.names[a]
        text += f"if (++{x} == {v.integer(extent(a))}) {{ {x} = 0; "
    v.line(f"{text}++{v.names[outer[0]]};{' }' * (len(outer) - 1)}")
