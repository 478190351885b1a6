"""Kernels of products take in the loop that makes their right matrix, such as what converts weights
of 8 or 4 bits: it is made in registers, tile by tile, of what lies in memory.

Comes in: loops whose layouts are settled, and products that have taken in their readers. A loop
goes into a product if that alone reads the matrix, and no check is among what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace

from plait.ir.calls import Extern, TensorArg
from plait.ir.effects import needs
from plait.ir.expr import Atom, Expr, Size, atom_of, free_symbols, symbol, total
from plait.ir.loops import (
    Buffer,
    Load,
    LoopProgram,
    Node,
    Op,
    Pointwise,
    exprs_of,
    is_arg,
    node,
    rewrite,
    substitute_vars,
    walk,
    with_args,
)
from plait.ir.product import RIGHT, Cut, Product
from plait.ir.rules import Simplifier
from plait.schedule.deps import Bodies, Uses, load_of, roots

_MAX_NODES = 120  # of what makes an element
_MAX_GIVEN = 12  # tensors besides the factors
_LEAST_DEPTH = 32  # of a step along k


def join_operands(program: LoopProgram, bodies: Bodies) -> LoopProgram:
    """The program with loops in the kernels of the products whose right matrix they make."""
    if not any(isinstance(op, Extern) and isinstance(op.kernel, Product) for op in program.ops):
        return program
    return _Joiner(program, bodies).run()


class _Joiner:
    """The state of the pass over a program."""

    def __init__(self, program: LoopProgram, bodies: Bodies) -> None:
        self.program, self.bodies = program, bodies
        self.ops: list[Op | None] = list(program.ops)
        self.uses = Uses(program, bodies)
        self.simplify = Simplifier()

    def run(self) -> LoopProgram:
        for k, op in enumerate(self.program.ops):
            if not isinstance(op, Extern) or not isinstance(op.kernel, Product):
                continue
            how, place = op.kernel.how, self._maker(k, op)
            if not isinstance(how, Cut) or how.is_large or how.matrices or place is None:
                continue  # many tiles would make the same part of it
            if (joined := self._joined(op, op.kernel, how, place)) is not None:
                self.ops[place], self.ops[k] = None, joined
        return replace(self.program, ops=tuple(op for op in self.ops if op is not None))

    def _maker(self, k: int, call: Extern) -> int | None:
        """The place of the loop that makes the right matrix, if the call can take it in."""
        operands = [a.buf for a in _tensors(call)]
        right = operands[1]
        places = self.uses.makers.get(right, [])
        elsewhere = right in self.uses.shared or self.uses.readers.get(right) != [k]
        if elsewhere or len(places) != 1 or operands.count(right) > 1:
            return None
        (place,) = places
        loop = self.ops[place]
        if not isinstance(loop, Pointwise) or loop.index is not None:
            return None
        facts = self.bodies.of(roots(loop))
        if facts.checks or facts.size > _MAX_NODES or not facts.loads:
            return None
        if not self.uses.may_move(facts.bufs, place, k):
            return None
        return place if len({*facts.bufs, *needs(call)}) <= _MAX_GIVEN else None

    def _joined(self, call: Extern, kernel: Product, how: Cut, place: int) -> Extern | None:
        """The call with the loop in it; None where steps along k have no good length, or elements
        of the matrix do not lie one after the other."""
        loop = self.ops[place]
        assert isinstance(loop, Pointwise), loop
        left, right, *given = _tensors(call)
        sizes = tuple(n for n in (*(1,) * (3 - len(right.shape)), *right.shape) if type(n) is int)
        if len(sizes) < 3:
            return None
        depth = math.gcd(sizes[1], how.depth)
        vars_ = tuple(symbol(name, extent=n) for name, n in zip("bkj", sizes, strict=True))
        index = vars_[3 - len(right.shape) :]
        flat = total(v * s for v, s in zip(index, right.strides, strict=True)) + right.offset
        at = _digits(loop.vars, self.program.buffers[loop.out], flat)
        if at is None or depth < _LEAST_DEPTH:
            return None
        body = self.simplify(substitute_vars(loop.body, at))
        names = {a.buf: f"given{n}" for n, a in enumerate(given)}
        main = _main(body, vars_, names)
        if main is None:
            return None
        added: list[str] = []

        def renamed(n: Node, args: tuple[Node, ...]) -> Node:
            if n.op != "load":
                return with_args(n, args)
            load = load_of(n)
            if load.buf != main and load.buf not in names:
                added.append(load.buf)
                names[load.buf] = f"given{len(names)}"
            name = RIGHT if load.buf == main else names[load.buf]
            return node("load", args, Load(name, load.index, load.masked), n.dtype)

        made = Pointwise(RIGHT, vars_, rewrite(body, renamed), None, loop.origin)
        others = [a for a in call.args if not isinstance(a, TensorArg)]
        return replace(
            call,
            args=(left, self._whole(main), *given, *map(self._whole, added), *others),
            kernel=replace(kernel, right=made, how=replace(how, depth=depth)),
            origin=tuple(dict.fromkeys((*loop.origin, *call.origin))),
        )

    def _whole(self, name: str) -> TensorArg:
        b = self.program.buffers[name]
        return TensorArg(name, b.shape, b.strides, 0)


def _tensors(call: Extern) -> list[TensorArg]:
    return [a for a in call.args if isinstance(a, TensorArg)]


def _main(body: Node, vars_: Sequence[Expr], known: Container[str]) -> str | None:
    """The buffer that most of a matrix comes from: one that each k and column has other elements
    of, or bits of these. None where there is no such, or sizes are not all known."""
    _, k, j = map(atom_of, vars_)
    found = None
    own = {atom_of(v) for v in vars_}
    for n in walk((body,)):
        atoms = {a for e in exprs_of(n) if isinstance(e, Expr) for a in free_symbols(e)}
        if any(a not in own and not is_arg(a) for a in atoms):
            return None
        if n.op == "load" and load_of(n).buf not in known and {k, j} <= atoms and found is None:
            found = load_of(n).buf
    return found


def _digits(vars_: tuple[Expr, ...], b: Buffer, flat: Size) -> dict[Atom, Size] | None:
    """Variables over a dense buffer, of the element at a position."""
    found: dict[Atom, Size] = {atom_of(v): 0 for v, n in zip(vars_, b.shape, strict=True) if n == 1}
    steps = {s: (v, n) for v, s, n in zip(vars_, b.strides, b.shape, strict=True) if n != 1}
    step: Size = 1
    for _ in range(len(steps)):
        if step not in steps:
            return None
        v, n = steps[step]
        found[atom_of(v)] = flat // step % n
        step = step * n
    return found if len(found) == len(vars_) else None
