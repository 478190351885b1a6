"""What must come before what: effects, integers read at run time, assertions, aliases, mutation,
dead code."""

from __future__ import annotations

from plait.config import Config
from plait.ir.calls import WAIT, Extern
from plait.ir.dtypes import i64
from plait.ir.expr import compare, symbol
from plait.ir.loops import Alias, Assert, Item, Load, Mutate, apply, node
from plait.pipelines import schedule
from plait.schedule.deps import Bodies, drop_dead, memory_roots, preds
from plait.schedule.plan import Plan
from tests.schedule_tools import Builder, check, kernels

CFG = Config()


def place(plan: Plan, kind: type) -> list[int]:
    """The places of the steps of a kind."""
    return [k for k, s in enumerate(plan.steps) if isinstance(s, kind)]


def test_effects_keep_their_order_and_stay() -> None:
    b = Builder()
    x = b.input(4)
    for k in range(4):
        b.extern((4,), x, op=f"test::print{k}", effectful=True)
    b.extern((4,), x, op="test::pure")
    b.output(b.map("exp", x))
    plan = schedule(b.program(), CFG)
    ran = [s.op for s in plan.steps if isinstance(s, Extern)]
    assert ran == [f"test::print{k}" for k in range(4)]
    assert all(s.outs == (None,) for s in plan.steps if isinstance(s, Extern))


def test_a_wait_reads_what_its_collective_was_given() -> None:
    """So a write to it comes after the wait, though nothing else reads it by then."""
    b = Builder()
    x = b.input(4)
    whole = b.extern((4,), x, op="_c10d_functional::all_gather_into_tensor", effectful=True)
    filled = b.whole(whole)
    b.ops.append(Extern((None,), WAIT, (filled,), mutates=(whole,), held=(x,), effectful=True))
    b.ops.append(Mutate(x, b.map("exp", x)))
    b.output(whole)
    plan = schedule(b.program(), CFG)
    ran = [k for k, s in enumerate(plan.steps) if isinstance(s, Extern)]
    assert ran[-1] < place(plan, Mutate)[0]


def test_a_size_read_at_run_time_comes_first() -> None:
    b = Builder()
    count, x = b.input(1, dtype=i64), b.input(8)
    n = symbol("u0", lo=0)
    b.symbols["u0"] = None
    b.ops.append(Item("u0", count))
    b.ops.append(Assert(n, "u0 must not be zero"))
    y = b.pointwise((n,), lambda o, i: o.masked(
        apply("lt", o.index(i), o.const(8, i64)), lambda: o.load(x, i), 0.0
    ))  # fmt: skip
    b.output(y)
    plan = schedule(b.program(), CFG)
    (item,), (guard,) = place(plan, Item), place(plan, Assert)
    launch = plan.steps.index(kernels(plan)[0])
    assert item < guard < launch
    assert [str(s) for s in kernels(plan)[0].sizes] == ["u0"]
    # Its size is not known when the call starts, so it cannot lie in the arena.
    assert y not in plan.memory.offsets


def test_what_is_behind_an_assertion_stays_there_when_it_is_fused() -> None:
    b = Builder()
    n = b.size("s0")
    x = b.input(n)
    b.output(b.map("exp", x))
    for least in (5, 6):
        b.ops.append(Assert(compare("le", least, n), f"at least {least}"))
    b.output(b.map("sin", x))
    plan = schedule(b.program(), CFG)
    assert len(kernels(plan)) == 1
    first, second = place(plan, Assert)
    assert [s.message for s in plan.steps if isinstance(s, Assert)] == ["at least 5", "at least 6"]
    assert first < second < plan.steps.index(kernels(plan)[0])


def test_an_alias_is_its_base() -> None:
    b = Builder()
    x = b.input(8)
    base = b.map("exp", x)
    view = b.buffer((2, 4), fixed=True)
    b.ops.append(Alias(view, base, 0))
    z = b.pointwise((2, 4), lambda o, i, j: o.neg(o.load(view, i, j)))
    b.output(z)
    program = b.program()
    assert memory_roots(program.ops) == {view: base}
    plan = schedule(program, CFG)
    assert len(kernels(plan)) == 2
    (alias,) = place(plan, Alias)
    freed = [k for k, names in enumerate(plan.frees) if base in names]
    assert freed == [len(plan.steps) - 1] and alias < freed[0]
    assert base not in plan.memory.offsets and view not in plan.memory.offsets


def test_old_values_are_read_before_an_update() -> None:
    b = Builder()
    x, y = b.input(8), b.input(8)
    b.ops.append(Mutate(x, new := b.map("exp", y)))
    program = b.program()
    old = b.map("neg", x)  # recorded before the update in the second program
    b.ops.insert(0, b.ops.pop())
    b.output(old)
    plan = schedule(b.program(), CFG)
    check(plan, b.program())
    assert len(program.ops) == 2 and new in plan.memory.in_place


def test_an_op_in_place_waits_for_readers_and_holds_up_later_ones() -> None:
    b = Builder()
    x = b.input(8)
    y = b.extern((8,), x, op="test::make")
    before = b.map("exp", y)
    b.ops.append(Extern((), "test::add_", (b.whole(y),), mutates=(y,), effectful=True))
    after = b.map("exp", y)
    b.output(before, after)
    program = b.program()
    plan = schedule(program, CFG)
    check(plan, program)
    need = preds(program, Bodies())
    assert 1 in need[2] and 2 in need[3]


def test_unused_results_vanish() -> None:
    b = Builder()
    x = b.input(4, 8)
    b.map("exp", x)
    b.reduce((4,), (8,), "welford", lambda o, i, r: o.load(x, i, r), (True, True, True))
    mean, m2, count = b.results()
    assert mean
    b.output(mean)
    (op,) = drop_dead(b.program(), Bodies()).ops
    assert getattr(op, "outs") == (mean, None, None) and m2 and count  # noqa: B009


def test_reads_before_an_update_are_not_moved_behind_it() -> None:
    """exp(x) has one reader, which comes after x was overwritten: it must not be inlined there."""
    b = Builder()
    x = b.input(8)
    y = b.extern((8,), x, op="test::make")
    e = b.map("exp", y)
    b.ops.append(Extern((), "test::add_", (b.whole(y),), mutates=(y,), effectful=True))
    z = b.pointwise((8,), lambda o, i: o.add(o.load(e, i), o.load(y, i)))
    b.output(z)
    program = b.program()
    plan = schedule(program, CFG)
    check(plan, program)
    assert len(kernels(plan)) == 2


def test_bodies_are_walked_once() -> None:
    bodies = Bodies()
    b = Builder()
    x = b.input(8)
    load = node("load", (), Load(x, (0,)), b.buffers[x].dtype)
    assert bodies.of((load,)) is bodies.of((load,))
