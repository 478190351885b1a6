"""Memory of collectives that were started and not waited for: nobody reads what they fill, and
nobody writes what they were given or takes it over."""

from __future__ import annotations

from collections.abc import Mapping

from plait.ir.calls import WAIT, starts_collective
from plait.wrapper import instructions as ins
from plait.wrapper.operators import operator_of
from plait.wrapper.walk import defined, refs, root, used

# These touch no contents.
_LOOKS = (ins.View, ins.AssertSizeStride, ins.AssertAlignment, ins.Symbol, ins.Return, ins.Note)


class InFlight:
    """What is in use by collectives, in one walk over a program. base: as in the verifier."""

    def __init__(self, base: Mapping[str, str]) -> None:
        self.base = base
        self.given: dict[str, frozenset[str]] = {}  # what is filled -> what is read meanwhile

    def fault(self, i: ins.Instr) -> str:
        """Why an instruction may not stand here, in words. "" if it may: then it is noted."""
        op = i.op if isinstance(i, ins.CallExtern) else ""
        if op == WAIT:
            for name in self._roots(used(i)):
                self.given.pop(name, None)
        elif self.given and (fault := self._conflict(i)):
            return fault
        if starts_collective(op):
            read = self._roots(used(i))
            made = frozenset(defined(i)) or read  # in place, it fills what it is given
            self.given.update(dict.fromkeys(made, read - made))
        return ""

    def _conflict(self, i: ins.Instr) -> str:
        touched = () if isinstance(i, _LOOKS) else self._roots(used(i))
        for name in sorted(self.given.keys() & touched):
            return f"{name} is used before its collective is waited for"
        read = frozenset().union(*self.given.values())
        for name in sorted(read & self._roots(_written(i))):
            return f"{name} is written while a collective reads it"
        return ""

    def _roots(self, names: tuple[str, ...]) -> frozenset[str]:
        return frozenset(root(n, self.base) for n in names)


def _written(i: ins.Instr) -> tuple[str, ...]:
    """The tensors whose memory an instruction writes."""
    match i:
        case ins.Launch():
            return i.outs
        case ins.Copy():
            return (i.dst,)
        case ins.Fill():
            return (i.tensor,)
        case ins.Reuse():
            return (i.old,)
        case ins.CallExtern():
            op = operator_of(i.op)
            formals = () if op is None else op._schema.arguments
            named = dict(i.kwargs)
            given = [*zip(formals, i.args, strict=False)]
            given += [(f, named[f.name]) for f in formals if f.name in named]
            changed = (o for f, o in given if f.alias_info is not None and f.alias_info.is_write)
            return (*i.into, *(n for o in changed for n in refs(o)))
        case _:
            return ()
