"""Accumulators of one kernel: declaration, update, combination over vectors and lanes.

One accumulator (one a vector in flight) for each Reduce; argmax and argmin have a value and a
position. Long f32 sums have two levels: a chunk is summed on its own and then added to an f64, so
that the error does not grow with the length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plait.ir.dtypes import DType, b1, f32, f64, i64
from plait.ir.loops import Const
from plait.ir.reductions import REDUCTIONS
from plait.kernel.cpu.expr import (
    Parts,
    ctype,
    literal,
    mask_part,
    memory,
    n_parts,
    scalar_cast,
    scalar_op,
    splat,
    vector_cast,
    vector_op,
    vtype,
)
from plait.kernel.cpu.values import Values
from plait.schedule.legalize.linear import position
from plait.schedule.plan import Reduce


class Accumulators:
    """Writes the reductions of a kernel into the blocks of a `Values`."""

    def __init__(self, values: Values) -> None:
        self.v, self.sums = values, values.facts.sums
        self.now: dict[tuple[str, int], Parts] = {}
        self.whole: dict[tuple[str, int], Parts] = {}
        self.positions: dict[tuple[str, int], Parts] = {}

    def begin(self, reduces: Sequence[Reduce], reps: int) -> None:
        """Declares the accumulators of a pass in the innermost block."""
        v = self.v
        for s in reduces:
            vector = self.sums[s.name].vector
            for rep in range(reps if vector else 1):
                d = s.value.dtype
                first = REDUCTIONS[s.kind].identity(d)
                if self.sums[s.name].long:
                    self.whole[s.name, rep] = self._declare(f64, first, vector)
                    continue
                self.now[s.name, rep] = self._declare(d, first, vector)
                if REDUCTIONS[s.kind].extreme:
                    self.positions[s.name, rep] = self._declare(i64, 0, vector)
                if s.running:
                    v.acc_values[s.name, rep] = self.now[s.name, rep]

    def _declare(self, d: DType, first: Const, vector: bool) -> Parts:
        v = self.v
        one = literal(first, d)
        names = tuple(v.name("a") for _ in range(n_parts(d) if vector else 1))
        for name, text in zip(names, splat(one, d) if vector else (one,), strict=True):
            v.line(f"{vtype(d) if vector else ctype(d)} {name} = {text};")
        return names

    # --------------------------------------------------------------------------------------- chunks
    def _long(self, reduces: Sequence[Reduce], reps: int) -> Iterator[tuple[Reduce, int]]:
        """Long sums, once for each vector in flight."""
        for s in (s for s in reduces if self.sums[s.name].long):
            yield from ((s, rep) for rep in range(reps if self.sums[s.name].vector else 1))

    def begin_chunk(self, reduces: Sequence[Reduce], reps: int) -> None:
        """Starts the next part of long sums."""
        for s, rep in self._long(reduces, reps):
            self.now[s.name, rep] = self._declare(f32, 0.0, self.sums[s.name].vector)

    def end_chunk(self, reduces: Sequence[Reduce], reps: int) -> None:
        """Adds the parts to the sums."""
        for s, rep in self._long(reduces, reps):
            part = self.now[s.name, rep]
            wide = vector_cast(part, f32, f64) if self.sums[s.name].vector else part
            for whole, x in zip(self.whole[s.name, rep], wide, strict=True):
                self.v.line(f"{whole} += {x};")

    # --------------------------------------------------------------------------------------- update
    def update(self, s: Reduce) -> None:
        """Combines the present value (of copy v.rep) into the accumulator."""
        v, d = self.v, s.value.dtype
        vector = self.sums[s.name].vector
        if not vector and v.rep > 0:
            return
        acc = self.now[s.name, v.rep if vector else 0]
        if vector and self._fuses(s):
            parts = (*(v.vector(a) for a in s.value.args), acc)
            for name, text in zip(acc, vector_op("fma", d, parts, d), strict=True):
                v.line(f"{name} = {text};")
            return
        value = v.vector(s.value) if vector else v.get(s.value)
        if REDUCTIONS[s.kind].extreme:
            self._update_position(s, value, vector)
            return
        if not vector:  # of equal ones (0. and -0.) the first, but the last of a running extreme
            both = (value[0], acc[0]) if s.running else (acc[0], value[0])
            v.line(f"{acc[0]} = {scalar_op(REDUCTIONS[s.kind].op, d, both, d)};")
            return
        if v.tail and v.nest.inner:
            rest = splat(literal(REDUCTIONS[s.kind].identity(d), d), d)
            value = vector_op("where", d, (("lm",), value, rest), d)
        if s.running and v.nest.inner:
            self._scan(s, acc, value)
            return
        # The value first: min and max test their first argument for NaNs, which then need not wait
        # for the accumulator. Of equal ones (0. and -0.) they give the second, which is the last
        # one that a running minimum wants.
        pair = (acc, value) if s.running else (value, acc)
        for name, text in zip(acc, vector_op(REDUCTIONS[s.kind].op, d, pair, d), strict=True):
            v.line(f"{name} = {text};")

    def _fuses(self, s: Reduce) -> bool:
        """Whether products are added without being rounded. Those of a tail are masked first; those
        that another pass needs too are values of their own. So is any, where rows keep their bits:
        whether a product is computed here or read from memory depends on how many rows there are.
        """
        v, n = self.v, s.value
        if v.nest.linear.by_row:
            return False
        is_sum = s.kind == "sum" and not s.running and n.op == "mul" and n.dtype.is_float
        lone = n not in v.nest.kept and not (v.tail and v.nest.inner)
        return is_sum and "fma" in v.isa.cpu and lone

    def _scan(self, s: Reduce, carry: Parts, value: Parts) -> None:
        """Running results over the lanes; carry holds the last one in every lane, from vector to
        vector."""
        v, d = self.v, s.value.dtype
        before, found = carry[0], []
        for part in value:
            found.append(v.define(vtype(d), f"scan_{s.kind}_{d.name}({part}, {before})"))
            before = v.define(vtype(d), f"last_{d.name}({found[-1]})")
        for name in carry:
            v.line(f"{name} = {before};")
        v.acc_values[s.name, v.rep] = tuple(found)

    def _update_position(self, s: Reduce, value: Parts, vector: bool) -> None:
        v, d = self.v, s.value.dtype
        rep = v.rep if vector else 0
        best, at = self.now[s.name, rep], self.positions[s.name, rep]
        here = position(v.nest.linear)
        if not vector:
            better = scalar_op(REDUCTIONS[s.kind].op, d, (value[0], best[0]), b1)
            if d.is_float:
                better = f"{better} || ({value[0]} != {value[0]} && {best[0]} == {best[0]})"
            v.line(f"if ({better}) {{ {best[0]} = {value[0]}; {at[0]} = {v.get(here)[0]}; }}")
            return
        better = vector_op(REDUCTIONS[s.kind].op, d, (value, best), b1)[0]
        if d.is_float:
            nan = vector_op("isnan", d, (value,), b1)[0]
            better = f"{better} | ({nan} & ~{vector_op('isnan', d, (best,), b1)[0]})"
        if v.tail and v.nest.inner:
            better = f"({better}) & lm"
        m = v.define("vi32", better)
        for k, (name, x) in enumerate(zip(best, value, strict=True)):
            v.line(f"{name} = {mask_part(m, d, k)} ? {x} : {name};")
        for k, (name, x) in enumerate(zip(at, v.vector(here), strict=True)):
            v.line(f"{name} = {mask_part(m, i64, k)} ? {x} : {name};")

    # --------------------------------------------------------------------------------------- finish
    def finish(self, reduces: Sequence[Reduce], reps: int) -> None:
        """Makes the results known to later statements, in the innermost block."""
        v = self.v
        for s in reduces:
            if s.running:
                continue
            vector = self.sums[s.name].vector
            if not (vector and v.nest.inner):
                for rep in range(reps if vector else 1):
                    found = self.positions if REDUCTIONS[s.kind].extreme else self.now
                    v.acc_values[s.name, rep] = (
                        self._rounded(s, rep) if self.sums[s.name].long else found[s.name, rep]
                    )
            elif REDUCTIONS[s.kind].extreme:
                v.acc_values[s.name, 0] = (self._first_best(s, reps),)
            else:
                v.acc_values[s.name, 0] = (self._across(s, reps),)

    def _across(self, s: Reduce, reps: int) -> str:
        """All copies, registers and lanes combined into one scalar."""
        v, op, long = self.v, REDUCTIONS[s.kind].op, self.sums[s.name].long
        d = f64 if long else s.value.dtype
        parts = [
            (p,) for rep in range(reps) for p in (self.whole if long else self.now)[s.name, rep]
        ]
        while len(parts) > 1:
            pairs = list(zip(parts[::2], parts[1::2], strict=True))
            parts = [(v.define(vtype(d), _one_register(op, d, a[0], b[0])),) for a, b in pairs]
        t = "i32" if d == b1 else memory(d)
        text = f"h_{s.kind}_{t}({parts[0][0]})"
        if long:
            text = scalar_cast(text, f64, f32)
        return v.define(ctype(s.value.dtype), f"{text} != 0" if d == b1 else text)

    def _rounded(self, s: Reduce, rep: int) -> Parts:
        """A long sum as f32."""
        v, whole = self.v, self.whole[s.name, rep]
        if not self.sums[s.name].vector:
            return (v.define(ctype(f32), scalar_cast(whole[0], f64, f32)),)
        return tuple(v.define(vtype(f32), x) for x in vector_cast(whole, f64, f32))

    def _first_best(self, s: Reduce, reps: int) -> str:
        """The position of the best of all lanes; of equal ones the first."""
        v, d = self.v, s.value.dtype
        n, t = reps * v.lanes, memory(d)
        best, at = v.name("g"), v.name("g")
        v.line(f"{t} {best}[{n}]; i64 {at}[{n}];")
        for rep in range(reps):
            for array, type_, parts in (
                (best, t, self.now[s.name, rep]),
                (at, "i64", self.positions[s.name, rep]),
            ):
                for k, p in enumerate(parts):
                    v.line(f"st_{type_}({array} + {rep * v.lanes + k * v.lanes // 2}, {p});")
        value, where = v.name("a"), v.name("a")
        v.line(f"{t} {value} = {best}[0]; i64 {where} = {at}[0];")
        x, sign = f"{best}[k]", {"gt": ">", "lt": "<"}[REDUCTIONS[s.kind].op]
        nans = (f"({x} != {x})", f"({value} != {value})") if d.is_float else ("false", "false")
        better = f"{x} {sign} {value} || ({nans[0]} && !{nans[1]})"
        equal = f"{x} == {value} || ({nans[0]} && {nans[1]})"
        v.line(
            f"for (int k = 1; k < {n}; ++k) if ({better} || (({equal}) && {at}[k] < {where})) "
            f"{{ {value} = {x}; {where} = {at}[k]; }}"
        )
        return where


def _one_register(op: str, d: DType, a: str, b: str) -> str:
    return vector_op(op, d, ((a,) * n_parts(d), (b,) * n_parts(d)), d)[0]
