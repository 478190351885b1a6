"""Work that can be done in several ways, of which a call takes one: the launches of each stand one
after the other, and run in that way alone (`Launch.when`).

The verifier asks here what must hold of them: each way leaves the same memory written, so that what
follows need not know which was taken, and needs nothing that only another makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.ir.expr import Atom, Expr, bounds, evaluate
from plait.wrapper import instructions as ins
from plait.wrapper.walk import used

Ways = dict[Atom, dict[int, list[ins.Launch]]]
"""The symbol that picks a way -> number of a way -> its launches."""


def way_of(i: ins.Instr) -> tuple[Atom, int] | None:
    """The symbol that picks among several ways and the number of the one that an instruction
    belongs to; None where there is one way. Raises ValueError if `when` is no such condition."""
    if not isinstance(i, ins.Launch) or i.when == 1:
        return None
    if isinstance(i.when, Expr) and i.when.const == 0 and len(i.when.terms) == 1:
        ((mono, c),) = i.when.terms
        if c == 1 and len(mono) == 1 and mono[0].kind == "eq":
            a, b = mono[0].a, mono[0].b
            picked = a.symbol if isinstance(a, Expr) else None
            if picked is not None and isinstance(b, int):
                return picked, b
    raise ValueError(f"{i.when} is not `pick == k`")


def moments(body: Sequence[ins.Instr]) -> list[int]:
    """When each instruction runs: the launches of all ways of some work as if at once."""
    firsts: dict[Atom, int] = {}
    found = [way_of(i) for i in body]
    return [k if w is None else firsts.setdefault(w[0], k) for k, w in enumerate(found)]


def ways_of(body: Sequence[ins.Instr]) -> Ways:
    """All work that is done in several ways."""
    ways: Ways = {}
    for i in body:
        if isinstance(i, ins.Launch) and (found := way_of(i)):
            ways.setdefault(found[0], {}).setdefault(found[1], []).append(i)
    return ways


def of_one_way(body: Sequence[ins.Instr]) -> frozenset[str]:
    """What only one of several ways uses, and nobody writes where another is taken."""
    found: set[str] = set()
    for of in ways_of(body).values():
        names = [{n for i in way for n in i.args} for way in of.values()]
        found |= set().union(*names) - names[0].intersection(*names)
    return frozenset(found)


def faults(p: ins.WrapperProgram, samples: Sequence[Mapping[str, int]]) -> list[str]:
    """What is wrong with the ways of a program. samples: values of its symbols."""
    values = {i.name: i.value for i in p.body if isinstance(i, ins.Symbol)}
    texts = []
    for pick, of in ways_of(p.body).items():
        texts += _of_numbers(pick, sorted(of), values.get(pick.name))
        launches = [i for way in of.values() for i in way]
        texts += _of_grids(pick, launches, samples)
        texts += _of_memory(p, list(of.values()), launches)
    return texts


def _of_numbers(pick: Atom, numbers: list[int], value: object) -> list[str]:
    """Whether exactly one way is taken, whatever the sizes."""
    if not isinstance(value, (int, Expr)):
        return [f"{pick.name} picks a way of doing work and is no function of sizes"]
    low, high = bounds(value)
    if not (numbers == list(range(len(numbers))) and 0 <= low and high < len(numbers)):
        return [f"{pick.name} = {value} picks from {low} to {high} among ways {numbers}"]
    return []


def _of_grids(
    pick: Atom, launches: Sequence[ins.Launch], samples: Sequence[Mapping[str, int]]
) -> list[str]:
    """Whether the grids of all other ways are 0."""

    def runs(i: ins.Launch, env: Mapping[str, int]) -> bool:
        taken = pick.name in env and evaluate(i.when, env) != 0
        return evaluate(i.grid, env) != 0 and not taken

    wrong = [i for i in launches if any(runs(i, env) for env in samples)]
    return [f"{i.kernel} runs where another way is taken" for i in wrong]


def _of_memory(
    p: ins.WrapperProgram, ways: list[list[ins.Launch]], launches: list[ins.Launch]
) -> list[str]:
    """Whether all read and write the same, but for what one alone uses."""
    names = [{n for i in way for n in i.args} for way in ways]
    common = names[0].intersection(*names)
    mine = set(map(id, launches))
    others = {n for i in p.body if id(i) not in mine and not _brings(i) for n in used(i)}
    stray = sorted(n for own in names for n in own - common if n in others)
    if stray:
        return [f"{stray[0]} is not used by every way of the same work"]
    written = [{n for i in way for n in i.outs} & common for way in ways]
    odd = sorted(set().union(*written) - written[0].intersection(*written))
    return [f"{odd[0]} is not written by every way of the same work"] if odd else []


def _brings(i: ins.Instr) -> bool:
    """Whether an instruction only says where memory is."""
    return isinstance(i, (ins.Alloc, ins.Place, ins.Reuse, ins.Free))
