"""Kernels that do the same at different places of their buffers become one, which is told the
places: the steps of a loop that was written out, each of which reads and writes rows of its own.

Comes in: kernels. Goes out: for those that share, the kernel that is written in their place, and
the numbers that launches give it. A place is the constant in an index; places that grow together
from kernel to kernel are told by one number, that of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd

from plait.devices import facts_of
from plait.ir.expr import INF, Expr, Size, symbol
from plait.ir.loops import Load, Node, node, rewrite, walk, with_args
from plait.schedule.dedup import Shared, offset, structure
from plait.schedule.plan import Kernel, Reduce, Stmt, Store, stmt_roots

LEAST = 3  # places for which a kernel is shared: a function is built in 0.02 to 0.2 s

Place = tuple[str, int, int]
"""A buffer, the number of one of its axes, and the constant in an index there."""


def share_offsets(nests: Sequence[Kernel]) -> dict[str, Shared]:
    """The loop nests that share, by name. Those of a GPU do not: what is known of a place tells
    how wide its compiler may load."""
    looks: dict[object, list[Kernel]] = {}
    for k in nests:
        if facts_of(k.device).is_host and not k.parts:
            looks.setdefault(_look(k), []).append(k)
    found: dict[str, Shared] = {}
    for some in looks.values():
        placed = [(k, _places(k)) for k in some] if len(some) >= LEAST else []
        if len({_consts(places) for _, places in placed}) < LEAST:
            continue
        alike: dict[object, list[tuple[Kernel, list[Place]]]] = {}
        for k, places in placed:
            named = {p: symbol(offset(n), lo=-INF) for n, p in enumerate(places)}
            alike.setdefault(structure(_moved(k, named)), []).append((k, places))
        for group in alike.values():
            found |= _shared(group)
    return found


def _look(k: Kernel) -> object:
    """Kernels that look different cannot share."""
    layout = tuple((b.dtype.name, b.strides) for b in k.args)
    return k.device, k.vars, k.rvars, len(k.stmts), layout, k.sizes


def _shared(group: Sequence[tuple[Kernel, list[Place]]]) -> dict[str, Shared]:
    """Kernels that are equal but for their places, if these are many."""
    rows = [_consts(places) for _, places in group]
    if len(set(rows)) < LEAST:
        return {}
    told: list[Size] = []
    steps: dict[tuple[int, ...], Expr] = {}  # what launches give, kernel by kernel
    for first, *others in zip(*rows, strict=True):
        apart = [0, *(const - first for const in others)]
        unit = gcd(*apart) * (1 if sum(apart) >= 0 else -1)
        if unit == 0:  # all begin here
            told.append(first)
            continue
        given = tuple([d // unit for d in apart])
        step = symbol(offset(len(steps)), min(given), max(given))
        told.append(first + unit * steps.setdefault(given, step))
    found = {}
    for (k, places), *given_to in zip(group, *steps, strict=True):
        moved = _moved(k, dict(zip(places, told, strict=True)))
        sizes, hints = (*k.sizes, *steps.values()), (*k.hints, *given_to)
        found[k.name] = Shared(replace(moved, sizes=sizes, hints=hints), tuple(given_to))
    return found


def _places(k: Kernel) -> list[Place]:
    """Where it reads and writes, each place once."""
    found: dict[Place, None] = {}
    for n in walk([r for s in k.stmts for r in stmt_roots(s)]):
        if isinstance(n.attr, Load):
            found |= dict.fromkeys(_of(n.attr.buf, n.attr.index))
    for s in k.stmts:
        if isinstance(s, Store):
            found |= dict.fromkeys(_of(s.buf, s.index))
    return list(found)


def _consts(places: Sequence[Place]) -> tuple[int, ...]:
    return tuple([const for _, _, const in places])


def _of(buf: str, index: tuple[Size, ...]) -> list[Place]:
    consts = (e if isinstance(e, int) else e.const for e in index)
    return [(buf, axis, const) for axis, const in enumerate(consts)]


def _moved(k: Kernel, to: Mapping[Place, Size]) -> Kernel:
    """The kernel with other places."""
    memo: dict[Node, Node] = {}

    def at(buf: str, index: tuple[Size, ...]) -> tuple[Size, ...]:
        places = _of(buf, index)
        return tuple([e - p[2] + to[p] for e, p in zip(index, places, strict=True)])

    def moved(n: Node, args: tuple[Node, ...]) -> Node:
        if isinstance(n.attr, Load):
            attr = Load(n.attr.buf, at(n.attr.buf, n.attr.index), n.attr.masked)
            return node("load", args, attr, n.dtype)
        return with_args(n, args)

    def there(n: Node) -> Node:
        return rewrite(n, moved, memo)

    def stmt(s: Stmt) -> Stmt:
        if isinstance(s, Reduce):
            return replace(s, value=there(s.value))
        mask = None if s.mask is None else there(s.mask)
        index_args = tuple(map(there, s.index_args))
        return replace(
            s, value=there(s.value), index=at(s.buf, s.index), index_args=index_args, mask=mask
        )

    return replace(k, stmts=tuple(map(stmt, k.stmts)))
