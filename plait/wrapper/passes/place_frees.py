"""Ends of lives: a Free stands right after the last use of its tensor, where until now all lived to
the end.

Needs everything else where it will be, so it comes last. A view counts as a use of its base. What
is returned, the bases of returned views, constants and arenas stay to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.wrapper import instructions as ins
from plait.wrapper.walk import defined, symbols, used, views_of


def place_frees(p: ins.WrapperProgram) -> ins.WrapperProgram:
    """The program where every tensor that is not needed at the end is freed."""
    body = [i for i in p.body if not isinstance(i, ins.Free)]
    last = _last_uses(p, body)
    ends: dict[int, list[str]] = {}
    for name, at in last.items():
        ends.setdefault(at, []).append(name)
    out: list[ins.Instr] = []
    for k, i in enumerate(body):
        out.append(i)
        if k != len(body) - 1:
            out.extend(ins.Free(name) for name in ends.get(k, ()))
    return replace(p, body=tuple(out))


def _last_uses(p: ins.WrapperProgram, body: Sequence[ins.Instr]) -> dict[str, int]:
    """Tensor -> position of the instruction after which nothing needs it, in order of
    definition."""
    integers = frozenset().union(*(symbols(i) for i in body))
    last: dict[str, int] = {i.name: -1 for i in p.inputs if isinstance(i, ins.TensorInput)}
    for k, i in enumerate(body):
        if isinstance(i, ins.Call):
            last.update({n: k for n in defined(i) if n not in integers})
        elif not isinstance(i, (ins.Symbol, ins.Constant, ins.Arena)):
            last.update(dict.fromkeys(defined(i), k))
        for name in used(i):
            if name in last:
                last[name] = k
    for view, of in reversed(views_of(body).items()):  # views of views come after their bases
        if of in last:
            last[of] = max(last[of], last[view])
    return {name: k for name, k in last.items() if k >= 0}
