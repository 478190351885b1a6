"""Which launches of a parallel region wait for those before them: only those that data flows to.

Needs views, takeovers and places as they will be: whether two places overlap is asked of their ranges, which may be
symbolic; what is not known to be apart is taken to overlap. Changes nothing but `Launch.barrier`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from plait.ir import sizes as sz
from plait.ir.sizes import Size
from plait.wrapper import instructions as ins
from plait.wrapper.walk import bases_of, root, used


@dataclass
class _Memory:
    """Which memory may be other memory. Allocations (`own`, until an operator may have kept them) and places are known;
    inputs, constants and results of calls may share memory among each other."""

    bases: Mapping[str, str]
    places: dict[str, ins.Place] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)

    def define(self, i: ins.Instr) -> None:
        match i:
            case ins.Place():
                self.places[i.name] = i
            case ins.Alloc():
                self.own.add(i.name)
            case ins.CallExtern(may_keep=True) | ins.CallPython():
                # A result may be the memory of an argument, which is no longer ours alone.
                self.own.difference_update([root(n, self.bases) for n in used(i)])
            case _:
                pass

    def may_share(self, a: str, b: str) -> bool:
        """Whether two roots may have a byte in common."""
        if a == b:
            return True
        if a in self.places and b in self.places:
            return not _apart(self.places[a], self.places[b])
        known = self.own | self.places.keys()
        return a not in known and b not in known


def _apart(a: ins.Place, b: ins.Place) -> bool:
    """Whether two places certainly do not overlap."""
    return sz.known_le(_end(a), b.offset) or sz.known_le(_end(b), a.offset)


def _end(p: ins.Place) -> Size:
    reach = sz.total(sz.mul(sz.add(s, -1), t) for s, t in zip(p.shape, p.strides, strict=True))
    return sz.add(p.offset, sz.mul(sz.add(reach, 1), p.dtype.nbytes))


def find_barriers(p: ins.WrapperProgram) -> ins.WrapperProgram:
    """The program where a launch waits only if it reads what an earlier one wrote, or writes what one reads or wrote,
    since the last barrier or other end of a parallel region."""
    memory = _Memory(bases_of(p.body))
    read: set[str] = set()
    written: set[str] = set()
    out: list[ins.Instr] = []
    for i in p.body:
        memory.define(i)
        if isinstance(i, ins.Launch):
            outs = {root(n, memory.bases) for n in i.outs}
            args = {root(n, memory.bases) for n in i.args}
            barrier = _meet(memory, args, written) or _meet(memory, outs, read)
            if barrier:
                read, written = set(), set()
            read |= args
            written |= outs
            i = replace(i, barrier=barrier)
        elif isinstance(i, _ENDS_A_REGION) or _reads_item(i):
            read, written = set(), set()
        out.append(i)
    return replace(p, body=tuple(out))


_ENDS_A_REGION = (ins.CallExtern, ins.CallPython, ins.Hook, ins.Copy, ins.Fill, ins.CheckFinite)


def _reads_item(i: ins.Instr) -> bool:
    return isinstance(i, ins.Symbol) and isinstance(i.value, ins.ItemOf)


def _meet(memory: _Memory, a: set[str], b: set[str]) -> bool:
    return bool(a & b) or any(memory.may_share(x, y) for x in a for y in b)
