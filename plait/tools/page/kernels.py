"""What a kernel does to memory and how much it computes, from its loops.

In: a `Kernel` of a plan. Out: its accesses, each with the bytes that it moves and how these lie,
and its operations. Sizes that vary are taken as the kernel's hints say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from plait.ir.expr import Atom, Size, atom_of, coefficient, free_symbols
from plait.ir.layouts import flat_index
from plait.ir.loops import Node, index_exprs, walk
from plait.ir.ops import OPS
from plait.schedule.cost import buffer_nbytes, hint, hint_numel
from plait.schedule.deps import extent, load_of
from plait.schedule.plan import Kernel, Reduce, Store, stmt_roots

IN_ORDER, ACROSS, APART, PIECES, BY_DATA = "in order", "across", "apart", "in pieces", "by data"
"""How the elements lie that a loop visits one after the other: side by side, or all the same one;
side by side along another loop; along no loop; side by side for a while (their position is a
quotient or a remainder); at positions that data says."""
_RANK = {IN_ORDER: 0, PIECES: 1, BY_DATA: 2, ACROSS: 3, APART: 4}


@dataclass
class Access:
    """What a kernel reads or writes of a buffer.

    nbytes: of the elements, each counted once.
    order: one of the five words above; the worst where there are several accesses. The loop that
        counts is the one along which most bytes of the nest lie side by side: a target makes
        vectors of its points.
    stride: elements between two that this loop visits one after the other; 0 if unknown.
    """

    buffer: str
    writes: bool
    nbytes: int
    order: str
    stride: int


def accesses_of(k: Kernel) -> list[Access]:
    """A kernel's accesses, reads first, a row for each buffer and direction."""
    found: dict[tuple[bool, str], Access] = {}
    sizes = {b.name: buffer_nbytes(b, k.hint_of) for b in k.args}
    for a in (a for nest in k.nests for a in _accesses(nest, k.hint_of)):
        known = found.setdefault((a.writes, a.buffer), replace(a, nbytes=0))
        known.nbytes = min(known.nbytes + a.nbytes, sizes[a.buffer])
        if _RANK[a.order] > _RANK[known.order]:
            known.order, known.stride = a.order, a.stride
    return [found[key] for key in sorted(found, key=lambda key: key[0])]


class _Touch(NamedTuple):
    """An access before it is known which loop counts. flat: position in the buffer; None if data
    says it."""

    buffer: str
    writes: bool
    nbytes: int
    flat: Size | None


def _accesses(k: Kernel, hints: Mapping[str, int]) -> Iterator[Access]:
    touches = list(_touches(k, hints))
    axes = [atom_of(v) for v in (*k.vars, *k.rvars) if hint(extent(v), hints) > 1]

    def in_order(axis: Atom) -> int:
        known = ((t.flat, t.nbytes) for t in touches if t.flat is not None)
        return sum(nbytes for flat, nbytes in known if coefficient(flat, axis) in (0, 1))

    best = max(reversed(axes), key=in_order, default=None)
    for t in touches:
        order, stride = IN_ORDER, 0
        if t.flat is None:
            order = BY_DATA
        elif best is not None and (found := coefficient(t.flat, best)) not in (0, 1):
            stride = 0 if found is None else hint(found, hints)
            turned = any(coefficient(t.flat, a) == 1 for a in axes)
            order = PIECES if found is None else ACROSS if turned else APART
        yield Access(t.buffer, t.writes, t.nbytes, order, stride)


def _touches(k: Kernel, hints: Mapping[str, int]) -> Iterator[_Touch]:
    buffers = {b.name: b for b in k.args}
    axes = [*map(atom_of, (*k.vars, *k.rvars))]

    def touch(name: str, index: tuple[Size, ...], inside: Sequence[Atom], by_data: bool,
              writes: bool) -> _Touch:  # fmt: skip
        used = {a for e in index for a in free_symbols(e)}
        visited = [a.extent for a in inside if by_data or a in used]
        nbytes = hint_numel([n for n in visited if n is not None], hints)
        flat = None if by_data else flat_index(buffers[name], index)
        return _Touch(name, writes, nbytes * buffers[name].dtype.nbytes, flat)

    for n in walk([n for s in k.stmts for n in stmt_roots(s)]):
        if n.op == "load":
            load = load_of(n)
            yield touch(load.buf, load.index, axes, len(n.args) > load.masked, writes=False)
    for s in k.stmts:
        if isinstance(s, Store):
            inside = axes if s.full else axes[: len(k.vars)]
            yield touch(s.buf, s.index, inside, bool(s.index_args), writes=True)


def operations_of(k: Kernel) -> int:
    """Arithmetic operations of a launch, each as often as it is done; a reduction is one more a
    point."""
    return sum(_operations(nest, k.hint_of) for nest in k.nests)


def _operations(k: Kernel, hints: Mapping[str, int]) -> int:
    axes = [*map(atom_of, (*k.vars, *k.rvars))]
    place = {a: n for n, a in enumerate(axes, 1)}
    points = [hint_numel(map(extent, (*k.vars, *k.rvars)[:n]), hints) for n in range(len(axes) + 1)]
    running = {s.name for s in k.stmts if isinstance(s, Reduce) and s.inner}
    depth: dict[Node, int] = {}
    done = sum(points[-1] for s in k.stmts if isinstance(s, Reduce))
    for n in walk([n for s in k.stmts for n in stmt_roots(s)]):
        used = [place.get(a, 0) for e in index_exprs(n) for a in free_symbols(e)]
        depth[n] = max([0, *used, *(depth[a] for a in n.args)])
        if n.op == "acc":
            depth[n] = len(axes) if n.attr in running else len(k.vars)
        done += points[depth[n]] if n.op in OPS else 0
    return done
