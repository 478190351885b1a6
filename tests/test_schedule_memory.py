"""Where buffers live: the arena, takeovers, mutated inputs, the order of steps, and the peak."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from plait.config import Config
from plait.errors import InternalError
from plait.ir.dtypes import f32, i64
from plait.ir.expr import Size, evaluate, symbol, total
from plait.ir.loops import Mutate, Scatter, arg_symbol, loop_vars
from plait.pipelines import schedule
from plait.schedule.memory import Block, lives, peak_nbytes, place, storage_nbytes
from plait.schedule.plan import Kernel, Plan
from plait.schedule.spans import Skyline, Spans, Timeline
from plait.schedule.verify import verify_plan
from tests.schedule_tools import Builder, Record, check, kernels

CFG = Config()


def plan_of(b: Builder, cfg: Config = CFG, **syms: int) -> Plan:
    program = b.program()
    plan = schedule(program, cfg)
    check(plan, program, syms)
    return plan


def chain(b: Builder, x: str, shape: tuple[Size, ...], n: int, may_keep: bool = False) -> str:
    """n times: a kernel, then a call that hands its result on."""
    for _ in range(n):
        x = b.map("tanh", x)
        x = b.extern(shape, x, may_keep=may_keep)
    return x


def test_intermediates_share_an_arena() -> None:
    b = Builder()
    x = b.input(64, 64)
    b.output(b.map("exp", chain(b, x, (64, 64), 4)))
    plan = plan_of(b)
    assert len(plan.memory.offsets) == 4
    assert plan.memory.arena_nbytes == 64 * 64 * 4


def test_what_an_op_may_keep_has_memory_of_its_own() -> None:
    b = Builder()
    x = b.input(64, 64)
    b.output(b.map("exp", chain(b, x, (64, 64), 4, may_keep=True)))
    assert not plan_of(b).memory.offsets


def test_results_of_out_variants_may_be_placed() -> None:
    b = Builder()
    x = b.input(64, 64)
    y = b.extern((64, 64), x, may_keep=False, out_op="test::opaque_out", out_names=("out",))
    b.output(b.map("exp", y))
    plan = plan_of(b)
    assert set(plan.memory.offsets) == {y}


def test_no_planning_if_not_wanted() -> None:
    b = Builder()
    x = b.input(64, 64)
    b.output(b.map("exp", chain(b, x, (64, 64), 2)))
    plan = plan_of(b, Config(memory_planning=False))
    assert not plan.memory.offsets and not plan.memory.in_place


def test_unknown_sizes_share_where_they_are_equal() -> None:
    b = Builder()
    n, m = b.size("s0"), b.size("s1")
    x, y = b.input(n, 8), b.input(m, 8)
    one, other = chain(b, x, (n, 8), 3), chain(b, y, (m, 8), 3)
    b.output(b.map("exp", one), b.map("exp", other))
    plan = plan_of(b, s0=5, s1=7)
    assert len(plan.memory.offsets) == 6
    assert len(set(map(str, plan.memory.offsets.values()))) == 2


S0, S1 = symbol("s0", lo=1), symbol("s1", lo=2)
PRODUCTS = (1, S0, S1, S0 * S1, S0 * S0 * S1, (S0 + 1) // 2 * S1, (S0 - 3) // 2 * S1 + S1, S0 - 1)


def random_blocks(seed: int) -> list[Block]:
    rng = random.Random(seed)
    blocks = []
    for k in range(24):
        parts = [
            rng.choice(PRODUCTS) * rng.choice((4, 60, 64, 512, 3072))
            for _ in range(rng.randint(1, 2))
        ]
        start = rng.randrange(30)
        blocks.append(Block((f"b{k}",), total(parts), start, start + rng.randrange(8)))
    return blocks


@pytest.mark.parametrize("seed", range(12))
def test_what_lives_at_one_time_lies_apart_whatever_the_sizes(seed: int) -> None:
    blocks = random_blocks(seed)
    offsets, nbytes = place(blocks, {"s0": 48, "s1": 4})
    for s0, s1 in ((1, 2), (2, 300), (5, 17), (48, 4), (1000, 2), (777, 333)):
        env = {"s0": s0, "s1": s1}
        starts = [evaluate(offsets[b.names[0]], env) for b in blocks]
        ends = [start + evaluate(b.nbytes, env) for start, b in zip(starts, blocks, strict=True)]
        assert all(start % 64 == 0 for start in starts) and max(ends) <= evaluate(nbytes, env)
        for k, a in enumerate(blocks):
            for j, b in enumerate(blocks[:k]):
                if a.start <= b.end and b.start <= a.end:
                    assert ends[k] <= starts[j] or ends[j] <= starts[k], (a, b, env)


def test_unlike_sizes_share_an_arena_as_known_ones_do() -> None:
    """The buffers of an attention over s0 images of s1 tokens: products of either size, and of
    both."""
    hints = {"s0": 3, "s1": 50}
    rows, scores = S0 * S1 * 1024, S0 * S1 * S1 * 16
    sizes = [rows, S0 * S1 * 4, rows * 3, scores, rows, rows, rows * 4, rows]
    blocks = [Block((f"b{k}",), n, k, k + 1 + k % 2) for k, n in enumerate(sizes * 3)]
    nbytes = place(blocks, hints)[1]
    known = place([replace(b, nbytes=evaluate(b.nbytes, hints)) for b in blocks], hints)[1]
    assert evaluate(nbytes, hints) <= known * 1.01 + 1024


def test_a_kernel_writes_over_what_dies_in_it() -> None:
    b = Builder()
    x = b.input(64, 64)
    y = b.extern((64, 64), x, may_keep=False, out_op="test::opaque_out", out_names=("out",))
    z = b.map("tanh", y)
    w = b.extern((64, 64), z, may_keep=False)
    b.output(b.map("exp", w))
    plan = plan_of(b)
    assert plan.memory.in_place[z] == y
    assert plan.memory.arena_nbytes == 64 * 64 * 4


def test_a_transposed_reader_does_not_write_over() -> None:
    b = Builder()
    x = b.input(64, 64)
    y = b.extern((64, 64), x, may_keep=False, out_op="test::opaque_out", out_names=("out",))
    z = b.pointwise((64, 64), lambda o, i, j: o.add(o.load(y, i, j), o.load(y, j, i)))
    w = b.extern((64, 64), z, may_keep=False)
    b.output(b.map("exp", w))
    plan = plan_of(b)
    assert z not in plan.memory.in_place


def test_softmax_writes_over_its_scores() -> None:
    from tests.test_schedule import softmax

    b = Builder()
    x = b.input(16, 32)
    y = b.extern((16, 32), x, may_keep=False, out_op="test::opaque_out", out_names=("out",))
    p = softmax(b, y, 16, 32)
    b.output(b.map("exp", b.extern((16, 32), p, may_keep=False)))
    assert plan_of(b).memory.in_place[p] == y


@pytest.mark.parametrize("last", [0, 1, 7, 8, 20])
def test_bytes_taken_at_some_steps(last: int) -> None:
    rng = random.Random(last)
    timeline, spans = Timeline(last), Spans()
    given: list[tuple[int, int, int, int]] = []
    for _ in range(60):
        first, end = sorted(rng.randint(0, last) for _ in range(2))
        start = rng.randrange(100)
        stop = start + rng.randint(1, 12)
        whole = {k for *_, a, b in given for k in range(a, b)}
        there = {k for f, e, a, b in given if f <= end and first <= e for k in range(a, b)}
        assert {k for a, b in timeline.taken(first, end) for k in range(a, b)} == there
        assert spans.meet(start, stop) == (not whole.isdisjoint(range(start, stop)))
        timeline.take(first, end, start, stop)
        spans.add(start, stop)
        given.append((first, end, start, stop))
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans.ranges))


def test_what_lies_highest_at_some_steps() -> None:
    rng, skyline, highest = random.Random(0), Skyline(), [-1] * 13
    for thing in range(200):
        first, last = sorted(rng.randrange(13) for _ in range(2))
        assert {*skyline.cover(first, last, thing)} == {*highest[first : last + 1]}
        highest[first : last + 1] = [thing] * (last + 1 - first)
        assert {*highest} <= {*skyline.tops} <= {*highest, -1}
        assert len(skyline.starts) == len(skyline.tops) <= 14


def test_running_statistics_are_updated_in_place() -> None:
    b = Builder()
    x, running, other = b.input(8, 4, 16), b.input(4), b.input(4)
    mean = b.reduce((4,), (8, 16), "sum", lambda o, c, n, k: o.load(x, n, c, k))
    b.output(b.map("add", running, other))  # reads the old value
    new = b.map("add", running, mean)
    b.ops.append(Mutate(running, new))
    y = b.pointwise((8, 4, 16), lambda o, n, c, k: o.sub(o.load(x, n, c, k), o.load(mean, c)))
    b.output(y)
    assert plan_of(b).memory.in_place[new] == running


def test_a_returned_value_is_copied_into_the_input() -> None:
    b = Builder()
    x = b.input(8)
    new = b.map("exp", x)
    b.ops.append(Mutate(x, new))
    b.output(new)
    assert not plan_of(b).memory.in_place


def test_neighbours_are_not_overwritten() -> None:
    b = Builder()
    x = b.input(8)
    new = b.pointwise((8,), lambda o, i: o.load(x, 7 - i))
    b.ops.append(Mutate(x, new))
    plan = plan_of(b)
    assert not plan.memory.in_place and any(isinstance(s, Mutate) for s in plan.steps)


def relaid(plan: Plan, name: str) -> Plan:
    """The plan with a buffer transposed wherever kernels see it, and nowhere else."""
    buffers = {
        n: replace(b, strides=b.strides[::-1]) if n == name else b for n, b in plan.buffers.items()
    }
    steps = (
        replace(s, args=tuple(buffers[b.name] for b in s.args)) if isinstance(s, Kernel) else s
        for s in plan.steps
    )
    return replace(plan, buffers=buffers, steps=tuple(steps))


def test_kernels_and_calls_must_see_one_layout() -> None:
    b = Builder()
    x, running = b.input(64, 64), b.input(64, 64)
    inner = b.map("tanh", x)
    b.output(out := b.map("exp", b.extern((64, 64), inner)))
    b.ops.append(Mutate(running, new := b.map("add", running, x)))
    plan = plan_of(b)
    assert plan.memory.in_place[new] == running
    for name, words in (
        (inner, f"sees {inner} as"),
        (out, "the result sees"),
        (new, f"{new} is computed in {running}"),
    ):
        with pytest.raises(InternalError, match=words):
            verify_plan(relaid(plan, name))


def test_scatter_into_a_mutated_input_needs_no_copy() -> None:
    b = Builder()
    cache, at, new = b.input(16, 8), b.input(3, dtype=i64), b.input(3, 8)
    out = b.buffer((16, 8))
    i, j = loop_vars("i", (3, 8))
    o = Record(b)
    b.ops.append(
        Scatter(
            out, cache, (i, j), (arg_symbol(0, 16), j), (o.load(at, i),), o.load(new, i, j), "store"
        )
    )
    b.ops.append(Mutate(cache, out))
    y = b.map("tanh", out)
    b.output(y)
    plan = plan_of(b)
    assert len(kernels(plan)) == 2
    assert all(out not in k.outs for k in kernels(plan))


def test_the_peak_stays_near_that_of_coming_and_going() -> None:
    b = Builder()
    x = b.input(512, 1024)
    outs = []
    y = x
    for _ in range(6):  # results pile up while what is in the arena gets small
        y = b.extern((512, 1024), b.map("tanh", y), may_keep=False)
        outs.append(b.map("exp", y))
        y = b.map("neg", y)
    b.output(*outs)
    plan = plan_of(b)
    alive = lives(plan)
    free = peak_nbytes(list(alive.values()), len(plan.steps), {})
    outside = [
        x
        for n, x in alive.items()
        if n not in plan.memory.offsets and n not in plan.memory.in_place
    ]
    arena = plan.memory.arena_nbytes
    assert isinstance(arena, int)
    assert arena + peak_nbytes(outside, len(plan.steps), {}) <= free * 1.02 + (1 << 20)


def test_big_results_are_made_late() -> None:
    """Two big results of calls, each needed once for something small: one after the other."""
    b = Builder()
    x = b.input(4)
    big = [b.extern((512, 1024), x, op=f"test::big{k}") for k in range(4)]
    small = [b.reduce((), (512, 1024), "sum", lambda o, i, j, y=y: o.load(y, i, j)) for y in big]
    b.output(*small)
    plan = plan_of(b)
    free = peak_nbytes(list(lives(plan).values()), len(plan.steps), {})
    assert free < 1.1 * 512 * 1024 * 4


def test_storage_counts_gaps() -> None:
    from plait.ir.loops import Buffer

    assert storage_nbytes(Buffer("x", f32, (4, 8), (16, 1))) == (3 * 16 + 8) * 4
    assert storage_nbytes(Buffer("x", f32, (0, 8), (16, 1))) == 0


def test_an_old_value_outlives_the_fill_before_a_scatter() -> None:
    """The new value of an input is made by two kernels; the first must not run over what is read
    later, by an op behind the scatter."""
    b = Builder()
    x, at, g = b.input(4, 6), b.input(5, dtype=i64), b.input(5, 6)
    zeros = b.pointwise((4, 6), lambda o, i, j: o.f(0.0))
    out = b.buffer((4, 6))
    i, j = loop_vars("i", (5, 6))
    o = Record(b)
    index = (arg_symbol(0, 4), j)
    b.ops.append(Scatter(out, zeros, (i, j), index, (o.load(at, i),), o.load(g, i, j), "add"))
    b.output(b.pointwise((3, 6), lambda o, i, j: o.load(x, i + 1, j)))
    b.ops.append(Mutate(x, out))
    plan_of(b)
