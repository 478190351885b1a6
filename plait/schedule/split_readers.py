"""A loop that alone reads a buffer which is made in pieces, such as a concatenation, is split into
pieces too: each is computed of what its piece of the buffer is made of, which is not made itself.

Comes in: loops that are inlined as far as that pays. A piece that is no more than a copy costs
nothing to make twice, so two readers may be split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.ir.effects import defines, updates
from plait.ir.expr import atom_of
from plait.ir.loops import (
    Load,
    LoopProgram,
    Node,
    Op,
    Pointwise,
    fences,
    rewrite,
    substitute_vars,
    with_args,
)
from plait.ir.rules import Simplifier
from plait.schedule.deps import Bodies, load_of, memory_roots, reads

_MAX_NODES = 400  # of a piece's body
_MAX_READERS = 2


def split_readers(program: LoopProgram, bodies: Bodies) -> LoopProgram:
    """The program without the buffers that loops need not read as a whole."""
    pieces = _pieces(program)
    if not pieces:
        return program
    readers: dict[str, list[int]] = {}
    changed: set[str] = set()
    memory = memory_roots(program.ops)
    for k, op in enumerate(program.ops):
        for name in reads(op, bodies):
            readers.setdefault(name, []).append(k)
        changed.update(memory.get(n, n) for n in updates(op))
    shared = {*program.returned, *memory, *memory.values(), *changed}
    ops: list[tuple[Op, ...]] = [(op,) for op in program.ops]
    for name, places in pieces.items():
        loops = [program.ops[k] for k in places]
        users = readers.get(name, [])
        if name in shared or not 0 < len(users) <= _MAX_READERS:
            continue
        made = [p for p in loops if isinstance(p, Pointwise)]
        found = [_split(program, program.ops[k], name, made, bodies) for k in users]
        # What was split for another buffer stays: it reads this one as a whole.
        if any(f is None for f in found) or any(ops[k] != (program.ops[k],) for k in users):
            continue
        if _crosses(program, places, users, made, changed, memory, bodies):
            continue
        if len(users) > 1 and any(p.body.op != "load" for p in made):
            continue
        for k, f in zip(users, found, strict=True):
            ops[k] = f or ()
        for k in places:
            ops[k] = ()
    return replace(program, ops=tuple(op for some in ops for op in some))


def _pieces(program: LoopProgram) -> dict[str, list[int]]:
    """Buffers that are made by loops over their parts, and those."""
    found: dict[str, list[int]] = {}
    others: set[str] = set()
    for k, op in enumerate(program.ops):
        if isinstance(op, Pointwise) and op.index is not None:
            found.setdefault(op.out, []).append(k)
        else:
            others.update(defines(op))
    return {name: places for name, places in found.items() if name not in others}


def _crosses(
    program: LoopProgram, places: Sequence[int], users: Sequence[int], made: Sequence[Pointwise],
    changed: set[str], memory: dict[str, str], bodies: Bodies,
) -> bool:  # fmt: skip
    """Whether pieces cannot be computed where their readers stand."""
    given = {name for p in made for name in bodies.of((p.body,)).bufs}
    if any(memory.get(name, name) in changed for name in given):
        return True
    first, last = min(places), max(users)
    return any(first < f < last for f in fences(program.ops))


def _split(
    program: LoopProgram, op: Op, name: str, pieces: Sequence[Pointwise], bodies: Bodies
) -> tuple[Pointwise, ...] | None:
    """A reader in pieces; None where it is no loop that reads each element where it stores one."""
    if not isinstance(op, Pointwise) or op.index is not None:
        return None
    if program.buffers[op.out].shape != program.buffers[name].shape:  # it reads a part
        return None
    facts = bodies.of((op.body,))
    loads = [load_of(n) for n in facts.loads if load_of(n).buf == name]
    if facts.checks or any(x.masked or x.index != op.vars for x in loads):
        return None
    made: list[Pointwise] = []
    simplify = Simplifier()
    for p in pieces:
        assert p.index is not None, p
        body = simplify(_of_piece(op, name, p))
        if bodies.of((body,)).size > _MAX_NODES:
            return None
        origin = tuple(dict.fromkeys((*p.origin, *op.origin)))
        made.append(Pointwise(op.out, p.vars, body, p.index, origin))
    return tuple(made)


def _of_piece(reader: Pointwise, name: str, piece: Pointwise) -> Node:
    """A reader's body at the points of a piece."""
    assert piece.index is not None, piece
    at = {atom_of(v): e for v, e in zip(reader.vars, piece.index, strict=True)}

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        if isinstance(n.attr, Load) and n.attr.buf == name:
            return piece.body
        return with_args(n, args)

    return rewrite(substitute_vars(reader.body, at), fn)
