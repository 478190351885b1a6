"""Memory that one stream made and another one uses: the allocator is told, as it hands memory out
in a stream's order.

A pass over new instructions, run where streams are ordered. Programs on their caller's stream alone
stay as they are. In others a call of `streams::record_stream` stands behind the first use of a
tensor by each stream but its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.devices import facts_of
from plait.wrapper import instructions as ins
from plait.wrapper.walk import bases_of, defined, forks, is_fence, root, used

RECORD = "streams::record_stream"


def keep_memory(p: ins.WrapperProgram, devices: Mapping[str, str]) -> ins.WrapperProgram:
    """The program where no memory is handed out again while another stream may use it. devices: of
    tensors."""
    changes = forks(p)
    if not changes:
        return p
    away = {name for name, device in devices.items() if not facts_of(device).is_host}
    home = now = changes[0].args[0]
    bases = bases_of(p.body)
    known: dict[str, set[ins.Operand]] = {i.name: {home} for i in p.inputs}
    out: list[ins.Instr] = []
    for i in p.body:
        out.append(i)
        if is_fence(i):
            now = i.args[1] if i in changes else now
            continue
        known.update((name, {now}) for name in defined(i) if name not in bases)
        if isinstance(i, (ins.Launch, ins.CallExtern, ins.Copy, ins.Fill)):
            for name in dict.fromkeys(root(n, bases) for n in used(i)):
                if name in away and now not in known[name]:
                    known[name].add(now)
                    out.append(ins.CallExtern(RECORD, (ins.Ref(name), now), (), (), fence=True))
    return replace(p, body=tuple(out))
