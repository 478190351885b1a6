"""Replaces a sum that picks one point (the gradient of a choice) by its value: no pass is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plait.ir.dtypes import i64
from plait.ir.expr import Expr
from plait.ir.loops import Node, const, integer, node, with_args
from plait.schedule.legalize.linear import LinearKernel, dependences, extent, map_nodes
from plait.schedule.plan import Reduce


def drop_picks(linear: LinearKernel) -> LinearKernel:
    """The kernel with the sum of what is 0 but at one point (the gradient of a choice) as that,
    which takes no pass."""
    for s in linear.stmts:
        if isinstance(s, Reduce) and (value := _picked(s, linear, dependences(linear))) is not None:
            return drop_picks(_replaced(linear, s.name, value))
    return linear


def _picked(
    s: Reduce, linear: LinearKernel, deps: Callable[[Node], frozenset[object]]
) -> Node | None:
    """v where 0 <= k < n and c, of a sum over r < n of (v where r == k and c)."""
    if s.kind != "sum" or s.inner or len(linear.rvars) != 1 or s.value.op != "where":
        return None
    (r,) = linear.rvars
    met, value, zero = s.value.args
    if zero.op != "const" or zero.attr != 0:
        return None
    found: list[Node] = []
    rest = [value]
    todo = [met]
    while todo:
        n = todo.pop()
        if n.op == "and":
            todo += n.args
            continue
        sides = n.args if n.op == "eq" else ()
        here = [
            k
            for k, a in enumerate(sides)
            if a.op == "index" and isinstance(a.attr, Expr) and a.attr.symbol == r
        ]
        if here and sides[0].dtype == i64:
            found.append(sides[1 - here[0]])
        else:
            rest.append(n)
    if len(found) != 1 or any(r in deps(n) for n in (*found, *rest)):
        return None
    size = extent(r)
    end = integer(size)
    inside = node("and", (node("ge", (found[0], const(0, i64))), node("lt", (found[0], end))))
    for n in rest[1:]:
        inside = node("and", (inside, n))
    return node("add", (node("where", (inside, value, zero)), zero))  # -0.0 + 0.0 is 0.0


def _replaced(linear: LinearKernel, name: str, value: Node) -> LinearKernel:
    """The kernel without this reduction, whose result is `value`."""

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        return value if n.op == "acc" and n.attr == name else with_args(n, args)

    kept = (s for s in linear.stmts if not (isinstance(s, Reduce) and s.name == name))
    return map_nodes(replace(linear, stmts=tuple(kept)), fn)
