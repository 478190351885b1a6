"""Sizes that cost something are computed once: an expression that several instructions evaluate
becomes a symbol.

Counted are divisions, minima and products of symbols; a target folds sums and multiples into what
it writes. The symbol is defined as soon as its own symbols are: at the start, unless a value that
is read has a part in it. Keeps the value of every expression; hides what it is made of, so passes
that compare sizes come before.
"""

from __future__ import annotations

from dataclasses import replace

from plait.ir.expr import Expr, Size, atom_of, bounds, free_symbols, symbol
from plait.wrapper import instructions as ins
from plait.wrapper import walk
from plait.wrapper.walk import defined, rewrite


def share_sizes(p: ins.WrapperProgram) -> ins.WrapperProgram:
    """The program with a symbol for each costly expression that occurs more than once."""
    counts: dict[Expr, int] = {}
    for i in p.body:
        for e in dict.fromkeys(walk.sizes(i)):
            if isinstance(e, Expr) and _is_costly(e):
                counts[e] = counts.get(e, 0) + 1
    repeated = [e for e, n in counts.items() if n > 1]
    if not repeated:
        return p
    taken = {i.name for i in p.inputs}.union(*map(defined, p.body))
    shared: dict[Expr, Expr] = {}
    for e in repeated:
        lo, hi = bounds(e)
        shared[e] = symbol(_fresh("n", taken), lo, hi)
    ready = {i.name for i in p.inputs if isinstance(i, ins.SymbolInput)}
    waiting = dict(shared)
    out = _define_ready(waiting, ready)
    for i in p.body:
        out.append(
            i if isinstance(i, ins.Symbol) else rewrite(i, lambda n: n, lambda e: _swap(e, shared))
        )
        ready.update(defined(i))
        out += _define_ready(waiting, ready)
    return replace(p, body=tuple(out))


def _is_costly(e: Expr) -> bool:
    return any(len(mono) > 1 or mono[0].kind != "sym" for mono, _ in e.terms)


def _swap(e: Size, shared: dict[Expr, Expr]) -> Size:
    return shared.get(e, e) if isinstance(e, Expr) else e


def _define_ready(waiting: dict[Expr, Expr], ready: set[str]) -> list[ins.Instr]:
    """Definitions of those symbols whose expressions can be evaluated by now; they wait no more."""
    now = [e for e in waiting if all(a.name in ready for a in free_symbols(e))]
    out: list[ins.Instr] = []
    for e in now:
        out.append(ins.Symbol(atom_of(waiting.pop(e)).name, e))
    return out


def _fresh(stem: str, taken: set[str]) -> str:
    k = 0
    while f"{stem}{k}" in taken:
        k += 1
    taken.add(f"{stem}{k}")
    return f"{stem}{k}"
