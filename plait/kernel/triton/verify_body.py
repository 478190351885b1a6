"""What the plan of a body promises to those who print it: a rule for every way in which it could
give wrong numbers without a complaint of Triton."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from plait.ir.expr import bounds
from plait.ir.loops import Load, walk
from plait.kernel.triton.choose_accesses import Access
from plait.kernel.triton.choose_accumulators import IN_ORDER, Accumulation, Accumulator
from plait.kernel.triton.plan_body import BodyPlan, RowPass
from plait.kernel.triton.split_rows import Span
from plait.schedule.legalize.linear import extent, stmt_nodes
from plait.schedule.plan import Reduce, Stmt


def faults_of_body(plan: BodyPlan) -> list[str]:
    """The rules that a plan breaks."""
    rules = (_order, _accumulators, _spans, _loads_ahead, _values, _stores)
    return [fault for rule in rules for fault in rule(plan)]


def _order(plan: BodyPlan) -> Iterator[str]:
    """Each statement is done once, after what it needs, and nothing is stored while later passes
    read: an output may have the memory of an input."""
    done: list[Stmt] = []
    known: set[object] = set()
    for p in (*plan.passes, RowPass((), plan.last, Span())):
        inner = {a.reduce.name for a in p.accumulators if a.reduce.inner}
        steps: list[tuple[Stmt, Reduce | None]] = [(a.reduce, a.first) for a in p.accumulators]
        for s, first in steps + [(b.store, None) for b in p.stores]:
            done.append(s)
            needs = {d for n in stmt_nodes(s) for d in plan.layout.deps(n) if isinstance(d, str)}
            if not needs <= {*known, *inner, first and first.name}:
                yield f"uses {sorted(needs)} before their last point"
        known |= {a.reduce.name for a in p.accumulators} - inner
    if _count(done) != _count(plan.layout.linear.stmts):
        yield "does not do each of its statements once"
    if any(p.stores for p in plan.passes[:-1]):
        yield "stores before its last pass"


def _loads_ahead(plan: BodyPlan) -> Iterator[str]:
    """What is loaded a block ahead needs nothing of its own block."""
    for p in plan.passes:
        if p.ahead and (p.span != Span() or not plan.layout.tile.looped):
            yield "loads a block ahead of one that is not the next"
        for n in p.ahead:
            if n.args or plan.loads[n].guarded or not plan.layout.is_inner(n):
                yield f"loads {n.attr} before what it needs"


def _count(stmts: Iterable[Stmt]) -> Counter[Stmt]:
    """Statements, but for those that are part of every pass that uses them."""
    return Counter(s for s in stmts if not (isinstance(s, Reduce) and s.inner))


def _accumulators(plan: BodyPlan) -> Iterator[str]:
    """Reductions accumulate as what they are; those that go together know of each other."""
    for p in plan.passes:
        for a in p.accumulators:
            beside = [b.reduce for b in p.accumulators if a.reduce == b.first]
            first = a.first is None or a.first in [b.reduce for b in p.accumulators]
            folds = not a.folds or math.prod(a.folds) == plan.layout.tile.block
            if list(a.beside) != beside or not first or not folds or a.how is not _how(plan, a):
                yield f"accumulates {a.reduce.name} as {a.how.value}"


def _how(plan: BodyPlan, a: Accumulator) -> Accumulation:
    if not plan.layout.linear.rvars:
        return Accumulation.POINT
    if a.beside:
        return Accumulation.PEAK if a.reduce.kind == "max" else Accumulation.MEAN
    if a.reduce.segment:
        return Accumulation.SEGMENT
    whole = Accumulation.SCAN if a.reduce.running else Accumulation.BLOCK
    return whole if a.first is None else Accumulation.WITH


def _spans(plan: BodyPlan) -> Iterator[str]:
    """Blocks without a mask lie in their rows, and one more block reaches the end."""
    for p in (p for p in plan.passes if p.span != Span()):
        r, whole, start = plan.layout.tile.groups[-1], p.span.whole, p.span.start
        fits = whole == r.points // r.block * r.block
        line = start.line if start else 0
        if isinstance(r.points, int) and isinstance(whole, int):
            fits = fits and r.block <= whole and r.points - whole + line <= r.block
        else:
            fits = fits and 0 < line <= r.block
        if not (fits and plan.layout.tile.looped):
            yield f"walks along rows of {r.points} points as {p.span}"
        ordered = any(a.how in IN_ORDER for a in p.accumulators)
        if start and (ordered or math.prod(g.block for g in plan.layout.tile.outer) > 1):
            yield "walks from before rows, whose points must stay in order"


def _values(plan: BodyPlan) -> Iterator[str]:
    """A load has the shape of its value, and another form is made of what the value is made of. Of
    rows without points nothing is read or checked but what is needed without them."""
    layout, rvars = plan.layout, plan.layout.linear.rvars
    outer = {*walk([n for b in plan.last for n in stmt_nodes(b.store)])}
    maybe_empty = any(bounds(extent(r))[0] <= 0 for r in rvars)
    for n in walk(layout.linear.roots()):
        guarded = maybe_empty and n not in outer
        if guarded != (n in plan.guarded):
            yield f"{'needs' if guarded else 'leaves out'} {n} of rows without points"
        if n in plan.forms and not {*plan.forms[n].operands} <= {*walk(n.args)}:
            yield f"makes {n} of other values"
        if isinstance(n.attr, Load):
            dims = layout.dims_of_index(n.attr.index[0])
            dims |= layout.dims(n.args[-1]) if n.attr.masked else frozenset()
            want = Access(n.attr.buf, n.attr.index[0], dims, guarded and "r" not in dims)
            if plan.loads[n] != want:
                yield f"loads {n} as {plan.loads[n]}"


def _stores(plan: BodyPlan) -> Iterator[str]:
    """A store runs at each of its points; at fewer, where these write the same."""
    layout = plan.layout
    passes = [(b, layout.everything) for p in plan.passes for b in p.stores]
    for b, points in (*passes, *((b, layout.rows) for b in plan.last)):
        s, a = b.store, b.access
        moves = layout.dims_of_index(s.index[0]).union(*map(layout.dims, stmt_nodes(s)))
        # An index that is only checked may move along rows where the value does not.
        least = points if s.mode in ("add", "mul", "sum") else moves & points
        placed = (a.buf, a.offset) == (s.buf, s.index[0]) and least <= a.dims <= points
        if not placed or b.inner != (points != layout.rows or layout.tile.column_programs > 0):
            yield f"stores {s.buf} as {a}"
