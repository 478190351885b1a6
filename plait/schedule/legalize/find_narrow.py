"""Finds the values that are seen in nothing but 16-bit floats: they may be approximated."""

from __future__ import annotations

from collections.abc import Sequence

from plait.ir.dtypes import f32
from plait.ir.loops import Node, walk
from plait.schedule.legalize.linear import LinearKernel


def find_narrow(linear: LinearKernel) -> frozenset[Node]:
    """The float32 values of which errors of a few of the last bits do not matter."""
    found: set[Node] = set()
    shown = {n for n in linear.roots() if n.dtype == f32}
    for n in reversed(list(walk(linear.roots()))):
        if n.dtype == f32 and n not in shown:
            found.add(n)
        ends = n.op == "cast" and n.dtype.name in ("f16", "bf16")
        if not ends and not (
            n in found and n.op in ("add", "sub", "mul", "neg", "where", "truediv", "reciprocal")
        ):
            shown.update(n.args)
    return frozenset(found)


def find_rounded(roots: Sequence[Node]) -> frozenset[Node]:
    """The same of those that nothing but a rounding to 16 bits reads: operators do that, whatever
    they share a kernel with. Quotients by what some programs know, and others learn from a call,
    are none: compilers round the reciprocal of a number that they know otherwise than a GPU."""
    found: set[Node] = set()
    others = {n for n in roots if n.dtype == f32}
    for n in walk(roots):
        if n.op in ("truediv", "reciprocal") and not _is_data(n.args[-1]):
            others.add(n)
        ends = n.op == "cast" and n.dtype.name in ("f16", "bf16")
        (found if ends else others).update(a for a in n.args if a.dtype == f32)
    return frozenset(found - others)


def _is_data(n: Node) -> bool:
    """Whether a value is made of what lies in memory."""
    return any(a.op in ("load", "acc") for a in walk((n,)))
