"""Writes reductions out as plain ones, and decides the type that they accumulate in.

Welford becomes a sum for the mean and sums of deviations. Running sums and products of f32 carry
f64, 16-bit floats and bools are combined as f32 and i32.
"""

from __future__ import annotations

import math
from dataclasses import replace

from plait.ir.dtypes import f64, i64
from plait.ir.expr import Size, product
from plait.ir.loops import Node, cast, const, node, rewrite, with_args
from plait.ir.reductions import REDUCTIONS
from plait.schedule.legalize.linear import LinearKernel, extent, map_stmt
from plait.schedule.plan import Reduce, Stmt


def expand_reductions(linear: LinearKernel) -> LinearKernel:
    """Welford -> sum for the mean, then sum of squared deviations; running f32 sums and products
    carry f64; 16-bit floats and bools are compared as f32 and i32."""
    if not any(isinstance(s, Reduce) and _is_rewritten(s) for s in linear.stmts):
        return linear
    count = product(extent(r) for r in linear.rvars)
    accs: dict[str, Node] = {}  # acc name -> what it is now
    memo: dict[Node, Node] = {}

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op == "acc":
            assert isinstance(n.attr, str), n
            return accs.get(n.attr, n)
        return with_args(n, args)

    stmts: list[Stmt] = []
    for s in linear.stmts:
        s = map_stmt(s, lambda n: rewrite(n, fn, memo))
        if isinstance(s, Reduce) and s.kind == "welford":
            stmts.extend(_welford(s, count, accs))
        elif isinstance(s, Reduce) and _is_rewritten(s):
            row, narrow = REDUCTIONS[s.kind], s.value.dtype
            wide = row.accumulates(narrow, s.running)
            stmts.append(replace(s, value=cast(s.value, wide)))
            if not row.extreme:
                accs[s.name] = cast(node("acc", (), s.name, wide), narrow)
        else:
            stmts.append(s)
    indirect = {a: rewrite(n, fn, memo) for a, n in linear.indirect.items()}
    return replace(linear, stmts=tuple(stmts), indirect=indirect)


def _is_rewritten(s: Reduce) -> bool:
    d = s.value.dtype
    return s.kind == "welford" or REDUCTIONS[s.kind].accumulates(d, s.running) != d


def _welford(s: Reduce, count: Size, accs: dict[str, Node]) -> list[Stmt]:
    """A sum for the mean, then the sum of squared deviations from it. The sum of the deviations
    themselves is what rounding left out of the mean: without it, the mean of equal numbers may be
    an ulp off, which is not small beside their deviations of 0."""
    dtype = s.value.dtype
    n = (
        const(count, dtype)
        if isinstance(count, int)
        else cast(node("index", (), count, i64), dtype)
    )
    zero = const(0, dtype)

    def per_point(total: Node, divisor: Node) -> Node:
        mean = node("truediv", (total, divisor))
        if not isinstance(count, int) or count == 0:
            mean = node("where", (node("eq", (n, zero)), zero, mean))
        return mean

    accs[f"{s.name}.count"] = n
    total, rest, m2 = (node("acc", (), f"{s.name}.{part}", dtype) for part in ("sum", "rest", "m2"))
    if _is_widened(s.value):  # such means are exact enough
        mean = accs[f"{s.name}.mean"] = per_point(total, n)
        off = node("sub", (s.value, mean))
        return [
            replace(s, name=f"{s.name}.sum", kind="sum"),
            replace(s, name=f"{s.name}.m2", kind="sum", value=node("mul", (off, off))),
        ]
    # Scaled by a power of two, which is exact, the sum does not overflow where the mean does not.
    scale = const(
        2.0 ** -(count - 1).bit_length() if isinstance(count, int) and count else 2.0**-32, dtype
    )
    mean = per_point(total, node("mul", (n, scale)))
    off = node("sub", (s.value, mean))
    more = per_point(rest, n)
    accs[f"{s.name}.mean"] = node("add", (mean, more))
    # Where squares overflow, the correction may as well: infinity less infinity would be NaN.
    overflows = node("eq", (m2, const(math.inf, dtype)))
    # Rounding may leave a little below 0.
    corrected = node("abs", (node("sub", (m2, node("mul", (rest, more)))),))
    accs[f"{s.name}.m2"] = node("where", (overflows, m2, corrected))
    return [
        replace(s, name=f"{s.name}.sum", kind="sum", value=node("mul", (s.value, scale))),
        replace(s, name=f"{s.name}.rest", kind="sum", value=off),
        replace(s, name=f"{s.name}.m2", kind="sum", value=node("mul", (off, off))),
    ]


def _is_widened(n: Node) -> bool:
    """Whether a number has far more room than it had where it came from."""
    return n.op == "cast" and n.dtype == f64 and n.args[0].dtype.nbytes < f64.nbytes


def faults_of_reductions(linear: LinearKernel) -> list[str]:
    """Reductions that a target cannot accumulate as they stand."""
    reductions = [s for s in linear.stmts if isinstance(s, Reduce)]
    return [
        f"has the {s.kind} '{s.name}' of {s.value.dtype.name}"
        for s in reductions
        if _is_rewritten(s) and (linear.rvars or s.kind == "welford")  # a scan of one point stays
    ]
