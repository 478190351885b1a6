"""Long reductions to few results are cut in two stages, so that all of a device shares them.

The outermost reduced axes (or a part of one) become outer axes of a first reduction, whose partial
results a second, short one combines. What it takes to be worth a second kernel is the device's
(`devices.Rates`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace

from plait.devices import Rates, facts_of
from plait.ir import expr
from plait.ir.effects import loop_outs
from plait.ir.expr import Atom, Size
from plait.ir.layouts import flat_index
from plait.ir.loops import (
    Buffer,
    Load,
    LoopProgram,
    Node,
    Op,
    Pointwise,
    Reduction,
    index_exprs,
    loop_vars,
    node,
    substitute_vars,
    walk,
)
from plait.ir.reductions import REDUCTIONS
from plait.schedule.cost import Hints, buffer_nbytes, hint, hint_numel
from plait.schedule.deps import Bodies, extent, load_of, roots
from plait.schedule.stages import Cut, Stages


def split_reductions(
    program: LoopProgram, bodies: Bodies, by_row: bool = False
) -> tuple[LoopProgram, dict[str, Reduction]]:
    """The program with long reductions in two stages, and the sums of columns that kernels which
    reduce rows could make on the way: as they were, by the buffer of partial sums. by_row: how one
    is cut does not depend on how many results it has."""
    buffers = dict(program.buffers)
    ops: list[Op] = []
    column_sums: dict[str, Reduction] = {}
    below = _sums_below(program)
    maxima = {*below.values()}
    peaks: dict[str, Stages] = {}
    rows: set[tuple[str, int]] = set()
    results: dict[str, int] = {}
    walks = any(facts_of(b.device).rates.column_programs for b in buffers.values())
    if walks and not by_row:
        rows, results = _of_rows(program, bodies)
    for op in program.ops:
        if not isinstance(op, Reduction):
            ops.append(op)
            continue
        if peak := peaks.get(below.get(loop_outs(op)[0], "")):
            ops += peak.below(op)
            continue
        if _asks_rows(op, bodies, results):
            value, op = _valued(op, buffers)
            ops.append(value)
        is_peak = loop_outs(op)[0] in maxima
        found = _chunks(op, buffers, bodies, program.hints, rows, is_peak, by_row)
        if found is None:
            ops.append(op)
            continue
        cut, parts, columns = found
        stages = Stages(cut, parts, buffers, program.hints)
        first, *rest = stages.ops()
        ops += (first, *rest)
        if is_peak:
            peaks[loop_outs(op)[0]] = stages
        if columns and isinstance(first, Reduction):
            column_sums[loop_outs(first)[0]] = replace(op, outs=first.outs)
    return replace(program, ops=tuple(ops), buffers=buffers), column_sums


def _sums_below(program: LoopProgram) -> dict[str, str]:
    """Sums of exp(x - m), where m is the maximum of x over the same axes, with that maximum."""
    maxima = {
        loop_outs(op)[0]: op for op in program.ops if isinstance(op, Reduction) and op.kind == "max"
    }
    found: dict[str, str] = {}
    for op in program.ops:
        if not isinstance(op, Reduction) or op.kind != "sum" or op.body.op != "exp":
            continue
        (less,) = op.body.args
        if less.op != "sub" or less.args[1].op != "load":
            continue
        value, peak = less.args[0], load_of(less.args[1])
        first = maxima.get(peak.buf)
        if (
            first is not None
            and peak.index == op.vars
            and (first.vars, first.rvars, first.body) == (op.vars, op.rvars, value)
        ):
            found[loop_outs(op)[0]] = peak.buf
    return found


def _of_rows(program: LoopProgram, bodies: Bodies) -> tuple[set[tuple[str, int]], dict[str, int]]:
    """What reductions along memory read, and what is computed from their results at every point,
    each with the length of their rows; and the results."""
    rows: set[tuple[str, int]] = set()
    results: dict[str, int] = {}
    for op in program.ops:
        if not isinstance(op, (Reduction, Pointwise)):
            continue
        loads = bodies.of(roots(op)).loads
        read = {load_of(n).buf for n in loads}
        if isinstance(op, Pointwise):
            rows.update((op.out, results[b]) for b in read if b in results)
        elif _along_memory(op, program.buffers, loads):
            length = hint_numel(map(extent, op.rvars), program.hints)
            rows.update((b, length) for b in read)
            results.update(dict.fromkeys(loop_outs(op), length))
    return rows, results


def _asks_rows(op: Reduction, bodies: Bodies, results: Mapping[str, int]) -> bool:
    """Whether a reduction over rows looks something up in each, and asks for what the row was
    reduced to: work for the many programs that had the rows."""
    loads = [(n, load_of(n)) for n in bodies.of(roots(op)).loads]
    looked_up = any(len(n.args) > load.masked for n, load in loads)
    return (
        not op.vars
        and looked_up
        and any(x.buf in results and x.index == op.rvars for _, x in loads)
    )


def _valued(op: Reduction, buffers: dict[str, Buffer]) -> tuple[Pointwise, Reduction]:
    """What a reduction reduces as a loop of its own, and the rest."""
    stem = loop_outs(op)[0]
    shape = tuple(extent(v) for v in op.rvars)
    name, dtype = f"{stem}_value", op.body.dtype
    buffers[name] = Buffer(name, dtype, shape, expr.contiguous_strides(shape), buffers[stem].device)
    value = Pointwise(name, op.rvars, op.body, origin=op.origin)
    return value, replace(op, body=node("load", (), Load(name, op.rvars), dtype))


def _chunks(
    op: Reduction,
    buffers: Mapping[str, Buffer],
    bodies: Bodies,
    hints: Hints,
    rows: Set[tuple[str, int]],
    is_peak: bool,
    by_row: bool,
) -> tuple[Reduction, Cut, bool] | None:
    """A reduction, perhaps over fewer axes, how it is cut, and whether as a sum of columns,
    or None where it stays whole. is_peak: it is the maximum that exponentials are summed below.
    by_row: as if it had one result, whatever it loads."""
    outer = 1 if by_row else hint_numel(map(extent, op.vars), hints)
    points = outer * hint_numel(map(extent, op.rvars), hints)
    found = bodies.of(roots(op)).loads
    if not op.rvars or not found:
        return None
    kind = facts_of(buffers[loop_outs(op)[0]].device).rates
    loaded = [buffers[load_of(n).buf] for n in found]
    # Of a mean a column, and of a mask, there is little to read.
    nbytes = 4 if by_row else max(loaded, key=lambda b: buffer_nbytes(b, hints)).dtype.nbytes
    along = not op.down if by_row else _along_memory(op, buffers, found)
    large = (b for b in loaded if hint_numel(b.shape, hints) == points)
    if not along and any((b.name, outer) in rows for b in large):
        flat, widest = _flattened(op, buffers, found), max(b.dtype.nbytes for b in loaded)
        if parts := _column_cut(flat, widest * points, outer, kind, hints):
            return flat, parts, True
    units = outer if along else outer // kind.neighbours
    if points * nbytes < max(kind.split_nbytes, kind.unit_nbytes * units):
        return None
    if units >= kind.min_units:
        lanes = None if along else _lanes(op, buffers, found, kind, hints, is_peak)
        return None if lanes is None else (op, lanes, False)
    least, aligned = (
        (kind.min_along, kind.align_along) if along else (kind.min_across, kind.align_across)
    )
    aim = kind.units if along or nbytes > 2 else kind.narrow_units
    want = min(aim // max(units, 1), points // max(outer, 1) // least)
    if want < 2:
        return None
    inner = extent(op.rvars[-1])
    uneven = along and isinstance(inner, int) and inner % aligned
    if uneven and not by_row:  # parts of rows would begin anywhere
        op = _flattened(op, buffers, found)
    near = (1, 4) if along else (kind.fewer_across, kind.more_across)
    parts = _cut(op, want, aligned, along, near, hints)
    return None if parts is None else (op, parts, False)


def _column_cut(op: Reduction, nbytes: int, row: int, kind: Rates, hints: Hints) -> Cut | None:
    """A part for each program that sums columns, or None where these are better summed apart. row:
    points of one. If the sum stays a kernel of its own, equal parts are better."""
    if op.kind != "sum" or op.body.dtype.nbytes < 4 or len(op.rvars) > 1:
        return None
    size = extent(op.rvars[0])
    want = min(
        kind.column_programs,
        kind.column_points // max(row, 1),
        hint(size, hints) // kind.column_min_rows,
    )
    if nbytes < kind.column_min_nbytes or row > kind.column_max_row or want < 2:
        return None
    if isinstance(size, int):
        equal = [d for d in range(-(-want // 2), 2 * want + 1) if size % d == 0]
        want = min(equal, key=lambda d: abs(d - want), default=want)
    return Cut(0, want, expr.ceildiv(size, want))


def _lanes(
    op: Reduction,
    buffers: Mapping[str, Buffer],
    loads: tuple[Node, ...],
    kind: Rates,
    hints: Hints,
    is_peak: bool,
) -> Cut | None:
    """A part for each of so many neighbouring rows that they are as long as a number of vectors:
    where rows of results begin in the middle of vectors, each element is a load of its own. That
    gains where elements are short, or all is read again unless the sum below it is cut too."""
    (r, *more), size = op.rvars, extent(op.rvars[0])
    if more or not isinstance(size, int) or not kind.vector_nbytes or REDUCTIONS[op.kind].extreme:
        return None
    lanes, moved = 1, 0
    for n in loads:
        b, load = buffers[load_of(n).buf], load_of(n)
        flat = flat_index(b, load.index)
        step = expr.coefficient(flat, expr.atom_of(r))
        if step == 0:
            continue
        columns = [v for v in op.vars if expr.is_contiguous(flat, expr.atom_of(v))]
        if load.masked or len(columns) != 1 or not isinstance(step, int):
            return None
        column = columns[0]
        begin = expr.substitute(flat, {expr.atom_of(r): 0, expr.atom_of(column): 0})
        if step != extent(column) or begin % (kind.vector_nbytes // b.dtype.nbytes) != 0:
            return None
        part = kind.vector_nbytes // math.gcd(step * b.dtype.nbytes, kind.vector_nbytes)
        lanes, moved = max(lanes, part), moved + buffer_nbytes(b, hints)
        if b.dtype.nbytes > 2 and not is_peak:
            return None
    enough = moved >= (2 if is_peak else 4) * kind.cache_nbytes
    if lanes == 1 or not enough or size % lanes or size // lanes < kind.min_across:
        return None
    return Cut(0, lanes=lanes)


def _flattened(op: Reduction, buffers: Mapping[str, Buffer], loads: tuple[Node, ...]) -> Reduction:
    """A reduction over one axis, where everything that it loads walks the reduced axes as one."""
    flats = [flat_index(buffers[load_of(n).buf], load_of(n).index) for n in loads]
    steps: Size = 1
    used = [expr.atom_of(v) for v in op.rvars]
    for axis, v in zip(reversed(used), reversed(op.rvars), strict=True):
        for flat in flats:
            step, last = expr.coefficient(flat, axis), expr.coefficient(flat, used[-1])
            if step is None or last is None or step != last * steps:
                return op
        steps = steps * extent(v)
    exprs = [e for n in walk((op.body,)) if n.op == "index" for e in index_exprs(n)]
    if any(not expr.free_symbols(e).isdisjoint(used) for e in exprs):
        return op
    (whole,) = loop_vars("r", (steps,))
    env: dict[Atom, Size] = {}
    inner: Size = 1
    for k, v in reversed(list(enumerate(op.rvars))):
        at = whole // inner
        env[used[k]] = at % extent(v) if k else at
        inner = inner * extent(v)
    return replace(op, rvars=(whole,), body=substitute_vars(op.body, env))


def _cut(
    op: Reduction, want: int, aligned: int, along: bool, near: tuple[int, int], hints: Hints
) -> Cut | None:
    """Cut with about `want` partial results for a result, each beginning at a multiple of
    `aligned` points. Across memory, where what is summed may be stored on the way, equal parts
    matter more. near: how many times fewer or more such parts may be."""
    fewer, more = near
    sizes = [extent(v) for v in op.rvars]
    whole = 0
    row = REDUCTIONS[op.kind]
    position = bool(row.extreme)  # is counted in one axis of chunks
    while want >= 2 and whole < len(sizes) - 1 and not (position and whole):
        n = hint(sizes[whole], hints)
        if n > more * want or (position and n < want) or hint_numel(sizes[whole + 1 :], hints) <= 1:
            break
        whole, want = whole + 1, -(-want // max(n, 1))
    kept = Cut(whole) if hint_numel(sizes[:whole], hints) > 1 else None
    size = sizes[whole]
    if want < 2 or not isinstance(size, int) or (position and whole):
        return kept
    last = whole == len(sizes) - 1
    counts = (
        *range(want, min(more * want, size - 1) + 1),
        *range(want - 1, max(want // fewer, 2) - 1, -1),
    )
    exact = [d for d in counts if size % d == 0]
    even = [d for d in exact if not last or size // d % aligned == 0] or ([] if along else exact)
    if even:
        return Cut(whole, even[0], size // even[0])
    if not along and kept is not None and want <= 4:
        return kept
    if row.merges and size > want:
        rest = -(-size // want)
        rest = -(-rest // aligned) * aligned if last else rest
        return Cut(whole, -(-size // rest), rest) if rest < size else kept
    return Cut(whole, exact[0], size // exact[0]) if exact else kept


def _along_memory(op: Reduction, buffers: Mapping[str, Buffer], loads: tuple[Node, ...]) -> bool:
    """Whether neighbours in memory are reduced together (and not neighbouring results). What is
    read once a result (a mean, a scale) says nothing of it."""
    inner = [v.symbol for v in op.rvars]
    for n in loads:
        flat = flat_index(buffers[load_of(n).buf], load_of(n).index)
        if not n.args and all(r is not None and expr.coefficient(flat, r) == 0 for r in inner):
            continue
        if any(expr.is_contiguous(flat, expr.atom_of(v)) for v in op.vars):
            return False
    return True
