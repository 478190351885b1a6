"""What is decided about kernels before they are printed, and the verifiers that see a damaged
decision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from plait.errors import InternalError
from plait.ir.dtypes import f32
from plait.ir.loops import Load, loop_vars, node
from plait.kernel.cpu.choose_levels import Place, faults_of_levels
from plait.kernel.cpu.plan_body import BodyPlan, plan_body, verify_body
from plait.kernel.cpu.share_work import Share, Unit, faults_of_sharing
from plait.schedule.legalize import legalize
from plait.schedule.plan import Kernel, Reduce, Store
from tests.fuzz_kernels import Maker
from tests.kernel_tools import strided


def planned(kernel: Kernel, lanes: int = 16) -> BodyPlan:
    return plan_body(kernel, legalize(kernel), lanes, verifies=True)


def places(seeds: range) -> Iterator[tuple[BodyPlan, int, Place]]:
    for seed in seeds:
        plan = planned(Maker(seed).kernel())
        yield from ((plan, k, place) for k, place in enumerate(plan.places))


def faults_with(plan: BodyPlan, k: int, place: Place) -> list[str]:
    changed = (*plan.places[:k], place, *plan.places[k + 1 :])
    return faults_of_levels(plan.vectors, plan.sharing, changed)


def test_no_value_could_be_computed_further_out() -> None:
    moved = 0
    for plan, k, place in places(range(60)):
        for n, level in place.values.items():
            for other in (*range(level), place.depth + 1):
                damaged = replace(place, values={**place.values, n: other})
                assert faults_with(plan, k, damaged), f"{n} at {other} in place of {level}"
                moved += 1
    assert moved > 1000


def test_results_are_not_known_before_their_loops_end() -> None:
    seen = set()
    for plan, k, place in places(range(40, 100)):
        for s in plan.vectors.nest.passes[k] if k < len(plan.vectors.nest.passes) else ():
            if isinstance(s, Reduce):
                damaged = replace(place, known={**place.known, s.name: 0})
                assert any("before its last point" in f for f in faults_with(plan, k, damaged))
                seen.add(s.running)
    assert seen == {False, True}


def updated(rows_apart: bool) -> Kernel:
    """Elements of 8 rows that are added up: in one element a row, or in one in all."""
    i, j = loop_vars("i", (8, 64))
    x = node("load", (), Load("x", (i, j)), f32)
    store = Store("y", (i if rows_apart else 0,), x, False, "add")
    buffers = (strided("x", f32, (8, 64)), strided("y", f32, (8,)))
    return Kernel("k", (i, j), (), (store,), buffers, ("y",), (), sequential=True)


def sharing_faults(plan: BodyPlan, **damage: Any) -> list[str]:
    sharing = replace(plan.sharing, **damage)
    return faults_of_sharing(plan.kernel, plan.vectors.nest, sharing)


def test_every_point_has_one_thread() -> None:
    for seed in range(60):
        plan = planned(Maker(seed).kernel())
        if outer := plan.sharing.outer:
            assert sharing_faults(plan, outer=outer[1:])
            assert sharing_faults(plan, outer=(*outer, outer[0]))
        if plan.sharing.unit is Unit.VECTORS:
            assert sharing_faults(plan, unit=Unit.POINT)


def test_points_that_run_in_order_stay_on_a_thread() -> None:
    for apart, share in ((True, Share.FIRST), (False, Share.ALL)):
        plan = planned(updated(apart))
        assert plan.sharing.share is share
        assert sharing_faults(plan, share=Share.RUN)
        assert bool(sharing_faults(plan, share=Share.FIRST)) is not apart
        assert sharing_faults(plan, share=Share.COLUMNS)
        with pytest.raises(InternalError, match="kernel k runs in order"):
            verify_body(replace(plan, sharing=replace(plan.sharing, share=Share.RUN)))
