"""Values and integer expressions of one kernel as C++ variables, each defined once in the outermost
block that can.

A value is a tuple of C++ names, one a register (see expr). Blocks form a chain, one a nesting
level; a node's block is the deepest one that binds something that the node depends on. `rep`
numbers the vectors that are in flight at once: a vector value has one copy for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from plait.ir.checks import Bound, Check
from plait.ir.dtypes import DType, i32, i64
from plait.ir.expr import Atom, Expr, Size, bounds, coefficient, free_symbols, may_be_zero
from plait.ir.loops import Node, check_of, const, node, walk
from plait.kernel.cpu.expr import (
    Parts,
    ctype,
    literal,
    mask_from,
    mask_part,
    n_parts,
    scalar_cast,
    scalar_op,
    splat,
    vector_bitcast,
    vector_cast,
    vector_op,
    vtype,
)
from plait.kernel.cpu.passes import Nest
from plait.runtime.toolchain import Isa
from plait.schedule.legalize.linear import dependences, extent

_ORDER = {"lt": (True, False), "le": (False, False), "gt": (True, True), "ge": (False, True)}
_SIGN = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}


class Loader(Protocol):
    """Writes loads (the part of access that values need)."""

    def load(self, n: Node) -> Parts:
        """The value of a load node."""
        ...

    def kept(self, n: Node) -> Parts:
        """A value that an earlier pass kept in its row buffer."""
        ...

    def keep(self, n: Node, parts: Parts) -> None:
        """Writes a value into its row buffer."""
        ...

    def lane_values(self, e: Size) -> Parts:
        """An integer expression that is no affine function of the lane, as i64 lanes."""
        ...


class Block:
    """Text of one nesting level and what is defined in it."""

    __slots__ = ("lines", "memo")

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.memo: dict[object, Parts] = {}


class Values:
    """The state of writing one kernel: blocks, names, and the vector copy that is being written."""

    def __init__(self, nest: Nest, isa: Isa, checks: Sequence[Check]) -> None:
        self.nest, self.isa = nest, isa
        self.lanes = nest.lanes
        self.deps = dependences(nest.linear)
        self.chain: list[Block] = []
        self.depth_of: dict[object, int] = {}
        self.entered = 0  # the innermost block that runs only if the loops in it do
        self._reads: dict[Node, bool] = {}
        self.names: dict[Atom, str] = {}
        self.bases: dict[str, str] = {}
        self.checks = {c: k + 1 for k, c in enumerate(checks)}
        self.acc_values: dict[tuple[str, int], Parts] = {}
        self.vector_roots: set[object] = set() if self.lanes == 1 else {nest.axis}
        self.keep_names: dict[Node, str] = {}
        self.keep_strides: list[tuple[Atom, Size]] = []
        self.pass_number = 0
        self.rep, self.reps, self.tail = 0, 1, False
        self.loader: Loader
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

    def is_vector(self, n: Node) -> bool:
        """Whether a node differs between lanes."""
        return not self.vector_roots.isdisjoint(self.deps(n))

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
            kept = self.nest.kept.get(n, self.pass_number) < self.pass_number
            todo = (
                ()
                if kept or self._lanes_below(n) is not None
                else [a for a in n.args if self.key(a) not in self.chain[self.depth(a)].memo]
            )
            if todo:
                stack.extend(todo)
                continue
            stack.pop()
            memo[self.key(n)] = self.loader.kept(n) if kept else self._compute(n)
            if self.nest.kept.get(n) == self.pass_number:
                self.loader.keep(n, memo[self.key(n)])
        return self.chain[self.depth(root)].memo[self.key(root)]

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

    def _compute(self, n: Node) -> Parts:
        depth, vector = self.depth(n), self.is_vector(n)
        if n.op == "const":
            assert isinstance(n.attr, (bool, int, float))
            return (literal(n.attr, n.dtype),)
        if n.op == "acc":
            return self._acc(n)
        if n.op == "load":
            return self.loader.load(n)
        if n.op == "index":
            return self._index(n)
        if n.op == "bounded":
            return self._bounded(n)
        if n.op == "nonzero":
            return self._nonzero(n)
        if not vector:
            return (self.define(ctype(n.dtype), self._scalar(n), depth),)
        return self.define_parts(n.dtype, self._vector(n), depth)

    def _acc(self, n: Node) -> Parts:
        """The present value of an accumulator; a running one is copied, because it goes on
        changing."""
        assert isinstance(n.attr, str)
        vector = self.is_vector(n)
        parts = self.acc_values[n.attr, self.rep if vector else 0]
        type_ = vtype(n.dtype) if vector else ctype(n.dtype)
        return tuple(self.define(type_, p, self.depth(n)) for p in parts)

    def _scalar(self, n: Node) -> str:
        args = tuple(self.get(a)[0] for a in n.args)
        if n.op == "cast":
            return scalar_cast(args[0], n.args[0].dtype, n.dtype)
        if n.op == "bitcast":
            return f"__builtin_bit_cast({ctype(n.dtype)}, {args[0]})"
        return scalar_op(n.op, n.args[-1].dtype, args, n.dtype)

    def _vector(self, n: Node) -> Parts:
        mask = self._lanes_below(n)
        if mask is not None:
            return (mask,)
        if n.op == "philox" and isinstance(n.args[2].attr, int):
            return self._philox(n, n.args[2].attr)
        args = tuple(self.vector(a) for a in n.args)
        if n.op == "cast":
            return vector_cast(args[0], n.args[0].dtype, n.dtype)
        if n.op in ("min", "max") and n.dtype.name in ("f32", "f64"):
            return self._bound(n, args)
        if n.op == "bitcast":
            return vector_bitcast(args[0], n.dtype)
        return vector_op(n.op, n.args[-1].dtype, args, n.dtype)

    def _lanes_below(self, n: Node) -> str | None:
        """A comparison of positions that is true for the first lanes only or for the last only."""
        if n.op not in _ORDER or not self.is_vector(n):
            return None
        strict, swapped = _ORDER[n.op]
        ends = [_affine(a) for a in (n.args[::-1] if swapped else n.args)]
        if ends[0] is None or ends[1] is None:
            return None
        room = ends[1] - ends[0]  # true where this is > 0, or >= 0
        step = None if self.varies(room) else coefficient(room, self.axis)
        if step not in (1, -1):
            return None
        first = room + (0 if strict else 1)  # true where > 0
        if step == -1:
            return f"lanes_below({self.integer(first)}{self.rep_offset(-1)})"
        return f"~lanes_below(1 - ({self.integer(first)}{self.rep_offset(1)}))"

    def _philox(self, n: Node, word: int) -> Parts:
        """One word of a block of four, which other words of the same block share."""
        seed, counter, depth = n.args[0], n.args[1], self.depth(n)
        block = word >> 2
        memo, key = self.chain[depth].memo, ("philox", seed, counter, block, self.rep)
        if key not in memo:
            pairs = zip(self.vector(seed), self.vector(counter), strict=True)
            memo[key] = tuple(
                self.define("vphilox", f"v_philox4({s}, {c}, splat_i64({block}l))", depth)
                for s, c in pairs
            )
        return tuple(f"{p}.word[{word & 3}]" for p in memo[key])

    def _bound(self, n: Node, args: tuple[Parts, ...]) -> Parts:
        """min or max of floats: one instruction where one side is a constant that is no NaN."""
        for k, other in ((0, 1), (1, 0)):
            c = n.args[other]
            if c.op == "const" and c.attr == c.attr:
                name = {"min": "least", "max": "most"}[n.op]
                return tuple(
                    f"{name}_{n.dtype.name}({y}, {x})"
                    for x, y in zip(args[k], args[other], strict=True)
                )
        return vector_op(n.op, n.dtype, args, n.dtype)

    def _bounded(self, n: Node) -> Parts:
        """The run-time check of an index: outside [0, size) the kernel fails and the value is 0."""
        assert isinstance(n.attr, Bound)
        depth, size = self.depth(n), self.integer(n.attr.size)
        if not self.is_vector(n):
            x = self.get(n.args[0])[0]
            bad = self.define("bool", f"(u64){x} >= (u64)({size})", depth)
            self._fail_if(n, bad)
            return (self.define("i64", f"{bad} ? 0 : {x}", depth),)
        if isinstance(n.attr.size, int) and n.attr.size >> 30 == 0:
            return self._bounded_short(n, n.attr.size)
        lanes = self.vector(n.args[0])
        limit = self.define("vu64", f"splat_u64((u64)({size}))", depth)
        bads = tuple(f"((vu64){p} >= {limit})" for p in lanes)
        bad_lanes = self.define("vi32", mask_from(bads, n.dtype), depth)
        self._fail_if(n, bad_lanes)
        zero = "(vi64){}"
        return self.define_parts(
            n.dtype,
            tuple(
                f"{mask_part(bad_lanes, n.dtype, k)} ? {zero} : {p}" for k, p in enumerate(lanes)
            ),
            depth,
        )

    def _bounded_short(self, n: Node, size: int) -> Parts:
        """The check in 32 bits: narrowing saturates, so what is outside stays outside."""
        depth = self.depth(n)
        x = _unwrapped(n.args[0], size)
        low, high = self.vector(n.args[0] if x is None else x)
        at = self.define("vi32", f"sat_i32({low}, {high})", depth)
        if x is not None:
            at = self.define("vi32", f"{at} < 0 ? {at} + {size} : {at}", depth)
        bad = self.define("vi32", f"(vi32)((vu32){at} >= {size}u)", depth)
        self._fail_if(n, bad)
        good = self.define("vi32", f"{at} & ~{bad}", depth)
        self.chain[depth].memo["short", n, self.rep] = (good,)
        return self.define_parts(n.dtype, vector_cast((good,), i32, i64), depth)

    def short(self, n: Node) -> str | None:
        """The lanes of an i64 vector as a vi32, where they are known in that form."""
        self.get(n)
        found = self.chain[self.depth(n)].memo.get(("short", n, self.rep))
        return found[0] if found else None

    def _nonzero(self, n: Node) -> Parts:
        """The run-time check of a divisor; the value stays what it is, since dividing by 0 gives 0
        here."""
        parts = self.get(n.args[0])
        if not self.is_vector(n):
            self._fail_if(n, f"{parts[0]} == 0")
            return parts
        parts = self.vector(n.args[0])
        zeros = mask_from(tuple(f"({p} == 0)" for p in parts), n.dtype)
        self._fail_if(n, zeros)
        return parts

    def _fail_if(self, n: Node, bad: str) -> None:
        """Reports n's check where `bad` holds: a bool, or a vi32 mask of lanes if n is a vector."""
        check = check_of(n)
        assert check is not None
        depth, report = self.depth(n), f"return {self.checks[check]};"
        if not self.is_vector(n):
            also = f" && {self.get(n.args[1])[0]}" if len(n.args) > 1 else ""
            self.line(f"if ({bad}{also}) {report}", depth)
            return
        also = f" & {self.vector(n.args[1])[0]}" if len(n.args) > 1 else ""
        self.line(f"if (any({bad}{also}{' & lm' if self.tail else ''})) {report}", depth)

    def _index(self, n: Node) -> Parts:
        e = n.attr
        assert isinstance(e, (int, Expr))
        depth = self.depth(n)
        if not self.is_vector(n):
            return (self.define("i64", self.integer(e), depth),)
        step = None if self.varies(e) else coefficient(e, self.axis)
        if step is None:
            return self.loader.lane_values(e)
        first = self.define("i64", f"{self.integer(e)}{self.rep_offset(step)}", depth)
        c = self.integer(step)
        return self.define_parts(
            n.dtype, (f"iota_lo({first}, {c})", f"iota_hi({first}, {c})"), depth
        )

    # -------------------------------------------------------------------------- integer expressions
    @property
    def axis(self) -> Atom:
        """The vectorised loop variable."""
        assert self.nest.axis is not None
        return self.nest.axis

    @property
    def tile(self) -> Atom:
        """The loop variable along which tiles are turned around."""
        assert self.nest.tile is not None
        return self.nest.tile

    def rep_offset(self, step: Size) -> str:
        """Text that moves an index by `step` a lane from the first vector in flight to the present
        one."""
        if self.rep == 0 or step == 0:
            return ""
        moved = step * (self.rep * self.lanes)
        return f" + {moved}" if isinstance(moved, int) else f" + ({self.integer(moved)})"

    def varies(self, e: Size) -> bool:
        """Whether a data-dependent index in e differs between lanes."""
        where = self.nest.linear.indirect
        return any(a in where and self.is_vector(where[a]) for a in free_symbols(e))

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


def _unwrapped(w: Node, size: int) -> Node | None:
    """x where w is `x + size if x < 0 else x`: an index that may count from the end."""
    if w.op != "where":
        return None
    x, end = w.args[2], const(size, i64)
    sums = (node("add", (x, end)), node("add", (end, x)))
    return x if w.args[0] == node("lt", (x, const(0, i64))) and w.args[1] in sums else None


def _affine(n: Node) -> Size | None:
    """The integer expression that an i64 node is known to be."""
    if n.op == "index":
        assert isinstance(n.attr, (int, Expr))
        return n.attr
    return n.attr if n.op == "const" and isinstance(n.attr, int) else None


def atom_text(a: Atom, x: str, y: str) -> str:
    """A division, remainder, minimum, maximum or comparison of two i64 texts."""
    if a.kind in ("div", "mod"):
        if bounds(a.a)[0] >= 0:
            return f"({x}) {'/' if a.kind == 'div' else '%'} ({y})"
        return f"{a.kind}_floor({x}, {y})"
    if a.kind in ("min", "max"):
        return f"({x}) {'<' if a.kind == 'min' else '>'} ({y}) ? ({x}) : ({y})"
    return f"({x}) {_SIGN[a.kind]} ({y})"
