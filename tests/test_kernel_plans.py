"""What is decided about kernels before they are printed, and the verifiers that see a damaged
decision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from plait.errors import InternalError
from plait.ir.dtypes import f32
from plait.ir.expr import Size, symbol
from plait.ir.loops import Buffer, Load, loop_vars, node, walk
from plait.kernel.cpu.choose_levels import Place, faults_of_levels
from plait.kernel.cpu.plan_body import BodyPlan, plan_body, verify_body
from plait.kernel.cpu.share_work import Share, Unit, faults_of_sharing
from plait.kernel.triton import plan_body as triton
from plait.kernel.triton.choose_accumulators import Accumulation
from plait.kernel.triton.tiles import plan_tile
from plait.kernel.triton.verify_body import faults_of_body
from plait.schedule.legalize import legalize
from plait.schedule.legalize.drop_picks import drop_picks
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


# ------------------------------------------------------------------------------------------- Triton
def triton_plan(kernel: Kernel) -> triton.BodyPlan:
    linear = drop_picks(legalize(kernel))
    return triton.plan_body(linear, plan_tile(linear), "tl.int64", {"s0": "s0"})


def softmax(n: Size) -> triton.BodyPlan:
    """Long rows in two passes. They begin anywhere, if n is known."""
    (i,), (r,) = loop_vars("i", (3,)), loop_vars("r", (n,))
    x, peak = node("load", (), Load("x", (i, r)), f32), node("acc", (), "peak", f32)
    power = node("exp", (node("sub", (x, peak)),))
    share = node("truediv", (power, node("acc", (), "sum", f32)))
    stmts = (
        Reduce("peak", "max", x),
        Reduce("sum", "sum", power),
        Store("out", (i, r), share, True),
        Store("peaks", (i,), node("add", (peak, node("load", (), Load("x", (i, 0)), f32))), False),
    )
    rows, peaks = Buffer("x", f32, (3, n), (n, 1)), strided("peaks", f32, (3,))
    buffers = (rows, replace(rows, name="out"), peaks)
    return triton_plan(Kernel("k", (i,), (r,), stmts, buffers, ("out", "peaks"), ()))


def bend(plan: triton.BodyPlan, k: int, **damage: Any) -> triton.BodyPlan:
    """The plan with a damaged pass."""
    return replace(plan, passes=tuple(
        replace(p, **damage) if p is plan.passes[k] else p for p in plan.passes
    ))  # fmt: skip


def test_a_damaged_order_is_seen() -> None:
    plan = softmax(65537)
    assert len(plan.passes) == 2 and faults_of_body(plan) == []
    first, second = plan.passes
    assert any("uses ['peak', 'sum'] before" in f for f in order_faults(plan, second, first))
    for passes in ((first,), (second,), (first, second, second), (first, first, second)):
        assert "does not do each of its statements once" in order_faults(plan, *passes)
    moved = replace(first, stores=second.stores), replace(second, stores=())
    assert "stores before its last pass" in order_faults(plan, *moved)


def order_faults(plan: triton.BodyPlan, *passes: triton.RowPass) -> list[str]:
    return faults_of_body(replace(plan, passes=passes))


def test_damaged_accumulators_are_seen() -> None:
    plan = softmax(65537)
    peak, total = plan.passes[0].accumulators
    assert (peak.how, total.how) == (Accumulation.PEAK, Accumulation.WITH)
    damaged = [(replace(peak, how=how), total) for how in Accumulation if how is not peak.how]
    damaged += [(peak, replace(total, how=how)) for how in Accumulation if how is not total.how]
    damaged += [(replace(peak, beside=()), total), (peak, replace(total, first=total.reduce))]
    damaged += [(peak, replace(total, folds=(1, 2, 3, 4)))]
    for accumulators in damaged:
        faults = faults_of_body(bend(plan, 0, accumulators=accumulators))
        assert any(f.startswith("accumulates") for f in faults), accumulators


def test_damaged_walks_along_rows_are_seen() -> None:
    plan = softmax(65537)
    span, block = plan.passes[0].span, plan.layout.tile.groups[-1].block
    assert span.start is not None
    for whole in (0, block, span.whole - block, span.whole + 1, span.whole + block):
        damaged = bend(plan, 0, span=replace(span, whole=whole))
        assert any(f.startswith("walks along rows") for f in faults_of_body(damaged)), whole
    ordered = [replace(a, how=Accumulation.MEAN) for a in plan.passes[0].accumulators]
    faults = faults_of_body(bend(plan, 0, accumulators=tuple(ordered)))
    assert "walks from before rows, whose points must stay in order" in faults


def test_damaged_loads_and_stores_are_seen() -> None:
    plan = softmax(65537)
    for n, access in plan.loads.items():
        fields = {"offset": access.offset + 1, "dims": frozenset("y"), "guarded": True}
        for name, value in fields.items():
            damaged = replace(plan, loads={**plan.loads, n: replace(access, **{name: value})})
            assert any(f.startswith("loads") for f in faults_of_body(damaged)), name
    (s,) = plan.passes[1].stores
    for access in (replace(s.access, offset=0), replace(s.access, dims=frozenset("x"))):
        damaged = bend(plan, 1, stores=(replace(s, access=access),))
        assert any(f.startswith("stores out") for f in faults_of_body(damaged))
    assert any(
        "stores out" in f for f in faults_of_body(bend(plan, 1, stores=(replace(s, inner=False),)))
    )


def test_reads_of_rows_without_points_are_seen() -> None:
    n = symbol("s0", lo=0)
    plan = softmax(n)
    assert faults_of_body(plan) == [] and plan.guarded
    faults = faults_of_body(replace(plan, guarded=frozenset()))
    assert any(f.startswith("needs") for f in faults)
    everything = frozenset(walk(plan.layout.linear.roots()))
    faults = faults_of_body(replace(plan, guarded=everything))
    assert any(f.startswith("leaves out") for f in faults)


def test_damaged_forms_are_seen() -> None:
    plan = softmax(65537)
    (n, form), *_ = plan.forms.items()
    for other in (n, node("load", (), Load("peaks", (0,)), f32)):
        damaged = replace(plan, forms={n: replace(form, operands=(*form.operands, other))})
        assert any(f.startswith("makes") for f in faults_of_body(damaged))


def test_plans_of_random_kernels_obey_the_rules() -> None:
    # In these three an index that is checked has no part in where its element lies.
    for seed in (*range(100), 4645, 4798, 5154):
        assert faults_of_body(triton_plan(Maker(seed).kernel())) == [], seed
