"""Which launches of a parallel region wait for those before them: only those that data flows to.

Needs views, takeovers and places as they will be: whether two places overlap is asked of their
ranges, which may be symbolic; what is not known to be apart is taken to overlap. Changes nothing
but `Launch.barrier`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from plait.ir.expr import Size, known_le, total
from plait.schedule.spans import Spans
from plait.wrapper import instructions as ins
from plait.wrapper.walk import bases_of, may_keep, root, used

Range = tuple[Size, Size]


@dataclass
class _Memory:
    """Which memory may be other memory. Allocations (`own`, until an operator may have kept them)
    and places are known; inputs, constants and results of calls may share memory among each other.
    places: their first byte, and one past their last."""

    bases: Mapping[str, str]
    places: dict[str, Range] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)

    def define(self, i: ins.Instr) -> None:
        match i:
            case ins.Place():
                self.places[i.name] = (i.offset, _end(i))
            case ins.Alloc():
                self.own.add(i.name)
            case _ if may_keep(i):
                # A result may be the memory of an argument, which is no longer ours alone.
                self.own.difference_update([root(n, self.bases) for n in used(i)])
            case _:
                pass


@dataclass
class _Touched:
    """What the launches of a region have read, or written. roots: all of it; unknown: some is no
    memory that is known; places: those that it holds, spans: those of them between numbers,
    symbolic: the others."""

    memory: _Memory
    roots: set[str] = field(default_factory=set)
    unknown: bool = False
    places: list[Range] = field(default_factory=list)
    spans: Spans = field(default_factory=Spans)
    symbolic: list[Range] = field(default_factory=list)

    def add(self, roots: set[str]) -> None:
        for name in roots - self.roots:
            place = self.memory.places.get(name)
            if place is None:
                self.unknown = self.unknown or name not in self.memory.own
                continue
            self.places.append(place)
            start, end = place
            if isinstance(start, int) and isinstance(end, int):
                self.spans.add(start, end)
            else:
                self.symbolic.append(place)
        self.roots |= roots

    def may_meet(self, roots: set[str]) -> bool:
        """Whether one of roots may have a byte in common with it."""
        return not self.roots.isdisjoint(roots) or any(map(self._may_hold, roots))

    def _may_hold(self, name: str) -> bool:
        place = self.memory.places.get(name)
        if place is None:
            return self.unknown and name not in self.memory.own
        start, end = place
        if isinstance(start, int) and isinstance(end, int):
            return self.spans.meet(start, end) or not all(_apart(place, p) for p in self.symbolic)
        return not all(_apart(place, p) for p in self.places)


def _apart(a: Range, b: Range) -> bool:
    """Whether two places certainly do not overlap."""
    return known_le(a[1], b[0]) or known_le(b[1], a[0])


def _end(p: ins.Place) -> Size:
    reach = total((s - 1) * t for s, t in zip(p.shape, p.strides, strict=True))
    return p.offset + (reach + 1) * p.dtype.nbytes


def find_barriers(p: ins.WrapperProgram) -> ins.WrapperProgram:
    """The program where a launch waits only if it reads what an earlier one wrote, or writes what
    one reads or wrote, since the last barrier or other end of a parallel region."""
    memory = _Memory(bases_of(p.body))
    read, written = _Touched(memory), _Touched(memory)
    out: list[ins.Instr] = []
    for i in p.body:
        memory.define(i)
        if isinstance(i, ins.Launch):
            outs = {root(n, memory.bases) for n in i.outs}
            args = {root(n, memory.bases) for n in i.args}
            barrier = written.may_meet(args) or read.may_meet(outs)
            if barrier:
                read, written = _Touched(memory), _Touched(memory)
            read.add(args)
            written.add(outs)
            i = replace(i, barrier=barrier)
        elif isinstance(i, _ENDS_A_REGION) or _reads_item(i):
            read, written = _Touched(memory), _Touched(memory)
        out.append(i)
    return replace(p, body=tuple(out))


_ENDS_A_REGION = ins.Call | ins.Hook | ins.Copy | ins.Fill | ins.CheckFinite


def _reads_item(i: ins.Instr) -> bool:
    return isinstance(i, ins.Symbol) and isinstance(i.value, ins.ItemOf)
