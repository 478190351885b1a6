"""Kernels of products take in the loops that read what they make: an element is finished where it
was computed, and the product itself never reaches memory.

Comes in: loops in normal form. A product gives way to the loops only if all that read it are
pointwise and go over its elements once, in any shape. It is computed where the first of them
stands; of two large ones that a loop reads it goes into the later. On a GPU, in kernels of small
tiles, loops may also mix an element with its partner in a pair of columns, as rotary embeddings do,
and go over a part of the columns, such as queries; what others read is stored beside what they make
then.

What a device's kernels can take in, says `devices.Products`: on one that stores in rows,
loops are taken before they are inlined, and layouts that are free follow the product; on others
they are inlined first as far as that pays, and layouts are settled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plait.devices import Products, facts_of
from plait.ir.calls import Extern, ExternArg, TensorArg
from plait.ir.dtypes import b1, f32
from plait.ir.effects import needs
from plait.ir.expr import (
    Atom,
    Expr,
    Size,
    atom_of,
    coefficient,
    exact_div,
    free_symbols,
    product,
    substitute,
)
from plait.ir.layouts import flat_index
from plait.ir.loops import (
    Buffer,
    Load,
    LoopProgram,
    Node,
    Op,
    Pointwise,
    const,
    exprs_of,
    is_arg,
    node,
    rewrite,
    substitute_vars,
    walk,
    with_args,
)
from plait.ir.ops import OPS
from plait.ir.product import Cut, Panels, Part, Product, is_large_product
from plait.ir.record import inline
from plait.ir.rules import Simplifier
from plait.schedule.deps import Bodies, Uses, extent, load_of, roots
from plait.schedule.product_elements import inverted, of_partner, pairs_of


def join_readers(program: LoopProgram, bodies: Bodies, in_rows: bool) -> LoopProgram:
    """The program with loops in the kernels of the products that they read, on devices whose
    kernels store in rows, or on the others."""
    if not any(isinstance(op, Extern) and isinstance(op.kernel, Product) for op in program.ops):
        return program
    return _Joiner(program, bodies, in_rows).run()


@dataclass(frozen=True, slots=True)
class _Reader:
    """A loop that reads a product.

    op: its place
    at: its variables over those of the product
    views: what it loads beside the product, as matrices with the product's rows and columns; None:
        it loads anything
    buffers: with layouts that become fixed
    body: of one that loads anything, over the variables of the product
    half: how far the columns of a pair are apart, of which it mixes elements; 0: it mixes none
    partners: its loads of the other element of a pair
    part: the columns of the product that it goes over; None: all
    """

    op: int
    loop: Pointwise
    at: dict[Atom, Size]
    views: Mapping[Load, TensorArg] | None = None
    buffers: Mapping[str, Buffer] = field(default_factory=dict)
    body: Node | None = None
    half: int = 0
    partners: frozenset[Node] = frozenset()
    part: Part | None = None


class _Joiner:
    """Goes over a program once. ops: None where one has gone."""

    def __init__(self, program: LoopProgram, bodies: Bodies, in_rows: bool) -> None:
        self.program, self.bodies, self.in_rows = program, bodies, in_rows
        self.ops: list[Op | None] = list(program.ops)
        self.buffers = dict(program.buffers)
        self.uses = Uses(program, bodies)
        self.simplify = Simplifier()

    def run(self) -> LoopProgram:
        for k, op in enumerate(self.program.ops):
            if isinstance(op, Extern) and isinstance(op.kernel, Product) and op.made:
                able = facts_of(self.buffers[op.made[0]].device).products
                if able.in_rows == self.in_rows:
                    self._grow(k, op, able)
        ops = tuple(op for op in self.ops if op is not None)
        return replace(self.program, ops=ops, buffers=self.buffers)

    def _grow(self, k: int, call: Extern, able: Products) -> None:
        """Gives the call at k the readers of its results, and theirs, while that can be."""
        assert isinstance(call.kernel, Product), call
        todo = list(call.kernel.results)
        while todo:
            own = todo.pop()
            stays = self._stays(own.out)
            if stays and (self.in_rows or own.out in self.uses.changed):
                continue
            if self.in_rows:
                self._gather(own.out, able)
            readers = self._readers(k, call, own, able, stays)
            if readers:
                for r in readers:
                    self.ops[r.op] = None
                    self.buffers |= r.buffers
                self.ops[k] = None
                k = readers[0].op
                call, made = self._joined(call, own, readers, stays)
                self.ops[k] = call
                self.uses.makers |= {o: [k] for o in call.made}
                if not stays:
                    del self.buffers[own.out]
                whole = [r.out for r, p in zip(made, readers, strict=True) if p.part is None]
                todo += (r for r in made if whole.count(r.out) == 1)

    def _stays(self, out: str) -> bool:
        """Whether others than loops need a result."""
        readers = (self.ops[k] for k in self.uses.readers.get(out, ()))
        return out in self.uses.shared or any(isinstance(op, Extern) for op in readers)

    def _gather(self, out: str, able: Products) -> None:
        """Puts readers of a buffer into another one that alone reads them: x * sigmoid(x) is two at
        first."""
        places = self.uses.readers.get(out, [])
        while len(places) > 1:
            loop = self.ops[places[0]]
            if (
                not isinstance(loop, Pointwise)
                or self._is_piece(loop)
                or loop.out in self.uses.shared
            ):
                return
            users = self.uses.readers.get(loop.out, [])
            user = self.ops[users[0]] if len(users) == 1 else None
            if not isinstance(user, Pointwise):
                return
            body = inline(user.body, {loop.out: (loop.vars, loop.body)})
            same = product(map(extent, loop.vars)) == product(map(extent, user.vars))
            if not same or len(list(walk((body,)))) > able.nodes:
                return
            self._replace(places[0], loop, users[0], replace(user, body=body))

    def _replace(self, first: int, loop: Pointwise, last: int, user: Pointwise) -> None:
        """Lets a loop go, which has gone into its user."""
        origin = tuple(dict.fromkeys((*loop.origin, *user.origin)))
        self.ops[first], self.ops[last] = None, replace(user, origin=origin)
        del self.buffers[loop.out], self.uses.readers[loop.out]
        for places in self.uses.readers.values():
            if first in places:
                places[:] = sorted({*places, last} - {first})

    def _readers(
        self, k: int, call: Extern, own: Pointwise, able: Products, stays: bool
    ) -> list[_Reader]:
        """All loops that read a result, if the kernel can do what they do. stays: the result is
        stored too."""
        out, n_others = own.out, len(call.made) - (not stays)
        places = self.uses.readers.get(out, [])
        if stays:
            places = [p for p in places if not isinstance(self.ops[p], Extern)]
        made = {getattr(self.ops[p], "out", None) for p in places}
        if not 0 < len(made) <= able.results - n_others:
            return []
        first = places[0]
        if out in self.uses.aliased or (stays and self.uses.readers[out][0] < first):
            return []
        if not self.uses.may_move(needs(call), k, first):
            return []
        if any(at < first for o in call.made if o != out for at in self.uses.readers.get(o, ())):
            return []
        found: list[_Reader] = []
        given, large = {*needs(call)}, is_large_product(call)
        for place in places:
            loop = self.ops[place]
            if not isinstance(loop, Pointwise) or self._is_piece(loop, places):
                return []
            others = {*self.bodies.of(roots(loop)).bufs} - {out}
            late = any(self.uses.makers.get(name, [-1])[-1] >= first for name in others)
            if late or not others.isdisjoint(call.made):
                return []
            makers = [at for name in others for at in self.uses.makers.get(name, ())]
            if large and any(at > k and is_large_product(self.ops[at]) for at in makers):
                return []
            if not self.uses.may_move(others, first, place):
                return []
            reader = self._reader(place, loop, call, own, able)
            if reader is None:
                return []
            given |= others
            found.append(reader)
        halves = {call.kernel.half, *(r.half for r in found)} - {0}  # type: ignore[union-attr]
        if stays and not any(r.half for r in found):
            return []
        return found if len(given) <= able.given and len(halves) < 2 else []

    def _is_piece(self, loop: Pointwise, places: Sequence[int] = ()) -> bool:
        """Whether a loop is one of several that make a buffer, not all of which are at these
        places, or makes what a kernel of a product does not store."""
        b = self.buffers[loop.out]
        apart = self.in_rows or not {*places}.issuperset(self.uses.makers[loop.out])
        return (loop.index is not None and apart) or loop.out in self.uses.changed or b.dtype == b1

    def _reader(
        self, place: int, loop: Pointwise, call: Extern, own: Pointwise, able: Products
    ) -> _Reader | None:
        """A loop that goes over a result once; None where it does not, or is of another kind than
        kernels take in."""
        assert own.index is not None and isinstance(call.kernel, Product), call
        facts, b = self.bodies.of(roots(loop)), self.buffers[own.out]
        if facts.checks or facts.size > able.nodes:
            return None
        loads = [load_of(n) for n in facts.loads if load_of(n).buf == own.out]
        if not isinstance(call.kernel.how, Panels):
            return self._of_columns(place, loop, call.kernel, own)
        masked = any(load_of(n).masked for n in facts.loads)
        if masked or len({load.index for load in loads}) != 1:
            return None
        index = loads[0].index
        # It is stored in rows, one after the other.
        *_, i, j = own.vars
        flat, columns = flat_index(b, index), call.kernel.how.columns
        found = inverted(loop.vars, (flat,), (i * columns + j,), (product(b.shape),))
        steps = {atom_of(v): coefficient(flat, atom_of(v)) for v in loop.vars}
        if found is None:
            return None
        return self._in_rows(_Reader(place, loop, found[0]), own, steps, columns)  # type: ignore[arg-type]

    def _of_columns(
        self, place: int, loop: Pointwise, kernel: Product, own: Pointwise
    ) -> _Reader | None:
        """A reader of a product that is cut; None where it loads the product at other places than
        its own and that of its partner in a pair."""
        assert own.index is not None, own
        shape, known = self.buffers[own.out].shape, isinstance(extent(own.vars[-1]), int)
        small = known and isinstance(kernel.how, Cut) and not kernel.how.is_large
        loads = [n for n in self.bodies.of(roots(loop)).loads if load_of(n).buf == own.out]
        for index in dict.fromkeys(load_of(n).index for n in loads):
            found = inverted(loop.vars, index, own.index, shape, own.vars[-1] if small else None)
            if found is None:
                continue
            at, part = found
            body = substitute_vars(loop.body, at)
            loads = [n for n in walk((body,)) if n.op == "load" and load_of(n).buf == own.out]
            pairs = pairs_of(kernel, own, part, loads, self.simplify)
            if pairs is not None:
                half, partners = pairs
                return _Reader(place, loop, at, body=body, half=half, partners=partners, part=part)
        return None

    def _in_rows(
        self, r: _Reader, own: Pointwise, steps: Mapping[Atom, Size], columns: int
    ) -> _Reader | None:
        """A reader with what it loads as matrices; None where it loads or stores otherwise than in
        rows of the product. steps: how far its variables move in the product."""
        body = list(walk((r.loop.body,)))
        target, strides = self.buffers[r.loop.out], tuple(steps.values())
        if target.dtype != f32 or not all(map(_is_plain, body)):
            return None
        if not _same(strides, target):
            if target.fixed:
                return None
            target = replace(target, strides=strides)
        buffers = {r.loop.out: replace(target, fixed=True)}
        views: dict[Load, TensorArg] = {}
        shape = (extent(own.vars[2]), columns)
        for load in dict.fromkeys(load_of(n) for n in body if n.op == "load"):
            if load.buf == own.out:
                continue
            b = buffers.get(load.buf) or _following(self.buffers[load.buf], load, steps)
            found = _by_row(b, load, steps, columns)
            if found is None:
                return None
            buffers[load.buf] = replace(b, fixed=True)
            views[load] = TensorArg(load.buf, shape, *found)
        return replace(r, views=views, buffers=buffers)

    def _joined(
        self, call: Extern, own: Pointwise, readers: Sequence[_Reader], stays: bool
    ) -> tuple[Extern, list[Pointwise]]:
        """The call with results of these readers in place of one, or beside it, and those
        results."""
        assert isinstance(call.kernel, Product), call
        given = [a for a in call.args if isinstance(a, TensorArg)]
        made = [self._result(own, r, given) for r in readers]
        kept = [piece for piece in call.kernel.pieces if stays or piece[0] is not own]
        parts = (*(part for _, part in kept), *(r.part for r in readers))
        results = (*(r for r, _ in kept), *made)
        outs = tuple(dict.fromkeys(r.out for r in results))
        origin = tuple(dict.fromkeys((*call.origin, *(o for r in made for o in r.origin))))
        sizes: Sequence[ExternArg] = [a for a in call.args if not isinstance(a, TensorArg)]
        if not isinstance(call.kernel.how, Panels):
            sizes = _symbols(results, given, [self.buffers[o].strides for o in outs])
        half = max((r.half for r in readers), default=0) or call.kernel.half
        parts = parts if any(parts) else ()
        kernel = replace(call.kernel, results=results, half=half, parts=parts)
        joined = replace(call, outs=outs, args=(*given, *sizes), kernel=kernel, origin=origin)
        return joined, made

    def _result(self, own: Pointwise, r: _Reader, given: list[TensorArg]) -> Pointwise:
        """What a reader makes, as a result. given: the operands of the kernel; grows."""
        names: dict[Load | str, str] = {}
        if r.views is None:
            names = {a.buf: f"given{n}" for n, a in enumerate(given[2:])}

        def named(load: Load) -> Load:
            key = load.buf if r.views is None else load
            if key not in names:
                names[key] = f"given{len(given) - 2}"
                b = self.buffers[load.buf]
                whole = TensorArg(b.name, b.shape, b.strides, 0)
                given.append(whole if r.views is None else r.views[load])
            index = load.index if r.views is None else own.vars[2:]
            return Load(names[key], index, load.masked)

        def renamed(n: Node, args: tuple[Node, ...]) -> Node:
            if n.op != "load":
                return with_args(n, args)
            load = load_of(n)
            if load.buf != own.out:
                return node("load", args, named(load), n.dtype)
            value = of_partner(own, r.half) if n in r.partners else own.body
            if load.masked:
                return node("where", (args[-1], value, const(0, n.dtype)))
            return value

        body = r.loop.body if r.body is None else r.body
        index = tuple(substitute(e, r.at) for e in r.loop.index or r.loop.vars)
        body = self.simplify(rewrite(body, renamed))
        return Pointwise(r.loop.out, own.vars, body, index, r.loop.origin)


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


# ------------------------------------------------------------------------------------------ in rows
def _is_plain(n: Node) -> bool:
    """Whether a node is one of numbers and conditions alone."""
    if isinstance(n.attr, Load):
        return n.dtype == f32 and not n.args
    return n.dtype in (f32, b1) and (n.op == "const" or n.op in OPS)


def _same(strides: tuple[Size, ...], b: Buffer) -> bool:
    """Whether a buffer has these strides, as far as they count."""
    pairs = zip(b.shape, strides, b.strides, strict=True)
    return all(n == 1 or a == c for n, a, c in pairs)


def _following(b: Buffer, load: Load, steps: Mapping[Atom, Size]) -> Buffer:
    """A buffer whose layout is free, with that of the product."""
    atoms = [e.symbol if isinstance(e, Expr) else None for e in load.index]
    if b.fixed or len({*atoms}) != len(b.shape) or not all(a in steps for a in atoms):
        return b
    strides = tuple(steps[a] for a in atoms if a is not None)
    largest = [n * s for n, s in zip(b.shape, strides, strict=True)]
    return replace(b, strides=strides) if product(b.shape) in largest else b


def _by_row(
    b: Buffer, load: Load, steps: Mapping[Atom, Size], columns: int
) -> tuple[tuple[int, int], Size] | None:
    """How far a row and a column of the product are in another buffer, and where that begins; None
    where it is loaded otherwise, or columns are apart."""
    flat = flat_index(b, load.index)
    rest: Size = flat
    found: dict[bool, int] = {}
    for a, far in steps.items():
        step = coefficient(flat, a)
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
    return (found.get(False, 0), found.get(True, 1)), rest
