"""Prints reductions: of a block that holds its rows, or a block after the other in a loop."""

from __future__ import annotations

from plait.ir.dtypes import DType, b1, i64
from plait.ir.reductions import REDUCTIONS
from plait.kernel.triton.choose_accumulators import Accumulation, Accumulator
from plait.kernel.triton.ops import TYPES, combiner, literal, render
from plait.kernel.triton.passes import offset_from, scale_of
from plait.kernel.triton.values import Values
from plait.schedule.plan import Reduce

_LAST = {"tl.int32": 2**31 - 1, "tl.int64": 2**63 - 1}
"""A position behind all others, by the type of positions."""


class Reductions:
    """Prints the reductions of one kernel.

    begun: reduction -> the variables that accumulate it.
    lanes: reduction -> its accumulator after the loop, one value a lane.
    seen: how many blocks of its row a program has seen.
    """

    def __init__(self, values: Values) -> None:
        self.values, self.layout, self.lines = values, values.layout, values.lines
        self.begun: dict[str, tuple[str, ...]] = {}
        self.lanes: dict[str, str] = {}
        self.seen = ""

    # ------------------------------------------------------------------------------- of whole rows
    def whole(self, a: Accumulator) -> None:
        """A reduction of a block that holds whole rows."""
        s = a.reduce
        if a.how is Accumulation.POINT:
            text = literal(0, i64) if a.is_arg else self.values.value(s.value)
        elif a.how is Accumulation.SEGMENT:
            text = self._of_segments(s)
        elif a.how is Accumulation.SCAN:
            text = self.lines.define(self._running(s, self._block(s)), True)
        else:
            block = self._block(s)
            position = self._position() if a.is_arg else ""
            text = self.lines.define(self._reduced(s, block, position, inner=True), True, "a")
        self.values.results[s.name] = text

    def _of_segments(self, s: Reduce) -> str:
        """The result of each point's segment. Segments lie in their row as a whole, or outside."""
        block, shape = self.layout.shape(self.layout.everything), self.layout.segments(s.segment)
        value = f"tl.broadcast_to({self.values.value(s.value)}, {block})"
        kind, found = TYPES[s.value.dtype.name], self._of_each(s, value, shape)
        found = self.lines.define(f"{found}.to({kind})", True, "a")
        spread = f"tl.reshape(tl.broadcast_to({found}, {shape}), {block})"
        return self.lines.define(spread, True, "a")

    def _of_each(self, s: Reduce, value: str, shape: str) -> str:
        """The results of segments, with the shape of the block but for one point of each."""
        if self._is_tree(s):
            many, one = self.layout.each_segment(s.segment)
            rows = self.lines.define(f"tl.reshape({value}, {many})", True)
            found = f"p_tree_{REDUCTIONS[s.kind].op}({rows})"
            many_rows = not many.startswith("[1,")
            return f"tl.{'reshape' if many_rows else 'broadcast_to'}({found}, {one})"
        cut = self.lines.define(f"tl.reshape({value}, {shape})", True)
        return f"tl.reduce({cut}, 2, {combiner(s.kind, s.value.dtype)})[:, :, None]"

    def _block(self, s: Reduce) -> str:
        """The value of a reduction over the whole block, identity outside the tensor."""
        shape = self.layout.shape(self.layout.everything)
        value = f"tl.broadcast_to({self.values.value(s.value)}, {shape})"
        for mask in self.values.mask(frozenset("r")):
            value = f"tl.where({mask}, {value}, {_first(s)})"
        return self.lines.define(value, True)

    def _position(self) -> str:
        shape = self.layout.shape(self.layout.everything)
        return self.lines.define(f"tl.broadcast_to(r, {shape})", True)

    def _reduced(self, s: Reduce, block: str, position: str, inner: bool) -> str:
        """The rows' results out of a block, as a column."""
        d = s.value.dtype
        if position:
            return f"tl.reduce(({block}, {position}), 1, p_{s.kind})[1][:, None].to(tl.int64)"
        if self._is_tree(s):
            return f"p_tree_{REDUCTIONS[s.kind].op}({block})"
        if s.kind == "sum" and d.is_float:
            return f"tl.sum({block}, 1)[:, None]"
        if d == b1:
            word = self.lines.define(f"{block}.to(tl.int32)", inner)
            return f"(tl.reduce({word}, 1, {combiner(s.kind, d)})[:, None] != 0)"
        return f"tl.reduce({block}, 1, {combiner(s.kind, d)})[:, None].to({TYPES[d.name]})"

    def _is_tree(self, s: Reduce) -> bool:
        """Whether the order in which it combines values matters, and must not be Triton's."""
        by_row = self.layout.linear.by_row and s.value.dtype.is_float
        return by_row and REDUCTIONS[s.kind].op in ("add", "mul")

    # ------------------------------------------------------------------------------- before a loop
    def start(self, a: Accumulator, in_order: bool) -> None:
        """Accumulators before the loop. in_order: it walks along the row from its first point, so
        that a lane that has points begins with the position of its first."""
        if a.how is Accumulation.SEGMENT:
            return
        shape = self.layout.shape(
            self.layout.rows if a.how is Accumulation.SCAN else self.layout.everything
        )
        if a.how is Accumulation.SCAN and self._is_one_row():
            shape = "[]"
        if a.folds:
            shape = f"[{a.folds[0]}, {a.folds[2]}]"
        first = _first(a.reduce)
        names = [self.lines.define(f"tl.broadcast_to({first}, {shape})", False, "a")]
        if a.is_arg:
            kind = self.values.plan.index_type
            last = f"tl.full({shape}, {_LAST[kind]}, {kind})"
            at = f"tl.broadcast_to(rbase, {shape})" if in_order else last
            names.append(self.lines.define(at, False, "a"))
        self.begun[a.reduce.name] = tuple(names)

    def start_count(self) -> None:
        """The count of blocks before the loop."""
        self.seen = self.lines.define("tl.full([], 0, tl.float32)", False, "a")

    # ----------------------------------------------------------------------------------- in a loop
    def step(self, a: Accumulator) -> None:
        """One block of a reduction inside the loop."""
        if a.how is Accumulation.WITH:
            return
        if a.how is Accumulation.SEGMENT:
            self.values.results[a.reduce.name] = self._of_segments(a.reduce)
            return
        if a.how is Accumulation.MEAN:
            self._mean(a)
            return
        block, names = self._block(a.reduce), self.begun[a.reduce.name]
        kind = a.reduce.kind
        if a.how is Accumulation.SCAN:
            self._scan(a.reduce, block)
        elif a.is_arg:
            self._best(kind, names, block)
        elif a.how is Accumulation.PEAK:
            self._peak(a, block)
        elif a.reduce.value.dtype == b1:
            sign = {"or": "|", "and": "&"}[REDUCTIONS[kind].op]
            self.lines.add(f"{names[0]} = {names[0]} {sign} {block}", True)
        else:
            fn = combiner(kind, a.reduce.value.dtype)
            self.lines.add(f"{names[0]} = {fn}({names[0]}, {block})", True)

    def _best(self, kind: str, names: tuple[str, ...], block: str) -> None:
        """The better of each lane's value so far and its value in a block, with its position."""
        position, both = self._position(), ", ".join(names)
        how = f"p_{kind}_later"  # outside of the row there is nothing better
        if self.values.piece.start is not None:
            how = f"p_{kind}"
            for mask in self.values.mask(frozenset("r")):
                last = _LAST[self.values.plan.index_type]
                position = self.lines.define(f"tl.where({mask}, {position}, {last})", True)
        self.lines.add(f"{both} = {how}({both}, {block}, {position})", True)

    def count(self) -> None:
        """One more block at the end of the loop's body."""
        self.lines.add(f"{self.seen} = {self.seen} + 1", True)

    def _scan(self, s: Reduce, block: str) -> None:
        fn = combiner(s.kind, s.value.dtype, running=True)
        (carry,) = self.begun[s.name]
        scanned = self.lines.define(self._running(s, block), True)
        whole = f"tl.broadcast_to({carry}, {scanned}.shape)"
        self.values.results[s.name] = self.lines.define(f"{fn}({whole}, {scanned})", True)
        # Of one row, a number: Triton may lay out a column, and with it the block that it is
        # computed of, so that each thread holds all of it.
        axis, column = ("None", "") if self._is_one_row() else ("1", "[:, None]")
        total = f"tl.reduce({block}, {axis}, {fn}){column}"
        if self._is_tree(s):
            total = self._reduced(s, block, "", inner=True)
        elif fn.endswith("_last"):  # which depends on the order
            last = self.layout.tile.groups[-1].block - 1
            total = f"p_at({scanned}, rbase == {last}, {axis}){column}"
        self.lines.add(f"{carry} = {fn}({carry}, {total})", True)

    def _running(self, s: Reduce, block: str) -> str:
        """What a block's rows give from their first point up to each."""
        fn = combiner(s.kind, s.value.dtype, running=True)
        if self._is_tree(s):
            return f"p_running_tree_{REDUCTIONS[s.kind].op}({block})"
        return f"tl.associative_scan({block}, 1, {fn})"

    def _is_one_row(self) -> bool:
        """Whether a block holds points of one row."""
        return self.layout.tile.block == self.layout.tile.groups[-1].block

    def _peak(self, a: Accumulator, block: str) -> None:
        """A maximum, and before it the sums of exponentials below it."""
        (old,), fn = self.begun[a.reduce.name], combiner(a.reduce.kind, a.reduce.value.dtype)
        block = self.lines.define(f"tl.reshape({block}, {list(a.folds)})", True)
        folded = f"tl.reduce(tl.reduce({block}, 3, {fn}), 1, {fn})"
        new = self.lines.define(f"{fn}({old}, {folded})", True)
        for s in a.beside:
            (total,) = self.begun[s.name]
            self.lines.add(f"{total} = p_exp_sum({total}, {old}, {block}, {new})", True)
        self.lines.add(f"{old} = {new}", True)

    def _mean(self, a: Accumulator) -> None:
        """Adds a block to each lane's mean, which its accumulator is, and to its squared deviations
        from that: of equal numbers exactly."""
        d, (mean,) = a.reduce.value.dtype, self.begun[a.reduce.name]
        x, _ = offset_from(a.beside[0])
        off = f"{self.values.value(x)} - {mean}"
        for mask in self.values.mask(frozenset("r")):
            off = f"tl.where({mask}, {off}, 0.0)"
        off = self.lines.define(off, True)
        seen = self.lines.define(f"{self.seen}.to({TYPES[d.name]})", True)
        share = self.lines.define(render("truediv", d, (literal(1, d), f"({seen} + 1)")), True)
        for s in a.beside:
            if s.value.op == "mul":  # the weight is 0 where the square may be too large
                (squares,) = self.begun[s.name]
                added = f"{off} * ({off} * ({seen} * {share}))"
                self.lines.add(f"{squares} = {squares} + {added}", True)
        self.lines.add(f"{mean} = {mean} + {off} * {share}", True)

    # -------------------------------------------------------------------------------- after a loop
    def finish(self, a: Accumulator) -> None:
        """The rows' results after the loop."""
        if a.how in (Accumulation.SCAN, Accumulation.SEGMENT):
            return
        s, names = a.reduce, self.begun[a.reduce.name]
        if a.first is not None:
            rescaled = bool(a.folds)
            text = self._rescaled(a.first, names[0]) if rescaled else self._gathered(s, a.first)
        else:
            self.lanes[s.name] = lanes = names[0]
            if a.how is Accumulation.MEAN:
                scale = scale_of(a.beside[0], s)
                scaled = lanes if scale is None else f"{lanes} * {self.values.value(scale)}"
                lanes = self.lines.define(f"{scaled} * {self._lane_counts(s.value.dtype)}", False)
            text = self._reduced(s, lanes, names[1] if a.is_arg else "", inner=False)
        self.values.results[s.name] = self.lines.define(text, False, "a")

    def _rescaled(self, first: Reduce, total: str) -> str:
        """The sum of exp(x - max x) of a row out of its lanes'."""
        peak = self.values.results[first.name]
        lane = f"{total} * p_exp_below({self.lanes[first.name]}, {peak})"
        # A row of nothing but -inf: its differences from its maximum are NaN.
        return f"tl.where({peak} == float('-inf'), float('nan'), tl.sum({lane}, 1)[:, None])"

    def _gathered(self, s: Reduce, first: Reduce) -> str:
        """The sum of x - c, or of its square, of a row out of its lanes'."""
        _, center = offset_from(s)
        off = f"{self.lanes[first.name]} - {self.values.value(center)}"
        off = self.lines.define(off, False)
        lanes = f"{self._lane_counts(s.value.dtype)} * {off}"
        if s.value.op == "mul":
            lanes = f"{self.begun[s.name][0]} + {lanes} * {off}"
        return f"tl.sum({lanes}, 1)[:, None]"

    def _lane_counts(self, d: DType) -> str:
        """How many points of a row each lane has."""
        r = self.layout.tile.groups[-1]
        points = self.values.indices.size(r.points)
        return f"(({points} - rbase + {r.block - 1}) // {r.block}).to({TYPES[d.name]})"


def _first(s: Reduce) -> str:
    """What a reduction begins with."""
    return literal(REDUCTIONS[s.kind].identity(s.value.dtype), s.value.dtype)
