"""Plans of small programs made by hand: how many kernels, what is in them, and that they compute the same."""

from __future__ import annotations

from plait.config import Config
from plait.schedule import schedule
from tests.schedule_tools import Builder, check, kernels

CFG = Config()


def softmax(b: Builder, x: str, n: int, m: int) -> str:
    top = b.reduce((n,), (m,), "max", lambda o, i, r: o.load(x, i, r))
    e = b.pointwise((n, m), lambda o, i, j: o.exp(o.sub(o.load(x, i, j), o.load(top, i))))
    total = b.reduce((n,), (m,), "sum", lambda o, i, r: o.load(e, i, r))
    return b.pointwise((n, m), lambda o, i, j: o.truediv(o.load(e, i, j), o.load(total, i)))


def test_softmax_computes() -> None:
    b = Builder()
    x = b.input(4, 8)
    b.output(softmax(b, x, 4, 8))
    program = b.program()
    plan = schedule(program, CFG)
    check(plan, program)
    assert all(k.name.startswith("plait_") for k in kernels(plan))


def test_chain_is_one_loop() -> None:
    b = Builder()
    x = b.input(4, 8)
    y = x
    for op in ("exp", "neg", "tanh"):
        y = b.map(op, y)
    b.output(y)
    program = b.program()
    plan = schedule(program, CFG)
    assert len(kernels(plan)) == 1
    check(plan, program)
