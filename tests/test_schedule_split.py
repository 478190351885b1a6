"""Reductions in two stages: every kind gives what one stage gives."""

from __future__ import annotations

import pytest

from plait.config import Config
from plait.ir.sizes import Size
from plait.schedule import schedule
from plait.schedule.plan import Reduce
from tests.schedule_tools import Builder, check, kernels

CFG = Config()


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min", "argmax", "argmin", "welford"])
@pytest.mark.parametrize("shape", [(1 << 18,), (16, 1 << 14), (3, 100003), (2, 3 * 50 * 2003)])
def test_full_and_row_reductions(kind: str, shape: tuple[int, ...]) -> None:
    b = Builder()
    x = b.input(*shape)
    outer, inner = (shape[:1], shape[1:]) if shape[0] < 4 else ((), shape)
    outs = (True, True, True) if kind == "welford" else (True,)

    def body(o, *i):  # type: ignore[no-untyped-def]
        return o.mul(o.load(x, *i), o.f(0.001)) if kind == "prod" else o.load(x, *i)

    b.reduce(outer, inner, kind, body, outs)
    b.output(*(n for n in b.results() if n))
    program = b.program()
    plan = schedule(program, CFG)
    check(plan, program)
    if shape != (3, 100003) or kind not in ("argmax", "argmin", "welford"):
        assert len(kernels(plan)) == 2


def test_columns_split_along_rows_with_their_producer() -> None:
    b = Builder()
    x = b.input(8192, 64)
    e = b.map("tanh", x)
    s = b.reduce((64,), (8192,), "sum", lambda o, i, r: o.load(e, r, i))
    b.output(e, s)
    program = b.program()
    plan = schedule(program, CFG)
    check(plan, program)
    first, second = kernels(plan)
    assert [s.kind for k in (first, second) for s in k.stmts if isinstance(s, Reduce)] == ["sum", "sum"]
    assert e in first.outs


def test_small_and_wide_reductions_stay_whole() -> None:
    shapes: list[tuple[tuple[Size, ...], tuple[Size, ...]]] = [((), (1000,)), ((64,), (1 << 14,))]
    for outer, inner in shapes:
        b = Builder()
        x = b.input(*outer, *inner)
        b.output(b.reduce(outer, inner, "sum", lambda o, *i: o.load(x, *i)))  # noqa: B023
        program = b.program()
        assert len(kernels(schedule(program, CFG))) == 1


def test_what_is_read_once_a_result_does_not_split_rows() -> None:
    """The backward of batch norm: rows in memory, less a mean a channel, summed."""
    b = Builder()
    x, mean = b.input(4, 64, 1024), b.input(64)
    b.output(b.reduce((64,), (4, 1024), "sum", lambda o, c, n, i: o.sub(o.load(x, n, c, i), o.load(mean, c))))
    program = b.program()
    plan = schedule(program, CFG)
    check(plan, program)
    assert len(kernels(plan)) == 1
