"""Values and integer expressions of one kernel as C++ variables, each defined once in the outermost
block that can.

A value is a tuple of C++ names, one a register (see expr). Blocks form a chain, one a nesting
level; a node's block is the deepest one that binds something that the node depends on. `rep`
numbers the vectors that are in flight at once: a vector value has one copy for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

from plait.ir.checks import Check
from plait.ir.dtypes import DType
from plait.ir.expr import Atom, Expr, Size, bounds, free_symbols, may_be_zero
from plait.ir.loops import Node, walk
from plait.kernel.cpu.expr import Parts, memory, n_parts, splat, vtype
from plait.kernel.cpu.vectorize import Vectors
from plait.runtime.toolchain import Isa
from plait.schedule.legalize.linear import extent

_SIGN = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}


Compute: TypeAlias = Callable[["Values", Node], Parts]
"""Writes down the value of a node whose arguments are known."""


class Block:
    """Text of one nesting level and what is defined in it."""

    __slots__ = ("lines", "memo")

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.memo: dict[object, Parts] = {}


class Values:
    """The state of writing one kernel: blocks, names, and the vector copy that is being written."""

    def __init__(self, facts: Vectors, isa: Isa, checks: Sequence[Check], compute: Compute) -> None:
        self.facts, self.nest, self.isa, self.compute = facts, facts.nest, isa, compute
        self.lanes = self.nest.lanes
        self.is_vector, self.deps = facts.differs, facts.nest.deps
        self.chain: list[Block] = []
        self.depth_of: dict[object, int] = {}
        self.entered = 0  # the innermost block that runs only if the loops in it do
        self._reads: dict[Node, bool] = {}
        self.names: dict[Atom, str] = {}
        self.bases: dict[str, str] = {}
        self.checks = {c: k + 1 for k, c in enumerate(checks)}
        self.acc_values: dict[tuple[str, int], Parts] = {}
        self.tiles: dict[tuple[Node, bool], str] = {}
        self.keep_names: dict[Node, str] = {}
        self.keep_strides: list[tuple[Atom, Size]] = []
        self.pass_number = 0
        self.rep, self.reps, self.tail = 0, 1, False
        self._n_names = 0

    # --------------------------------------------------------------------------------------- blocks
    @property
    def here(self) -> Block:
        """The innermost open block."""
        return self.chain[-1]

    def line(self, text: str, depth: int = -1) -> None:
        """Appends a line to a block (the innermost by default)."""
        self.chain[depth].lines.append(text)

    @contextmanager
    def block(self) -> Iterator[None]:
        """A level of nesting without text of its own."""
        self.chain.append(Block())
        yield
        self.chain.pop()

    @contextmanager
    def loop(self, opening: str, binds: Sequence[Atom]) -> Iterator[None]:
        """A C++ block, in which these loop variables have values."""
        self.chain.append(Block())
        for a in binds:
            self.depth_of[a] = len(self.chain) - 1
        yield
        closed = self.chain.pop()
        self.here.lines += [opening, *closed.lines, "}"]
        for a in binds:
            del self.depth_of[a]

    @contextmanager
    def nested(self, loops: Sequence[tuple[Atom, str]]) -> Iterator[None]:
        """Several loops, each in the one before."""
        if not loops:
            yield
            return
        with self.loop(loops[0][1], (loops[0][0],)), self.nested(loops[1:]):
            yield

    def maybe(self, opening: str | None) -> AbstractContextManager[None]:
        """A C++ block, or nothing."""
        return nullcontext() if opening is None else self.loop(opening, ())

    @contextmanager
    def unless_empty(self, axes: Sequence[Atom]) -> Iterator[None]:
        """A block that runs only if these loops have points. What reads memory or checks a value,
        which is defined outside of loops where it can be, is not defined outside of this block."""
        maybe = [self.integer(n) for n in map(extent, axes) if may_be_zero(n)]
        before = self.entered
        with self.maybe(f"if ({' && '.join(f'{n} > 0' for n in maybe)}) {{" if maybe else None):
            if maybe:
                self.entered = len(self.chain) - 1
            yield
        self.entered = before

    def name(self, prefix: str = "t") -> str:
        """A new C++ name."""
        self._n_names += 1
        return f"{prefix}{self._n_names}"

    def depth(self, n: Node) -> int:
        """The block in which a node is computed: the outermost one that knows what it depends
        on."""
        known = max((self.depth_of[d] for d in self.deps(n)), default=0)
        return max(known, self.entered) if self.entered > known and self._may_fault(n) else known

    def _may_fault(self, root: Node) -> bool:
        """Whether a node needs a load or a check."""
        if root not in self._reads:
            for n in walk((root,)):
                here = n.op in ("load", "bounded", "nonzero")
                self._reads[n] = here or any(self._reads[a] for a in n.args)
        return self._reads[root]

    def key(self, n: Node) -> object:
        """What a node's value is remembered by."""
        return (n, self.rep) if self.is_vector(n) else (n, 0)

    # --------------------------------------------------------------------------------------- values
    def get(self, root: Node) -> Parts:
        """The value of a node: scalar (one part) unless is_vector(root)."""
        stack = [root]
        while stack:
            n = stack[-1]
            memo = self.chain[self.depth(n)].memo
            if self.key(n) in memo:
                stack.pop()
                continue
            known = self.is_kept(n) or self.facts.first_lanes(n) is not None
            args = () if known else n.args
            todo = [a for a in args if self.key(a) not in self.chain[self.depth(a)].memo]
            if todo:
                stack.extend(todo)
                continue
            stack.pop()
            memo[self.key(n)] = self.compute(self, n)
        return self.chain[self.depth(root)].memo[self.key(root)]

    def is_kept(self, n: Node) -> bool:
        """Whether an earlier pass kept a node's value in a row buffer."""
        return self.nest.kept.get(n, self.pass_number) < self.pass_number

    def vector(self, n: Node) -> Parts:
        """The value of a node in every lane."""
        parts = self.get(n)
        return parts if self.is_vector(n) else self.splat(n, parts)

    def splat(self, n: Node, parts: Parts) -> Parts:
        """A scalar node's value copied into every lane, once."""
        memo = self.chain[self.depth(n)].memo
        found = memo.get(("splat", n))
        if found is None:
            one = self.define(vtype(n.dtype), splat(parts[0], n.dtype)[0], self.depth(n))
            found = memo["splat", n] = (one,) * n_parts(n.dtype)
        return found

    def define(self, type_: str, text: str, depth: int = -1) -> str:
        """A new constant in a block."""
        name = self.name()
        self.line(f"{type_} const {name} = {text};", depth)
        return name

    def define_parts(self, d: DType, texts: Parts, depth: int = -1) -> Parts:
        """A new vector value in a block."""
        return tuple(self.define(vtype(d), t, depth) for t in texts)

    # -------------------------------------------------------------------------- integer expressions
    def short(self, n: Node) -> str:
        """The lanes of a checked index as a vi32."""
        parts = self.get(n)
        depth, key = self.depth(n), ("short", n, self.rep)
        memo = self.chain[depth].memo
        if key not in memo:  # an earlier pass kept it, in 64 bits
            memo[key] = (self.define("vi32", f"sat_i32({', '.join(parts)})", depth),)
        return memo[key][0]

    def rep_offset(self, step: Size) -> str:
        """Text that moves an index by `step` a lane from the first vector in flight to the present
        one."""
        if self.rep == 0 or step == 0:
            return ""
        moved = step * (self.rep * self.lanes)
        return f" + {moved}" if isinstance(moved, int) else f" + ({self.integer(moved)})"

    def expr_depth(self, e: Size) -> int:
        """The block in which an expression is known."""
        return max((self._symbol_depth(a) for a in free_symbols(e)), default=0)

    def _symbol_depth(self, a: Atom) -> int:
        node = self.nest.linear.indirect.get(a)
        return self.depth_of.get(a, 0) if node is None else self.depth(node)

    def integer(self, e: Size) -> str:
        """An expression as C++ text of type i64. Divisions and the like are computed once, as early
        as possible."""
        if isinstance(e, int):
            return f"{e}l" if abs(e) >> 31 else str(e)
        parts = []
        for mono, c in e.terms:
            factors = [self._factor(a) for a in mono]
            if c != 1:
                factors.insert(0, f"{c}l")
            parts.append("*".join(factors))
        if e.const:
            parts.append(f"{e.const}l")
        return parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"

    def _factor(self, a: Atom) -> str:
        if a.kind == "sym":
            node = self.nest.linear.indirect.get(a)
            return self.names[a] if node is None else self.get(node)[0]
        e = a.expr
        depth = self.expr_depth(e)
        memo = self.chain[depth].memo
        if e not in memo:
            memo[e] = (
                self.define("i64", atom_text(a, self.integer(a.a), self.integer(a.b)), depth),
            )
        return memo[e][0]

    def pointer(self, buf: str, offset: Size) -> str:
        """A pointer to element `offset` (at lane 0, first vector in flight)."""
        groups: dict[int, Size] = {}
        if isinstance(offset, int):
            groups[0] = offset
        else:
            if offset.const:
                groups[0] = offset.const
            for mono, c in offset.terms:
                term = Expr(0, ((mono, c),))
                depth = self.expr_depth(term)
                groups[depth] = groups.get(depth, 0) + term
        pointer: str = self.bases[buf]
        total: Size = 0
        type_ = memory(self.nest.linear.buffers[buf].dtype)
        for depth in sorted(groups):
            if groups[depth] == 0:
                continue
            total = total + groups[depth]
            key = ("pointer", buf, total)
            memo = self.chain[depth].memo
            if key not in memo:
                memo[key] = (
                    self.define(f"{type_}*", f"{pointer} + {self.integer(groups[depth])}", depth),
                )
            pointer = memo[key][0]
        return pointer


def atom_text(a: Atom, x: str, y: str) -> str:
    """A division, remainder, minimum, maximum or comparison of two i64 texts."""
    if a.kind in ("div", "mod"):
        if bounds(a.a)[0] >= 0:
            return f"({x}) {'/' if a.kind == 'div' else '%'} ({y})"
        return f"{a.kind}_floor({x}, {y})"
    if a.kind in ("min", "max"):
        return f"({x}) {'<' if a.kind == 'min' else '>'} ({y}) ? ({x}) : ({y})"
    return f"({x}) {_SIGN[a.kind]} ({y})"
