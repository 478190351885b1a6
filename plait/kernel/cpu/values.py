"""Values and integer expressions of one kernel as C++ variables, each defined once in the outermost
block that can.

A value is a tuple of C++ names, one a register (see expr). Blocks form a chain, one a nesting
level; a node's block is the deepest one that binds something that the node depends on. `rep`
numbers the vectors that are in flight at once: a vector value has one copy for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from plait.ir.dtypes import DType
from plait.ir.expr import Atom, Expr, Size, bounds, summands
from plait.ir.loops import Node
from plait.kernel.cpu.choose_levels import Place
from plait.kernel.cpu.expr import Parts, memory, n_parts, splat, vtype
from plait.kernel.cpu.plan_body import BodyPlan
from plait.runtime.toolchain import Isa

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

    def __init__(self, plan: BodyPlan, isa: Isa, compute: Compute) -> None:
        kernel, self.facts, self.isa, self.compute = plan.kernel, plan.vectors, isa, compute
        self.nest = nest = plan.vectors.nest
        self.lanes, self.is_vector = nest.lanes, plan.vectors.differs
        self.places, self.pass_number = plan.places, 0
        self.chain = [Block()]
        axes = (*nest.linear.vars, *nest.linear.rvars)
        self.names: dict[Atom | None, str] = {nest.tile_number: "xt"}
        self.names |= {s.symbol: f"z{k}" for k, s in enumerate(kernel.sizes)}
        self.names |= {a: f"x{k}" for k, a in enumerate(axes)}
        self.bases = {b.name: f"b{k}" for k, b in enumerate(kernel.args)}
        self.checks = {c: k + 1 for k, c in enumerate(kernel.checks)}
        self.acc_values: dict[tuple[str, int], Parts] = {}
        self.tiles: dict[tuple[Node, bool], str] = {}
        self.kept_names = {n: f"kept{k}" for k, n in enumerate(nest.kept)}
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
    def loop(self, opening: str, binds: Sequence[Atom] = ()) -> Iterator[None]:
        """A C++ block, in which these loop variables have values."""
        known, level = self.place.known, len(self.chain)
        assert all(known[a] == level for a in binds), f"{opening} is not at the planned level"
        self.chain.append(Block())
        yield
        closed = self.chain.pop()
        self.line(opening)
        self.here.lines += (*closed.lines, "}")

    def copies(self) -> Iterator[None]:
        """Once for each vector in flight, which is the present one then."""
        for rep in range(self.reps):
            self.rep = rep
            yield
        self.rep = 0

    def name(self, prefix: str = "t") -> str:
        """A new C++ name."""
        self._n_names += 1
        return f"{prefix}{self._n_names}"

    @property
    def place(self) -> Place:
        """Where the present statements stand."""
        return self.places[self.pass_number]

    def depth(self, n: Node) -> int:
        """The block in which a node is computed."""
        return self.places[self.pass_number].values[n]

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
        return n in self.nest.kept and self.nest.kept[n].by < self.pass_number

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

    def integer(self, e: Size) -> str:
        """An expression as C++ text of type i64. Divisions and the like are computed once, as early
        as possible."""
        if isinstance(e, int):
            return f"{e}l" if abs(e) >> 31 else str(e)
        parts = summands(e, self._factor, "{}l*".format)
        if e.const:
            parts.append(f"{e.const}l")
        return parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"

    def _factor(self, a: Atom) -> str:
        if a.kind == "sym":
            node = self.nest.linear.indirect.get(a)
            return self.names[a] if node is None else self.get(node)[0]
        e = a.expr
        depth = self.place.level(e)
        memo = self.chain[depth].memo
        if e not in memo:
            memo[e] = (
                self.define("i64", atom_text(a, self.integer(a.a), self.integer(a.b)), depth),
            )
        return memo[e][0]

    def pointer(self, buf: str, offset: Size) -> str:
        """A pointer to element `offset` (at lane 0, first vector in flight)."""
        terms, const = ((), offset) if isinstance(offset, int) else (offset.terms, offset.const)
        groups: dict[int, Size] = {0: const}
        for mono, c in terms:
            term = Expr(0, ((mono, c),))
            depth = self.place.level(term)
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
