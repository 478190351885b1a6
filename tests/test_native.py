"""The native executor on hand-written programs: memory, aliasing, arenas, sizes, mutation, wrong
inputs."""

from __future__ import annotations

import copy
import math
import weakref

import pytest
import torch

from plait.ir.dtypes import b1, f32, f64, i64
from plait.ir.expr import compare, smax, smin, symbol
from plait.runtime.load import arena_stats, trim_arenas
from plait.wrapper.instructions import (
    Arena,
    AssertAlignment,
    AssertScalar,
    AssertSizeStride,
    BumpVersion,
    CallExtern,
    CallPython,
    CheckFinite,
    Constant,
    Copy,
    Fill,
    Free,
    ItemOf,
    Literal,
    Note,
    Place,
    Ref,
    Return,
    Reuse,
    SizeOf,
    Symbol,
    SymbolInput,
    TensorInput,
    View,
)
from tests.native_tools import add_program, alloc, build, launch, program, ret, tensor


def test_launch_reads_inputs_and_writes_an_output():
    x, y = torch.randn(8), torch.randn(8)
    out = add_program()(x, y)
    assert isinstance(out, tuple)
    assert torch.equal(out[0], x + y)


def test_storage_offset_of_inputs_is_honoured():
    x = torch.randn(20)
    assert torch.equal(add_program()(x[3:11], x[12:])[0], x[3:11] + x[12:])


def test_boxed_clears_the_list():
    boxed = add_program().boxed
    x, y = torch.randn(8), torch.randn(8)
    args = [x, y]
    assert boxed._boxed_call is True
    assert torch.equal(boxed(args)[0], x + y)
    assert args == []


def test_boxed_lets_inputs_die_after_their_last_use():
    alive: list[bool] = []
    p = program(
        (tensor("x", 8), tensor("y", 8)),
        alloc("o", 8),
        launch("k_add", "x", "y", "o", n=8),
        CallPython(0, "probe", (), (), ()),
        ret("o"),
        n_callables=1,
    )
    x, y = torch.randn(8), torch.randn(8)
    storage = weakref.ref(x.untyped_storage())
    prog = build(p, callables=[lambda: alive.append(storage() is not None)])
    boxed, args = prog.boxed, [x, y]
    pointer = weakref.ref(x)
    prog_args = args
    del x
    boxed(prog_args)
    assert pointer() is None
    assert alive == [False]


def test_none_and_ints_and_same_tensor_twice():
    s0 = symbol("s0")
    p = program(
        (SymbolInput("s0"), tensor("x", s0)),
        Return((Literal("none"), 2 * s0 - 1, Ref("x"), Ref("x"), 7)),
    )
    x = torch.randn(5)
    out = build(p)(5, x)
    assert out[0] is None and out[1] == 9 and out[4] == 7
    assert out[2] is x and out[3] is x


def test_outputs_share_storage_where_the_program_says_so():
    p = program(
        (tensor("x", 8),),
        alloc("o", 8),
        launch("k_inc", "x", "o", n=8),
        View("v", "o", f32, (2, 4), (4, 1), 0),
        View("w", "o", f32, (4,), (1,), 4),
        ret("v", "w", "o"),
    )
    x = torch.randn(8)
    v, w, o = build(p)(x)
    assert v.data_ptr() == o.data_ptr() and w.data_ptr() == o.data_ptr() + 16
    assert v.untyped_storage().data_ptr() == o.untyped_storage().data_ptr()
    assert torch.equal(v, (x + 1).view(2, 4)) and torch.equal(w, (x + 1)[4:])
    before = v._version
    o.add_(1)
    assert v._version == before + 1
    again = build(p)(x)
    assert again[0].data_ptr() != v.data_ptr()


def test_view_of_an_input():
    p = program(
        (tensor("x", 2, 4),),
        View("t", "x", f32, (4, 2), (1, 4), 0),
        View("r", "t", f32, (4,), (1,), 4),
        ret("t", "r"),
    )
    x = torch.randn(2, 4)
    t, r = build(p)(x)
    assert torch.equal(t, x.t()) and torch.equal(r, x[1])
    assert t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_absolute_view_counts_from_the_storage():
    p = program(
        (TensorInput("x", f32, (4,), (1,)),),
        View("v", "x", f32, (4,), (1,), 2, relative=False),
        alloc("o", 4),
        launch("k_inc", "v", "o", n=4),
        ret("o"),
    )
    x = torch.randn(10)
    assert torch.equal(build(p)(x[5:9])[0], x[2:6] + 1)


def test_reinterpreting_view():
    p = program((tensor("x", 4),), View("v", "x", i64, (2,), (1,), 0), ret("v"))
    x = torch.randn(4)
    assert torch.equal(build(p)(x)[0], x.view(torch.int64))


def test_reuse_takes_over_memory():
    p = program(
        (tensor("x", 8),),
        alloc("a", 8),
        launch("k_inc", "x", "a", n=8),
        Reuse("b", "a", f32, (2, 4), (4, 1)),
        launch("k_twice", "a", "b", n=8),
        ret("b"),
    )
    x = torch.randn(8)
    out = build(p)(x)[0]
    assert torch.equal(out, ((x + 1) * 2).view(2, 4))


def test_constants_and_mutation_of_them_is_seen():
    weight = torch.randn(8)
    p = program(
        (tensor("x", 8),),
        Constant("w", 0),
        alloc("o", 8),
        launch("k_add", "x", "w", "o", n=8),
        ret("o"),
        n_constants=1,
    )
    prog = build(p, constants=[weight])
    x = torch.randn(8)
    assert torch.equal(prog(x)[0], x + weight)
    weight.add_(1)
    assert torch.equal(prog(x)[0], x + weight)


def test_empty_tensors():
    s0 = symbol("s0")
    p = program(
        (tensor("x", s0, 4),),
        Symbol("s0", SizeOf("x", "size", 0)),
        alloc("o", s0, 4),
        launch("k_inc", "x", "o", n=4 * s0),
        View("v", "o", f32, (4, s0), (1, 4), 0),
        ret("o", "v"),
    )
    o, v = build(p)(torch.randn(0, 4))
    assert o.shape == (0, 4) and v.shape == (4, 0)


def test_math_table_reaches_the_library():
    p = program((), alloc("o"), launch("k_has_math", "o"), ret("o"))
    assert build(p)()[0].item() == 1.0


def arena_program(n=1024):
    return program(
        (tensor("x", n),),
        Arena("m", 8 * n),
        Place("a", "m", 0, f32, (n,), (1,)),
        launch("k_inc", "x", "a", n=n),
        Place("b", "m", 4 * n, f32, (n,), (1,)),
        launch("k_twice", "a", "b", n=n),
        Free("a"),
        alloc("o", n),
        launch("k_inc", "b", "o", n=n),
        ret("o"),
    )


def test_arena_is_checked_out_and_returned():
    prog = build(arena_program())
    x = torch.randn(1024)
    assert torch.equal(prog(x)[0], (x + 1) * 2 + 1)
    stats = arena_stats()
    assert stats["in_use_bytes"] == 0 and stats["held_bytes"] >= 8192
    trim_arenas()
    assert arena_stats()["held_bytes"] == 0
    assert torch.equal(prog(x)[0], (x + 1) * 2 + 1)


def test_arena_goes_back_after_an_error():
    p = program(
        (tensor("x", 4),),
        Arena("m", 64),
        CallPython(0, "boom", (), (), ()),
        ret("x"),
        n_callables=1,
    )
    prog = build(p, callables=[lambda: 1 / 0])
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            prog(torch.randn(4))
    assert arena_stats()["in_use_bytes"] == 0


def test_dynamic_arena():
    s0 = symbol("s0")
    p = program(
        (tensor("x", s0),),
        Symbol("s0", SizeOf("x", "size", 0)),
        Arena("m", 8 * s0),
        Place("a", "m", 0, f32, (s0,), (1,)),
        Place("b", "m", 4 * s0, f32, (s0,), (1,)),
        launch("k_inc", "x", "a", n=s0),
        launch("k_twice", "a", "b", n=s0),
        alloc("o", s0),
        CallExtern("aten::neg.out", (Ref("b"),), (("out", Ref("o")),), (), ("o",), may_keep=False),
        ret("o"),
    )
    prog = build(p)
    for n in (16, 3, 1000, 16, 0, 70_000):
        x = torch.randn(n)
        assert torch.equal(prog(x)[0], -(x + 1) * 2)


def test_extern_into_places_keeps_headers_apart_from_calls():
    """Cached headers must follow the arena block, which differs when another program holds the
    first one."""
    n = 16
    p = program(
        (tensor("x", n, n), tensor("y", n, n)),
        Arena("m", 8 * n * n),
        Place("a", "m", 0, f32, (n, n), (n, 1)),
        CallExtern(
            "aten::mm.out", (Ref("x"), Ref("y")), (("out", Ref("a")),), (), ("a",), may_keep=False
        ),
        Place("b", "m", 4 * n * n, f32, (n, n), (n, 1)),
        CallExtern("aten::sin.out", (Ref("a"),), (("out", Ref("b")),), (), ("b",), may_keep=False),
        CallPython(0, "hook", (), (), ()),
        alloc("o", n * n),
        launch("k_inc", "b", "o", n=n * n),
        ret("o"),
        n_callables=1,
    )
    prog = build(p, callables=[lambda: hook and hook.pop()()])
    x, y = torch.randn(n, n), torch.randn(n, n)
    hook: list = []
    want = (torch.sin(x @ y) + 1).flatten()
    torch.testing.assert_close(prog(x, y)[0], want)
    inner: list[torch.Tensor] = []
    hook.append(
        lambda: inner.append(prog(y, x)[0])
    )  # the program calls itself: two frames, two blocks
    torch.testing.assert_close(prog(x, y)[0], want)
    torch.testing.assert_close(inner[0], (torch.sin(y @ x) + 1).flatten())
    for _ in range(3):
        torch.testing.assert_close(prog(x, y)[0], want)


def test_size_expressions():
    a, b = symbol("a", -100), symbol("b", 1)
    exprs = [
        a + b,
        a - 3 * b,
        a * b * b,
        a // b,
        a % b,
        smin(a, b),
        smax(a, 2 * b),
        compare("lt", a, b),
        compare("eq", a, b),
        2 * a - 1,
    ]
    prog = build(program((SymbolInput("a"), SymbolInput("b")), Return(tuple(exprs))))
    for x in (-7, -1, 0, 5, 12):
        for y in (1, 3, 5):
            want = (
                x + y,
                x - 3 * y,
                x * y * y,
                x // y,
                x % y,
                min(x, y),
                max(x, 2 * y),
                int(x < y),
                int(x == y),
                2 * x - 1,
            )
            assert prog(x, y) == want


def test_symbols_from_tensors():
    names = ("size", "stride", "offset", "item", "twice")
    body = [
        Symbol("size", SizeOf("x", "size", 1)),
        Symbol("stride", SizeOf("x", "stride", 0)),
        Symbol("offset", SizeOf("x", "offset", 0)),
        Symbol("item", ItemOf("n")),
        Symbol("twice", 2 * symbol("item")),
    ]
    p = program(
        (tensor("x", 4, 4), tensor("n", dtype=i64)), *body, Return(tuple(symbol(n) for n in names))
    )
    x = torch.randn(100).as_strided((3, 5), (7, 1), 2)
    assert build(p)(x, torch.tensor(21)) == (5, 7, 2, 21, 42)
    q = program((tensor("n", dtype=b1),), Symbol("item", ItemOf("n")), Return((symbol("item"),)))
    assert build(q)(torch.tensor(True)) == (1,)


def test_overflow_is_an_error():
    a = symbol("a")
    prog = build(program((SymbolInput("a"),), Return((a * a * a,))))
    assert prog(1000) == (10**9,)
    with pytest.raises(RuntimeError, match="overflows"):
        prog(2**40)
    assert prog(3) == (27,)


def test_asserts():
    s0 = symbol("s0")
    p = program(
        (tensor("x", s0),),
        Symbol("s0", SizeOf("x", "size", 0)),
        AssertScalar(compare("le", s0, 4), "s0 is at most four"),
        Return(()),
    )
    prog = build(p)
    assert prog(torch.randn(4)) == ()
    with pytest.raises(RuntimeError, match="s0 is at most four"):
        prog(torch.randn(5))
    q = build(
        program(
            (tensor("x", 2, 3),),
            AssertSizeStride("x", f32, (2, 3), (3, 1)),
            AssertAlignment("x", 16),
            CheckFinite("x", "aten.log"),
            Return(()),
        )
    )
    assert q(torch.zeros(2, 3)) == ()
    with pytest.raises(
        RuntimeError, match=r"'x' has sizes \[3, 2\] and strides \[2, 1\], expected \[2, 3\]"
    ):
        q(torch.zeros(3, 2))
    with pytest.raises(RuntimeError, match="not aligned to 16 bytes"):
        q(torch.zeros(7)[1:].view(2, 3))
    with pytest.raises(RuntimeError, match=r"NaN or an infinity, computed by aten\.log"):
        q(torch.full((2, 3), math.inf))


def test_copy_and_bump():
    p = program(
        (tensor("x", 8), tensor("y", 8)),
        alloc("o", 8),
        launch("k_add", "x", "y", "o", n=8),
        Copy("x", "o"),
        BumpVersion("y"),
        Return(()),
    )
    x, y = torch.randn(8), torch.randn(8)
    want, versions = x + y, (x._version, y._version)
    build(p)(x, y)
    assert torch.equal(x, want)
    assert (x._version, y._version) == (versions[0] + 1, versions[1] + 1)


def test_copy_converts_and_broadcasts():
    p = program(
        (tensor("x", 3, 4), tensor("y", 4, dtype=f64)), Copy("x", "y", bump=False), Return(())
    )
    x, y = torch.zeros(3, 4), torch.randn(4, dtype=torch.float64)
    build(p)(x, y)
    assert torch.equal(x, y.float().expand(3, 4)) and x._version == 0


def test_fill():
    for value, want in (
        (3, 3.0),
        (Literal("float", (0.25).hex()), 0.25),
        (Literal("float", "inf"), math.inf),
    ):
        p = program((), alloc("o", 3), Fill("o", value), Note("model.py:3"), ret("o"))
        assert torch.equal(build(p)()[0], torch.full((3,), want))


def test_wrong_inputs_are_errors():
    prog = add_program()
    x = torch.randn(8)
    for args, text in [
        ((x,), "takes 2 inputs, got 1"),
        ((x, 3), "input 'y': expected a tensor, got int"),
        ((x, x.double()), "input 'y': expected dtype float32, got float64"),
        ((x, x.to("meta")), "on device cpu, got one on meta"),
    ]:
        with pytest.raises(TypeError, match=text):
            prog(*args)
    with pytest.raises(TypeError):
        prog.boxed((x, x))
    assert torch.equal(prog(x, x)[0], x + x)


def test_negative_view_inputs_are_resolved():
    x = torch.randn(8, dtype=torch.complex64)
    neg = x.conj().imag
    assert neg.is_neg()
    assert torch.equal(add_program()(neg.clone().contiguous(), torch.zeros(8))[0], -x.imag)
    flipped = torch._neg_view(torch.ones(8))
    assert torch.equal(add_program()(flipped, torch.zeros(8))[0], -torch.ones(8))


def test_failed_kernel_check_is_an_index_error():
    p = program((), launch("k_fails", n=8), Return(()))
    with pytest.raises(IndexError, match=r"index out of range in self \(in kernel k_fails\)"):
        build(p)()


def test_outputs_can_be_resized_shared_and_pickled():
    prog, x = add_program(), torch.randn(8)
    (out,) = prog(x, x)
    assert out.data_ptr() % 64 == 0
    out.resize_(100_000)
    assert torch.equal(out[:8], x + x)
    (shared,) = prog(x, x)
    assert torch.equal(shared.share_memory_(), x + x)
    assert torch.equal(copy.deepcopy(prog(x, x)[0]), x + x)
    with torch.profiler.profile(profile_memory=True) as prof:
        kept = prog(x, x)
    assert sum(e.cpu_memory_usage for e in prof.events()) == kept[0].nbytes
