"""Dead code: what only defines a name that nobody needs goes, and results of calls that nobody uses
lose their names.

Needs a program without Free, which would name what goes. Keeps everything that has an effect:
asserts, launches, calls, copies.
"""

from __future__ import annotations

from dataclasses import replace

from plait.wrapper import instructions as ins
from plait.wrapper.walk import symbols, used

_DEFINE = (
    ins.Symbol,
    ins.Arena,
    ins.Place,
    ins.Alloc,
    ins.Reuse,
    ins.View,
    ins.Constant,
    ins.DefineKernel,
)


def drop_dead(p: ins.WrapperProgram) -> ins.WrapperProgram:
    """The program without what only defines names that nobody needs."""
    needed: set[str] = set()
    out: list[ins.Instr] = []
    for i in reversed(p.body):
        if isinstance(i, _DEFINE) and i.name not in needed:
            continue
        if isinstance(i, ins.Call):
            i = replace(i, outs=tuple(n if n in needed else None for n in i.outs))
        if isinstance(i, ins.Launch):
            needed.add(i.kernel)
        needed.update(used(i), symbols(i))
        out.append(i)
    return replace(p, body=tuple(reversed(out)))
