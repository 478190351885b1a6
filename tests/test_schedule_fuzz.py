"""Random LoopPrograms: the plan computes what the unfused program computes. A failure prints a
program to paste into a file and run, which holds the LoopProgram itself (tests/repro.py).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from plait.config import Config
from plait.devices import DEVICES
from plait.ir import loops as L
from plait.ir.dtypes import f32, i64
from plait.ir.expr import Size, smin
from plait.ir.loops import apply
from plait.ir.verify import verify
from plait.pipelines import schedule
from tests.repro import program_repro
from tests.schedule_tools import Builder, Record, check, kernels

CFG = Config()
SYM = {"s0": 6}
Point = tuple[Size, ...]


@dataclass(frozen=True)
class View:
    """A tensor seen through an index map."""

    buf: str
    shape: tuple[Size, ...]
    at: Callable[[Point], Point]


def whole(b: Builder, name: str) -> View:
    return View(name, b.buffers[name].shape, lambda p: tuple(p))


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.b = Builder()
        self.tensors: list[View] = []
        self.n: Size = self.b.size("s0") if self.rng.random() < 0.3 else 6
        for _ in range(self.rng.randint(1, 3)):
            self.tensors.append(whole(self.b, self.b.input(*self.shape())))
        self.mutations: list[L.Mutate] = []
        self.index = self.b.input(self.n, dtype=i64)  # zeros and ones

    def shape(self) -> tuple[Size, ...]:
        return self.rng.choice(
            [(4, self.n), (2, 8, 5), (self.n,), (6, 4), (2, 8, 5), (1, 4), (4, 1, 6), ()]
        )

    def pick(self) -> View:
        """A tensor, mostly a late one, perhaps through views."""
        x = self.tensors[max(self.rng.randrange(-4, len(self.tensors)), -len(self.tensors), -4)]
        while self.rng.random() < 0.4:
            x = self.view(x)
        return x

    def view(self, x: View) -> View:
        kind = self.rng.choice(["permute", "flatten", "split", "slice", "expand", "flip"])
        n = len(x.shape)
        if kind == "permute" and n > 1:
            perm = self.rng.sample(range(n), n)
            back = [perm.index(k) for k in range(n)]
            return View(
                x.buf, tuple(x.shape[k] for k in perm), lambda p: x.at(tuple(p[k] for k in back))
            )
        if kind == "flatten" and n > 1:
            d = self.rng.randrange(n - 1)
            size = x.shape[d + 1]
            shape = (*x.shape[:d], x.shape[d] * size, *x.shape[d + 2 :])
            return View(
                x.buf, shape, lambda p: x.at((*p[:d], p[d] // size, p[d] % size, *p[d + 1 :]))
            )
        if kind == "split" and n > 0:
            d = self.rng.randrange(n)
            if x.shape[d] in (4, 6, 12, 24):
                shape = (*x.shape[:d], x.shape[d] // 2, 2, *x.shape[d + 1 :])
                return View(
                    x.buf, shape, lambda p: x.at((*p[:d], p[d] * 2 + p[d + 1], *p[d + 2 :]))
                )
        if kind == "slice" and n > 0:
            d = self.rng.randrange(n)
            if isinstance(x.shape[d], int) and x.shape[d] > 2:
                shape = (*x.shape[:d], x.shape[d] - 2, *x.shape[d + 1 :])
                return View(x.buf, shape, lambda p: x.at((*p[:d], p[d] + 1, *p[d + 1 :])))
        if kind == "flip" and n > 0:
            d = self.rng.randrange(n)
            size = x.shape[d]
            return View(x.buf, x.shape, lambda p: x.at((*p[:d], size - 1 - p[d], *p[d + 1 :])))
        if kind == "expand" and n < 4:
            return View(x.buf, (3, *x.shape), lambda p: x.at(p[1:]))
        return x

    def load(self, o: Record, x: View, point: Point) -> L.Node:
        value = o.load(x.buf, *x.at(point))
        return value if value.dtype == f32 else o.cast(value, f32)

    def add(self, name: str) -> None:
        self.tensors.append(whole(self.b, name))

    # ---- ops
    def unary(self) -> None:
        x, op = self.pick(), self.rng.choice(["exp", "neg", "tanh", "abs"])

        def body(o: Record, *p: Size) -> L.Node:
            return o.tanh(apply(op, self.load(o, x, p)))

        self.add(self.b.pointwise(x.shape, body))

    def binary(self) -> None:
        x, op = self.pick(), self.rng.choice(["add", "mul", "max"])
        fits = [t for t in self.tensors if self.broadcasts(t.shape, x.shape)]
        y = self.rng.choice(fits or [x])

        def body(o: Record, *p: Size) -> L.Node:
            q = p[len(p) - len(y.shape) :]
            q = tuple(0 if s == 1 else e for s, e in zip(y.shape, q, strict=True))
            return apply(op, self.load(o, x, p), self.load(o, y, q))

        self.add(self.b.pointwise(x.shape, body))

    @staticmethod
    def broadcasts(a: tuple[Size, ...], to: tuple[Size, ...]) -> bool:
        return len(a) <= len(to) and all(
            x in (1, y) for x, y in zip(a, to[len(to) - len(a) :], strict=True)
        )

    def reduce(self) -> None:
        x = self.pick()
        kind = self.rng.choice(["sum", "max", "welford", "argmax", "min"])
        axes = sorted(self.rng.sample(range(len(x.shape)), self.rng.randint(0, len(x.shape))))
        keep = [k for k in range(len(x.shape)) if k not in axes]

        def body(o: Record, *p: Size) -> L.Node:
            point = dict(zip([*keep, *axes], p, strict=True))
            return self.load(o, x, tuple(point[k] for k in range(len(x.shape))))

        outs = (True, True, self.rng.random() < 0.2) if kind == "welford" else (True,)
        shape = tuple(x.shape[k] for k in keep)
        self.b.reduce(shape, tuple(x.shape[k] for k in axes), kind, body, outs)
        names = [n for n in self.b.results() if n]
        for n in names:
            self.add(n)
        if self.rng.random() < 0.7:  # an epilogue at full level
            stat = names[0]

            def epilogue(o: Record, *p: Size) -> L.Node:
                s = self.load(o, whole(self.b, stat), tuple(p[k] for k in keep))
                return o.tanh(o.sub(self.load(o, x, p), s))

            self.add(self.b.pointwise(x.shape, epilogue))

    def softmax(self) -> None:
        """The maximum along axes, and sums of exponentials below it."""
        x = self.rng.choice([self.pick(), self.tensors[0]])
        axes = sorted(self.rng.sample(range(len(x.shape)), self.rng.randint(0, len(x.shape))))
        if len(x.shape) == 3 and self.rng.random() < 0.7:
            axes = [1]
        keep = [k for k in range(len(x.shape)) if k not in axes]
        shape, inner = tuple(x.shape[k] for k in keep), tuple(x.shape[k] for k in axes)

        def at(o: Record, p: Point) -> L.Node:
            point = dict(zip([*keep, *axes], p, strict=True))
            return self.load(o, x, tuple(point[k] for k in range(len(x.shape))))

        peak = self.b.reduce(shape, inner, "max", lambda o, *p: at(o, p))

        def below(o: Record, *p: Size) -> L.Node:
            return o.exp(o.sub(at(o, p), o.load(peak, *p[: len(keep)])))

        total = self.b.reduce(shape, inner, "sum", below)
        self.add(self.rng.choice([str(peak), str(total)]))
        self.add(
            self.b.pointwise(
                (*shape, *inner),
                lambda o, *p: o.truediv(below(o, *p), o.load(total, *p[: len(keep)])),
            )
        )

    def cat(self) -> None:
        x = self.pick()
        if not x.shape or len(x.shape) > 3:
            return
        n = x.shape[0]
        out = self.b.buffer((n + n, *x.shape[1:]))
        for k in range(2):
            self.b.pointwise(
                x.shape,
                lambda o, *p: self.load(o, x, p),
                out,
                lambda *p, k=k: (p[0] + n * k, *p[1:]),
            )
        self.add(out)

    def pad(self) -> None:
        x = self.pick()
        if not x.shape:
            return
        n = x.shape[0]

        def body(o: Record, *p: Size) -> L.Node:
            inside = apply("ge", o.index(p[0]), o.const(1, i64))
            return o.masked(inside, lambda: self.load(o, x, (p[0] - 1, *p[1:])), 0.5)

        self.add(self.b.pointwise((n + 1, *x.shape[1:]), body))

    def gather(self) -> None:
        x = self.pick()
        if not x.shape or not isinstance(x.shape[0], int) or x.shape[0] < 2:
            return

        def body(o: Record, *p: Size) -> L.Node:
            at = o.checked(o.load(self.index, p[0]), x.shape[0])
            return self.load(o, x, (at, *p[1:]))

        self.add(self.b.pointwise((self.n, *x.shape[1:]), body))

    def scatter(self) -> None:
        x = self.pick()
        if len(x.shape) < 1 or x.shape[0] != self.n:
            return
        fits = [
            t.buf
            for t in self.tensors
            if len(t.shape) == len(x.shape)
            and t.shape[1:] == x.shape[1:]
            and t.shape[0] in (2, 4, 6)
            and self.b.buffers[t.buf].dtype == f32
        ]
        if fits and self.rng.random() < 0.6:
            base = self.rng.choice(fits)
        else:
            base = self.b.pointwise((4, *x.shape[1:]), lambda o, *p: o.f(0.0))
        out = self.b.buffer(self.b.buffers[base].shape)
        o = Record(self.b)
        vars_ = L.loop_vars("i", x.shape)
        at = (L.arg_symbol(0, self.b.buffers[base].shape[0]), *vars_[1:])
        args = (o.load(self.index, vars_[0]),)
        self.b.ops.append(
            L.Scatter(
                out, base, vars_, at, args, self.load(o, x, vars_), self.rng.choice(["add", "max"])
            )
        )
        self.add(out)
        if base in self.b.inputs and self.rng.random() < 0.7:
            self.mutations.append(L.Mutate(base, out))

    def scan(self) -> None:
        x = self.pick()
        if not x.shape:
            return
        vars_ = L.loop_vars("i", x.shape)
        body = self.load(Record(self.b), x, vars_)
        out = self.b.buffer(x.shape)
        axis = self.rng.randrange(len(x.shape))
        if self.rng.random() < 0.3:
            at = self.b.buffer(x.shape, i64)
            self.b.ops.append(L.Scan((out, at), vars_, axis, "max", body))
            self.add(at)
        else:
            self.b.ops.append(L.Scan((out,), vars_, axis, "sum", body))
        self.add(out)

    def extern(self) -> None:
        x = self.rng.choice(self.tensors)
        options = [
            {},
            {"may_keep": False},
            {"may_keep": False, "out_op": "o", "out_names": ("out",)},
        ]
        self.add(self.b.extern(x.shape, x.buf, **self.rng.choice(options)))

    def mutate(self) -> None:
        """The last thing: an input takes the value of something of its shape."""
        targets = [n for n in self.b.inputs if isinstance(n, str) and n != self.index]
        target = self.rng.choice(targets)
        shape, n_inputs = self.b.buffers[target].shape, len(self.b.inputs)
        fits = [
            t.buf
            for t in self.tensors[n_inputs:]
            if t.shape == shape and self.b.buffers[t.buf].dtype == f32
        ]
        if fits:
            self.b.ops.append(L.Mutate(target, self.rng.choice(fits)))

    def program(self) -> L.LoopProgram:
        steps = [
            self.unary,
            self.binary,
            self.binary,
            self.reduce,
            self.reduce,
            self.extern,
            self.cat,
            self.softmax,
            self.softmax,
        ]
        steps += [self.pad, self.gather, self.scatter, self.scan]
        for _ in range(self.rng.randint(2, 14)):
            self.rng.choice(steps)()
        if self.rng.random() < 0.3:
            self.mutate()
        taken = {m.target for m in self.b.ops if isinstance(m, L.Mutate)}
        for m in self.mutations:
            if m.target not in taken:
                self.b.ops.append(m)
                taken.add(m.target)
        late = self.tensors[-8:]
        outs = {t.buf for t in self.rng.sample(late, min(len(late), self.rng.randint(1, 3)))}
        outs = {n for n in outs if n not in self.b.inputs} or {self.tensors[-1].buf}
        self.b.output(*sorted(outs))
        return self.b.program()


def verified(step, fn, *args, **kwargs):  # type: ignore[no-untyped-def]
    """Runs a step; programs that come out of it are legal."""
    out = fn(*args, **kwargs)
    if isinstance(out, L.LoopProgram):
        verify(out, step)
    return out


def run(seed: int, split: dict[str, int] | None = None) -> tuple[int, int]:
    """(loops, kernels) of one random program, checked. split: what a test changed in the row of
    CPUs."""
    program = Fuzzer(seed).program()
    verify(program, f"seed {seed}")
    try:
        plan = schedule(program, CFG, verified)
        check(plan, program, SYM, seed)
    except Exception as error:
        raise AssertionError(f"{error}\n\n{program_repro(program, SYM, seed, split)}") from error
    return len(program.ops), len(kernels(plan))


@pytest.mark.parametrize("block", range(10))
def test_random_programs(block: int) -> None:
    loops = made = 0
    for seed in range(block * 40, block * 40 + 40):
        n, k = run(seed)
        loops, made = loops + n, made + k
    assert made < 0.8 * loops, "hardly anything was fused"


@pytest.mark.parametrize(
    "units, aligned, least, first", [(2, 1, 50, 1000), (6, 2, 50, 2000), (2, 1, 0, 3000)]
)
def test_random_programs_with_every_reduction_split(
    units: int, aligned: int, least: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = {
        "split_nbytes": 0,
        "min_along": 1,
        "min_across": 1,
        "units": units,
        "narrow_units": units,
        "min_units": least,
        "unit_nbytes": 0,
        "vector_nbytes": 16,
        "cache_nbytes": 0,
        "align_along": aligned,
        "align_across": aligned,
    }
    cpu = DEVICES["cpu"]
    monkeypatch.setitem(DEVICES, "cpu", replace(cpu, rates=replace(cpu.rates, **split)))
    for seed in range(first, first + 80):
        run(seed, split)


@pytest.mark.parametrize("seed", range(20))
def test_a_failure_prints_a_program_that_fails(
    seed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[L.LoopProgram] = []

    def wrong(plan: object, program: L.LoopProgram, syms: object, seed: int) -> None:
        checked.append(program)
        raise ValueError("the plan is wrong")

    split = {"split_nbytes": 0} if seed % 2 else {}
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "check", wrong)
        with pytest.raises(AssertionError) as error:
            run(seed, split)
    program = str(error.value).partition("\n\n")[2]
    exec(compile(program, "repro.py", "exec"), {})
    assert capsys.readouterr().out == "the plan computes what the program says\n"
    monkeypatch.setattr("tests.repro.check", wrong)
    with pytest.raises(ValueError, match="the plan is wrong"):
        exec(compile(program, "repro.py", "exec"), {})
    assert checked == [checked[0]] * 2


def test_equal_programs_give_equal_plans() -> None:
    for seed in range(20):
        one, two = schedule(Fuzzer(seed).program(), CFG), schedule(Fuzzer(seed).program(), CFG)
        assert repr(one.steps) == repr(two.steps)
        assert smin(len(one.refusals), 1) == smin(len(two.refusals), 1)
