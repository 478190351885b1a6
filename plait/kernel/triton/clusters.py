"""Rows that the programs of a cluster hold together: each holds a part, and tells the others what
that is reduced to.

They tell it through memory that they write anyway: the first results of a part hold what the part
is reduced to until every program has read it. All loads come before: what is written may lie where
something was read from.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.ir.expr import Size, coefficient, substitute
from plait.ir.loops import walk
from plait.ir.reductions import REDUCTIONS
from plait.schedule.legalize.linear import LinearKernel, dependences
from plait.schedule.plan import Reduce, Store

WORD = 4
"""Bytes of what a part is reduced to."""


@dataclass(frozen=True)
class Exchange:
    """Where parts of rows tell each other what they are reduced to.

    buf: the buffer. offset: of the first element of a row. step: elements from one point of a row
    to the next. pieces: elements that hold one word.
    """

    buf: str
    offset: Size
    step: int
    pieces: int


def exchange_of(linear: LinearKernel) -> Exchange | None:
    """How programs can hold a kernel's rows together, or None."""
    reductions = [s for s in linear.stmts if isinstance(s, Reduce)]
    stores = [s for s in linear.stmts if isinstance(s, Store)]
    if len(linear.rvars) != 1 or not all(map(_is_told, reductions)):
        return None
    if any(s.mode != "store" or s.index_args or s.segment for s in stores):
        return None
    deps = dependences(linear)
    loads = [n for n in walk(linear.roots()) if n.op == "load"]
    if linear.indirect or any(n.args or any(isinstance(d, str) for d in deps(n)) for n in loads):
        return None
    found = (_exchange(linear, s) for s in stores if s.full and s.mask is None)
    return next((e for e in found if e), None)


def n_elements(linear: LinearKernel, exchange: Exchange) -> int:
    """Elements of each part that hold what it is reduced to."""
    return exchange.pieces * sum(isinstance(s, Reduce) for s in linear.stmts)


def _is_told(s: Reduce) -> bool:
    """Whether what parts are reduced to is a word each, and together what the row is."""
    row = REDUCTIONS[s.kind]
    plain = row.merges and not row.extreme and not (s.inner or s.running or s.segment)
    return plain and s.value.dtype.nbytes == WORD


def _exchange(linear: LinearKernel, s: Store) -> Exchange | None:
    (r,) = linear.rvars
    step = coefficient(s.index[0], r)
    nbytes = linear.buffers[s.buf].dtype.nbytes
    if not isinstance(step, int) or step == 0 or nbytes > WORD:
        return None
    return Exchange(s.buf, substitute(s.index[0], {r: 0}), step, WORD // nbytes)
