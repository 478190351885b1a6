"""Loops, kernels and plans as people read them: hand-written expectations on small programs."""

from __future__ import annotations

from plait.ir import sizes as sz
from plait.ir.dtypes import b1, f32, i64
from plait.ir.loops import (
    Alias,
    Assert,
    Buffer,
    Extern,
    Item,
    LoopProgram,
    Mutate,
    Pointwise,
    Reduction,
    Scalar,
    Scan,
    Scatter,
    TensorArg,
    loop_vars,
    node,
)
from plait.ir.record import Recorder
from plait.ir.symtext import Scope
from plait.ir.text import op_lines, program_text
from plait.schedule.plan import Kernel, MemoryPlan, Plan, Reason, Reduce, Refusal, Store
from plait.schedule.text import plan_text, step_summary

s0 = sz.symbol("s0", lo=2)
I = loop_vars("i", (s0, 8))
R = loop_vars("r", (8,))
X = Buffer("x", f32, (s0, 8), (8, 1), fixed=True)
Y = Buffer("y", f32, (s0, 8), (8, 1))
ROWS = Buffer("rows", i64, (s0,), (1,))


def exp_of_row(index: object) -> Pointwise:
    """y[i0, i1] = exp(x[rows[i0], i1] where i1 < 4)."""
    ops = Recorder()
    row = ops.indirect(ops.load("rows", (I[0],), i64), s0)
    few = ops.op("lt", ops.index(I[1]), ops.const(4, i64))
    value = ops.masked(few, lambda: ops.load("x", (row, I[1]), f32), 0.0)
    return Pointwise("y", I, ops.op("exp", value), index, ("model.py:3 aten.exp",))  # type: ignore[arg-type]


def test_a_program() -> None:
    ops = Recorder()
    total = Reduction(("z",), I[:1], R, "sum", ops.load("y", (I[0], R[0]), f32))
    z = Buffer("z", f32, (s0,), (1,))
    program = LoopProgram(
        inputs=(("sym", "s0"), "x", None, "rows"),
        buffers={b.name: b for b in (X, ROWS, Y, z)},
        constants=(),
        ops=(exp_of_row(None), total, Assert(sz.compare("lt", s0, 100), "many"), Mutate("x", "y")),
        outputs=(TensorArg("z", (s0,), (1,), 0), s0 * 2, Scalar("none")),
        symbols={"s0": None, "s1": ("x", "stride", 0)},
        donated=("rows",),
    )
    assert program_text(program) == (
        """\
s0 = symbol(lo=2)
inputs(s0: int, x, _, rows)
s0 = int
s1 = x.stride(0)
x: f32[s0, 8] @ (8, 1) fixed
rows: i64[s0] @ (1,)
y: f32[s0, 8] @ (8, 1)
z: f32[s0] @ (1,)
donated(rows)

def y(i0: s0, i1: 8):  # pointwise
    \"""model.py:3 aten.exp\"""
    t0: i64 = index(i1)
    t1: b1 = lt(t0, 4)
    t2: i64 = rows[i0]
    t3: f32 = x[t2, i1] where t1
    t4: f32 = where(t1, t3, 0.0)
    t5: f32 = exp(t4)
    return t5

def z(i0: s0, *, r0: 8):  # reduction sum
    t0: f32 = y[i0, r0]
    return t0

assert (s0 < 100), 'many'

x[...] = y

return (z[s0] @ (1,), 2*s0, None)
"""
    )


def test_other_ops() -> None:
    ops = Recorder()
    load = ops.load("x", I, f32)
    scan = Scan(("v", None), I, 1, "max", load)
    symbol = sz.symbol("$0", extent=s0)
    scatter = Scatter(
        "y",
        "x",
        I,
        (symbol, I[1]),
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
    lines = [
        *op_lines(scan, Scope()), *op_lines(scatter, Scope()), *op_lines(call, Scope()),
        *op_lines(Alias("a", "x", 4), Scope()), *op_lines(Item("u0", "k"), Scope()),
        *op_lines(exp_of_row((I[0], I[1] + 8)), Scope())[-1:],
    ]  # fmt: skip
    assert lines == [
        "def v, _(i0: s0, i1: 8):  # scan max along i1",
        "    t0: f32 = x[i0, i1]",
        "    return t0",
        "def y(i0: s0, i1: 8):  # scatter add into a copy of x",
        "    t0: f32 = x[i0, i1]",
        "    t1: i64 = rows[i0]",
        "    y[t1, i1] add= t0 where True",
        "o = aten::f(x + s0[8] @ (1,) as i64, 3, flag=True)  # extern, fallback",
        "a = memory of x at 4",
        "u0 = item(k)",
        "    y[i0, i1 + 8] = t5",
    ]


def test_a_plan() -> None:
    ops = Recorder()
    value = ops.load("x", (I[0], R[0]), f32)
    m = node("acc", (), "m", f32)
    kernel = Kernel(
        "plait_softmax", I[:1], R, (Reduce("m", "max", value), Store("y", (I[0], R[0]), ops.op("sub", value, m), True)),
        (X, Y), ("y",), (s0,), work_ns=s0 * 4, origin=("model.py:3 aten.softmax",),
    )  # fmt: skip
    call = Extern(("z",), "aten::mm", (), fallback=False)
    program = LoopProgram((), {}, (), (), (), {})
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
arena(64 bytes)
y at byte 0
w in the memory of y

def plait_softmax(
    x: f32[s0, 8] @ (8, 1) fixed,
    y: f32[s0, 8] @ (8, 1),
    s0,
):
    \"""model.py:3 aten.softmax\"""
    for i0: s0:  # in any order, 4*s0 ns
        # inner: r0: 8
        t0: f32 = x[i0, r0]
        m = max(t0)
        t1: f32 = sub(t0, m)
        y[i0, r0] = t1  # full
free(x)

z = aten::mm()  # extern, by choice

# not fused: plait_softmax and z: one is a call
"""
    )
    assert (
        step_summary(kernel)
        == "kernel plait_softmax: x -> y; s0 over 8 points, about 4*s0 ns on one core"
    )
    assert step_summary(call) == "extern aten::mm: by choice"
