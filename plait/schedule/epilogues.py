"""Products take over what is computed of their results, number by number: a bias, an activation, a
residual. The result is then written once, as what it becomes.

Comes in: loops in normal form, with calls of `PackedProduct`s. A pointwise loop is taken over where
it alone reads the product, stores at every point where it loads, and loads all else by row and
column of the product. Goes out: the call in the loop's place, so that all that it reads is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.ir.attention import Formula
from plait.ir.calls import Extern, TensorArg
from plait.ir.dtypes import b1, f32
from plait.ir.effects import updates
from plait.ir.expr import Atom, Expr, Size, coefficient, exact_div, free_symbols, product
from plait.ir.loops import (
    Buffer,
    Load,
    LoopProgram,
    Node,
    Op,
    Pointwise,
    loop_vars,
    node,
    rewrite,
    walk,
)
from plait.ir.ops import OPS
from plait.ir.packed import PackedProduct
from plait.ir.product import PRODUCT
from plait.ir.record import inline
from plait.schedule.deps import Bodies, extent, load_of, memory_roots, reads
from plait.schedule.layout import flat_index

MAX_NODES = 60
"""Of an epilogue, which is written for each vector of a tile's row."""


def take_epilogues(program: LoopProgram, bodies: Bodies) -> LoopProgram:
    """The program with every loop taken over that can be."""
    if not any(isinstance(op, Extern) and _packed(op) for op in program.ops):
        return program
    pass_ = _Pass(program, bodies)
    for k in range(len(pass_.ops)):
        pass_.extend(k)
    ops = tuple(op for op in pass_.ops if op is not None)
    return replace(program, ops=ops, buffers=pass_.buffers)


def _packed(op: Extern) -> bool:
    return isinstance(op.kernel, PackedProduct) and op.made != ()


class _Pass:
    """ops: None where one has gone. readers: of each buffer, the places of ops."""

    def __init__(self, program: LoopProgram, bodies: Bodies) -> None:
        self.ops: list[Op | None] = list(program.ops)
        self.buffers = dict(program.buffers)
        self.returned = frozenset(program.returned)
        self.memory = memory_roots(program.ops)
        self.shared = {*self.memory.values()}
        self.readers: dict[str, list[int]] = {}
        self.changes: list[tuple[int, str]] = []
        for k, op in enumerate(program.ops):
            for name in reads(op, bodies):
                self.readers.setdefault(name, []).append(k)
            self.changes += ((k, self.memory.get(n, n)) for n in updates(op))

    def extend(self, k: int) -> None:
        """Lets the product at place k take over what follows it, loop after loop."""
        op = self.ops[k]
        while isinstance(op, Extern) and _packed(op):
            (out,) = op.made
            if not self._is_own(out):
                return
            after = self._gathered(out)
            if len(after) != 1:
                return
            loop = self.ops[after[0]]
            if not isinstance(loop, Pointwise) or loop.index is not None:
                return
            made = None if self._changes(op, k, after[0]) else self._joined(op, loop)
            if made is None:
                return
            self.ops[k], k = None, after[0]
            op = self.ops[k] = made
            del self.buffers[out]

    def _is_own(self, buf: str) -> bool:
        """Whether nothing but loops and calls that name a buffer sees it."""
        return buf not in self.returned and buf not in self.shared

    def _gathered(self, out: str) -> list[int]:
        """The readers of a buffer, after those loops have gone into another one that alone reads
        them and the buffer: x * sigmoid(x) is two at first."""
        after = self.readers.get(out, [])
        while len(after) > 1:
            first, loop = after[0], self.ops[after[0]]
            if not isinstance(loop, Pointwise) or loop.index is not None:
                break
            users = self.readers.get(loop.out, [])
            user = self.ops[users[0]] if len(users) == 1 else None
            if not isinstance(user, Pointwise) or not self._is_own(loop.out):
                break
            body = inline(user.body, {loop.out: (loop.vars, loop.body)})
            same = product(map(extent, loop.vars)) == product(map(extent, user.vars))
            if not same or len(list(walk((body,)))) > MAX_NODES:
                break
            origin = tuple(dict.fromkeys((*loop.origin, *user.origin)))
            self.ops[first], self.ops[users[0]] = None, replace(user, body=body, origin=origin)
            del self.buffers[loop.out], self.readers[loop.out]
            for places in self.readers.values():
                if first in places:
                    places[:] = sorted({*places, users[0]} - {first})
        return after

    def _changes(self, op: Extern, first: int, last: int) -> bool:
        """Whether an operand is written between two places."""
        given = {self.memory.get(a.buf, a.buf) for a in op.args if isinstance(a, TensorArg)}
        return any(first < k < last and name in given for k, name in self.changes)

    def _joined(self, op: Extern, loop: Pointwise) -> Extern | None:
        """The call that makes what the loop makes; None where it cannot."""
        assert isinstance(op.kernel, PackedProduct), op
        (out,) = op.made
        body = list(walk((loop.body,)))
        if len(body) > MAX_NODES or not all(map(_is_allowed, body)):
            return None
        loads = [load_of(n) for n in body if n.op == "load"]
        place = _place(loop, [x for x in loads if x.buf == out], self.buffers[out])
        target = self.buffers[loop.out]
        if place is None or target.dtype != f32:
            return None
        strides = tuple(place.values())
        if not _same(strides, target):
            if target.fixed:
                return None
            target = replace(target, strides=strides)
        tensors = [a for a in op.args if isinstance(a, TensorArg)]
        sizes = [a for a in op.args if not isinstance(a, TensorArg)]
        shape = (sizes[0], op.kernel.columns)
        numbers: dict[Load, int] = {}
        fixed: dict[str, Buffer] = {loop.out: replace(target, fixed=True)}
        for load in dict.fromkeys(x for x in loads if x.buf != out):
            b = fixed.get(load.buf) or _following(self.buffers[load.buf], load, place)
            at = _by_row(b, load, place, op.kernel.columns)
            if at is None or b.dtype != f32:
                return None
            fixed[load.buf] = replace(b, fixed=True)
            numbers[load] = len(tensors) - 2
            tensors.append(TensorArg(load.buf, shape, at.strides, at.first))  # type: ignore[arg-type]
        kernel = replace(op.kernel, epilogue=_epilogue(op.kernel, loop.body, out, numbers))
        self.buffers |= fixed
        return replace(
            op, outs=(loop.out,), args=(*tensors, *sizes), kernel=kernel,
            origin=tuple(dict.fromkeys((*op.origin, *loop.origin))),
        )  # fmt: skip


def _is_allowed(n: Node) -> bool:
    """Whether a node is one of numbers and conditions alone."""
    if isinstance(n.attr, Load):
        return n.dtype == f32 and not n.args
    return n.dtype in (f32, b1) and (n.op == "const" or n.op in OPS)


Place = Mapping[Atom, Size]
"""How far each variable of a loop moves in the product."""


def _place(loop: Pointwise, loads: Sequence[Load], b: Buffer) -> Place | None:
    """Where a loop loads the product; None unless it is at each of its elements once."""
    (index, *others) = {x.index for x in loads}
    if others:
        return None
    flat = flat_index(b, index)
    found = _steps(flat, loop.vars)
    if found is None or found[1] != 0:
        return None
    place, _ = found
    # Dense: each variable moves as far as all that move less together.
    step: Size = 1
    moving = [v for v in loop.vars if extent(v) != 1]
    todo = {_atom(v): extent(v) for v in moving}
    while todo:
        nearest = next((a for a in todo if place[a] == step), None)
        if nearest is None:
            return None
        step = step * todo.pop(nearest)
    return place if step == product(b.shape) else None


def _atom(v: Expr) -> Atom:
    assert v.symbol is not None, f"{v} is no loop variable"
    return v.symbol


def _steps(flat: Size, vars_: Sequence[Expr]) -> tuple[dict[Atom, Size], Size] | None:
    """How far each variable moves in an address, and where that begins."""
    steps: dict[Atom, Size] = {}
    rest: Size = flat
    for v in vars_:
        step = coefficient(flat, _atom(v))
        if step is None:
            return None
        steps[_atom(v)] = step
        rest = rest - v * step
    if not isinstance(rest, int) and {_atom(v) for v in vars_} & {*free_symbols(rest)}:
        return None
    return steps, rest


def _same(strides: tuple[Size, ...], b: Buffer) -> bool:
    """Whether a buffer has these strides, as far as they count."""
    pairs = zip(b.shape, strides, b.strides, strict=True)
    return all(n == 1 or a == c for n, a, c in pairs)


def _following(b: Buffer, load: Load, place: Place) -> Buffer:
    """A buffer whose layout is free, with that of the product."""
    atoms = [e.symbol if isinstance(e, Expr) else None for e in load.index]
    if b.fixed or len({*atoms}) != len(b.shape) or not all(a in place for a in atoms):
        return b
    strides = tuple(place[a] for a in atoms if a is not None)
    numel = product(b.shape)
    largest = [n * s for n, s in zip(b.shape, strides, strict=True)]
    return replace(b, strides=strides) if numel in largest else b


@dataclass(frozen=True)
class _ByRow:
    """How far a row and a column of the product are in another buffer."""

    strides: tuple[int, int]
    first: Size


def _by_row(b: Buffer, load: Load, place: Place, columns: int) -> _ByRow | None:
    """How a buffer is loaded; None where not by row and column, or columns are apart."""
    flat = flat_index(b, load.index)
    if isinstance(flat, int):
        return _ByRow((0, 0), flat)
    steps = {a: coefficient(flat, a) for a in place}
    rest: Size = flat
    found: dict[bool, int] = {}
    for a, far in place.items():
        step = steps[a]
        if step is None:
            return None
        rest = rest - a.expr * step
        if a.extent == 1:
            continue
        near = isinstance(far, int) and far < columns
        moved = far if near else exact_div(far, columns)
        each = 0 if step == 0 else None if moved is None else exact_div(step, moved)
        if not isinstance(each, int) or each < 0 or found.setdefault(near, each) != each:
            return None
    if not isinstance(rest, int) or found.get(True, 1) not in (0, 1):
        return None
    return _ByRow((found.get(False, 0), found.get(True, 1)), rest)


def _epilogue(p: PackedProduct, body: Node, out: str, numbers: Mapping[Load, int]) -> Formula:
    """What the kernel does of its sums, then the loop's body of that."""
    known = p.epilogue
    m, n = loop_vars("m", (1 << 40, p.columns)) if known is None else known.vars
    product_ = node("load", (), Load(PRODUCT, (m, n)), f32) if known is None else known.body

    def fn(x: Node, args: tuple[Node, ...]) -> Node:
        if isinstance(x.attr, Load):
            if x.attr.buf == out:
                return product_
            return node("load", (), Load(f"given{numbers[x.attr]}", (m, n)), f32)
        return x if args == x.args else node(x.op, args, x.attr, x.dtype)

    return Formula((m, n), rewrite(body, fn, {}))
