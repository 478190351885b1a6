"""A random program of a seed: its calls, its road, and statements out of the catalogue."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.fuzz import catalog, control, indexing, networks, special
from tests.fuzz.maker import FLOATS, INTS, Maker
from tests.fuzz.pool import INTERPRETED
from tests.fuzz.program import NAME, Call, Operand, Program, Road

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 100)
_WEIGHTS = (3, 4, 4, 4, 3, 4, 2, 2, 2, 4, 4, 1, 2, 1, 1)


SUBJECTS = ("", "flow", "networks")
"""Anything, mostly control flow, layers in a row."""


def generate(seed: int, device: str = "cpu", subject: str = "") -> Program:
    """A program that eager runs at its first call, or refuses in its last statement. What the
    device is called decides about the program: INTERPRETED gives those of "cuda", on a CPU, in one
    thread and by wrappers that are Python (see tests/interpreted.py). subject: one of SUBJECTS."""
    if device == INTERPRETED:
        p = generate(seed, "cuda", subject)
        wrapper = "fx" if p.road.wrapper == "fx" else "python"
        road = replace(p.road, wrapper=wrapper, threads=1)  # weights would be packed for a CPU
        return replace(p, device="cpu", road=replace(road, freeze=False, in_place=False))
    if subject == "networks":
        return _network(seed, device)
    flow = subject == "flow"
    rng = random.Random(seed)
    road = _road(rng, device)
    if flow and road.grad:
        road = replace(road, grad="backward")
    calls = _calls(rng, road)
    if flow and any(c.sizes != calls[0].sizes for c in calls):
        road = replace(road, threads=1)  # Dynamo in one thread sees what torch.fx traces in others
    if rng.random() < 0.5:
        dtypes: tuple[str, ...] = ("float32",)
    else:
        dtypes = tuple(
            rng.choice((*FLOATS, *INTS, "float32", "bool", "complex64")) for _ in range(2)
        )
    if road.grad:
        dtypes = ("float32", rng.choice(FLOATS))
    errors = 0.0 if device != "cpu" or flow else rng.choice((0, 0.2))
    m = Maker(rng, calls, dtypes, errors, bool(road.grad))
    for _ in range(rng.randint(1, 3)):
        m.operand(m.shape(rng.choice((1, 2, 2, 3))), rng.choice(dtypes))
    if rng.random() < 0.06 and not road.grad:
        _alias(m)
        calls[0] = replace(calls[0], apart=rng.random() < 0.5)
    for _ in range(rng.randint(1, 4) if flow else rng.randint(3, 14)):
        if flow and rng.random() < 0.7:
            weights = [w for w, _ in control.MAKERS]
            rng.choices([f for _, f in control.MAKERS], weights)[0](m)
        else:
            statement(m, road)
        if m.ended:
            break
    p = Program(
        seed, _with_grads(m, road), tuple(m.lines), _outputs(m), tuple(calls), road, device
    ).pruned()
    return _with_frozen(_with_held(_with_params(p, rng), rng), rng)


def _network(seed: int, device: str) -> Program:
    """A program of layers. Where it is compiled without Dynamo, its weights are mostly constants,
    which change between calls."""
    rng = random.Random(seed)
    road = replace(_road(rng, device), threads=1, capture=False)
    if device != "cpu" and not road.grad and rng.random() < 0.3:
        road = replace(road, way="direct", dynamic=rng.random() < 0.4)
    calls = _calls(rng, road)
    if rng.random() < 0.15 and len({tuple(c.sizes.items()) for c in calls}) > 1:
        rng.choice(calls).sizes["n"] = rng.choice((500, 1000, 4000))
    dtypes = ("float32", "float32")
    m = Maker(rng, calls, dtypes, 0.0, bool(road.grad))
    weights = [w for w, _ in networks.MAKERS]
    for _ in range(rng.randint(1, 2)):
        rng.choices([f for _, f in networks.MAKERS], weights)[0](m)
    p = Program(
        seed, _with_grads(m, road), tuple(m.lines), _outputs(m), tuple(calls), road, device
    ).pruned()
    named = {o.name for o in p.operands if o.dtype in FLOATS}
    held = tuple(w for w in m.weights if w in named and rng.random() < 0.9)
    others = [o for o in p.operands if o.name not in held and o.dtype != "int"]
    if road.way == "compile" or not held or not others or rng.random() < 0.2:
        return p
    if road.way == "package":  # whose weights stay those of the first call
        p = replace(p, calls=tuple(replace(c, seed=calls[0].seed, mood="mixed") for c in p.calls))
    return replace(p, road=replace(road, params=held, freeze=True, in_place=rng.random() < 0.6))


def statement(m: Maker, road: Road) -> None:
    """Adds a statement of a random class, if it can."""
    way = m.rng.random()
    if way < 0.2:
        catalog.fill(m, catalog.pick(m, catalog.POINTWISE))
    elif way < 0.38:
        catalog.fill(m, catalog.pick(m, catalog.VIEWS))
    elif way < 0.52:
        catalog.fill(m, catalog.pick(m, catalog.REDUCTIONS))
    elif way < 0.72:
        m.rng.choice(indexing.MAKERS)(m)
    else:
        weights = [w for w, _ in special.MAKERS]
        make = m.rng.choices([f for _, f in special.MAKERS], weights)[0]
        if road.grad and make in (special.dtype_view, special.in_place):
            if road.grad == "backward" and make is special.in_place:
                special.changed_later(m)
            return
        make(m)


def _road(rng: random.Random, device: str) -> Road:
    way = rng.choices(("compile", "direct", "package"), (60, 32, 8))[0]
    if device != "cpu":
        way = "compile"
    road = Road(way, rng.choice((False, None, True)), capture=rng.random() < 0.5)
    if way == "compile":
        road = replace(road, grad=rng.choices(("", "backward", "forward"), (68, 30, 2))[0])
    else:
        road = replace(road, dynamic=rng.random() < 0.4, capture=False)
    if rng.random() < 0.3 and way != "package":
        road = replace(road, wrapper=rng.choices(("python", "cpp", "fx"), (2, 1, 2))[0])
    if device == "cpu" and rng.random() < 0.15 and way != "package":
        road = replace(road, isa=rng.choice(("avx2", "portable")))
    if rng.random() < 0.06 and road.grad != "forward":  # whose levels are of all threads
        road = replace(road, threads=4)
    return road


def _calls(rng: random.Random, road: Road) -> list[Call]:
    """Two to four calls. Sizes change unless they are fixed; data and moods always do."""
    names = ["n", "m", "p"][: rng.randint(1, 3)]
    draw = lambda: rng.choices(SIZES, _WEIGHTS)[0]
    sizes = {n: draw() for n in names}
    if rng.random() < 0.04:
        sizes["n"] = rng.choice((1000, 4000))
    calls = []
    change = rng.random() < 0.5 and (road.way == "compile" or road.dynamic)
    for k in range(rng.choices((2, 3, 4), (6, 3, 1))[0]):
        if k and change:
            sizes = {n: v if rng.random() < 0.4 else draw() for n, v in sizes.items()}
        mood = rng.choices(("mixed", "none", "all", "few"), (5, 1, 1, 1))[0]
        calls.append(Call(rng.randrange(10**6), dict(sizes), {}, mood))
    return calls


def _alias(m: Maker) -> None:
    """An argument that is a view of another."""
    first = m.operands[0].name
    text = m.rng.choice(
        (f"{first}[1:]", f"{first}[:1]", f"{first}.view({first}.shape)", f"{first}[..., :1]")
    )
    try:
        m.put(Operand(m.fresh("a"), m.operands[0].dtype, values="alias", alias=text))
    except (RuntimeError, IndexError):
        return


def _outputs(m: Maker) -> tuple[str, ...]:
    made = [line.out for line in m.lines if line.out and line.out[0] != "w"]  # w: a tuple
    read = {n for line in m.lines for n in line.reads}
    keep = [n for n in made if n not in read or m.rng.random() < 0.3]
    written = [
        n for line in m.lines if not line.out for n in NAME.findall(line.text) if n[0] == "t"
    ]
    return tuple(dict.fromkeys([*keep, *(n for n in written if n in made)]))[:12] or tuple(
        made[-1:]
    )


def _with_grads(m: Maker, road: Road) -> tuple[Operand, ...]:
    if not road.grad:
        return tuple(m.operands)
    written = {n for line in m.lines if not line.out for n in NAME.findall(line.text)}
    return tuple(
        replace(o, grad=o.dtype in FLOATS and o.name not in written and not o.alias)
        for o in m.operands
    )


def _with_params(p: Program, rng: random.Random) -> Program:
    """Some programs are modules whose parameters are replaced between calls."""
    if rng.random() > 0.04 or p.road.way == "package" or p.road.grad or p.road.threads > 1:
        return p
    return _as_module(p)


def _with_frozen(p: Program, rng: random.Random) -> Program:
    """Some of those, and others, are compiled with parameters as constants."""
    r = p.road
    if r.way != "direct" or r.threads > 1 or r.held or rng.random() > (0.5 if r.params else 0.2):
        return p
    made = p if r.params else _as_module(p)
    return replace(made, road=replace(made.road, freeze=True)) if made.road.params else p


def _as_module(p: Program) -> Program:
    """The program with parameters, if operands can be some."""
    written = {n for line in p.lines if not line.out for n in NAME.findall(line.text)}
    aliased = {n for o in p.operands for n in NAME.findall(o.alias)}
    fit = [
        o.name
        for o in p.operands
        if o.dtype in FLOATS
        and o.name not in written | aliased
        and not o.alias
        and o.layout == "plain"
    ]
    others = [o for o in p.operands if o.name not in fit[:2]]
    if not fit or not any(o.dtype != "int" for o in others):
        return p
    return replace(p, road=replace(p.road, params=tuple(fit[:2])))


def _with_held(p: Program, rng: random.Random) -> Program:
    """Some programs are modules with a buffer that each call assigns."""
    r = p.road
    if rng.random() > 0.5 or r.way == "compile" or r.threads > 1 or r.params or p.inexact:
        return p
    written = {n for line in p.lines if not line.out for n in NAME.findall(line.text)}
    aliased = {n for o in p.operands for n in NAME.findall(o.alias)}
    floats = [o for o in p.operands if o.dtype in FLOATS and o.layout == "plain" and not o.alias]
    fit = [o.name for o in floats if o.name not in written | aliased]
    if not fit or len({(*c.sizes.items(), *c.ints.items()) for c in p.calls}) > 1:
        return p  # a call with other sizes may be turned away, and assigns nothing then
    return replace(p, road=replace(r, held=fit[0], dynamic=False))
