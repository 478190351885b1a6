"""Kernels of products take in the loops that read what they make: an element is finished where it
was computed, and the product itself never reaches memory.

Comes in: loops that are inlined as far as that pays, with their layouts. A product gives way to the
loops only if all that read it are pointwise and go over its elements once, in any shape. It is
computed where the first of them stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.ir.calls import Extern, TensorArg
from plait.ir.dtypes import b1
from plait.ir.effects import defines, needs, updates
from plait.ir.expr import Atom, Expr, Size, atom_of, coefficient, free_symbols, substitute, total
from plait.ir.loops import (
    Load,
    LoopProgram,
    Node,
    Op,
    Pointwise,
    exprs_of,
    fences,
    is_arg,
    node,
    rewrite,
    substitute_vars,
    walk,
    with_args,
)
from plait.ir.product import Product
from plait.ir.rules import Simplifier
from plait.schedule.deps import Bodies, extent, load_of, memory_roots, reads, roots

_MAX_RESULTS = 4
_MAX_GIVEN = 8  # tensors that a kernel's results may load


def join_readers(program: LoopProgram, bodies: Bodies) -> LoopProgram:
    """The program with loops in the kernels of the products that they read."""
    if not any(isinstance(op, Extern) and isinstance(op.kernel, Product) for op in program.ops):
        return program
    return _Joiner(program, bodies).run()


@dataclass(frozen=True, slots=True)
class _Reader:
    """A loop that reads a product. op: its place; at: its variables over those of the product."""

    op: int
    loop: Pointwise
    at: dict[Atom, Size]


class _Joiner:
    """Goes over a program once."""

    def __init__(self, program: LoopProgram, bodies: Bodies) -> None:
        self.program, self.bodies = program, bodies
        self.ops: list[Op | None] = list(program.ops)
        self.readers: dict[str, list[int]] = {}
        self.made: dict[str, int] = {}
        self.changed: dict[str, list[int]] = {}
        self.memory = memory_roots(program.ops)
        self.fences = fences(program.ops)
        self.shared = {*program.returned, *self.memory, *self.memory.values()}
        self.simplify = Simplifier()
        for k, op in enumerate(program.ops):
            for name in reads(op, bodies):
                self.readers.setdefault(name, []).append(k)
            for name in defines(op):
                self.made[name] = k
            for name in updates(op):
                self.changed.setdefault(self.memory.get(name, name), []).append(k)

    def run(self) -> LoopProgram:
        for k, op in enumerate(self.program.ops):
            if (
                isinstance(op, Extern)
                and isinstance(op.kernel, Product)
                and op.kernel.cut.parts == 1
            ):
                self._grow(k, op)
        ops = tuple(op for op in self.ops if op is not None)
        return replace(self.program, ops=ops)

    def _grow(self, k: int, call: Extern) -> None:
        """Gives the call at k the readers of its results, and theirs, while that can be."""
        assert isinstance(call.kernel, Product), call
        todo = list(call.kernel.results)
        while todo:
            own = todo.pop()
            readers = self._readers(k, call, own)
            if readers:
                for r in readers:
                    self.ops[r.op] = None
                self.ops[k] = None
                k = readers[0].op
                call, made = self._joined(call, own, readers)
                self.ops[k] = call
                todo += made

    def _readers(self, k: int, call: Extern, own: Pointwise) -> list[_Reader]:
        """All that read a result, if it can give way to them."""
        assert isinstance(call.kernel, Product), call
        out, n_others = own.out, len(call.made) - 1
        places = self.readers.get(out, [])
        if out in self.shared or not 0 < len(places) <= _MAX_RESULTS - n_others:
            return []
        first = places[0]
        if any(k < at < first for at in self.fences) or self._is_changed(needs(call), k, first):
            return []
        if any(at < first for o in call.made if o != out for at in self.readers.get(o, ())):
            return []
        found: list[_Reader] = []
        given = {*needs(call)}
        for place in places:
            loop = self.ops[place]
            at = self._at(own, loop) if isinstance(loop, Pointwise) else None
            if not isinstance(loop, Pointwise) or at is None:
                return []
            others = {*self.bodies.of(roots(loop)).bufs} - {out}
            late = any(self.made.get(name, -1) >= first for name in others)
            if late or self._is_changed(tuple(others), first, place) or self._is_piece(loop):
                return []
            if any(first < f < place for f in self.fences) or not others.isdisjoint(call.made):
                return []
            given |= others
            found.append(_Reader(place, loop, at))
        return found if len(given) <= _MAX_GIVEN else []

    def _is_changed(self, names: Sequence[str], after: int, before: int) -> bool:
        """Whether something is updated in place between two ops."""
        if not self.changed:
            return False
        found = (self.changed.get(self.memory.get(n, n), ()) for n in names)
        return any(after < at < before for places in found for at in places)

    def _is_piece(self, loop: Pointwise) -> bool:
        """Whether a loop is one of several that make a buffer, or makes what a kernel of a product
        does not store."""
        b = self.program.buffers[loop.out]
        return loop.index is not None or loop.out in self.changed or b.dtype == b1

    def _at(self, own: Pointwise, loop: Pointwise) -> dict[Atom, Size] | None:
        """A loop's variables over those of the result that it reads at one place."""
        assert own.index is not None, own
        facts = self.bodies.of(roots(loop))
        if facts.checks or any(load_of(n).masked for n in facts.loads):
            return None
        places = {load_of(n).index for n in facts.loads if load_of(n).buf == own.out}
        if len(places) != 1:
            return None
        return _inverted(loop.vars, places.pop(), own.index, self.program.buffers[own.out].shape)

    def _joined(
        self, call: Extern, own: Pointwise, readers: Sequence[_Reader]
    ) -> tuple[Extern, list[Pointwise]]:
        """The call with results of these readers in place of one, and those results."""
        assert isinstance(call.kernel, Product), call
        given = [a for a in call.args if isinstance(a, TensorArg)]
        names = {a.buf: f"given{n}" for n, a in enumerate(given[2:])}
        known = len(names)
        made = [self._result(own, r, names) for r in readers]
        for name in list(names)[known:]:
            b = self.program.buffers[name]
            given.append(TensorArg(name, b.shape, b.strides, 0))
        results = (*(r for r in call.kernel.results if r is not own), *made)
        outs = tuple(r.out for r in results)
        origin = tuple(dict.fromkeys((*call.origin, *(o for r in made for o in r.origin))))
        sizes = _symbols(results, given, [self.program.buffers[o].strides for o in outs])
        kernel = replace(call.kernel, results=results)
        joined = replace(call, outs=outs, args=(*given, *sizes), kernel=kernel, origin=origin)
        return joined, made

    def _result(self, own: Pointwise, r: _Reader, names: dict[str, str]) -> Pointwise:
        """What a reader makes, as a result. names: what its buffers are called; grows."""

        def renamed(n: Node, args: tuple[Node, ...]) -> Node:
            if n.op != "load":
                return with_args(n, args)
            load = load_of(n)
            if load.buf == own.out:
                return own.body
            name = names.setdefault(load.buf, f"given{len(names)}")
            return node("load", args, Load(name, load.index, load.masked), n.dtype)

        body = rewrite(substitute_vars(r.loop.body, r.at), renamed)
        index = tuple(substitute(v, r.at) for v in r.loop.vars)
        return Pointwise(r.loop.out, own.vars, self.simplify(body), index, r.loop.origin)


def _inverted(
    vars_: Sequence[Expr], index: Sequence[Size], to: Sequence[Size], shape: Sequence[Size]
) -> dict[Atom, Size] | None:
    """Variables over those of `to`, where index, over the variables, is the same element of a
    tensor of this shape: each number in it has some of them as digits. None where it has not."""
    found: dict[Atom, Size] = {}
    for e, t, n in zip(index, to, shape, strict=True):
        weights = [(v, coefficient(e, atom_of(v))) for v in vars_]
        digits = [(v, w) for v, w in weights if w != 0]
        if any(w is None for _, w in digits) or any(atom_of(v) in found for v, _ in digits):
            return None
        if total(v * w for v, w in digits if w is not None) != e:
            return None
        step: Size = 1
        left = list(digits)
        while left:
            v = next((v for v, w in left if w == step), None)
            if v is None:
                return None
            left = [(x, w) for x, w in left if x is not v]
            digit = t // step
            found[atom_of(v)] = digit % extent(v) if left else digit
            step = step * extent(v)
        if step != n:
            return None
    rest = [v for v in vars_ if atom_of(v) not in found]
    if any(extent(v) != 1 for v in rest):
        return None
    return found | {atom_of(v): 0 for v in rest}


def _symbols(
    results: Sequence[Pointwise], given: Sequence[TensorArg], strides: Sequence[tuple[Size, ...]]
) -> list[Expr]:
    """The sizes that results are computed with."""
    own = {v.symbol for r in results for v in r.vars}
    asked: list[Size] = [e for r in results for n in walk((r.body,)) for e in exprs_of(n)]
    asked += (e for r in results for e in r.index or ())
    asked += (e for x in given for e in x.strides)
    asked += (e for some in strides for e in some)
    symbols = {
        a.expr: None
        for e in asked
        if isinstance(e, Expr)
        for a in free_symbols(e)
        if a not in own and not is_arg(a)
    }
    return sorted(symbols, key=str)
