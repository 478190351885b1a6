"""Plans of small programs made by hand: how many kernels, what is in them, and that they compute
the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.config import Config
from plait.ir.effects import unwritten
from plait.ir.expr import Expr, Size, evaluate, symbol
from plait.ir.loops import LoopProgram, Node, apply
from plait.pipelines import LOOPS, schedule
from plait.schedule.cost import HINT, hint
from plait.schedule.plan import Kernel, Plan, Reduce, Store
from tests.schedule_tools import Builder, check, kernels

CFG = Config()


def plan_of(b: Builder, **syms: int) -> Plan:
    """The checked plan of a builder's program."""
    program = b.program()
    plan = schedule(program, CFG)
    check(plan, program, syms)
    return plan


def stores(k: Kernel) -> list[str]:
    return [s.buf for s in k.stmts if isinstance(s, Store)]


def softmax(b: Builder, x: str, n: Size, m: Size) -> str:
    top = b.reduce((n,), (m,), "max", lambda o, i, r: o.load(x, i, r))
    e = b.pointwise((n, m), lambda o, i, j: o.exp(o.sub(o.load(x, i, j), o.load(top, i))))
    total = b.reduce((n,), (m,), "sum", lambda o, i, r: o.load(e, i, r))
    return b.pointwise((n, m), lambda o, i, j: o.truediv(o.load(e, i, j), o.load(total, i)))


def layer_norm(b: Builder, x: str, w: str, n: Size, m: int) -> str:
    b.reduce((n,), (m,), "welford", lambda o, i, r: o.load(x, i, r), (True, True, False))
    mean, m2, _ = b.results()
    assert mean and m2
    rstd = b.pointwise(
        (n,), lambda o, i: o.rsqrt(o.add(o.mul(o.load(m2, i), o.f(1 / m)), o.f(1e-5)))
    )

    def scaled(o, i, j):  # type: ignore[no-untyped-def]
        centred = o.sub(o.load(x, i, j), o.load(mean, i))
        return o.mul(o.mul(centred, o.load(rstd, i)), o.load(w, j))

    return b.pointwise((n, m), scaled)


def test_chain_is_one_loop() -> None:
    b = Builder()
    x = b.input(4, 8)
    y = x
    for op in ("exp", "neg", "tanh"):
        y = b.map(op, y)
    b.output(y)
    (k,) = kernels(plan_of(b))
    assert len(k.stmts) == 1


def test_softmax_is_one_kernel() -> None:
    b = Builder()
    x = b.input(4, 8)
    y = softmax(b, x, 4, 8)
    b.output(y)
    plan = plan_of(b)
    (k,) = kernels(plan)
    assert [s.kind for s in k.stmts if isinstance(s, Reduce)] == ["max", "sum"]
    assert stores(k) == [y]
    assert {a.name for a in k.args} == {x, y}


def test_layer_norm_with_residual_is_one_kernel() -> None:
    b = Builder()
    x, r, w = b.input(4, 8), b.input(4, 8), b.input(8)
    h = b.map("add", x, r)
    y = layer_norm(b, h, w, 4, 8)
    b.output(y, h)
    plan = plan_of(b)
    (k,) = kernels(plan)
    assert sorted(stores(k)) == sorted([h, y])


def test_dynamic_softmax() -> None:
    b = Builder()
    n, m = b.size("s0"), b.size("s1")
    x = b.input(n, m)
    b.output(softmax(b, x, n, m))
    (k,) = kernels(plan_of(b, s0=5, s1=7))
    assert [str(s) for s in k.sizes] == ["s0", "s1"]


@pytest.mark.parametrize(("n", "n_kernels"), [(2, 1), (1000, 2)])
def test_a_hint_decides_what_is_computed_again(n: int, n_kernels: int) -> None:
    """A row that every one of n rows needs: computed n times, or put into memory."""
    b = Builder()
    rows, cols = b.size("s0", hint=n), b.size("s1", hint=50)
    x, w = b.input(cols), b.input(rows)
    row = b.map("sqrt", x)
    b.output(b.pointwise((rows, cols), lambda o, i, j: o.mul(o.load(row, j), o.load(w, i))))
    found = kernels(plan_of(b, s0=5, s1=7))
    assert len(found) == n_kernels
    assert dict(zip(map(str, found[-1].sizes), found[-1].hints, strict=True)) == {"s0": n, "s1": 50}


def work(n: Size, body: Callable[..., Node], m: Size = 256) -> Size:
    """The estimated time of y[i, j] = body of x[n, m] and w[n]; body(ops, x[i, j] or its index,
    w[i])."""
    b = Builder()
    if isinstance(n, Expr):
        n = b.size("s0", hint=64)
    x, w = b.input(n, 2 * m), b.input(n)
    y = b.pointwise((n, m), lambda o, i, j: body(o, lambda k: o.load(x, i, k(j)), o.load(w, i)))
    b.output(y)
    (k,) = kernels(schedule(b.program(), CFG))
    return k.work_ns


def test_work_is_counted_as_often_as_it_is_done() -> None:
    plain = work(64, lambda o, x, w: o.mul(x(lambda j: j), w))
    outside = work(64, lambda o, x, w: o.mul(x(lambda j: j), o.tanh(o.tanh(w))))
    inside = work(64, lambda o, x, w: o.tanh(o.tanh(o.mul(x(lambda j: j), w))))
    apart = work(64, lambda o, x, w: o.mul(x(lambda j: 2 * j), w))
    assert plain <= outside < 1.2 * plain
    assert min(inside, apart) > 2 * plain
    unknown = work(symbol("s0"), lambda o, x, w: o.mul(x(lambda j: j), w))
    assert evaluate(unknown, {"s0": 64}) == plain


def test_reductions_in_different_axes_stay_apart() -> None:
    b = Builder()
    x = b.input(4, 8)
    rows = b.reduce((4,), (8,), "sum", lambda o, i, r: o.load(x, i, r))
    cols = b.reduce((8,), (4,), "sum", lambda o, i, r: o.load(x, r, i))
    b.output(rows, cols)
    plan = plan_of(b)
    assert len(kernels(plan)) == 2
    (refusal,) = plan.refusals
    assert "cannot be made one" in refusal.reason.text


def test_reductions_of_one_input_join() -> None:
    b = Builder()
    x = b.input(4, 8)
    outs = [
        b.reduce((4,), (8,), kind, lambda o, i, r: o.load(x, i, r))
        for kind in ("sum", "max", "argmax")
    ]
    b.output(*outs)
    assert len(kernels(plan_of(b))) == 1


def test_transposed_consumer_joins_by_permuting() -> None:
    b = Builder()
    x, y = b.input(4, 8), b.input(8, 4)
    e = b.map("exp", x)
    z = b.pointwise((8, 4), lambda o, i, j: o.add(o.load(e, j, i), o.load(y, i, j)))
    b.output(e, z)
    assert len(kernels(plan_of(b))) == 1


def test_reshaped_consumer_joins_by_splitting() -> None:
    b = Builder()
    x = b.input(6, 8)
    e = b.map("exp", x)
    z = b.pointwise((2, 24), lambda o, i, j: o.neg(o.load(e, i * 3 + j // 8, j % 8)))
    s = b.reduce((2,), (24,), "sum", lambda o, i, r: o.load(e, i * 3 + r // 8, r % 8))
    b.output(e, z, s)
    assert len(kernels(plan_of(b))) == 1


def test_a_step_between_prevents_fusion() -> None:
    b = Builder()
    x = b.input(4, 8)
    e = b.map("exp", x)
    f = b.extern((4, 8), e)
    z = b.pointwise((4, 8), lambda o, i, j: o.add(o.load(e, i, j), o.load(f, i, j)))
    b.output(z)
    plan = plan_of(b)
    assert len(kernels(plan)) == 2
    assert any("test::opaque must run between" in r.reason.text for r in plan.refusals)


def test_attention_like_chain() -> None:
    b = Builder()
    q = b.input(2, 4, 3, 8)  # batch, tokens, heads, width
    scale = b.pointwise((2, 3, 4, 8), lambda o, i, h, t, d: o.mul(o.load(q, i, t, h, d), o.f(0.5)))
    scores = b.extern((2, 3, 4, 4), scale)
    mask = b.input(4, 4)
    s = b.pointwise(
        (2, 3, 4, 4), lambda o, i, h, t, u: o.add(o.load(scores, i, h, t, u), o.load(mask, t, u))
    )
    top = b.reduce((2, 3, 4), (4,), "max", lambda o, i, h, t, r: o.load(s, i, h, t, r))
    e = b.pointwise(
        (2, 3, 4, 4),
        lambda o, i, h, t, u: o.exp(o.sub(o.load(s, i, h, t, u), o.load(top, i, h, t))),
    )
    total = b.reduce((2, 3, 4), (4,), "sum", lambda o, i, h, t, r: o.load(e, i, h, t, r))
    p = b.pointwise(
        (2, 3, 4, 4), lambda o, i, h, t, u: o.truediv(o.load(e, i, h, t, u), o.load(total, i, h, t))
    )
    b.output(p)
    assert len(kernels(plan_of(b))) == 2


def test_pieces_of_a_concatenation() -> None:
    b = Builder()
    x, y = b.input(4, 8), b.input(4, 8)
    e = b.map("exp", x)
    out = b.buffer((8, 8))
    b.pointwise((4, 8), lambda o, i, j: o.load(e, i, j), out, lambda i, j: (i, j))
    b.pointwise((4, 8), lambda o, i, j: o.load(y, i, j), out, lambda i, j: (i + 4, j))
    z = b.map("neg", out)
    b.output(z)
    plan = plan_of(b)  # the reader is in pieces, too
    assert out not in {o for k in kernels(plan) for o in k.outs}
    b.output(out)
    plan = plan_of(b)
    assert any("written in pieces" in r.reason.text for r in plan.refusals)


def test_scatter_add_after_zeros() -> None:
    from plait.ir.dtypes import i64
    from plait.ir.loops import Scatter, arg_symbol, loop_vars

    b = Builder()
    g, where = b.input(5, 8), b.input(5, dtype=i64)
    zeros = b.pointwise((6, 8), lambda o, i, j: o.f(0.0))
    out = b.buffer((6, 8))
    i, j = loop_vars("i", (5, 8))
    from tests.schedule_tools import Record

    o = Record(b)
    b.ops.append(
        Scatter(
            out, zeros, (i, j), (arg_symbol(0, 6), j), (o.load(where, i),), o.load(g, i, j), "add"
        )
    )
    b.output(out)
    plan = plan_of(b)
    fill, scatter = kernels(plan)
    assert scatter.sequential and not fill.sequential
    assert [a.name for a in fill.args] == [out]


def test_empty_axes() -> None:
    b = Builder()
    x, y = b.input(4, 0), b.input(0, 3, 5)
    e = b.map("exp", x)
    rows = b.reduce((4,), (0,), "sum", lambda o, i, r: o.load(e, i, r))
    f = b.map("tanh", b.map("exp", y))
    rest = b.map("neg", rows)
    b.output(e, rows, f, rest)
    plan = plan_of(b)
    assert plan.buffers.keys() & {*unwritten(plan.program)} == {e, f}
    assert {o for k in kernels(plan) for o in k.outs} == {rows, rest}


def test_axes_of_one_element_vanish() -> None:
    b = Builder()
    x = b.input(1, 8, 1)
    s = b.reduce((8,), (1, 1), "sum", lambda o, i, r, t: o.load(x, r, i, t))
    y = b.pointwise((1, 8, 1), lambda o, i, j, k: o.add(o.load(x, i, j, k), o.load(s, j)))
    b.output(y)
    (k,) = kernels(plan_of(b))
    assert len(k.vars) == 1 and not k.rvars


def test_a_transposed_and_reshaped_chain_ends_in_one_axis() -> None:
    """Channels last in memory, seen as rows of another length, through three ops."""
    b = Builder()
    x = b.input(2, 6, 4, 8, strides=(192, 1, 48, 6))
    e = b.map("tanh", b.map("exp", x))
    y = b.pointwise((8, 48), lambda o, i, j: o.neg(o.load(e, i // 4, j % 6, i % 4, j // 6)))
    b.output(y)
    (k,) = kernels(plan_of(b))
    assert len(k.vars) == 1


def test_intermediates_keep_the_order_of_their_inputs() -> None:
    b = Builder()
    x = b.input(2, 6, 4, 8, strides=(192, 1, 48, 6))
    stat = b.reduce((6,), (2, 4, 8), "sum", lambda o, c, n, h, w: o.load(x, n, c, h, w))
    far = b.extern((6,), stat)
    e = b.pointwise(x_shape := (2, 6, 4, 8), lambda o, n, c, h, w: o.exp(o.load(x, n, c, h, w)))
    rows = b.reduce((2,), (6, 4, 8), "max", lambda o, n, c, h, w: o.load(e, n, c, h, w))
    b.output(
        b.extern((2,), rows),
        b.pointwise(
            x_shape, lambda o, n, c, h, w: o.tanh(o.add(o.load(e, n, c, h, w), o.load(far, c)))
        ),
    )
    plan = plan_of(b)
    if e in plan.buffers:
        assert plan.buffers[e].strides == (192, 1, 48, 6)


def test_a_reason_has_numbers() -> None:
    b = Builder()
    xs = [b.input(64, 64) for _ in range(20)]
    total, sums = xs[0], []
    for k, x in enumerate(xs[1:]):
        total = b.map("add", total, x)
        if k in (9, 18):
            sums.append(total)
    b.output(*sums)
    plan = plan_of(b)
    assert any("limit 16" in r.reason.text for r in plan.refusals)


def test_no_fusion_if_not_wanted() -> None:
    b = Builder()
    x = b.input(4, 8)
    b.output(softmax(b, x, 4, 8))
    program = b.program()
    plan = schedule(program, Config(fusion=False))
    check(plan, program)
    assert len(kernels(plan)) == 4


def test_checks_stay_out_of_masked_loads() -> None:
    """A gather with a check is not moved to where only some of its elements are needed."""
    from plait.ir.dtypes import i64

    b = Builder()
    x, at = b.input(8, 4), b.input(5, dtype=i64)
    g = b.pointwise((5, 4), lambda o, i, j: o.load(x, o.checked(o.load(at, i), 8), j))

    def padded(o, i, j):  # type: ignore[no-untyped-def]
        inside = apply("ge", o.index(i), o.const(1, i64))
        return o.masked(inside, lambda: o.load(g, i - 1, j), 0.0)

    b.output(b.pointwise((6, 4), padded))
    assert len(kernels(plan_of(b))) == 2


def test_pieces_of_a_buffer_have_one_layout() -> None:
    """The last of the kernels that write one buffer reads memory of another order than the first:
    nothing changes."""
    b = Builder()
    columns = b.input(8, 16, strides=(1, 8))
    out, piece = b.buffer((2, 8, 16)), b.input(8, 16)
    for k in range(2):
        x = columns if k else piece
        b.pointwise(
            (1, 8, 16),
            lambda o, i, j, m, x=x, y=piece: o.add(o.load(x, j, m), o.load(y, j, m)),
            out,
            lambda i, j, m, k=k: (i + 1 - k, j, m),
        )
        piece = b.extern((8, 16), b.map("exp", piece))
    b.output(b.map("neg", out))
    b.output(out)
    program = b.program()
    plan = schedule(program, CFG)
    check(plan, program)
    layouts = {a.strides for k in kernels(plan) for a in k.args if a.name == out}
    assert len(layouts) == 1


def test_names_tell_and_are_unique() -> None:
    b = Builder()
    x, y = b.input(4, 8), b.input(8, 4)
    outs = []
    for z in (x, y, x):
        outs.append(b.extern(b.buffers[z].shape, b.map("exp", z)))
    b.output(*outs)
    names = [k.name for k in kernels(plan_of(b))]
    assert len(set(names)) == len(names) and all(n.startswith("plait_pw_") for n in names)


def test_compile_time_is_linear() -> None:
    """A thousand loops in well under a second, and twice as many in little more than twice the
    time."""
    import time

    def build(n: int) -> Builder:
        b = Builder()
        x, w = b.input(64, 32), b.input(32)
        for _ in range(n):
            y = layer_norm(b, x, w, 64, 32)
            y = b.extern((64, 32), b.map("tanh", b.map("exp", y)))
            x = b.map("add", x, y)
        b.output(x)
        return b

    def best(n: int) -> float:
        """The least of three runs: a single one measures what else the machine does."""
        program = build(n).program()
        times = []
        for _ in range(3):
            start = time.process_time()
            schedule(program, CFG)
            times.append(time.process_time() - start)
        return min(times)

    short, long = best(80), best(160)
    assert long < 3 * short + 0.05, (short, long)


def test_many_tiny_updates_are_one_kernel() -> None:
    """The counters of batch norms: more than a large kernel may read."""
    b = Builder()
    one = b.map("exp", b.input(1))
    b.output(*(b.map("add", b.input(1), one) for _ in range(24)))
    assert len(kernels(plan_of(b))) == 1


def test_a_size_that_divides_by_zero_at_the_plausible_value() -> None:
    s = symbol("s", lo=0)
    assert hint(s * 100 // (s % 64), {}) == HINT
    assert hint(s * 100 // (s % 64), {"s": 3}) == 100


@pytest.mark.parametrize("compares", [True, False])
def test_what_is_compared_is_made_once(compares: bool) -> None:
    """A value that costs little is made again by each reader, unless one compares it with what
    another makes of it."""
    b = Builder()
    x = b.input(64, 64)
    y = b.map("mul", x, x)
    top = b.extern((64,), b.reduce((64,), (64,), "max", lambda o, i, r: o.load(y, i, r)))
    op = "eq" if compares else "lt"
    same = b.pointwise((64, 64), lambda o, i, j: apply(op, o.load(y, i, j), o.load(top, i)))
    b.output(same)
    made = kernels(plan_of(b))
    assert len(made) == 2 and (y in made[0].outs) is compares


def test_every_step_that_gives_loops_is_verified() -> None:
    found = []

    def log(step: str, fn: Callable[..., object], *args: object, **how: object) -> object:
        result = fn(*args, **how)
        if isinstance(result, LoopProgram):
            found.append(step)
        return result

    b = Builder()
    b.output(b.map("sqrt", b.input(4, 5)))
    schedule(b.program(), Config(), log)
    assert tuple(found) == LOOPS
