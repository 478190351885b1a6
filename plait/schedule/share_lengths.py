"""Kernels that do the same to tensors of different sizes become one, whose length is an argument:
the updates of an optimizer's parameters, say.

Comes in: kernels whose sizes are numbers. Goes out: for those that share, the kernel that is
written in their place, over one axis, and the lengths that launches give it. Kernels qualify whose
every point reads and writes one element of each buffer, the next point the next one, or the only
element of a buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from weakref import WeakKeyDictionary

from plait.devices import facts_of
from plait.ir.expr import Size, contiguous_strides, numel, symbol, total
from plait.ir.layouts import flat_index
from plait.ir.loops import Buffer, Load, Node, check_of, node, rewrite, walk, with_args
from plait.schedule.dedup import LENGTH, Shared, part_end, part_size, structure
from plait.schedule.deps import extent
from plait.schedule.plan import Kernel, Stmt, Store, stmt_roots
from plait.schedule.share_offsets import share_offsets

LEAST = 8  # lengths for which a kernel is shared: with a length that is known it is a little faster
UNIT = 16  # elements: a length that is a multiple of it stays one, for vectors
MAX_LENGTH = 2**31 - 2**16  # a position has 32 bits then, behind the end too


def share_lengths(kernels: Sequence[Kernel]) -> Mapping[str, Shared]:
    """The kernels that share, by name."""
    alike: dict[object, list[Kernel]] = {}
    found: dict[str, Shared] = {}
    for whole in kernels:
        for k in filter(_is_plain, whole.nests):
            if whole.alike:
                made = _general(k)
                assert made is not None, f"{k.name} stands among kernels that are alike"
                found[k.name] = made
                continue
            alike.setdefault(_look(k), []).append(k)
    for some in alike.values():
        if len({_length(k) for k in some}) >= LEAST:
            found |= _shared(some)
    rest = [k for whole in kernels for k in whole.nests if k.name not in found]
    found |= share_offsets(rest)
    return {k.name: both for k in kernels if (both := _with_parts(k, found)) is not None}


def general_key(k: Kernel) -> object:
    """A key that kernels have in common which could share; None if it could share with none."""
    made = _general(k) if _is_plain(k) else None
    return None if made is None else (structure(made.kernel), k.device)


def _look(k: Kernel) -> object:
    """Kernels that look different cannot share."""
    dtypes = tuple(b.dtype.name for b in k.args)
    return dtypes, len(k.stmts), k.origin, k.device, _length(k) % UNIT == 0


def _length(k: Kernel) -> int:
    n = numel(extent(v) for v in k.vars)
    assert isinstance(n, int), f"{n} is no number"
    return n


def _is_plain(k: Kernel) -> bool:
    if k.rvars or k.sizes or k.parts or k.sequential or not k.vars:
        return False
    plain = all(
        isinstance(s, Store) and s.mode == "store" and not (s.full or s.index_args or s.mask)
        for s in k.stmts
    )
    return plain and 1 < _length(k) <= MAX_LENGTH


def _shared(some: Sequence[Kernel]) -> dict[str, Shared]:
    """Those of some kernels that look alike which share one."""
    groups: dict[object, list[tuple[str, Shared]]] = {}
    for k in some:
        if (made := _general(k)) is not None:
            groups.setdefault(structure(made.kernel), []).append((k.name, made))
    found: dict[str, Shared] = {}
    for group in groups.values():
        lengths = {made.lengths[0] for _, made in group}
        if len(lengths) >= LEAST:
            hints = (max(lengths),)  # how it is written must not depend on which is the first
            found |= {
                name: replace(made, kernel=replace(made.kernel, hints=hints))
                for name, made in group
            }
    return found


def _general(k: Kernel) -> Shared | None:
    """The kernel over one axis whose extent is an argument; None if it cannot be."""
    if k not in _made:
        _made[k] = _generalised(k)
    return _made[k]


_made: WeakKeyDictionary[Kernel, Shared | None] = WeakKeyDictionary()
"""What `general_key` and `share_lengths` both ask for."""


def _generalised(k: Kernel) -> Shared | None:
    length = _length(k)
    unit = UNIT if length % UNIT == 0 else 1
    n = symbol(LENGTH, lo=1, hi=MAX_LENGTH // unit)
    point = symbol("i0", extent=n * unit)
    walked = total(
        v * s for v, s in zip(k.vars, contiguous_strides(tuple(map(extent, k.vars))), strict=True)
    )
    buffers: dict[str, Buffer] = {}
    nodes = walk([r for s in k.stmts for r in stmt_roots(s)])
    if any(m.op == "index" or m.args and m.op == "load" or check_of(m) for m in nodes):
        return None
    whole: tuple[Size, ...] = (n * unit,)
    for b, index in _accesses(k, nodes):
        here = flat_index(b, index)
        if here == walked:
            new = Buffer(b.name, b.dtype, whole, (1,), b.device, b.fixed)
        elif here == 0:
            new = Buffer(b.name, b.dtype, (), (), b.device, b.fixed)
        else:
            return None
        if buffers.setdefault(b.name, new) != new:
            return None
    at = {name: (point,) if b.shape else () for name, b in buffers.items()}
    memo: dict[Node, Node] = {}

    def moved(m: Node, args: tuple[Node, ...]) -> Node:
        if isinstance(m.attr, Load):
            return node("load", args, Load(m.attr.buf, at[m.attr.buf]), m.dtype)
        return with_args(m, args)

    def stored(s: Stmt) -> Stmt:
        assert isinstance(s, Store), s
        return replace(s, value=rewrite(s.value, moved, memo), index=at[s.buf])

    kernel = replace(
        k,
        vars=(point,),
        stmts=tuple(map(stored, k.stmts)),
        args=tuple(buffers[b.name] for b in k.args),
        sizes=(n,),
    )
    return Shared(kernel, (length // unit,))


def _accesses(k: Kernel, nodes: Iterable[Node]) -> Iterator[tuple[Buffer, tuple[Size, ...]]]:
    buffers = {b.name: b for b in k.args}
    for m in nodes:
        if isinstance(m.attr, Load):
            yield buffers[m.attr.buf], m.attr.index
    for s in k.stmts:
        assert isinstance(s, Store), s
        yield buffers[s.buf], s.index


def _with_parts(k: Kernel, found: Mapping[str, Shared]) -> Shared | None:
    """What is written for a kernel that shares, or whose parts do: each of these has a length, or
    places, of its own, and an end if all are alike."""
    if not k.parts:
        return found.get(k.name)
    if not any(p.name in found for p in k.parts):
        return None
    shared = [(at, p, found[p.name]) for at, p in enumerate(k.parts) if p.name in found]
    parts = tuple(found[p.name].kernel if p.name in found else p for p in k.parts)
    values = {
        part_size(str(s), at): value
        for at, p, made in shared
        for s, value in zip(made.given(p), made.lengths, strict=True)
    }
    if k.alike:
        share = facts_of(k.device).share
        ends = accumulate(-(-_length(p) // share) for p in k.parts)
        values |= {part_end(at): end for at, end in enumerate(ends)}
    sizes = tuple(symbol(name, lo=min(1, value)) for name, value in values.items())
    lengths = tuple(values.values())
    kernel = replace(k, parts=parts, sizes=(*k.sizes, *sizes), hints=(*k.hints, *lengths))
    return Shared(kernel, lengths)
