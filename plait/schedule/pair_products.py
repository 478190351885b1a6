"""Two products of which the second multiplies what the first makes are one launch, where the rows
between them are many: they are passed on while they are in a core's own cache.

Comes in: a plan, before memory is planned. Goes out: the plan with a `Pair` for two calls that
follow each other, what the first is given being needed as long as what the second is. Does
nothing where anything else reads what is between.
"""

from __future__ import annotations

from dataclasses import replace

from plait.ir.calls import Extern, TensorArg
from plait.ir.product import Pair, Panels, Product, is_of_rows
from plait.schedule.deps import memory_roots
from plait.schedule.memory import touched
from plait.schedule.plan import Plan, Step

# From `python -m benchmarks.packed_cpu`: both products of 2,048 rows are 15 % faster than apart.
MIN_NBYTES = 3 << 20
"""Of what is between them: less stays in the caches that cores have."""
MIN_ROWS = 1024
"""Of which each thread has its own; where these are few, they share columns better."""
MAX_COLUMNS = 8192
"""Of what is between them: of more, too few rows are passed on at a time."""


def pair_products(plan: Plan) -> Plan:
    """The plan with pairs."""
    steps: list[Step] = []
    frees: list[tuple[str, ...]] = []
    apart = _read_once(plan)
    for step, freed in zip(plan.steps, plan.frees, strict=True):
        pair = _pair(steps[-1], step, apart) if steps else None
        if pair is None:
            steps.append(step)
            frees.append(freed)
        else:
            steps[-1] = pair
            frees[-1] += freed
    return replace(plan, steps=tuple(steps), frees=tuple(frees))


def _read_once(plan: Plan) -> set[str]:
    """Buffers with memory of their own that one step reads, and nothing else."""
    found: dict[str, int] = {}
    for step in plan.steps:
        for name in touched(step)[0]:
            found[name] = found.get(name, 0) + 1
    roots = memory_roots(plan.program.ops)
    shared = {*roots, *roots.values(), *plan.program.returned, *plan.program.given}
    return {name for name, n in found.items() if n == 1} - shared


def _pair(first: Step, second: Step, apart: set[str]) -> Extern | None:
    """Both calls as one."""
    if not (isinstance(first, Extern) and isinstance(second, Extern)):
        return None
    a, b = first.kernel, second.kernel
    if not (isinstance(a, Product) and isinstance(b, Product) and is_of_rows(a) and is_of_rows(b)):
        return None
    assert isinstance(a.how, Panels) and isinstance(b.how, Panels), (a, b)
    (*given, rows), (left, *others, same), columns = first.args, second.args, a.how.columns
    (between,) = first.made
    if not isinstance(rows, int) or rows < MIN_ROWS or same != rows:
        return None
    if 4 * rows * columns < MIN_NBYTES or columns > MAX_COLUMNS:
        return None
    if between not in apart or left != TensorArg(between, (rows, columns), (columns, 1), 0):
        return None
    (head, dot, rest), also = a.name.partition("."), b.name.partition(".")[0]
    name = f"{head}_{also.rpartition('_')[2]}{dot}{rest}"
    kernel = Pair(name, a, b, len(given))
    return replace(
        second,
        outs=(*first.outs, *second.outs),
        args=(*given, *others, rows),
        kernel=kernel,
        flops=first.flops + second.flops,
        origin=tuple(dict.fromkeys((*first.origin, *second.origin))),
    )
