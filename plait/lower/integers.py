"""Integers of a program: symbols that are found at run time, or stand for functions of sizes, and
what is asserted of them."""

from __future__ import annotations

from plait.ir import expr
from plait.ir.expr import INF, Expr, Size, atom_of
from plait.ir.loops import Item
from plait.lower.core import Lowering, NoRule, View
from plait.lower.memory import copy


def item(ctx: Lowering, x: View, value: Expr) -> Size:
    """The symbol `value`, now defined as the value of one-element x (an integer or bool)."""
    atom = atom_of(value)
    whole = x if ctx.is_whole(x) else copy(ctx, x.remap((), lambda _: (0,) * len(x.shape)))
    ctx.fix_layout(whole.buf)
    ctx.ops.append(Item(atom.name, whole.buf))
    ctx.symbols[atom.name] = None
    return value


def define_functions(ctx: Lowering) -> None:
    """Gives the symbols that stand for functions of known sizes their values. That a function
    of what is found at run time has the range that tracing gives it is asserted."""
    for name, (traced, value) in ctx.functions.items():
        if name in ctx.symbols or any(a.name not in ctx.symbols for a in expr.free_symbols(value)):
            continue
        ctx.symbols[name] = value
        if is_found_size(ctx, value):
            ctx.found.add(name)
            found, said = (
                expr.symbol(name, lo=-INF),
                f"found {{}} where {{}} to {{}} was traced: {value}",
            )
            lo, hi = (int(max(min(b, 2**63 - 1), -(2**63))) for b in expr.bounds(traced))
            if (lo, hi) != (-(2**63), 2**63 - 1):
                inside = expr.compare("le", lo, found) * expr.compare("le", found, hi)
                ctx.assert_true(inside, said, (found, lo, hi))


def is_found_size(ctx: Lowering, *sizes: Size) -> bool:
    """Whether one of sizes depends on numbers that are found at run time: no guard has looked
    at it."""
    return any(a.name in ctx.found for e in sizes for a in expr.free_symbols(e))


def require_index(ctx: Lowering, index: Size, dim: int, size: Size) -> None:
    """Asserts that an index into dimension dim, of this size, is in [-size, size), unless what
    was checked says so: torch 2.11 traces `x[1]` without a guard. Raises NoRule for one that
    never is, which ATen refuses."""
    inside = expr.compare("le", -size, index) * expr.compare("lt", index, size)
    if inside == 0:
        raise NoRule(f"index {index} is out of bounds for dimension {dim} with size {size}")
    if inside == 1 and expr.may_be_zero(size):  # its range does not tell 0
        inside = size
    if inside != 1:
        said = f"index {{}} is out of bounds for dimension {dim} with size {{}}"
        ctx.assert_true(inside, said, (index, size), "IndexError")
