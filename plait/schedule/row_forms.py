"""Where the numbers of a sum lie, under `batch_invariant`.

Which numbers are added first follows from it: of neighbours that have sums of their own, each is
added up from its first number to its last; of numbers that lie side by side, those in the same lane
are. A kernel's loads do not tell: whether a value is computed anew or read from memory, in
whichever layout, depends on how many rows there are. So this is settled before anything is inlined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from plait.ir.expr import Atom, atom_of, free_symbols, is_contiguous
from plait.ir.layouts import flat_index
from plait.ir.loops import Buffer, LoopProgram, Op, Reduction, Scan
from plait.ir.reductions import REDUCTIONS
from plait.schedule.deps import Bodies, load_of, roots


def settle_rows(program: LoopProgram, bodies: Bodies) -> LoopProgram:
    """The program in which every Reduction and Scan says whether neighbours with sums of their own
    lie side by side (`down`) in what it reads, or the numbers of one sum, along its last reduced
    axis. From then on reduced axes stay as they are: apart, whole and in their order."""
    return replace(program, ops=tuple(_settled(op, program.buffers, bodies) for op in program.ops))


def _settled(op: Op, buffers: Mapping[str, Buffer], bodies: Bodies) -> Op:
    if isinstance(op, Reduction):
        along = tuple(map(atom_of, op.rvars))
    elif isinstance(op, Scan):
        along = (atom_of(op.vars[op.axis]),)
    else:
        return op
    across = [a for a in map(atom_of, op.vars) if a not in along]
    votes: Counter[Atom] = Counter()
    down = 0
    for load in map(load_of, bodies.of(roots(op)).loads):
        flat = flat_index(buffers[load.buf], load.index)
        if free_symbols(flat).isdisjoint(along):
            continue  # the same for all numbers of a sum
        nbytes = buffers[load.buf].dtype.nbytes
        near = [a for a in along if a.extent != 1 and is_contiguous(flat, a)]
        votes.update(dict.fromkeys(near, nbytes))
        beside = any(a.extent != 1 and is_contiguous(flat, a) for a in across)
        down += -nbytes if near else nbytes if beside else 0
    if isinstance(op, Scan) or REDUCTIONS[op.kind].extreme:  # in the order of positions
        return replace(op, down=down > 0)
    axes = sorted(zip(along, op.rvars, strict=True), key=lambda pair: votes[pair[0]])
    return replace(op, down=down > 0, rvars=tuple(v for _, v in axes))
