"""What the tensors of a program need in C++, and after which instruction each ends.

In: a `WrapperProgram`. Out: `Lives`, by which `cppsource.py` writes variables and their ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from plait.ir.dtypes import opaque
from plait.ir.expr import Expr
from plait.wrapper import instructions as ins
from plait.wrapper.walk import bases_of, defined, used

# Need no more than a pointer.
_MEMORY = (ins.Launch, ins.Place, ins.Reuse, ins.View, ins.AssertAlignment, ins.Free)


@dataclass(frozen=True)
class Lives:
    """The tensors of one program.

    made: name -> the input or the instruction that defines it.
    headers: tensors that need more than a pointer.
    drops: position of an instruction (-1: before all) -> tensors that end there and own something.
    """

    made: Mapping[str, ins.Instr | ins.Input]
    headers: Collection[str]
    drops: Mapping[int, list[str]]

    def is_pointer(self, name: str) -> bool:
        """Whether nothing but a pointer is made of it."""
        i = self.made[name]
        if name in self.headers or not isinstance(i, (ins.View, ins.Reuse, ins.Place)):
            return False
        return not isinstance(i, ins.Place) or not any(
            isinstance(e, Expr) for e in (i.offset, *i.shape, *i.strides)
        )


def lives_of(p: ins.WrapperProgram, slots: Collection[str]) -> Lives:
    """The lives of all tensors. slots: their names, among those that the program defines.

    A tensor ends with the last instruction that needs it or what lies in its memory. At the
    program's end, everything that is left ends by itself."""
    made: dict[str, ins.Instr | ins.Input] = {i.name: i for i in p.inputs}
    last = {i.name: -1 for i in p.inputs if isinstance(i, ins.TensorInput)}
    bases = bases_of(p.body)
    headers: set[str] = set()
    for k, i in enumerate(p.body):
        new = [name for name in defined(i) if name in slots]
        made.update(dict.fromkeys(new, i))
        last.update(dict.fromkeys(new, k))
        if isinstance(i, (ins.View, ins.Reuse)) and i.dtype == opaque:
            headers.add(bases[i.name])  # which has the element type
        for name in used(i):
            if not isinstance(i, _MEMORY):
                headers.add(name)
            while name in last:
                last[name] = k
                name = bases.get(name, "")
    drops: dict[int, list[str]] = {}
    for name, k in last.items():
        maker = made[name]
        lent = isinstance(maker, (ins.Constant, ins.Arena, ins.Place))
        owns = name in headers or not isinstance(maker, (ins.View, ins.Reuse))
        if k != len(p.body) - 1 and not lent and owns:
            drops.setdefault(k, []).append(name)
    return Lives(made, headers, drops)


def nbytes_of(i: ins.Alloc | ins.TensorInput) -> int | None:
    """Bytes from a tensor's first to past its last element, where constant."""
    reach = 1
    for n, step in zip(i.shape, i.strides, strict=True):
        if not isinstance(n, int) or not isinstance(step, int):
            return None
        if n == 0:
            return 0
        reach += (n - 1) * step
    return reach * i.dtype.nbytes
