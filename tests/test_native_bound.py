"""The native executor: Bound and its checks, parallel regions, threads, the profiler, leaks."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
import weakref

import pytest
import torch

from plait.errors import InputError
from plait.ir.dtypes import f32
from plait.ir.expr import symbol
from plait.runtime.load import Bound, Program, arena_stats
from plait.wrapper.instructions import (
    Arena,
    CallPython,
    OpaqueInput,
    Place,
    Ref,
    Return,
    SizeOf,
    Symbol,
    SymbolInput,
    View,
)
from tests.native_tools import (
    add_program,
    alloc,
    build,
    extern,
    launch,
    library,
    program,
    ret,
    tensor,
)


def bound(shape, strides, names=("x",), dtype="f32", weight=None):
    s0 = symbol("s0")
    p = program(
        (tensor("x", s0, 4), tensor("w", s0, 4)),
        Symbol("s0", SizeOf("x", "size", 0)),
        alloc("o", s0, 4),
        launch("k_add", "x", "w", "o", n=4 * s0),
        ret("o"),
    )
    second = (
        ("bound", "w", weight)
        if weight is not None
        else ("tensor", 1, "f32", shape, strides, "cpu")
    )
    return Bound(build(p), [("tensor", 0, dtype, shape, strides, "cpu"), second], names, True)


def test_bound_checks_its_inputs():
    f = bound((("s0", 2, 16), 4), "contiguous", names=("x", "y"))
    x = torch.randn(3, 4)
    assert torch.equal(f(x, x), x + x)
    assert torch.equal(f(y=x, x=x), x + x)
    for args, kwargs, text in [
        ((x, x.double()), {}, "input 'y': expected dtype float32, got float64"),
        ((x, 3), {}, "input 'y': expected a tensor, got int"),
        ((x, x[0]), {}, "input 'y': expected 2 dimensions, got 1"),
        (
            (x, torch.randn(4, 4)),
            {},
            r"input 'y': expected size 3 \(s0, as in an earlier input or dimension\) "
            r"in dimension 0, got 4",
        ),
        ((torch.randn(3, 5), x), {}, "input 'x': expected size 4 in dimension 1, got 5"),
        (
            (torch.randn(1, 4), x),
            {},
            r"input 'x': expected size at least 2 \(s0\) in dimension 0, got 1",
        ),
        ((torch.randn(17, 4), x), {}, r"input 'x': expected size at most 16 \(s0\)"),
        (
            (torch.randn(4, 3).t(), x),
            {},
            r"input 'x': expected a contiguous tensor, got strides \[1, 3\]",
        ),
        (
            (x.to("meta"), x),
            {},
            "input 'x': expected a plain tensor on device cpu, got one on meta",
        ),
        ((x,), {}, "input 'y' is missing"),
        ((x, x, x), {}, "expected 2 inputs, got 3"),
        ((x,), {"z": x}, "there is no input 'z'"),
        ((x, x), {"x": x}, "input 'x' was given twice"),
    ]:
        with pytest.raises(InputError, match=text):
            f(*args, **kwargs)
    assert torch.equal(f(x, x), x + x)


def test_bound_listed_strides():
    f = bound((3, 4), (4, 1), names=("x", "y"))
    x = torch.randn(3, 4)
    assert torch.equal(f(x, x), x + x)
    with pytest.raises(InputError, match=r"input 'y': expected stride 4 in dimension 0, got 5"):
        f(x, torch.randn(3, 5)[:, :4])


def test_bound_parameters_follow_their_data():
    w = torch.nn.Parameter(torch.randn(3, 4))
    f = bound((3, 4), (4, 1), weight=w)
    x = torch.randn(3, 4)
    assert torch.equal(f(x), x + w.detach())
    w.data = torch.randn(3, 4)
    assert torch.equal(f(x), x + w.detach())


def test_bound_symbols_ints_and_objects():
    s0, k = symbol("s0"), symbol("k")
    p = program(
        (SymbolInput("s0"), tensor("x", s0), SymbolInput("k"), OpaqueInput("o"), OpaqueInput("n")),
        Return((s0 * k, Ref("o"), Ref("n"))),
    )
    inputs = [
        ("symbol", "s0"),
        ("tensor", 0, "f32", ("s0",), None, "cpu"),
        ("int", 1, ("k", -5, 9)),
        ("object", 2),
        ("none",),
    ]
    f = Bound(build(p), inputs, ["x", "k", "o"], False)
    marker = object()
    assert f(torch.randn(6), 7, marker) == (42, marker, None)
    for wrong, text in [
        (7.0, "an int, got float"),
        (True, "an int, got bool"),
        (10, r"at most 9 \(k\), got 10"),
    ]:
        with pytest.raises(InputError, match=f"input 'k': expected {text}"):
            f(torch.randn(6), wrong, marker)


def heavy(n=4096, work_ns=10**6):
    p = program(
        (tensor("x", n),),
        Arena("m", 8 * n),
        Place("a", "m", 0, f32, (n,), (1,)),
        Place("b", "m", 4 * n, f32, (n,), (1,)),
        alloc("o", n),
        alloc("t"),
        launch("k_inc", "x", "a", n=n, work_ns=work_ns),
        launch("k_reverse", "a", "b", n=n, work_ns=work_ns),
        launch("k_sum", "b", "t", n=n, work_ns=1),
        launch("k_reverse", "b", "a", n=n, work_ns=work_ns),
        launch("k_twice", "a", "o", n=n, work_ns=work_ns),
        ret("o", "t"),
    )
    return build(p)


def test_regions_run_in_parallel_with_barriers():
    prog = heavy()
    x = torch.randn(4096)
    for _ in range(300):
        o, t = prog(x)
        assert torch.equal(o, (x + 1) * 2)
    torch.testing.assert_close(t, (x + 1).sum(), rtol=1e-4, atol=1e-3)
    assert prog.stats()["regions"] == 1 and prog.stats()["launches"] == 5


def test_set_num_threads_is_respected():
    p = build(program((), alloc("o"), launch("k_threads", "o", work_ns=10**7), ret("o")))
    before = torch.get_num_threads()
    try:
        for n in (1, 2, 3, 1):
            torch.set_num_threads(n)
            assert p()[0].item() == n
    finally:
        torch.set_num_threads(before)


def test_failure_in_a_parallel_region():
    prog = build(program((), launch("k_fails", n=8, work_ns=10**7), Return(())))
    for _ in range(10):
        with pytest.raises(IndexError, match="index out of range in self"):
            prog()


def test_two_threads_in_one_program():
    progs = [heavy(), heavy(n=64, work_ns=10)]
    failures: list[str] = []

    def work(seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        for i in range(150):
            for prog, n in zip(progs, (4096, 64), strict=True):
                x = torch.randn(n, generator=g)
                if not torch.equal(prog(x)[0], (x + 1) * 2):
                    failures.append(f"thread {seed}, call {i}")

    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert not failures and not any(t.is_alive() for t in threads)
    assert arena_stats()["in_use_bytes"] == 0


def longest_pause(prog: Program) -> float:
    """Seconds that another Python thread stood still, at most, while the program ran twice."""
    times: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            times.append(time.perf_counter())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    time.sleep(0.02)
    for _ in range(2):
        prog()
    done.set()
    ticker.join(timeout=60)
    return max(b - a for a, b in itertools.pairwise(times))


def test_the_gil_is_released_for_long_work_only():
    long = build(program((), launch("k_sleep", n=500_000_000, work_ns=500_000_000), Return(())))
    assert longest_pause(long) < 0.4
    # Told to be short, it is believed: the lock stays. The second call would know better, so there
    # is none.
    short = build(program((), launch("k_sleep", n=500_000_000, work_ns=10), Return(())))
    assert longest_pause(short) > 0.4


def test_operators_of_python_take_the_gil_back():
    library = torch.library.Library("plait_test_gil", "DEF")
    library.define("slow(Tensor x) -> Tensor")

    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return x + len([x, x])

    library.impl("slow", slow, "CPU")
    p = program((tensor("x", 4),), extern("plait_test_gil::slow", Ref("x"), outs=("o",)), ret("o"))
    prog, x = build(p), torch.randn(4)
    for _ in range(5):  # from the second call on it runs without the lock
        assert torch.equal(prog(x)[0], x + 2)


def test_inference_mode():
    mm = extern("aten::mm", Ref("x"), Ref("x"), outs=("m",))
    inc = launch("k_inc", "x", "o", n=16)
    view = View("v", "x", f32, (16,), (1,), 0)
    p = program((tensor("x", 4, 4),), alloc("o", 4, 4), inc, mm, view, ret("o", "m", "v"))
    prog, x = build(p), torch.randn(4, 4)
    with torch.inference_mode():
        assert all(t.is_inference() for t in prog(x)[:2])
    assert not any(t.is_inference() for t in prog(x))


def test_kernels_show_in_the_profiler():
    prog = add_program()
    x = torch.randn(8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        prog(x, x)
    assert "k_add" in {e.name for e in prof.events()}


def test_no_leaks():
    import resource

    prog = heavy(n=64, work_ns=10)
    mm = build(
        program(
            (tensor("x", 8, 8),),
            View("t", "x", f32, (8, 8), (1, 8), 0),
            extern("aten::mm", Ref("x"), Ref("t"), outs=("o",)),
            ret("o"),
        )
    )
    x, y = torch.randn(64), torch.randn(8, 8)

    def calls(n):
        for _ in range(n):
            prog(x)
            prog.boxed([x])
            mm(y)
            with pytest.raises(TypeError):
                mm(x.double())

    calls(200)
    gc.collect()
    counts = [sys.getrefcount(o) for o in (x, y, prog, mm)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls(10_000)
    assert [sys.getrefcount(o) for o in (x, y, prog, mm)] == counts
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB


def test_programs_in_reference_cycles_are_collected():
    class Holder:
        def hook(self):
            return None

    holder = Holder()
    p = program((), CallPython(0, "hook", (), (), ()), Return(()), n_callables=1)
    holder.prog = build(p, callables=[holder.hook])
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


def test_libraries_outlive_their_loader():
    prog = build(
        program((tensor("x", 8),), alloc("o", 8), launch("k_inc", "x", "o", n=8), ret("o"))
    )
    gc.collect()
    assert library().endswith(".so")
    assert torch.equal(prog(torch.zeros(8))[0], torch.ones(8))
