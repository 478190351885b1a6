"""Drops axes of one point, and merges neighbouring axes that every access walks as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from plait.ir.expr import Atom, Expr, Size, coefficient, substitute, symbol
from plait.ir.loops import Load, Node, node, rewrite, with_args
from plait.schedule.legalize.linear import (
    LinearKernel,
    extent,
    map_stmt,
    offset_of,
    offsets_of,
    rebuilt,
)
from plait.schedule.plan import Reduce, Store


def _substituted(
    linear: LinearKernel, env: Mapping[Atom, Size], drop: Atom, put: Atom | None = None
) -> LinearKernel:
    """The kernel with loop variables replaced in every offset; axis `drop` leaves, env's other axis
    becomes `put`."""
    memo: dict[Node, Node] = {}

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op == "load":
            assert isinstance(n.attr, Load)
            return node(
                "load",
                args,
                Load(n.attr.buf, (substitute(offset_of(n), env),), n.attr.masked),
                n.dtype,
            )
        if n.op == "index":
            assert isinstance(n.attr, (int, Expr))
            return node("index", args, substitute(n.attr, env), n.dtype)
        return with_args(n, args)

    def on_node(n: Node) -> Node:
        return rewrite(n, fn, memo)

    stmts = []
    for s in linear.stmts:
        s = map_stmt(s, on_node)
        if isinstance(s, Store):
            s = replace(s, index=(substitute(s.index[0], env),))
        stmts.append(s)

    def axes(old: tuple[Atom, ...]) -> tuple[Atom, ...]:
        kept = [a for a in old if a != drop]
        return tuple(put if put is not None and a in env else a for a in kept)

    out = rebuilt(linear, tuple(stmts), on_node)
    return replace(out, vars=axes(linear.vars), rvars=axes(linear.rvars))


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
    extent(b)."""
    exprs = offsets_of(linear)
    for which in ("vars", "rvars"):
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


def _walks_as_one(e: Size, a: Atom, b: Atom) -> bool:
    ca, cb = coefficient(e, a), coefficient(e, b)
    return ca is not None and cb is not None and ca == cb * extent(b)


def faults_of_axes(linear: LinearKernel) -> list[str]:
    """Axes of one point, and neighbours that could be one."""
    exprs = offsets_of(linear)
    axes = (linear.vars, linear.rvars)
    pairs = [pair for group in axes for pair in pairwise(group)]
    return [
        *(f"has axis {a.name} of one point" for group in axes for a in group if extent(a) == 1),
        *(
            f"has axes {a.name} and {b.name} that all accesses walk as one"
            for a, b in pairs
            if all(_walks_as_one(e, a, b) for e in exprs)
        ),
    ]
