"""Drops axes of one point, and merges neighbouring axes that every access walks as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from plait.ir.expr import Atom, Expr, Size, coefficient, substitute, symbol
from plait.ir.loops import Load, Node, node, with_args
from plait.schedule.legalize.linear import LinearKernel, extent, map_nodes, offset_of, offsets_of
from plait.schedule.plan import Reduce, Stmt, Store


def _substituted(
    linear: LinearKernel, env: Mapping[Atom, Size], drop: Atom, put: Atom | None = None
) -> LinearKernel:
    """The kernel with loop variables replaced in every offset; axis `drop` leaves, env's other axis
    becomes `put`."""

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        if isinstance(n.attr, Load):
            attr = n.attr._replace(index=(substitute(offset_of(n), env),))
            return node("load", args, attr, n.dtype)
        if n.op == "index" and isinstance(n.attr, Expr):
            return node("index", args, substitute(n.attr, env), n.dtype)
        return with_args(n, args)

    def moved(s: Stmt) -> Stmt:
        return replace(s, index=(substitute(s.index[0], env),)) if isinstance(s, Store) else s

    def axes(old: tuple[Atom, ...]) -> tuple[Atom, ...]:
        return tuple(put if put is not None and a in env else a for a in old if a != drop)

    out = map_nodes(linear, fn)
    stmts = tuple(map(moved, out.stmts))
    return replace(out, stmts=stmts, vars=axes(linear.vars), rvars=axes(linear.rvars))


def drop_single_axes(linear: LinearKernel) -> LinearKernel:
    """The kernel without axes of one point. A scan of one point is a reduction."""
    for a in (*linear.vars, *linear.rvars):
        if extent(a) == 1:
            linear = _substituted(linear, {a: 0}, drop=a)
    if not linear.rvars:
        stmts = (replace(s, running=False) if isinstance(s, Reduce) else s for s in linear.stmts)
        linear = replace(linear, stmts=tuple(stmts))
    return linear


def merge_axes(linear: LinearKernel) -> LinearKernel:
    """Merges axis pairs (a, b) that every access walks as one: stride(a) == stride(b) *
    extent(b). Reduced ones that are settled stay as they are."""
    exprs = offsets_of(linear)
    for which in ("vars",) if _is_settled(linear) else ("vars", "rvars"):
        k = len(getattr(linear, which)) - 2
        while k >= 0:
            axes: tuple[Atom, ...] = getattr(linear, which)
            a, b = axes[k], axes[k + 1]
            if all(_walks_as_one(e, a, b) for e in exprs):
                both = symbol(f"{a.name}.{b.name}", extent=extent(a) * extent(b))
                linear = _substituted(linear, {a: 0, b: both}, drop=a, put=both.symbol)
                exprs = offsets_of(linear)
            k -= 1
    return linear


def _is_settled(linear: LinearKernel) -> bool:
    return any(isinstance(s, Reduce) and s.down is not None for s in linear.stmts)


def _walks_as_one(e: Size, a: Atom, b: Atom) -> bool:
    ca, cb = coefficient(e, a), coefficient(e, b)
    return ca is not None and cb is not None and ca == cb * extent(b)


def faults_of_axes(linear: LinearKernel) -> list[str]:
    """Axes of one point, and neighbours that could be one."""
    exprs = offsets_of(linear)
    axes = (linear.vars, linear.rvars)
    merged = axes[:1] if _is_settled(linear) else axes
    pairs = [pair for group in merged for pair in pairwise(group)]
    return [
        *(f"has axis {a.name} of one point" for group in axes for a in group if extent(a) == 1),
        *(
            f"has axes {a.name} and {b.name} that all accesses walk as one"
            for a, b in pairs
            if all(_walks_as_one(e, a, b) for e in exprs)
        ),
    ]
