"""Passes over wrapper programs: each a pure function WrapperProgram -> WrapperProgram, listed in order as data.

They share symbol expressions, drop what nobody uses, merge views, find which launches need no barrier and put the ends
of lives where they belong. No pass may drop an assert or a call: `run_passes` checks that, and the program, after each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plait.wrapper.instructions import (
    Arena,
    CallExtern,
    CallPython,
    Constant,
    Free,
    Instr,
    Symbol,
    TensorInput,
    View,
    WrapperProgram,
)
from plait.wrapper.walk import defined, symbols, used

Pass = Callable[[WrapperProgram], WrapperProgram]


def place_frees(p: WrapperProgram) -> WrapperProgram:
    """Ends every tensor's life right after its last use; a view counts as a use of its base.

    What is returned, the bases of returned views, constants and arenas stay to the end.
    """
    body = [i for i in p.body if not isinstance(i, Free)]
    last = _last_uses(p, body)
    ends: dict[int, list[str]] = {}
    for name, at in last.items():
        ends.setdefault(at, []).append(name)
    out: list[Instr] = []
    for k, i in enumerate(body):
        out.append(i)
        if k != len(body) - 1:
            out.extend(Free(name) for name in ends.get(k, ()))
    return replace(p, body=tuple(out))


def _last_uses(p: WrapperProgram, body: list[Instr]) -> dict[str, int]:
    """Tensor -> position of the instruction after which nothing needs it, in order of definition."""
    integers = frozenset().union(*(symbols(i) for i in body))
    last: dict[str, int] = {i.name: -1 for i in p.inputs if isinstance(i, TensorInput)}
    base: dict[str, str] = {}
    for k, i in enumerate(body):
        if isinstance(i, (CallExtern, CallPython)):
            last.update((n, k) for n in defined(i) if n not in integers)
        elif not isinstance(i, (Symbol, Constant, Arena)):
            last.update((n, k) for n in defined(i))
        for name in used(i):
            if name in last:
                last[name] = k
        if isinstance(i, View):
            base[i.name] = i.base
    for view, of in reversed(base.items()):  # views of views come after their bases
        if of in last:
            last[of] = max(last[of], last[view])
    return {name: k for name, k in last.items() if k >= 0}
