"""Loops in normal form: what is scattered into zeros and then added to something is scattered into
that."""

from __future__ import annotations

import pytest
import torch

from plait.config import Config
from plait.ir.dtypes import i64
from plait.ir.loops import Scatter, arg_symbol, loop_vars
from plait.pipelines import schedule
from plait.schedule.plan import Plan
from tests.schedule_tools import Builder, Record, check, kernels


def scattered(b: Builder, fill: float = 0.0) -> str:
    """Rows of an input added into a buffer of 6 x 8 that holds one number."""
    g, where = b.input(5, 8), b.input(5, dtype=i64)
    base = b.pointwise((6, 8), lambda o, i, j: o.f(fill))
    out = b.buffer((6, 8))
    i, j = loop_vars("i", (5, 8))
    o = Record(b)
    b.ops.append(
        Scatter(
            out, base, (i, j), (arg_symbol(0, 6), j), (o.load(where, i),), o.load(g, i, j), "add"
        )
    )
    return out


def plan_of(b: Builder) -> Plan:
    program = b.program()
    plan = schedule(program, Config())
    check(plan, program)
    return plan


@pytest.mark.parametrize("scatter_first", [True, False])
def test_a_scatter_into_zeros_goes_into_what_it_is_added_to(scatter_first: bool) -> None:
    b = Builder()
    x = b.input(6, 8)
    made = b.extern((6, 8), x, may_keep=False)
    s = scattered(b)
    b.output(b.map("add", *((s, made) if scatter_first else (made, s))))
    (only,) = kernels(plan_of(b))
    assert only.outs == (made,)  # in place: neither zeros nor a sum are in memory


def test_two_scatters_of_one_sum() -> None:
    b = Builder()
    b.output(b.map("add", scattered(b), scattered(b)))
    assert (
        len(kernels(plan_of(b))) == 4
    )  # zeros, one scatter, a copy, the other: no second zeros, no sum


@pytest.mark.parametrize("why", ["needed elsewhere", "no zeros", "itself", "product"])
def test_other_scatters_stay(why: str) -> None:
    b = Builder()
    made = b.extern((6, 8), b.input(6, 8))
    s = scattered(b, 1.0 if why == "no zeros" else 0.0)
    b.output(b.map("mul" if why == "product" else "add", s, s if why == "itself" else made))
    if why == "needed elsewhere":
        b.output(s)
    assert len(kernels(plan_of(b))) == 3


def test_an_input_of_the_scatter_that_changes_before_the_sum_keeps_it_where_it_is() -> None:
    b = Builder()
    made = b.extern((6, 8), b.input(6, 8))
    s = scattered(b)
    g = b.inputs[1]
    b.extern((1,), made, mutates=(g,))
    b.output(b.map("add", s, made))
    program = b.program()
    plan = schedule(program, Config())
    check(plan, program)
    assert len(kernels(plan)) == 3


def test_sums_of_one_minus_zero_begin_at_zero() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), x.mean(), torch.var_mean(x, correction=0)[1], x.prod(), x.amax()

    x = torch.tensor(-0.0)
    found = torch.compile(f, backend="plait")(x)
    assert [bool(v.signbit()) for v in found] == [bool(v.signbit()) for v in f(x)]
