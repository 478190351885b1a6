"""Loops, kernels and plans as text: hand-written expectations on small programs, and what is
printed reads back: over the fuzzers' programs, over models (inference, forward, backward, dynamic
shapes), and bad text is named by its line.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

import plait
from plait.config import Config
from plait.ir.calls import Extern, Scalar, TensorArg
from plait.ir.checks import Check
from plait.ir.dtypes import b1, f16, f32, f64, i8, i64
from plait.ir.expr import compare, symbol
from plait.ir.expr.text import Scope, TextError
from plait.ir.loops import (
    Alias,
    Assert,
    Buffer,
    Item,
    LoopProgram,
    Mutate,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
    apply,
    const,
    loop_vars,
    node,
)
from plait.ir.record import Recorder
from plait.ir.text import op_lines, program_text, read_program
from plait.pipelines import schedule
from plait.schedule.plan import Kernel, MemoryPlan, Plan, Reason, Reduce, Refusal, Store
from plait.schedule.text import kernel_text, plan_text, read_kernel, read_plan, step_summary
from plait.wrapper import show
from plait.wrapper.text import read as read_wrapper
from tests.fuzz_kernels import Maker
from tests.instruction_table import EXAMPLE
from tests.interned import stay
from tests.models import MODELS, SOME
from tests.test_schedule_fuzz import Fuzzer

s0 = symbol("s0", lo=2)
I = loop_vars("i", (s0, 8))
R = loop_vars("r", (8,))
X = Buffer("x", f32, (s0, 8), (8, 1), fixed=True)
Y = Buffer("y", f32, (s0, 8), (8, 1))
ROWS = Buffer("rows", i64, (s0,), (1,))


def exp_of_row(index: object) -> Pointwise:
    """y[i0, i1] = exp(x[rows[i0], i1] where i1 < 4)."""
    ops = Recorder()
    row = ops.indirect(ops.load("rows", (I[0],), i64), s0)
    few = apply("lt", ops.index(I[1]), ops.const(4, i64))
    value = ops.masked(few, lambda: ops.load("x", (row, I[1]), f32), 0.0)
    return Pointwise("y", I, apply("exp", value), index, ("model.py:3 aten.exp",))  # type: ignore[arg-type]


def test_a_program() -> None:
    ops = Recorder()
    total = Reduction(("z",), I[:1], R, "sum", ops.load("y", (I[0], R[0]), f32), down=False)
    z = Buffer("z", f32, (s0,), (1,))
    program = LoopProgram(
        inputs=(("sym", "s0"), "x", None, "rows"),
        buffers={b.name: b for b in (X, ROWS, Y, z)},
        constants={},
        ops=(exp_of_row(None), total, Assert(compare("lt", s0, 100), "many"), Mutate("x", "y")),
        outputs=(TensorArg("z", (s0,), (1,), 0), s0 * 2, Scalar("none")),
        symbols={"s0": None, "s1": ("x", "stride", 0)},
        donated=("rows",),
        hints={"s0": 24, "s1": 8},
    )
    assert program_text(program) == (
        """\
s0 = symbol(lo=2)
k0 = symbol('$0', extent=s0)

inputs(int('s0'), x, None, rows)
given('s0', hint=24)
given('s1', read(x, 'stride', 0), hint=8)
x: f32[s0, 8] @ (8, 1) = fixed
rows: i64[s0] @ (1,)
y: f32[s0, 8] @ (8, 1)
z: f32[s0] @ (1,)
donated(rows)

def pointwise(i0: s0, i1: 8) -> y:
    'model.py:3 aten.exp'
    t0: i64 = index(i1)
    t1: b1 = lt(t0, 4)
    t2: i64 = rows[i0]
    t3: f32 = load(x[k0, i1], k0=t2, where=t1)
    t4: f32 = where(t1, t3, 0.0)
    t5: f32 = exp(t4)
    return t5

def reduce(i0: s0, *, r0: 8) -> z:
    t0: f32 = y[i0, r0]
    return sum(t0, down=False)

require((s0 < 100), 'many')

x[...] = y

return (z[s0] @ (1,), 2*s0, None)
"""
    )
    assert read_program(program_text(program)) == program


def test_other_ops() -> None:
    ops = Recorder()
    load = ops.load("x", I, f32)
    scan = Scan(("v", None), I, 1, "max", load, down=True)
    key = symbol("$0", extent=s0)
    scatter = Scatter(
        "y",
        "x",
        I,
        (key, I[1]),
        (ops.load("rows", (I[0],), i64),),
        load,
        "add",
        mask=ops.const(True, b1),
    )
    call = Extern(
        ("o",),
        "aten::f",
        (TensorArg("x", (8,), (1,), s0, i64), 3),
        (("flag", Scalar("bool", "True")),),
    )
    checked = ops.checked(ops.load("rows", (I[0],), i64), 8, check=Check("IndexError", "it's out"))
    half = Pointwise("w", I, apply("and", ops.load("b", (checked, I[1]), b1), ops.const(1, b1)))
    ops_ = (
        scan, scatter, call, Alias("a", "x", 4), Alias("b", "x", s0, relative=False),
        Item("u0", "k"), exp_of_row((I[0], I[1] + 8)), half,
    )  # fmt: skip
    scope = Scope(frozenset({"i0", "i1"}))
    lines = [line for op in ops_ for line in op_lines(op, scope)]
    assert lines == [
        "def scan(i0: s0, i1: 8) -> (v, None):",
        "    t0: f32 = x[i0, i1]",
        "    return max(t0, along=i1, down=True)",
        "def scatter(i0: s0, i1: 8) -> y[k0, i1]:",
        "    t0: f32 = x[i0, i1]",
        "    t1: i64 = rows[i0]",
        "    return add(t0, base=x, k0=t1, where=True)",
        "o = call('aten::f')(x.at(s0, i64)[8] @ (1,), 3, flag=True)",
        "a = memory(x, 4)",
        "b = memory(x, s0, from_start=True)",
        "item('u0', k)",
        "def pointwise(i0: s0, i1: 8) -> y[i0, i1 + 8]:",
        "    'model.py:3 aten.exp'",
        "    t0: i64 = index(i1)",
        "    t1: b1 = lt(t0, 4)",
        "    t2: i64 = rows[i0]",
        "    t3: f32 = load(x[k0, i1], k0=t2, where=t1)",
        "    t4: f32 = where(t1, t3, 0.0)",
        "    t5: f32 = exp(t4)",
        "    return t5",
        "def pointwise(i0: s0, i1: 8) -> w:",
        "    t0: i64 = rows[i0]",
        "    t1: b1 = lt(t0, 0)",
        "    t2: i64 = add(t0, 8)",
        "    t3: i64 = where(t1, t2, t0)",
        '    t4: i64 = bounded(t3, size=8, check=IndexError("it\'s out"))',
        "    t5: b1 = load(b[k0_2, i1], k0_2=t4)",
        "    t6: b1 = and_(t5, True)",
        "    return t6",
    ]
    program = LoopProgram((), {}, {}, ops_, (), {})
    assert read_program(program_text(program)) == program


def test_a_plan() -> None:
    ops = Recorder()
    value = ops.load("x", (I[0], R[0]), f32)
    m = node("acc", (), "m", f32)
    kernel = Kernel(
        "plait_softmax", I[:1], R,
        (Reduce("m", "max", value), Store("y", (I[0], R[0]), apply("sub", value, m), True)),
        (X, Y), ("y",), (s0,), work_ns=s0 * 4, origin=("model.py:3 aten.softmax",), hints=(24,),
    )  # fmt: skip
    call = Extern(("z",), "aten::mm", (), fallback=False)
    program = LoopProgram((), {}, {}, (), (), {})
    refusal = Refusal("y", "z", Reason("one is a call"))
    plan = Plan(
        program,
        (kernel, call),
        (("x",), ()),
        {"x": X, "y": Y},
        MemoryPlan(64, {"y": 0}, {"w": "y"}),
        (refusal,),
    )
    assert plan_text(plan) == (
        """\
s0 = symbol(lo=2)

x: f32[s0, 8] @ (8, 1) = fixed
y: f32[s0, 8] @ (8, 1)
arena(64)
place(y, 0)
reuse(w, y)

@kernel(x, y, writes=(y,), sizes=(s0,), hints=(24,), work_ns=4*s0)
def plait_softmax(i0: s0, *, r0: 8):
    'model.py:3 aten.softmax'
    t0: f32 = x[i0, r0]
    m = max(t0)
    t1: f32 = acc('m')
    t2: f32 = sub(t0, t1)
    y[i0, r0] = store(t2, full=True)
free(x)

z = call('aten::mm', fallback=False)()

# not fused: plait_softmax and z: one is a call
refused('y', 'z', 'one is a call')
"""
    )
    assert read_plan(plan_text(plan), program) == plan
    assert read_kernel(kernel_text(kernel)) == kernel
    assert (
        step_summary(kernel)
        == "kernel plait_softmax: x -> y; s0 over 8 points, about 96 ns on one core"
    )
    assert step_summary(call) == "extern aten::mm: by choice"


# ------------------------------------------------------------------------------------- reading back
def test_constants_keep_type_and_bits() -> None:
    values = [
        *(
            const(v, d)
            for v in (0.0, -0.0, 0.1, 1e300, float("inf"), float("-inf"))
            for d in (f16, f32, f64)
        ),
        *(const(v, d) for v in (0, -1, 2**62) for d in (i8, i64)),
        const(True, b1),
        const(float("nan"), f64),
    ]
    for value in values:
        program = LoopProgram((), {}, {}, (Pointwise("x", (), value),), (), {})
        (loop,) = read_program(program_text(program)).ops
        assert isinstance(loop, Pointwise) and loop.body is value


def test_names_that_are_no_variables() -> None:
    names = ["a.b", "class", "ref", "_", "t0", "i0", "s0", "with 'quotes'"]
    buffers = {n: Buffer(n, f32, (s0, 4), (4, 1), device="cuda:1") for n in names}
    ops = Recorder()
    loops = tuple(
        Pointwise(n, loop_vars("i", (s0, 4)), ops.load(n, loop_vars("i", (s0, 4)), f32), None)
        for n in names
    )
    parts = tuple(Pointwise(n, (), ops.const(1, f32), (0, s0 - 1), ("a, 'b'", "c")) for n in names)
    outs = tuple(TensorArg(n, (), (), 0) for n in names)
    program = LoopProgram((*names, None), buffers, {}, (*loops, *parts), outs, {}, (*names,))
    assert read_program(program_text(program)) == program
    kernel = Kernel(
        "k", (), (), (Store("a.b", (0, 0), ops.const(1, f32), False),), (*buffers.values(),),
        ("a.b",), ()
    )  # fmt: skip
    assert read_kernel(kernel_text(kernel)) == kernel


def test_random_programs_and_plans_read_back() -> None:
    for seed in range(150):
        program = Fuzzer(seed).program()
        assert read_program(program_text(program)) == program, seed
        plan = schedule(program, Config())
        assert read_program(program_text(plan.program)) == plan.program, seed
        assert read_plan(plan_text(plan), plan.program) == plan, seed


def test_random_kernels_read_back() -> None:
    for seed in range(300):
        kernel = Maker(seed).kernel()
        assert read_kernel(kernel_text(kernel)) == kernel, seed


def compiled(monkeypatch: pytest.MonkeyPatch, fn: object, *args: object) -> Iterator[object]:
    """The loop programs and plans of a call of fn compiled, backward passes included."""
    programs: list[LoopProgram] = []
    shown = show.show_loops
    with monkeypatch.context() as patch:
        patch.setattr(show, "show_loops", lambda log, p: (programs.append(p), shown(log, p)))
        report = plait.explain(fn, *args, quiet=True)  # type: ignore[arg-type]
    assert len(programs) == len(report.graphs) > 0
    yield from programs
    yield from (g.plan for g in report.graphs)


def reads_back(p: object) -> None:
    if isinstance(p, LoopProgram):
        assert read_program(program_text(p)) == p
    else:
        assert isinstance(p, Plan)
        assert read_program(program_text(p.program)) == p.program
        assert read_plan(plan_text(p), p.program) == p


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SOME else pytest.mark.slow) for n in MODELS]
)
def test_models_read_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, data = MODELS[name]
    torch._dynamo.reset()
    model, x = make(), data(2)
    with torch.no_grad():
        for p in compiled(monkeypatch, model.eval(), x):
            reads_back(p)
    for p in compiled(monkeypatch, model.train(), x):
        reads_back(p)


def test_dynamic_shapes_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    x = torch.randn(6, 10, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x.flatten(), x.t().reshape(-1)[3:]])
        return torch.nn.functional.pad(y, (1, x.shape[0])).unfold(0, 4, 2).softmax(-1).sum(0)

    found = list(compiled(monkeypatch, f, x))
    assert any("symbol(" in program_text(p) for p in found if isinstance(p, LoopProgram))
    for p in found:
        reads_back(p)


# ----------------------------------------------------------------------------------------- bad text
GOOD = """\
s0 = symbol(lo=2)

x: f32[s0, 8] @ (8, 1) = fixed

def pointwise(i0: s0, i1: 8) -> y:
    t0: f32 = x[i0, i1]
    t1: f32 = load(x[i1, i0], where=True)
    return t1

return (y[s0] @ (1,),)
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("symbol(lo=2)", "symbol(low=2)", 1, "expected only the arguments lo, hi, extent"),
        ("f32[s0, 8] @", "f33[s0, 8] @", 3, "expected an element type, got f33"),
        ("pointwise(", "elementwise(", 5, "expected def pointwise, reduce, scan or scatter"),
        ("i1: 8)", "i1)", 5, "expected a loop variable"),
        ("t0: f32 =", "t0: f99 =", 6, "expected an element type, got f99"),
        ("x[i0, i1]", "x[i0, i7]", 6, "expected an integer expression, got i7"),
        ("load(x[i1, i0], where=True)", "exp(t0, t0)", 7, "expected another number of arguments"),
        ("load(x[i1, i0], where=True)", "expp(t0)", 7, "expected an operation of the op table"),
        ("load(x[i1, i0], where=True)", "exp(t4)", 7, "expected a value of a line above"),
        ("load(x[i1, i0], where=True)", "load(x[i1], k1=t0)", 7, "expected k0, k1"),
        ("    return t1\n", "", 7, "expected a return at the end of the loop"),
        ("y[s0] @", "y[s0 // 0] @", 10, "expected a division by a positive number"),
        ("return (y[s0] @ (1,),)", "return y", 10, "expected a tuple, got y"),
        ("return (y[s0] @ (1,),)", "import os", 10, "expected a loop, a call or a declaration"),
    ],
)
def test_bad_text_names_its_line(old: str, new: str, line: int, message: str) -> None:
    read_program(GOOD)
    assert old in GOOD
    with pytest.raises(TextError) as error:
        read_program(GOOD.replace(old, new, 1))
    assert str(error.value).startswith(f"line {line}, column ") and message in str(error.value)


def damaged(text: str, r: random.Random) -> str:
    """text with a word of it in a place where it was not."""
    lines, words = text.split("\n"), text.split()
    k = r.randrange(len(lines))
    at = r.randrange(len(lines[k]) + 1)
    lines[k] = lines[k][:at] + r.choice(words) + lines[k][at + r.randint(0, 4) :]
    return "\n".join(lines)


def refused(read: Callable[[str], object], text: str) -> bool:
    """Whether a text is refused, which has to be with its line."""
    try:
        read(text)
    except TextError as error:
        assert str(error).startswith("line ")
        return True
    except SyntaxError as error:
        assert error.lineno is not None
        return True
    return False


def test_damaged_text_is_read_or_refused_with_a_line() -> None:
    r = random.Random(0)
    n = 0
    for seed in range(80):
        plan = schedule(Fuzzer(seed).program(), Config())
        n += refused(read_program, damaged(program_text(plan.program), r))
        n += refused(lambda t, p=plan.program: read_plan(t, p), damaged(plan_text(plan), r))
        n += refused(read_kernel, damaged(kernel_text(Maker(seed).kernel()), r))
        n += refused(read_wrapper, damaged(EXAMPLE, r))
    assert n > 160


nodes_stay = stay()
