"""Launches of several loop nests: what may share one, what may not, and that the parts run right in
it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import plait
from plait.config import Config
from plait.errors import InternalError
from plait.pipelines import schedule
from plait.runtime.toolchain import find_toolchain
from plait.schedule.kernels import Names, joined
from plait.schedule.overwrite import overwritable
from plait.schedule.plan import Kernel, Plan
from plait.schedule.verify import verify_plan
from tests.kernel_tools import Loaded
from tests.schedule_tools import Builder, check, kernels, launches, run_kernel

CFG = Config()


def plan_of(b: Builder) -> Plan:
    program = b.program()
    plan = schedule(program, CFG)
    check(plan, program)
    return plan


def row_sums(b: Builder, x: str, n: int, m: int) -> str:
    return b.reduce((n,), (m,), "sum", lambda o, i, r: o.load(x, i, r))


def column_sums(b: Builder, x: str, n: int, m: int) -> str:
    return b.reduce((m,), (n,), "sum", lambda o, i, r: o.load(x, r, i))


def test_sums_of_rows_and_columns_share_a_launch() -> None:
    b = Builder()
    x = b.input(96, 160)
    b.output(row_sums(b, x, 96, 160), column_sums(b, x, 96, 160))
    plan = plan_of(b)
    (launch,) = launches(plan)
    assert len(launch.parts) == len(kernels(plan)) == 2
    assert [a.name for a in launch.args].count(x) == 1


def test_a_kernel_waits_for_what_it_needs() -> None:
    b = Builder()
    x = b.input(96, 160)
    rows = row_sums(b, x, 96, 160)
    y = b.pointwise((96, 160), lambda o, i, j: o.mul(o.load(x, i, j), o.load(rows, i)))
    b.output(y, column_sums(b, y, 96, 160))
    plan = plan_of(b)
    assert len(launches(plan)) == len(kernels(plan)) == 2
    both = joined(kernels(plan), Names())  # in one launch all the same: the plan is refused
    with pytest.raises(InternalError, match=f"loads {y}, which .* makes beside it"):
        verify_plan(replace(plan, steps=(both,), frees=((),)))


def test_a_small_kernel_passes_a_call_and_a_large_one_does_not() -> None:
    for rows, n_launches in ((96, 2), (4096, 3)):
        b = Builder()
        x, w = b.input(rows, 160), b.input(64, 80)
        y = b.map("exp", x)
        z = b.extern((64, 80), w)
        far = b.extern((64, 80), b.map("tanh", z))
        b.output(y, column_sums(b, y, rows, 160), far)
        assert len(launches(plan_of(b))) == n_launches, rows


def test_no_launch_raises_the_peak() -> None:
    """Both large values would be alive at once."""
    b = Builder()
    x, y = b.input(64, 1024), b.input(64, 1024)
    first = b.extern((64,), b.map("exp", x))
    second = b.extern((64,), b.map("tanh", y))
    b.output(first, second)
    plan = plan_of(b)
    assert len(launches(plan)) == 2


def test_a_part_does_not_write_where_another_reads() -> None:
    """y dies in this launch, but both parts read it: neither result takes its memory."""
    b = Builder()
    b.extern((4,), b.map("exp", b.input(512, 512)), effectful=True)  # the peak is here
    y = b.extern((96, 96), b.input(96, 96))
    rows, columns = row_sums(b, y, 96, 96), column_sums(b, y, 96, 96)
    one = b.pointwise((96, 96), lambda o, i, j: o.mul(o.load(y, i, j), o.load(rows, i)))
    two = b.pointwise((96, 96), lambda o, i, j: o.mul(o.load(y, i, j), o.load(columns, j)))
    b.output(b.extern((4,), one), b.extern((4,), two))
    plan = plan_of(b)
    (launch,) = (k for k in launches(plan) if k.parts)
    assert {one, two} <= set(launch.outs)
    assert not {one, two} & plan.memory.in_place.keys()
    part = next(p for p in launch.parts if one in p.outs)
    assert overwritable(part, one, y, plan.buffers)
    assert not overwritable(launch, one, y, plan.buffers)


def pack_kernel() -> Kernel:
    b = Builder()
    x, y = b.input(96, 160), b.input(33, 7)
    b.output(row_sums(b, x, 96, 160), column_sums(b, y, 33, 7), column_sums(b, x, 96, 160))
    (launch,) = launches(plan_of(b))
    assert len(launch.parts) == 3
    return launch


@pytest.mark.parametrize("threads", [1, 3])
def test_the_c_function_runs_all_parts(threads: int, tmp_path: Path) -> None:
    kernel = pack_kernel()
    loaded = Loaded([kernel], find_toolchain(CFG).isa, tmp_path)
    rng = np.random.default_rng(0)
    arrays = {b.name: rng.standard_normal(b.shape).astype("f4") for b in kernel.args}
    want = {name: a.copy() for name, a in arrays.items()}
    run_kernel(kernel, want, {})
    assert loaded(kernel, arrays, {}, threads) == 0
    for name in kernel.outs:
        np.testing.assert_allclose(arrays[name], want[name], rtol=2e-5, atol=2e-5)


def test_equal_launches_share_code() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x @ x
        sums = y.sum(0), y.sum(1)
        z = y @ y
        return *sums, z.sum(0), z.sum(1)

    report = plait.explain(f, torch.randn(600, 600), quiet=True)
    assert report.kernels == 2
    made = re.findall(r'extern "C" i64 plait_sum\w+\([^)]*\) \{', report.graphs[0].kernel_source)
    assert len(made) == 3


def test_a_failed_check_of_a_later_part_is_reported() -> None:
    def f(x: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        return x[i].sum(1), x[:, j].sum(0)

    x, i, j = torch.randn(40, 50), torch.arange(30), torch.arange(20)
    compiled = torch.compile(f, backend="plait")
    for got, want in zip(compiled(x, i, j), f(x, i, j), strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(IndexError, match="size 50"):
        compiled(x, i, j + 31)
    with pytest.raises(IndexError, match="size 40"):
        compiled(x, i + 11, j)
