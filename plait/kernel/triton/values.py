"""Prints values, loads and stores: a variable a value, in the scope that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.ir.checks import Bound
from plait.ir.dtypes import i64
from plait.ir.expr import Expr, Size, free_symbols, product
from plait.ir.loops import Load, Node, check_of
from plait.ir.ops import OPS
from plait.kernel.triton.choose_accesses import BlockStore
from plait.kernel.triton.choose_forms import Form
from plait.kernel.triton.indices import Indices
from plait.kernel.triton.lines import Lines
from plait.kernel.triton.ops import TYPES, bitcast, cast, literal, render
from plait.kernel.triton.plan_body import BodyPlan
from plait.kernel.triton.split_rows import RowStart
from plait.schedule.legalize.linear import extent, offset_of


@dataclass(frozen=True)
class Piece:
    """The blocks of a pass that are being printed.

    inside: they lie inside their rows as a whole.
    start: where the first of them begins, if that is before the row.
    later: the loads that later passes repeat; None in rows of one pass.
    """

    inside: bool = False
    start: RowStart | None = None
    later: frozenset[Node] | None = None


class Values:
    """Prints the values of one kernel.

    results: the text of each reduction that is finished.
    checks: a run-time check was printed.
    """

    def __init__(self, plan: BodyPlan, lines: Lines) -> None:
        self.plan, self.layout, self.lines = plan, plan.layout, lines
        self.indices = Indices(plan.layout, plan.index_type, plan.sizes, lines, self.value)
        self.results: dict[str, str] = {}
        self.checks = False
        self.piece = Piece()
        self._hoisted: dict[tuple[Node, tuple[str, ...]], list[str]] = {}
        self._starts: dict[RowStart, tuple[str, str]] = {}

    def value(self, root: Node) -> str:
        """The variable that holds a node's value."""
        stack = [root]
        while stack:
            n = stack[-1]
            if self.lines.find(n):
                stack.pop()
                continue
            todo = [a for a in self._needs(n) if not self.lines.find(a)]
            if todo:
                stack.extend(todo)
                continue
            stack.pop()
            inner = self.layout.is_inner(n)
            self.lines.keep(n, self.lines.define(self._text(n), inner), inner)
        return self.lines.find(root) or ""

    def _needs(self, n: Node) -> tuple[Node, ...]:
        """Nodes whose values must exist before this one: its operands and what its index is made
        of."""
        if form := self.plan.forms.get(n):
            return form.operands
        e: Size = 0
        if n.op == "load":
            e = offset_of(n)
        elif n.op == "index" and isinstance(n.attr, Expr):
            e = n.attr
        indirect = self.layout.linear.indirect
        return (*n.args, *(indirect[a] for a in sorted(free_symbols(e), key=str) if a in indirect))

    def _text(self, n: Node) -> str:
        if form := self.plan.forms.get(n):
            return self._formed(form)
        args = tuple(map(self.value, n.args))
        if n.op in OPS:
            return render(n.op, n.args[-1].dtype, args)
        if n.op == "load":
            return self._load(n, args)
        if n.op == "index":
            return self._index(n)
        if n.op == "bounded":
            return self._bounded(n, args)
        if n.op == "acc":
            return self.results[str(n.attr)]
        if n.op == "nonzero":
            # No check: an integer that eager divides by 0 on a GPU is no error, and its quotient
            # any number.
            return f"tl.where({args[0]} == 0, 1, {args[0]})"
        if n.op == "cast":
            return cast(args[0], n.args[0].dtype, n.dtype)
        if n.op == "bitcast":
            return bitcast(args[0], n.dtype)
        assert n.op == "const" and isinstance(n.attr, (bool, int, float)), n
        return literal(n.attr, n.dtype)

    def _formed(self, form: Form) -> str:
        args = [self.value(a) for a in form.operands]
        if not form.hoisted:
            return form.text.format(*args)
        key = form.operands[-1], form.hoisted
        if key not in self._hoisted:
            names = [args[-1]]
            for text in form.hoisted:
                names.append(self.lines.define(text.format(*names), self.layout.is_inner(key[0])))
            self._hoisted[key] = names[1:]
        return form.text.format(*args, *self._hoisted[key])

    def _load(self, n: Node, args: tuple[str, ...]) -> str:
        assert isinstance(n.attr, Load), n
        access = self.plan.loads[n]
        conditions = self.mask(access.dims)
        if n.attr.masked:
            conditions.append(args[-1])
        if access.guarded:
            conditions.append(self._has_points())
        at = self.offset(access.offset, access.dims)
        mask = f", {_and(conditions)}, other=0" if conditions else ""
        keep = ""
        if self.piece.later is not None and access.dims == self.layout.everything:
            keep = f", eviction_policy='evict_{'last' if n in self.piece.later else 'first'}'"
        return f"tl.load({self.pointer(access.buf)} + {at}{mask}{keep})"

    def _index(self, n: Node) -> str:
        if not isinstance(n.attr, Expr):
            assert isinstance(n.attr, int), n
            return literal(n.attr, i64)
        return f"({self.indices.expr(n.attr)}).to(tl.int64)"

    def _bounded(self, n: Node, args: tuple[str, ...]) -> str:
        """Asserts on the device that the index is in range at every point of the tensor where its
        mask holds. The value is in range everywhere: other checks are hung on it (`keep_checks`),
        and other indices are computed from it."""
        check = check_of(n)
        assert isinstance(n.attr, Bound) and check is not None, n
        self.checks = True
        dims, inner = self.layout.dims(n), self.layout.is_inner(n)
        size = self.indices.expr(n.attr.size)
        good = self.lines.define(f"({args[0]} >= 0) & ({args[0]} < {size})", inner)
        outside = self.mask(dims)
        if n in self.plan.guarded and "r" not in dims:
            outside.append(self._has_points())
        held = [good, *(f"~{m}" for m in args[1:]), *([f"~({_and(outside)})"] if outside else [])]
        self.lines.add(f"tl.device_assert({' | '.join(held)}, {check.message!r})", inner)
        return f"tl.where({good}, {args[0]}, 0)"

    def _has_points(self) -> str:
        """The condition that rows have points."""
        return f"({self.indices.size(product(map(extent, self.layout.linear.rvars)))} > 0)"

    # -------------------------------------------------------------------------------------- memory
    def mask(self, dims: frozenset[str]) -> list[str]:
        """Conditions under which a point lies inside the tensor."""
        inside = {g.name for g in self.layout.tile.groups if g.full}
        if self.piece.start is not None:  # blocks begin before the row, and end behind it
            inside.discard("r")
        if self.piece.inside:
            inside.add("r")
        return [f"{g.name}mask" for g in self.layout.tile.groups if g.name in dims - inside]

    def pointer(self, buf: str) -> str:
        """The argument that holds a buffer."""
        return f"p{list(self.layout.linear.buffers).index(buf)}"

    def offset(self, e: Size, dims: frozenset[str], whole: bool = False) -> str:
        """An offset of the shape of these dimensions. whole: a block even where that is one
        point."""
        text, start = self.indices.expr(e), self.piece.start
        if start is not None and e == start.offset + self.layout.linear.rvars[0].expr:
            text = f"{self._starts[start][0]} + along"
        if self.layout.dims_of_index(e) == dims and (dims or not whole):
            return f"({text})"
        return f"({text} + tl.full({self.layout.shape(dims)}, 0, {self.plan.index_type}))"

    def lead(self, start: RowStart) -> str:
        """How many elements before its row a program's first block begins."""
        if start not in self._starts:
            at = self.lines.define(self.indices.expr(start.offset), False, "i")
            # so that Triton sees what divides it
            whole = self.lines.define(f"{at} // {start.line} * {start.line}", False, "i")
            self._starts[start] = whole, self.lines.define(f"{at} - {whole}", False, "i")
        return self._starts[start][1]

    def _store_segments(self, s: BlockStore) -> None:
        """A store of one value for each segment of the rows."""
        points, r = s.store.segment, self.layout.tile.groups[-1]
        number, e = self.layout.numbers[points], self.layout.by_number(s.access.offset, points)
        shape = f"[{', '.join(str(g.block) for g in self.layout.tile.outer)}, {r.block // points}]"
        if not self.lines.find(number):
            at = f"tl.arange(0, {r.block // points}).to({self.plan.index_type})[None, :]"
            at = f"offset // {points} + {at}" if self.layout.tile.looped else at
            self.lines.keep(number, self.lines.define(at, True, "i"), True)
        at = f"({self.indices.expr(e)} + tl.full({shape}, 0, {self.plan.index_type}))"
        value = f"tl.broadcast_to({self.value(s.store.value)}, {self.layout.shape(s.access.dims)})"
        # All points of a segment have one value.
        value = f"tl.reduce(tl.reshape({value}, {self.layout.segments(points)}), 2, p_any_of)"
        conditions = self.mask(self.layout.rows)
        if self.mask(frozenset("r")):
            conditions.append(
                f"({self.indices.size(number)} < {self.indices.size(r.points)} // {points})"
            )
        mask = f", {_and(conditions)}" if conditions else ""
        self.lines.add(f"tl.store({self.pointer(s.access.buf)} + {at}, {value}{mask})", s.inner)

    def store(self, s: BlockStore) -> None:
        """A store, of a plain value or by an atomic operation."""
        if s.store.segment:
            self._store_segments(s)
            return
        value, dims, mode = self.value(s.store.value), s.access.dims, s.store.mode
        pointer = self.pointer(s.access.buf)
        pointer = f"{pointer} + {self.offset(s.access.offset, dims, whole=True)}"
        conditions = self.mask(dims)
        if s.store.mask is not None:
            conditions.append(self.value(s.store.mask))
        mask = f", {_and(conditions)}" if conditions else ""
        line = f"tl.store({pointer}, {value}{mask})"
        if mode != "store":
            of = TYPES[self.layout.linear.buffers[s.access.buf].dtype.name]
            full = f"tl.broadcast_to({value}, {self.layout.shape(dims)}).to({of})"
            line = f"tl.atomic_{mode}({pointer}, {full}{mask}, sem='relaxed')"
        self.lines.add(line, s.inner)


def _and(conditions: Sequence[str]) -> str:
    return " & ".join(conditions)
