"""Random programs on the native executor against the same steps on torch tensors that share memory
the same way.

Aims at what load() decides: regions and what is hoisted before them, ends of lives, pointers folded
into patches, cached headers. Every program runs with constant and with symbolic sizes, with
arguments and boxed, several times.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from plait.ir.dtypes import f32
from plait.ir.expr import Size, symbol
from plait.wrapper.instructions import (
    Alloc,
    Arena,
    BumpVersion,
    CallExtern,
    CallPython,
    Copy,
    Free,
    Instr,
    ListOf,
    Place,
    Ref,
    Return,
    Reuse,
    SizeOf,
    Symbol,
    View,
)
from tests.native_tools import build, launch, program, tensor

N = 6  # elements of a small tensor; a large one has BIG times as many, enough to end a region
BIG = 60_000
ARENA_SLOTS = 8
Memory = dict[str, torch.Tensor]


class Maker:
    """Writes a program and, beside it, the steps that a reader of the instructions would take."""

    def __init__(self, seed: int, unit: Size) -> None:
        self.rng = random.Random(seed)
        self.unit = unit  # N, or a symbol whose value is N
        self.body: list[Instr] = []
        self.steps: list[Callable[[Memory], object]] = []
        self.big: dict[str, bool] = {"x": False, "y": False}  # live tensors
        self.owner: dict[str, str] = {"x": "x", "y": "y"}
        self.owned: set[str] = set()  # whole allocations that may be reused
        self.slots = list(range(ARENA_SLOTS))

    def size(self, name: str) -> Size:
        return self.unit * BIG if self.big[name] else self.unit

    def pick(self, big: bool) -> str:
        return self.rng.choice([n for n in self.big if self.big[n] == big])

    def fresh(self) -> str:
        return f"t{len(self.body)}"

    def add(self, instr: Instr, step: Callable[[Memory], object]) -> None:
        self.body.append(instr)
        self.steps.append(step)

    def make_output(self, big: bool, old: str | None = None) -> str:
        """A tensor to write into: an allocation, a place in the arena, or a reused allocation."""
        name, count = self.fresh(), N * BIG if big else N
        self.big[name], self.owner[name] = big, name
        n = self.size(name)
        if old is not None:
            self.add(Reuse(name, old, f32, (n,), (1,)), lambda m: m.__setitem__(name, m[old]))
            self.owned.add(name)
        elif not big and self.slots and self.rng.random() < 0.5:
            slot = self.slots.pop(self.rng.randrange(len(self.slots)))
            place = Place(name, "arena", 4 * self.unit * slot, f32, (n,), (1,))
            self.add(place, lambda m: m.__setitem__(name, torch.empty(count)))
        else:
            self.add(
                Alloc(name, f32, (n,), (1,)), lambda m: m.__setitem__(name, torch.empty(count))
            )
            self.owned.add(name)
        return name

    def kernel(self) -> None:
        big = self.rng.random() < 0.1 and any(self.big.values())
        source = self.pick(big)
        reusable = [n for n in self.owned if self.big[n] == big and self.alone(n)]
        old = self.rng.choice(sorted(reusable)) if reusable and self.rng.random() < 0.3 else None
        if old is not None:
            source = old  # elementwise in place: it reads what dies
        out = self.make_output(big, old)
        kernel = self.rng.choice(("k_inc", "k_twice"))
        work = self.rng.choice((10, 10, 10**6))
        call = launch(kernel, source, out, n=self.size(out), work_ns=work)

        def step(m: Memory) -> None:
            m[out].copy_(m[source] + 1 if kernel == "k_inc" else m[source] * 2)

        self.add(call, step)
        if old is not None:
            self.forget(old)

    def alone(self, name: str) -> bool:
        return sum(o == self.owner[name] for n, o in self.owner.items() if n in self.big) == 1

    def forget(self, name: str) -> None:
        del self.big[name]
        self.owned.discard(name)

    def grow(self) -> None:
        source, name = self.pick(False), self.fresh()
        call = CallExtern(
            "aten::repeat", (Ref(source), ListOf((BIG,))), (), (name,), may_keep=False
        )
        self.add(call, lambda m: m.__setitem__(name, m[source].repeat(BIG)))
        self.big[name], self.owner[name] = True, name

    def view(self) -> None:
        bigs = [n for n in self.big if self.big[n]]
        base = self.rng.choice(bigs) if bigs else self.pick(False)
        name, k = self.fresh(), self.rng.randrange(BIG) if bigs else 0
        offset = self.unit * k
        view = View(name, base, f32, (self.unit,), (1,), offset)
        self.add(view, lambda m: m.__setitem__(name, m[base][N * k : N * k + N]))
        self.big[name], self.owner[name] = False, self.owner[base]

    def extern(self) -> None:
        source = self.pick(False)
        if self.rng.random() < 0.5:
            name = self.fresh()
            self.add(
                CallExtern("aten::neg", (Ref(source),), (), (name,), may_keep=False),
                lambda m: m.__setitem__(name, -m[source]),
            )
            self.big[name], self.owner[name] = False, name
            return
        out = self.make_output(False)
        call = CallExtern("aten::neg.out", (Ref(source),), (("out", Ref(out)),), (), (out,), False)
        self.add(call, lambda m: m[out].copy_(-m[source]))

    def copy(self) -> None:
        target, source = self.pick(False), self.pick(False)
        self.add(Copy(target, source, bump=False), lambda m: m[target].copy_(m[source].clone()))

    def other(self) -> None:
        if self.rng.random() < 0.3:
            self.add(CallPython(0, "pause", (), (), ()), lambda m: None)
        elif self.rng.random() < 0.3:
            self.add(BumpVersion("x"), lambda m: None)
        else:
            dead = [n for n in self.owned if self.alone(n)]
            if dead:
                name = self.rng.choice(sorted(dead))
                self.add(Free(name), lambda m: None)
                self.forget(name)

    def finish(self) -> tuple[list[Instr], list[str]]:
        placed = {i.name for i in self.body if isinstance(i, Place)}
        live = [n for n in self.big if self.owner[n] not in placed]
        outs = self.rng.sample(sorted(live), min(len(live), 4))
        head: list[Instr] = [Arena("arena", 4 * self.unit * ARENA_SLOTS)]
        if not isinstance(self.unit, int):
            head.insert(0, Symbol("s0", SizeOf("x", "size", 0)))
        return [*head, *self.body, Return(tuple(Ref(n) for n in outs))], outs


def make(seed: int, unit: Size):
    maker = Maker(seed, unit)
    actions = [maker.kernel] * 8 + [maker.extern, maker.extern, maker.view, maker.copy, maker.other]
    for _ in range(maker.rng.randrange(3, 30)):
        maker.rng.choice([*actions, maker.grow] if maker.rng.random() < 0.2 else actions)()
    body, outs = maker.finish()
    p = program((tensor("x", unit), tensor("y", unit)), *body, n_callables=1)
    return build(p, callables=[lambda: None]), maker.steps, outs


def check(seed: int, unit: Size) -> None:
    prog, steps, outs = make(seed, unit)
    for call in (prog, lambda *args: prog.boxed(list(args)), prog):
        x, y = torch.randn(N), torch.randn(N)
        memory: Memory = {"x": x.clone(), "y": y.clone()}
        for step in steps:
            step(memory)
        results = call(x, y)
        for name, got in zip(outs, results, strict=True):
            assert torch.equal(got, memory[name]), f"seed {seed}, unit {unit}, tensor {name}"
        assert torch.equal(x, memory["x"]) and torch.equal(y, memory["y"])


@pytest.mark.parametrize("seed", range(80))
def test_random_programs(seed: int):
    check(seed, N)
    check(seed, symbol("s0"))
