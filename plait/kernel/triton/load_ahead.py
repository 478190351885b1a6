"""Decides which loads of a loop are under way while it works on the block before.

An assembler that counts registers likes to use each value where it is loaded, and then waits for
memory once an element. Where neighbours in memory are those of neighbouring threads, an element is
a load. So such a loop loads the next block first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.ir.expr import free_symbols, is_contiguous
from plait.ir.loops import Node, walk
from plait.kernel.triton.choose_accesses import Access
from plait.kernel.triton.layout import Layout
from plait.kernel.triton.split_rows import Span
from plait.schedule.legalize.linear import offset_of, stmt_nodes
from plait.schedule.plan import Stmt


def loads_ahead(
    layout: Layout, stmts: Sequence[Stmt], span: Span, accesses: Mapping[Node, Access]
) -> tuple[Node, ...]:
    """The loads of a pass that are a block ahead: all of them where they need nothing else, and
    none is a vector along a row."""
    linear, tile = layout.linear, layout.tile
    if not tile.looped or tile.num_stages > 1 or span != Span():
        return ()
    nodes = walk([n for s in stmts for n in stmt_nodes(s)])
    found = [n for n in nodes if n.op == "load" and layout.is_inner(n)]
    indices = [offset_of(n) for n in found]
    if any(is_contiguous(e, r) for e in indices for r in linear.rvars):
        return ()
    simple = [
        n
        for n, e in zip(found, indices, strict=True)
        if not n.args and not accesses[n].guarded and free_symbols(e).isdisjoint(linear.indirect)
    ]
    return tuple(simple)
