"""A kernel in linear form: what kernel targets work on.

Every load and store of a `LinearKernel` has one linear element offset. The passes beside this file
give and take it; what they share stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from plait.ir.expr import Atom, Expr, Size, free_symbols, product
from plait.ir.loops import Buffer, Load, Node, integer, rewrite, walk
from plait.schedule.plan import Reduce, Stmt, Store


@dataclass(frozen=True)
class LinearKernel:
    """vars, rvars: loop variables, outermost first. stmts: as in Kernel, with one-element (linear)
    indices.
    indirect: symbol `@k` in an offset -> the i64 node whose value it is. buffers: by name, position
    in the argument list. hints: plausible values of size symbols.
    by_row: a row gives the same bits however many rows there are, and whatever is computed beside
    it."""

    vars: tuple[Atom, ...]
    rvars: tuple[Atom, ...]
    stmts: tuple[Stmt, ...]
    indirect: Mapping[Atom, Node]
    buffers: Mapping[str, Buffer]
    hints: Mapping[str, int]
    by_row: bool = False

    def roots(self) -> list[Node]:
        """Every node that a statement holds."""
        return [n for s in self.stmts for n in stmt_nodes(s)]


def stmt_nodes(s: Stmt) -> tuple[Node, ...]:
    """The nodes of a statement: value, indices, mask."""
    if isinstance(s, Reduce):
        return (s.value,)
    return (s.value, *s.index_args, *(() if s.mask is None else (s.mask,)))


def offset_of(n: Node) -> Size:
    """The linear offset of a load in a LinearKernel."""
    assert isinstance(n.attr, Load), n
    return n.attr.index[0]


def extent(a: Atom) -> Size:
    """Number of values of a loop variable."""
    assert a.extent is not None, a
    return a.extent


def trip_count(axes: tuple[Atom, ...]) -> Size:
    """Number of points over axes."""
    return product(extent(a) for a in axes)


def blocks(n: Size, size: int) -> Size:
    """How many blocks of `size` cover n points."""
    return (n + (size - 1)) // size


def position(linear: LinearKernel) -> Node:
    """The row-major number of a point among those of the reduced axes."""
    out: Size = 0
    for a in linear.rvars:
        out = out * extent(a) + a.expr
    return integer(out)


def offsets_of(linear: LinearKernel) -> list[Size]:
    """Every integer expression over loop variables in the kernel."""
    out = [s.index[0] for s in linear.stmts if isinstance(s, Store)]
    for n in walk(linear.roots()):
        if n.op == "load":
            out.append(offset_of(n))
        elif n.op == "index":
            assert isinstance(n.attr, (int, Expr)), n
            out.append(n.attr)
    return list(dict.fromkeys(out))


def map_stmt(s: Stmt, fn: Callable[[Node], Node]) -> Stmt:
    """s with fn applied to each of its nodes."""
    if isinstance(s, Reduce):
        return replace(s, value=fn(s.value))
    mask = None if s.mask is None else fn(s.mask)
    return replace(s, value=fn(s.value), index_args=tuple(fn(a) for a in s.index_args), mask=mask)


def map_nodes(linear: LinearKernel, fn: Callable[[Node, tuple[Node, ...]], Node]) -> LinearKernel:
    """The kernel with fn applied to each node and its new arguments, arguments first."""
    memo: dict[Node, Node] = {}
    stmts = tuple(map_stmt(s, lambda n: rewrite(n, fn, memo)) for s in linear.stmts)
    indirect = {a: rewrite(n, fn, memo) for a, n in linear.indirect.items()}
    return replace(linear, stmts=stmts, indirect=indirect)


def dependences(linear: LinearKernel) -> Callable[[Node], frozenset[object]]:
    """A function from a node to what it depends on: loop variables (Atoms) and accumulators (their
    names)."""
    loops = frozenset((*linear.vars, *linear.rvars))
    memo: dict[Node, frozenset[object]] = {}

    def of_expr(e: Size) -> frozenset[object]:
        return frozenset(a for a in free_symbols(e) if a in loops)

    def deps(root: Node) -> frozenset[object]:
        if root in memo:
            return memo[root]
        for n in walk((root,)):
            if n in memo:
                continue
            out: frozenset[object] = frozenset().union(*(memo[a] for a in n.args))
            if n.op == "load":
                out |= of_expr(offset_of(n))
            elif n.op == "index":
                assert isinstance(n.attr, (int, Expr)), n
                out |= of_expr(n.attr)
            elif n.op == "acc":
                out |= {n.attr}
            memo[n] = out
        return memo[root]

    return deps
