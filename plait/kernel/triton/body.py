"""The body of one Triton kernel, written from a `LinearKernel` and a `Tile`.

A value is one Triton variable of the block's rank, broadcast only where it must be. Text grows in
two levels: what does not depend on the reduced index is written outside the loop over it, once; the
rest inside the loop of its pass. A block that holds whole rows has no such loop, so nothing is read
twice; it may walk along rows, in one loop for all passes, outside of which is what does not depend
on the row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from plait.ir.checks import Bound
from plait.ir.dtypes import DType, bf16, f32, i64
from plait.ir.expr import (
    Atom,
    Expr,
    Size,
    bounds,
    coefficient,
    free_symbols,
    known_nonneg,
    product,
    substitute,
    symbol,
)
from plait.ir.loops import Const, Load, Node, check_of, walk
from plait.ir.ops import OPS
from plait.kernel.stores import How, how_to_store
from plait.kernel.triton.ops import TYPES, bitcast, cast, combiner, identity, literal, render
from plait.kernel.triton.passes import offset_from, peak_of, plan_passes, rescales, scale_of
from plait.kernel.triton.tiles import Group, Tile, held_dtypes
from plait.schedule.legalize.linear import LinearKernel, dependences, extent, offset_of, stmt_nodes
from plait.schedule.plan import PART, Reduce, Store

NEAR = {
    "tanh": "p_near_tanh({0})", "exp": "p_ex2({0} * 1.4426950408889634)",
    "truediv": "({0} / {1})", "reciprocal": "(1.0 / {0})", "logistic": "({0} * p_rcp({1}))",
}  # fmt: skip
"""Ops that are sooner done where a few of the last bits do not matter."""
LINE = 8
"""Vectors of 16 bytes in a line of memory."""
_SIGN = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}


class BodyWriter:
    """Writes one kernel. wide: indices have 64 bits. Raises Unsupported for what Triton has no
    atomic for."""

    def __init__(
        self, linear: LinearKernel, tile: Tile, wide: bool, size_names: dict[str, str]
    ) -> None:
        self.linear, self.tile = linear, tile
        self.index_type = "tl.int64" if wide else "tl.int32"
        self.size_names = size_names
        self.deps = dependences(linear)
        self.users = Counter(a for n in walk(linear.roots()) for a in n.args)
        self.narrow = narrow(linear)
        self.inner_only = _inner_only(linear)
        self.outer_lines: list[str] = []
        self.loop_lines: list[str] = []
        self.values: dict[Node, str] = {}
        self.loop_values: dict[Node, str] = {}
        self.exprs: dict[Size, str] = {}
        self.loop_exprs: dict[Size, str] = {}
        self.accs: dict[str, str] = {}
        self.running: set[str] = set()
        self.along = "x" if tile.walkers else "r"  # the dimension of the loop
        self.groups: tuple[Group, ...] = (
            *tile.groups,
            *((tile.programs,) if tile.programs else ()),
        )
        self.group_of = {a: g for g in self.groups for a in g.axes}
        self.passes = plan_passes(linear, tile.looped)
        self.later: frozenset[Node] | None = None  # loads that passes after this one repeat
        self.seen = ""  # how many blocks of its row a program has seen
        self.lanes: dict[str, str] = {}  # reduction -> its accumulator, one value a lane
        self.inside = False  # of blocks that lie inside their rows as a whole
        self.begin: tuple[Size, int] | None = None  # see _begin
        self.begun: dict[
            tuple[Size, int], tuple[str, str]
        ] = {}  # what the first block begins at, and how far before
        self.n = 0
        self.checks = False
        self.scaled: dict[
            Node, tuple[str, str]
        ] = {}  # divisor -> two numbers in its place, see _quotient
        self.halves: dict[Node, tuple[str, str]] = {}  # as well, see _share

    # --------------------------------------------------------------------------------------- levels
    def _fresh(self, prefix: str) -> str:
        self.n += 1
        return f"{prefix}{self.n}"

    def _define(self, text: str, inner: bool, prefix: str = "v") -> str:
        name = self._fresh(prefix)
        (self.loop_lines if inner else self.outer_lines).append(f"{name} = {text}")
        return name

    def _names(self, what: frozenset[object]) -> frozenset[str]:
        """The dimensions of the block that a value with these dependences varies along."""
        found = {g.name for g in self.tile.groups if not what.isdisjoint(g.axes)}
        for d in what:
            if isinstance(d, str):
                found |= {g.name for g in self.tile.outer}
                if d in self.running:
                    found.add("r")
        return frozenset(found)

    def _expr_deps(self, e: Size) -> frozenset[object]:
        out: set[object] = set()
        for a in free_symbols(e):
            if a in self.group_of:
                out.add(a)
            elif a in self.linear.indirect:
                out |= self.deps(self.linear.indirect[a])
        return frozenset(out)

    def shape(self, names: frozenset[str]) -> str:
        """The block's shape over these dimensions, 1 along the others."""
        return f"[{', '.join(str(g.block) if g.name in names else '1' for g in self.tile.groups)}]"

    def mask(self, names: frozenset[str]) -> list[str]:
        """Conditions under which a point lies inside the tensor."""
        covered = {g.name for g in self.tile.groups if g.full}
        if self.begin is not None:  # blocks begin before the row, and end behind it
            covered.discard("r")
        if self.inside:
            covered.add("r")
        return [f"{g.name}mask" for g in self.tile.groups if g.name in names - covered]

    # ---------------------------------------------------------------------------------- kernel body
    def write(self) -> list[str]:
        """All lines of the body."""
        heads = self._heads()
        lines, self.outer_lines = (
            self.outer_lines + heads,
            [],
        )  # first the sizes that heads are written with
        loaded = [
            {n for s in p for n in walk(stmt_nodes(s)) if n.op == "load"} for p in self.passes.loops
        ]
        if self.tile.walkers:
            self._walk()
            return lines + self.outer_lines
        for k, p in enumerate(self.passes.loops):
            if self.tile.looped and len(loaded) > 1:
                self.later = frozenset().union(*loaded[k + 1 :])
            self._pass(p)
        self.later = None
        for s in self.passes.last:
            self._store(s, inner=False)
        return lines + self.outer_lines

    def _heads(self) -> list[str]:
        """Which block this program is, and the indices of its points."""
        lines = [f"pid = tl.program_id(0).to({self.index_type})"]
        pids = {"x": "pid"}
        if len(self.tile.outer) == 2 or self.tile.programs:
            x = next(g for g in self.tile.outer if g.name == "x")
            lines.append(f"columns = {self._count(x)}")
            pids = {"x": "pid % columns", "y": "pid // columns"}
            if self.tile.programs:
                lines.append("y = pid // columns")
        for d, g in enumerate(self.tile.groups):
            at = ", ".join(":" if k == d else "None" for k in range(len(self.tile.groups)))
            span = f"tl.arange(0, {g.block}).to({self.index_type})[{at}]"
            if g.name == self.along and (self.tile.looped or self.tile.walkers):
                lines.append(f"{g.name}base = {span}")
                continue
            lines.append(
                f"r = {span}"
                if g.name == "r"
                else f"{g.name} = ({pids[g.name]}) * {g.block} + {span}"
            )
            lines += self._mask_of(g)
        return lines

    def _mask_of(self, g: Group) -> list[str]:
        return [] if g.full else [f"{g.name}mask = {g.name} < {self._points(g)}"]

    def _points(self, g: Group) -> str:
        return self.size(g.points)

    def _count(self, g: Group) -> str:
        return f"tl.cdiv({self._points(g)}, {g.block})"

    def size(self, e: Size) -> str:
        """A size expression that holds no loop variable."""
        return self._text(e, {})

    def _pass(self, stmts: Sequence[Reduce | Store]) -> None:
        looped = self.tile.looped
        started: list[tuple[Reduce, tuple[str, ...]]] = []
        if looped:
            started = [(s, self._start(s)) for s in stmts if isinstance(s, Reduce)]
        begun = {s.name: names for s, names in started}
        if not begun.keys().isdisjoint(self.passes.spread):
            self.seen = self._define("tl.full([], 0, tl.float32)", False, "a")
        if not looped:
            self._block_of(stmts, begun)
            self.outer_lines += self.loop_lines
            # Whole rows stay in registers: later passes go on with the same values.
            self.values.update(self.loop_values)
            self.exprs.update(self.loop_exprs)
            return
        r = next(g for g in self.tile.groups if g.name == "r")
        n = r.points
        last = n // r.block * r.block if isinstance(n, int) else 0
        self.begin = self._begin(stmts, n, last) if isinstance(n, int) else None
        head, mask = ["r = rbase + offset"], f"rmask = r < {self._points(r)}"
        if self.begin is not None:
            head = ["along = rbase + offset", f"r = along - {self._lead(self.begin)}"]
            mask = f"rmask = (r >= 0) & (r < {n})"
        rest = isinstance(n, int) and 0 < last < n and self._keeps_from_vectors(stmts, n)
        cut = self.begin is not None or rest
        if cut:
            self.inside = True
            self._block_of(stmts, begun)
            self.inside = False
            self._loop(
                0 if self.begin is None else r.block, str(last), r.block, [*head, *self.loop_lines]
            )
        self._block_of(stmts, begun)
        if self.begin is not None:  # the two ends
            self._loop(0, str(last + 1), last, [*head, mask, *self.loop_lines])
        elif cut:
            self.outer_lines += [f"offset = {last}", *head, mask, *self.loop_lines]
        else:
            self._loop(
                0, self._points(r), r.block, [*head, *([] if r.full else [mask]), *self.loop_lines]
            )
        self.begin = None
        for s, names in started:
            self._finish(s, names)

    def _loop(self, first: int, end: str, step: int, lines: Sequence[str]) -> None:
        """A loop over the blocks of a dimension. Loads are under way num_stages - 1 blocks
        ahead."""
        n = self.tile.num_stages
        span = (
            f"range({first}, {end}, {step})"
            if n == 1
            else f"tl.range({first}, {end}, {step}, num_stages={n})"
        )
        self.outer_lines += [f"for offset in {span}:", *(f"    {line}" for line in lines)]

    def _walk(self) -> None:
        """All passes for a block of rows after the other, and the sums of their columns, stored at
        the end."""
        everything = self.shape(frozenset(g.name for g in self.tile.groups))
        sums = [s for s in self.linear.stmts if isinstance(s, Store) and s.mode == "sum"]
        for s in sums:
            zeros = f"tl.zeros({everything}, {TYPES[self.linear.buffers[s.buf].dtype.name]})"
            self.accs[s.buf] = self._define(zeros, False, "a")
        lines: list[str] = []
        for p in (*self.passes.loops, self.passes.last):
            self._block_of(p, {})
            lines += self.loop_lines
            self.values.update(self.loop_values)
            self.exprs.update(self.loop_exprs)
        x, n = self.tile.groups[0], self.tile.walkers
        even = isinstance(x.points, int) and x.points % n == 0
        rows = f"{x.points // n}" if even else f"tl.cdiv({self._points(x)} - pid, {n})"
        self._loop(
            0, rows, x.block, [f"x = (xbase + offset) * {n} + pid", *self._mask_of(x), *lines]
        )
        for s in sums:
            value = self._define(f"tl.sum({self.accs[s.buf]}, 0)[None, :]", False)
            at = self._offset(s.index[0], frozenset("r"))
            mask = "".join(f", {m}" for m in self.mask(frozenset("r")))
            self.outer_lines.append(f"tl.store({self.pointer(s.buf)} + {at}, {value}{mask})")

    def _sum(self, s: Store) -> None:
        """Adds a block of rows to the sums of their columns."""
        value = (
            f"tl.broadcast_to({self.value(s.value)}, "
            f"{self.shape(frozenset(g.name for g in self.tile.groups))})"
        )
        for mask in self.mask(frozenset("x")):
            value = f"tl.where({mask}, {value}, 0)"
        self.loop_lines.append(f"{self.accs[s.buf]} = {self.accs[s.buf]} + {value}")

    def _contiguous(self, stmts: Sequence[Reduce | Store]) -> list[tuple[Size, int]]:
        """Where statements load and store along memory, and how many elements a vector has
        there."""
        loads = [
            (offset_of(n), n.dtype)
            for n in walk([m for s in stmts for m in stmt_nodes(s)])
            if n.op == "load"
        ]
        stores = [
            (s.index[0], self.linear.buffers[s.buf].dtype) for s in stmts if isinstance(s, Store)
        ]
        along = [(e, 16 // d.nbytes) for e, d in (*loads, *stores)]
        return [(e, n) for e, n in along if any(coefficient(e, a) == 1 for a in self.linear.rvars)]

    def _begin(
        self, stmts: Sequence[Reduce | Store], length: int, last: int
    ) -> tuple[Size, int] | None:
        """Where a row begins, if that may be anywhere, and how many elements a line of memory has.
        Then blocks begin where lines do, before the row, so that but for the two ends of the row
        there are vectors, and lines are written whole."""
        block = self.tile.groups[-1].block
        ordered = any(
            isinstance(s, Reduce) and (s.running or s.name in self.passes.spread) for s in stmts
        )
        if (
            ordered
            or len(self.linear.rvars) > 1
            or any(g.block > 1 for g in self.tile.outer)
            or last < 3 * block
        ):
            return None
        (r,) = self.linear.rvars
        rows = [(substitute(e, {r: 0}), n) for e, n in self._contiguous(stmts)]
        rows = [(e, n) for e, n in rows if not free_symbols(e).isdisjoint(self.linear.vars)]
        begins, each = {e for e, _ in rows}, max((n for _, n in rows), default=1)
        line = each * LINE
        if len(begins) != 1 or length - last + line > block:
            return None
        (begin,) = begins
        return (
            (begin, line)
            if not free_symbols(begin) - set(self.linear.vars) and begin % each != 0
            else None
        )

    def _lead(self, begin: tuple[Size, int]) -> str:
        """How many elements before its row a program's first block begins."""
        e, each = begin
        if begin not in self.begun:
            at = self._define(self.expr(e), False, "i")
            whole = self._define(
                f"{at} // {each} * {each}", False, "i"
            )  # so that Triton sees what divides it
            self.begun[begin] = whole, self._define(f"{at} - {whole}", False, "i")
        return self.begun[begin][1]

    def _keeps_from_vectors(self, stmts: Sequence[Reduce | Store], length: Size) -> bool:
        """Whether rows that begin where vectors may are so long that a mask, which ends in the
        middle of a vector, would forbid them all along. Then the rest of a row is a block of its
        own."""
        for offset, each in self._contiguous(stmts):
            if length % each == 0:
                continue
            steps = [coefficient(offset, a) for a in self.linear.vars]
            if all(isinstance(c, int) and c % each == 0 for c in steps):
                return True
        return False

    def _block_of(self, stmts: Sequence[Reduce | Store], begun: dict[str, tuple[str, ...]]) -> None:
        """What one block of a pass does."""
        self.loop_lines, self.loop_values, self.loop_exprs = [], {}, {}
        pending: list[Store] = []
        for s in stmts:
            if isinstance(s, Store):
                pending.append(s)
            elif s.name in self.passes.rescaled or s.name in self.passes.spread:
                pass  # goes with its maximum or sum
            elif self.tile.looped:
                self._step(s, begun)
            else:
                self._whole(s)
        for s in pending:  # after all loads: an output may have the memory of an input
            if s.mode == "sum":
                self._sum(s)
            else:
                self._store(s, inner=s.full)
        if not begun.keys().isdisjoint(self.passes.spread):
            self.loop_lines.append(f"{self.seen} = {self.seen} + 1")

    # ----------------------------------------------------------------------------------- reductions
    def _block(self, s: Reduce) -> str:
        """The value of a reduction over the whole block, identity outside the tensor."""
        everything = frozenset(g.name for g in self.tile.groups)
        value = f"tl.broadcast_to({self.value(s.value)}, {self.shape(everything)})"
        mask = self.mask(frozenset(("r",)))
        if mask:
            value = f"tl.where({mask[0]}, {value}, {identity(s.kind, s.value.dtype)})"
        return self._define(value, True)

    def _whole(self, s: Reduce) -> None:
        """A reduction of a block that holds whole rows."""
        if not self.linear.rvars:  # over one point
            arg = s.kind.startswith("arg")
            self.accs[s.name] = literal(0, i64) if arg else self.value(s.value)
            return
        block = self._block(s)
        if s.running:
            fn = combiner(s.kind, s.value.dtype, running=True)
            text = f"tl.associative_scan({block}, 1, {fn})"
            self.accs[s.name] = self._define(text, True)
            self.running.add(s.name)
            return
        text = self._reduced(s, block, self._position(s), inner=True)
        self.accs[s.name] = self._define(text, True, "a")

    def _position(self, s: Reduce) -> str:
        if not s.kind.startswith("arg"):
            return ""
        everything = frozenset(g.name for g in self.tile.groups)
        return self._define(f"tl.broadcast_to(r.to(tl.int64), {self.shape(everything)})", True)

    def _reduced(self, s: Reduce, block: str, position: str, inner: bool) -> str:
        """The rows' results out of a block, as a column."""
        d = s.value.dtype
        if s.kind.startswith("arg"):
            return f"tl.reduce(({block}, {position}), 1, p_{s.kind})[1][:, None]"
        if s.kind == "sum" and d.is_float:
            return f"tl.sum({block}, 1)[:, None]"
        if s.kind in ("any", "all"):
            word = self._define(f"{block}.to(tl.int32)", inner)
            return f"(tl.reduce({word}, 1, {combiner(s.kind, d)})[:, None] != 0)"
        return f"tl.reduce({block}, 1, {combiner(s.kind, d)})[:, None].to({TYPES[d.name]})"

    def _start(self, s: Reduce) -> tuple[str, ...]:
        """Accumulators before the loop."""
        d = s.value.dtype
        first = identity(s.kind, d)
        if s.running:
            rows = self.shape(frozenset(g.name for g in self.tile.outer))
            carry = self._define(f"tl.broadcast_to({first}, {rows})", False, "a")
            self.running.add(s.name)
            return (carry,)
        everything = self.shape(frozenset(g.name for g in self.tile.groups))
        if s.name in self.passes.rescaled or s in self.passes.rescaled.values():
            height, _, lanes, _ = self._folds()
            everything = f"[{height}, {lanes}]"
        acc = self._define(f"tl.broadcast_to({first}, {everything})", False, "a")
        if not s.kind.startswith("arg"):
            return (acc,)
        return acc, self._define(f"tl.full({everything}, {2**63 - 1}, tl.int64)", False, "a")

    def _folds(self) -> list[int]:
        """[rows, n, lanes, vector] of a block whose rows are folded n times, and whose vectors are
        folded too, so that what lies on one another belongs to one thread, which then keeps one
        maximum for it."""
        r = next(g for g in self.tile.groups if g.name == "r")
        rows = math.prod(g.block for g in self.tile.outer)
        if rows > 1:
            return [rows, 1, r.block, 1]
        vector = 16 // min(
            (d.nbytes for d in held_dtypes(self.linear, self.linear.vars)), default=4
        )
        n = max(r.block // (32 * self.tile.num_warps * vector), 1)
        return [rows, n, r.block // (n * vector), vector]

    def _step(self, s: Reduce, begun: dict[str, tuple[str, ...]]) -> None:
        """One block of a reduction inside the loop."""
        if spread := self.passes.deviations(s):
            self._deviate(s, spread, begun)
            return
        names, block = begun[s.name], self._block(s)
        if s.running:
            fn = combiner(s.kind, s.value.dtype, running=True)
            scanned = self._define(f"tl.associative_scan({block}, 1, {fn})", True)
            whole = f"tl.broadcast_to({names[0]}, {scanned}.shape)"
            self.accs[s.name] = self._define(f"{fn}({whole}, {scanned})", True)
            total = f"tl.reduce({block}, 1, {fn})[:, None]"
            if fn.endswith("_last"):  # which depends on the order
                total = f"p_at({scanned}, rbase == {self.tile.groups[-1].block - 1})"
            self.loop_lines.append(f"{names[0]} = {fn}({names[0]}, {total})")
        elif s.kind.startswith("arg"):
            position = self._position(s)
            mask = self.mask(frozenset(("r",)))
            if mask:
                position = self._define(f"tl.where({mask[0]}, {position}, {2**63 - 1})", True)
            both = ", ".join(names)
            self.loop_lines.append(f"{both} = p_{s.kind}({both}, {block}, {position})")
        elif s.kind in ("any", "all"):
            sign = "|" if s.kind == "any" else "&"
            self.loop_lines.append(f"{names[0]} = {names[0]} {sign} {block}")
        else:
            new = f"{combiner(s.kind, s.value.dtype)}({names[0]}, {block})"
            if with_it := [n for n, first in self.passes.rescaled.items() if first is s]:
                block = self._define(f"tl.reshape({block}, {self._folds()})", True)
                fn = combiner(s.kind, s.value.dtype)
                new = self._define(
                    f"{fn}({names[0]}, tl.reduce(tl.reduce({block}, 3, {fn}), 1, {fn}))", True
                )
            for n in with_it:
                self.loop_lines.append(
                    f"{begun[n][0]} = p_exp_sum({begun[n][0]}, {names[0]}, {block}, {new})"
                )
            self.loop_lines.append(f"{names[0]} = {new}")

    def _deviate(
        self, first: Reduce, spread: Sequence[Reduce], begun: dict[str, tuple[str, ...]]
    ) -> None:  # fmt: skip
        """Adds a block to each lane's mean, which its accumulator is, and to its squared deviations
        from that: of equal numbers exactly."""
        d, mean = first.value.dtype, begun[first.name][0]
        x, _ = offset_from(spread[0])
        off, mask = f"{self.value(x)} - {mean}", self.mask(frozenset(("r",)))
        off = self._define(f"tl.where({mask[0]}, {off}, 0.0)" if mask else off, True)
        seen = self._define(f"{self.seen}.to({TYPES[d.name]})", True)
        share = self._define(render("truediv", d, (literal(1, d), f"({seen} + 1)")), True)
        for s in spread:
            if s.value.op == "mul":  # the weight is 0 where the square may be too large
                squares, added = begun[s.name][0], f"{off} * ({off} * ({seen} * {share}))"
                self.loop_lines.append(f"{squares} = {squares} + {added}")
        self.loop_lines.append(f"{mean} = {mean} + {off} * {share}")

    def _lane_counts(self, d: DType) -> str:
        """How many points of a row each lane has."""
        r = self.tile.groups[-1]
        return f"(({self._points(r)} - rbase + {r.block - 1}) // {r.block}).to({TYPES[d.name]})"

    def _gathered(self, s: Reduce, first: Reduce, squares: str) -> str:
        """The sum of x - c, or of its square, of a row out of its lanes'."""
        _, center = offset_from(s)
        off = self._define(f"{self.lanes[first.name]} - {self.value(center)}", False)
        lanes = f"{self._lane_counts(s.value.dtype)} * {off}"
        if s.value.op == "mul":
            lanes = f"{squares} + {lanes} * {off}"
        return f"tl.sum({lanes}, 1)[:, None]"

    def _finish(self, s: Reduce, names: tuple[str, ...]) -> None:
        self.loop_lines = []
        if s.name in self.passes.rescaled:
            first = self.passes.rescaled[s.name].name
            lane = f"{names[0]} * p_exp_below({self.lanes[first]}, {self.accs[first]})"
            # A row of nothing but -inf: its differences from its maximum are NaN.
            nan = (
                f"tl.where({self.accs[first]} == float('-inf'), float('nan'), tl.sum({lane}, "
                "1)[:, None])"
            )
            self.accs[s.name] = self._define(nan, False, "a")
        elif s.name in self.passes.spread:
            text = self._gathered(s, self.passes.spread[s.name], names[0])
            self.accs[s.name] = self._define(text, False, "a")
        elif not s.running:
            self.lanes[s.name] = lanes = names[0]
            position = names[1] if len(names) > 1 else ""
            if spread := self.passes.deviations(s):  # means: see _deviate
                scale = scale_of(spread[0], s)
                scaled = lanes if scale is None else f"{lanes} * {self.value(scale)}"
                lanes = self._define(f"{scaled} * {self._lane_counts(s.value.dtype)}", False)
            text = self._reduced(s, lanes, position, inner=False)
            self.accs[s.name] = self._define(text, False, "a")

    # --------------------------------------------------------------------------------------- stores
    def _store(self, s: Store, inner: bool) -> None:
        level = frozenset(g.name for g in (self.tile.groups if inner else self.tile.outer))
        value, moves = self.value(s.value), self._names(self._expr_deps(s.index[0]))
        of_value = [self._names(self._all_deps(n)) for n in stmt_nodes(s)]
        how = how_to_store(s.mode, any(of_value), bool(moves))
        if how is How.ONCE and not self.linear.rvars:  # every program has a point
            level = frozenset()
        at = self._offset(s.index[0], level, whole=True)
        inner = (inner and bool(self.linear.rvars)) or self.tile.walkers > 0
        conditions = self.mask(level)
        if s.mask is not None:
            conditions.append(self.value(s.mask))
        d = self.linear.buffers[s.buf].dtype
        pointer = f"{self.pointer(s.buf)} + {at}"
        mask = f", {_and(conditions)}" if conditions else ""
        if s.mode == "store":
            line = f"tl.store({pointer}, {value}{mask})"
        else:
            full = f"tl.broadcast_to({value}, {self.shape(level)}).to({TYPES[d.name]})"
            line = f"tl.atomic_{s.mode}({pointer}, {full}{mask}, sem='relaxed')"
        (self.loop_lines if inner else self.outer_lines).append(line)

    def pointer(self, buf: str) -> str:
        """The argument that holds a buffer."""
        return f"p{list(self.linear.buffers).index(buf)}"

    def _offset(self, e: Size, level: frozenset[str], whole: bool = False) -> str:
        """An offset of the shape that `level` asks for. whole: a block even where that is one
        point."""
        names = self._names(self._expr_deps(e))
        text = self.expr(e)
        if self.begin is not None and e == self.begin[0] + self.linear.rvars[0].expr:
            text = f"{self.begun[self.begin][0]} + along"
        if names == level and (level or not whole):
            return f"({text})"
        return f"({text} + tl.full({self.shape(level)}, 0, {self.index_type}))"

    # --------------------------------------------------------------------------------------- values
    def value(self, root: Node) -> str:
        """The variable that holds a node's value."""
        stack = [root]
        while stack:
            n = stack[-1]
            if n in self.values or n in self.loop_values:
                stack.pop()
                continue
            todo = [a for a in self._needs(n) if a not in self.values and a not in self.loop_values]
            if todo:
                stack.extend(todo)
                continue
            stack.pop()
            inner = self.along in self._names(self._all_deps(n))
            name = self._define(self._node(n), inner)
            (self.loop_values if inner else self.values)[n] = name
        return self.values.get(root) or self.loop_values[root]

    def _needs(self, n: Node) -> tuple[Node, ...]:
        """Nodes whose values must exist before this one: its arguments and what its index is made
        of."""
        found = n.args[0].args if self._is_narrow_quotient(n) else n.args
        if (below := self._under(n)) is not None:
            found = (below[1],)
        elif _is_rounding(n):
            found = n.args[0].args
        e: Size = 0
        if n.op == "load":
            e = offset_of(n)
        elif n.op == "index" and isinstance(n.attr, Expr):
            e = n.attr
        extra = [
            self.linear.indirect[a]
            for a in sorted(free_symbols(e), key=str)
            if a in self.linear.indirect
        ]
        return (*found, *extra)

    def _all_deps(self, n: Node) -> frozenset[object]:
        out = self.deps(n)
        for a in self._needs(n):
            out |= self.deps(a)
        return out

    def _node(self, n: Node) -> str:
        if self._is_narrow_quotient(n):
            return self._quotient(n)
        if n.op == "truediv" and self._is_softmax(*n.args):
            return self._share(*n.args)
        if (below := self._under(n)) is not None:
            kind = "near_" if n in self.narrow else ""
            return f"p_{kind}one_more_than_{below[0]}({self.value(below[1])})"
        if _is_rounding(n):
            return f"p_as_bf16({self.value(n.args[0].args[0])})"
        args = tuple(self.value(a) for a in n.args)
        if n.op in OPS:
            near = NEAR.get("logistic" if _is_logistic(n) else n.op) if n in self.narrow else None
            return near.format(*args) if near else render(n.op, n.args[-1].dtype, args)
        writers: dict[str, Callable[[Node, tuple[str, ...]], str]] = {
            "load": self._load, "index": self._index, "bounded": self._bounded,
            "nonzero": self._nonzero, "acc": self._acc,
        }  # fmt: skip
        if n.op in writers:
            return writers[n.op](n, args)
        if n.op == "cast":
            return cast(args[0], n.args[0].dtype, n.dtype)
        if n.op == "bitcast":
            return bitcast(args[0], n.dtype)
        assert n.op == "const" and isinstance(n.attr, (bool, int, float))
        return _constant(n.attr, n.dtype)

    def _under(self, n: Node) -> tuple[str, Node] | None:
        """tanh and u of tanh(u) + 1, where nothing else needs the tanh: a logistic function, which
        has no branch and loses nothing below 0; or erf, for a 16-bit float."""
        if n.op != "add" or n.dtype != f32:
            return None
        for a, one in (n.args, n.args[::-1]):
            logistic = a.op == "tanh" or (a.op == "erf" and n in self.narrow)
            if logistic and one.op == "const" and one.attr == 1 and self.users[a] == 1:
                return a.op, a.args[0]
        return None

    def _is_narrow_quotient(self, n: Node) -> bool:
        """Whether it is a quotient that becomes a 16-bit float, but for those that `_share`
        writes."""
        if n.op != "cast" or n.dtype.name not in ("f16", "bf16"):
            return False
        (a,) = n.args
        return a.op == "truediv" and a.dtype == f32 and not self._is_softmax(*a.args)

    def _quotient(self, n: Node) -> str:
        """A quotient that becomes a 16-bit float. Where the divisor is the same all along a row,
        its reciprocal is: one rounding of 24 bits more does not show in 11. A small divisor is
        scaled, so that its reciprocal is finite."""
        a, b = n.args[0].args
        if "r" not in self._names(self._all_deps(a)) or "r" in self._names(self._all_deps(b)):
            return cast(render("truediv", f32, (self.value(a), self.value(b))), f32, n.dtype)
        if b not in self.scaled:
            inner = self.along in self._names(self._all_deps(b))
            scale = self._define(
                f"tl.where(tl.abs({self.value(b)}) < 2.0**-64, 2.0**64, 1.0)", inner
            )
            self.scaled[b] = (
                scale,
                self._define(f"tl.div_rn(1.0, {self.value(b)} * {scale})", inner),
            )
        return cast(f"({' * '.join((self.value(a), *self.scaled[b]))})", f32, n.dtype)

    def _is_softmax(self, a: Node, total: Node) -> bool:
        """Whether it is a / sum a, a = exp(x - max x) in float32: a divisor from 1 to the length of
        a row."""
        sums = {s.name: s for s in self.linear.stmts if isinstance(s, Reduce)}
        s = sums.get(str(total.attr)) if total.op == "acc" else None
        if s is None or s.kind != "sum" or s.running or s.value is not a or a.dtype != f32:
            return False
        peak = sums.get(peak_of(s))
        return peak is not None and rescales(s, peak)

    def _share(self, a: Node, total: Node) -> str:
        """A quotient by its divisor's reciprocal, in two parts: the nearest float32 but where the
        quotient is within 2**-22 of the middle of two."""
        if total not in self.halves:
            b, inner = self.value(total), self.along in self._names(self._all_deps(total))
            high = self._define(f"tl.div_rn(1.0, {b})", inner)
            self.halves[total] = high, self._define(f"tl.fma(-{b}, {high}, 1.0) * {high}", inner)
        high, low = self.halves[total]
        return f"tl.fma({self.value(a)}, {high}, {self.value(a)} * {low})"

    def _load(self, n: Node, args: tuple[str, ...]) -> str:
        assert isinstance(n.attr, Load)
        offset = offset_of(n)
        names = self._names(self._expr_deps(offset))
        conditions = self.mask(names)
        if n.attr.masked:
            of_mask = self._names(self._all_deps(n.args[-1]))
            conditions = self.mask(names | of_mask)
            conditions.append(args[-1])
            names |= of_mask
        if n in self.inner_only and "r" not in names:
            conditions.append(self._has_points())
        at = self._offset(offset, names) if names else f"({self.expr(offset)})"
        mask = f", {_and(conditions)}, other=0" if conditions else ""
        keep = ""
        if self.later is not None and names == frozenset(g.name for g in self.tile.groups):
            keep = f", eviction_policy='evict_{'last' if n in self.later else 'first'}'"
        return f"tl.load({self.pointer(n.attr.buf)} + {at}{mask}{keep})"

    def _index(self, n: Node, args: tuple[str, ...]) -> str:
        assert isinstance(n.attr, (int, Expr))
        text = self.expr(n.attr)
        return f"({text}).to(tl.int64)" if isinstance(n.attr, Expr) else _constant(n.attr, i64)

    def _bounded(self, n: Node, args: tuple[str, ...]) -> str:
        """Asserts on the device that the index is in range at every point of the tensor where its
        mask holds. The value is in range everywhere: other checks are hung on it (`keep_checks`),
        and other indices are computed from it."""
        assert isinstance(n.attr, Bound)
        self.checks = True
        names = self._names(self._all_deps(n))
        inner = self.along in names
        good = self._define(f"({args[0]} >= 0) & ({args[0]} < {self.expr(n.attr.size)})", inner)
        outside = self.mask(names)
        if n in self.inner_only and "r" not in names:
            outside.append(self._has_points())
        held = [
            good,
            *(f"~{mask}" for mask in args[1:]),
            *([f"~({_and(outside)})"] if outside else []),
        ]
        check = check_of(n)
        assert check is not None
        lines = self.loop_lines if inner else self.outer_lines
        lines.append(f"tl.device_assert({' | '.join(held)}, {check.message!r})")
        return f"tl.where({good}, {args[0]}, 0)"

    def _nonzero(self, n: Node, args: tuple[str, ...]) -> str:
        """No check: an integer that eager divides by 0 on a GPU is no error, and its quotient any
        number."""
        return f"tl.where({args[0]} == 0, 1, {args[0]})"

    def _has_points(self) -> str:
        """The condition that rows have points."""
        return f"({self.size(product(map(extent, self.linear.rvars)))} > 0)"

    def _acc(self, n: Node, args: tuple[str, ...]) -> str:
        return self.accs[str(n.attr)]

    # ------------------------------------------------------------------------------------- integers
    def expr(self, e: Size) -> str:
        """An integer expression over loop variables, sizes and values."""
        return self._text(self._linear(e), {})

    def _linear(self, e: Size) -> Size:
        """e with axes that it walks in the order of their group as one: the group's index itself,
        undivided."""
        for g in self.groups:
            if isinstance(e, int) or len(g.axes) < 2:
                continue
            step = coefficient(e, g.axes[-1])
            steps = [
                None if step is None else step * product(map(extent, g.axes[k + 1 :]))
                for k in range(len(g.axes))
            ]
            if step not in (None, 0) and all(
                c is not None and coefficient(e, a) == c for a, c in zip(g.axes, steps, strict=True)
            ):
                rest = substitute(e, dict.fromkeys(g.axes, 0))
                e = rest + step * symbol(f"#{g.name}", extent=g.points)
        return e

    def _text(self, e: Size, memo: dict[Size, str]) -> str:
        if isinstance(e, int):
            return str(e)
        for known in (self.exprs, self.loop_exprs):
            if e in known:
                return known[e]
        parts = []
        for mono, c in e.terms:
            factors = [self._atom(a) for a in mono]
            if c != 1:
                factors.insert(0, str(c) if c > 0 else f"({c})")
            parts.append(" * ".join(factors))
        if e.const:
            parts.append(str(e.const))
        text = " + ".join(parts)
        return (
            text
            if len(parts) == 1 and len(e.terms[0][0]) == 1 and e.terms[0][1] == 1
            else f"({text})"
        )

    def _atom(self, a: Atom) -> str:
        key = a.expr
        for known in (self.exprs, self.loop_exprs):
            if key in known:
                return known[key]
        inner = self.along in self._names(self._expr_deps(key))
        text = self._atom_text(a)
        if text.isidentifier():
            return text
        name = self._define(text, inner, "i")
        (self.loop_exprs if inner else self.exprs)[key] = name
        return name

    def _atom_text(self, a: Atom) -> str:
        if a.name.startswith("#"):
            return a.name[1:]
        if a in self.group_of:
            return self._axis(a)
        if a in self.linear.indirect:
            value = self.value(self.linear.indirect[a])
            return f"{value}.to({self.index_type})"
        if a.kind == "sym":
            return "pid" if a.name == PART else self.size_names[a.name]
        left, right = self.expr(a.a), self.expr(a.b)
        if a.kind in ("div", "mod"):
            if known_nonneg(a.a) and bounds(a.b)[0] > 0:
                return f"({left} {'//' if a.kind == 'div' else '%'} {right})"
            return f"p_index_{a.kind}({left}, {right})"
        if a.kind in ("min", "max"):
            return f"tl.{a.kind}imum({left}, {right})"
        return f"({left} {_SIGN[a.kind]} {right}).to({self.index_type})"

    def _axis(self, a: Atom) -> str:
        """A loop variable out of the index that walks its group."""
        g = self.group_of[a]
        if len(g.axes) == 1:
            return g.name
        k = g.axes.index(a)
        inner = self.size(product(map(extent, g.axes[k + 1 :])))
        text = g.name if k == len(g.axes) - 1 else f"({g.name} // {inner})"
        return text if k == 0 else f"{text} % {self.size(extent(a))}"


def narrow(linear: LinearKernel) -> frozenset[Node]:
    """The float32 values that show in nothing but 16-bit floats: errors of a few of their last bits
    do not matter."""
    found: set[Node] = set()
    shown = {n for n in linear.roots() if n.dtype == f32}
    for n in reversed(list(walk(linear.roots()))):
        if n.dtype == f32 and n not in shown:
            found.add(n)
        ends = n.op == "cast" and n.dtype.name in ("f16", "bf16")
        if not ends and not (
            n in found and n.op in ("add", "sub", "mul", "neg", "where", "truediv", "reciprocal")
        ):
            shown.update(n.args)
    return frozenset(found)


def _inner_only(linear: LinearKernel) -> frozenset[Node]:
    """What only points of rows need, where rows may have none: elsewhere it may not be read or
    checked."""
    if all(bounds(extent(r))[0] > 0 for r in linear.rvars):
        return frozenset()
    inner: list[Node] = []
    outer: list[Node] = []
    for s in linear.stmts:
        (inner if isinstance(s, Reduce) or s.full else outer).extend(stmt_nodes(s))
    return frozenset(walk(inner)) - frozenset(walk(outer))


def _is_logistic(n: Node) -> bool:
    """Whether it is a quotient by 1 + exp(x), whose reciprocal needs no scale."""
    ops = {a.op: a for a in n.args[1].args} if n.op == "truediv" and n.args[1].op == "add" else {}
    return "exp" in ops and "const" in ops and ops["const"].attr == 1


def _is_rounding(n: Node) -> bool:
    """Whether it is a float32 value with the precision of bfloat16."""
    if n.op != "cast" or n.dtype != f32:
        return False
    (a,) = n.args
    return a.op == "cast" and a.dtype == bf16 and a.args[0].dtype == f32


def _and(conditions: Sequence[str]) -> str:
    return " & ".join(conditions)


def _constant(value: Const, d: DType) -> str:
    return literal(value, d)
