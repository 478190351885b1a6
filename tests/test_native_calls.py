"""The native executor: operators of PyTorch and Python callables, their operands, results and
errors."""

from __future__ import annotations

import pytest
import torch

from plait.ir.dtypes import f32, f64, i64, opaque
from plait.ir.expr import symbol
from plait.runtime.load import LoadError, load
from plait.wrapper.instructions import (
    Arena,
    CallExtern,
    CallPython,
    Constant,
    ListOf,
    Literal,
    OpaqueInput,
    Place,
    Ref,
    Return,
    SizeOf,
    Symbol,
    TensorInput,
    View,
)
from plait.wrapper.native import encode
from tests.native_tools import alloc, build, extern, launch, program, ret, tensor


def test_extern_arguments_of_every_kind():
    x = torch.randn(2, 6)
    cases = [
        (
            extern(
                "aten::sum.dim_IntList",
                Ref("x"),
                ListOf((1,)),
                Literal("bool", "True"),
                outs=("o",),
            ),
            x.sum(1, True),
        ),
        (
            extern(
                "aten::clamp",
                Ref("x"),
                Literal("float", (-0.5).hex()),
                Literal("none"),
                outs=("o",),
            ),
            x.clamp(-0.5),
        ),
        (extern("aten::mul.Tensor", Ref("x"), 3, outs=("o",)), x * 3),
        (
            extern(
                "aten::add.Tensor",
                Ref("x"),
                Ref("x"),
                outs=("o",),
                alpha=Literal("float", "0x1p-1"),
            ),
            x * 1.5,
        ),
        (
            extern("aten::_to_copy", Ref("x"), outs=("o",), dtype=Literal("dtype", "f64")),
            x.double(),
        ),
        (
            extern(
                "aten::full",
                ListOf((2, 3)),
                Literal("float", "0x1p+1"),
                outs=("o",),
                dtype=Literal("dtype", "i64"),
                device=Literal("device", "cpu"),
            ),
            torch.full((2, 3), 2),
        ),
        (extern("aten::cat", ListOf((Ref("x"), Ref("x"))), 1, outs=("o",)), torch.cat([x, x], 1)),
        (
            extern(
                "aten::clone",
                Ref("x"),
                outs=("o",),
                memory_format=Literal("memory_format", "contiguous_format"),
            ),
            x,
        ),
        (
            extern("aten::gelu", Ref("x"), outs=("o",), approximate=Literal("str", "tanh")),
            torch.nn.functional.gelu(x, approximate="tanh"),
        ),
    ]
    for call, want in cases:
        got = build(program((tensor("x", 2, 6),), call, ret("o")))(x)[0]
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)


def test_none_for_a_tensor_is_an_undefined_tensor():
    with torch.library._scoped_library("plait_none", "DEF") as library:
        library.define("plus_one_without(Tensor x, Tensor y) -> Tensor")
        library.impl("plus_one_without", lambda x, y: x + 1 if y is None else x, "CPU")
        x = torch.randn(3)
        call = extern("plait_none::plus_one_without", Ref("x"), Literal("none"), outs=("o",))
        torch.testing.assert_close(build(program((tensor("x", 3),), call, ret("o")))(x)[0], x + 1)


def test_extern_lists_and_several_results():
    x = torch.randn(4, 6)
    split = extern("aten::split.Tensor", Ref("x"), 2, 1, outs=("a", None, "b"))
    a, b = build(program((tensor("x", 4, 6),), split, ret("a", "b")))(x)
    assert torch.equal(a, x[:, :2]) and torch.equal(b, x[:, 4:])
    topk = extern("aten::topk", Ref("x"), 2, outs=("v", "i"))
    v, i = build(program((tensor("x", 4, 6),), topk, ret("v", "i")))(x)
    assert torch.equal(v, x.topk(2)[0]) and torch.equal(i, x.topk(2)[1])
    index = extern("aten::index.Tensor", Ref("x"), ListOf((Literal("none"), Ref("i"))), outs=("o",))
    idx = torch.tensor([5, 0])
    got = build(program((tensor("x", 4, 6), tensor("i", 2, dtype=i64)), index, ret("o")))(x, idx)
    assert torch.equal(got[0], x[:, idx])


def test_extern_dynamic_sizes_and_int_result():
    s0 = symbol("s0")
    p = program(
        (tensor("x", s0, 4),),
        Symbol("s0", SizeOf("x", "size", 0)),
        extern("aten::expand", Ref("x"), ListOf((3, s0, 4)), outs=("e",)),
        extern("aten::sym_numel", Ref("e"), outs=("n",)),
        Return((Ref("e"), symbol("n") + 1)),
    )
    x = torch.randn(5, 4)
    e, n = build(p)(x)
    assert torch.equal(e, x.expand(3, 5, 4)) and n == 61


@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
@pytest.mark.parametrize(
    "m, k, n",
    [(4, 5, 6), (1, 5, 6), (4, 1, 6), (4, 5, 1), (1, 1, 1), (64, 32, 48), (0, 5, 6), (4, 0, 6)],
)
def test_matmul_roads(dtype, transposed, m, k, n):
    def stored(name, rows, cols):
        return (rows, cols), ((1, rows) if name in transposed else (cols, 1))

    torch_dtype = torch.float32 if dtype is f32 else torch.float64
    a = (
        torch.randn(k, m, dtype=torch_dtype).t()
        if "a" in transposed
        else torch.randn(m, k, dtype=torch_dtype)
    )
    b = (
        torch.randn(n, k, dtype=torch_dtype).t()
        if "b" in transposed
        else torch.randn(k, n, dtype=torch_dtype)
    )
    inputs = (
        TensorInput("a", dtype, *stored("a", m, k)),
        TensorInput("b", dtype, *stored("b", k, n)),
    )
    mm = CallExtern("aten::mm.out", (Ref("a"), Ref("b")), (("out", Ref("o")),), (), ("o",))
    torch.testing.assert_close(
        build(program(inputs, alloc("o", m, n, dtype=dtype), mm, ret("o")))(a, b)[0], a @ b
    )
    for shape in ((n,), (m, n), (1, n), (m, 1), (1,)):
        bias = torch.randn(*shape, dtype=torch_dtype)
        addmm = CallExtern(
            "aten::addmm.out",
            (Ref("c"), Ref("a"), Ref("b")),
            (("alpha", 2), ("out", Ref("o"))),
            (),
            ("o",),
        )
        p = program(
            (*inputs, tensor("c", *shape, dtype=dtype)),
            alloc("o", m, n, dtype=dtype),
            addmm,
            ret("o"),
        )
        torch.testing.assert_close(build(p)(a, b, bias)[0], torch.addmm(bias, a, b, alpha=2))


def test_matmul_that_makes_its_result():
    s0 = symbol("s0")
    weight, bias = torch.randn(6, 4), torch.randn(6)
    for op, args in (
        ("aten::mm", (Ref("x"), Ref("t"))),
        ("aten::addmm", (Ref("b"), Ref("x"), Ref("t"))),
    ):
        p = program(
            (tensor("x", s0, 4),),
            Symbol("s0", SizeOf("x", "size", 0)),
            Constant("w", 0),
            Constant("b", 1),
            View("t", "w", f32, (4, 6), (1, 4), 0),
            extern(op, *args, outs=("o",)),
            alloc("r", s0, 6),
            launch("k_inc", "o", "r", n=6 * s0),
            ret("o", "r"),
            n_constants=2,
        )
        prog = build(p, constants=[weight, bias])
        for n in (3, 0, 1, 200):
            x = torch.randn(n, 4)
            want = x @ weight.t() + (bias if op == "aten::addmm" else 0)
            o, r = prog(x)
            torch.testing.assert_close(o, want)
            torch.testing.assert_close(r, want + 1)


def test_views_of_element_types_that_plait_does_not_know():
    p = program(
        (tensor("x", 8, dtype=opaque),), View("v", "x", opaque, (2, 4), (4, 1), 0), ret("v")
    )
    x = torch.randn(8).to(torch.float8_e5m2)
    v = build(p)(x)[0]
    assert v.dtype == torch.float8_e5m2 and torch.equal(
        v.view(torch.uint8), x.view(torch.uint8).view(2, 4)
    )


def test_matmul_of_views_in_an_arena_with_dynamic_rows():
    s0 = symbol("s0")
    p = program(
        (tensor("x", s0, 4, 4), tensor("w", 4, 4)),
        Symbol("s0", SizeOf("x", "size", 0)),
        Arena("m", 64 * s0),
        Place("h", "m", 0, f32, (4 * s0, 4), (4, 1)),
        View("v", "x", f32, (4 * s0, 4), (4, 1), 0),
        View("wt", "w", f32, (4, 4), (1, 4), 0),
        CallExtern(
            "aten::mm.out", (Ref("v"), Ref("wt")), (("out", Ref("h")),), (), ("h",), may_keep=False
        ),
        View("h3", "h", f32, (s0, 4, 4), (16, 4, 1), 0),
        View("x3", "x", f32, (s0, 4, 4), (16, 1, 4), 0),
        alloc("o", s0, 4, 4),
        CallExtern(
            "aten::bmm.out",
            (Ref("h3"), Ref("x3")),
            (("out", Ref("o")),),
            (),
            ("o",),
            may_keep=False,
        ),
        ret("o"),
    )
    prog = build(p)
    w = torch.randn(4, 4)
    for n in (3, 1, 8, 3):
        x = torch.randn(n, 4, 4)
        torch.testing.assert_close(prog(x, w)[0], (x @ w.t()) @ x.transpose(1, 2))


def test_extern_error_names_the_operator_and_leaves_the_program_usable():
    s0, s1 = symbol("s0"), symbol("s1")
    p = program(
        (tensor("x", s0, 4), tensor("y", s1, 4)),
        Symbol("s0", SizeOf("x", "size", 0)),
        Symbol("s1", SizeOf("y", "size", 0)),
        extern("aten::mm", Ref("x"), Ref("y"), outs=("o",)),
        ret("o"),
    )
    prog = build(p)
    with pytest.raises(RuntimeError, match=r"operator aten::mm of program test"):
        prog(torch.randn(2, 4), torch.randn(3, 4))
    x, y = torch.randn(2, 4), torch.randn(4, 4)
    torch.testing.assert_close(prog(x, y)[0], x @ y)


def test_missing_operator_kernel_and_argument():
    with pytest.raises(LoadError, match="no operator aten::nothing_such"):
        build(
            program(
                (tensor("x", 4),), extern("aten::nothing_such", Ref("x"), outs=("o",)), ret("o")
            )
        )
    with pytest.raises(LoadError, match="aten::mm misses argument 'mat2'"):
        build(program((tensor("x", 4),), extern("aten::mm", Ref("x"), outs=("o",)), ret("o")))
    p = program((tensor("x", 8),), alloc("o", 8), launch("k_inc", "x", "o", n=8), ret("o"))
    with pytest.raises(LoadError, match="kernel library"):
        load(encode(p), {})
    with pytest.raises(LoadError, match=r"no_such\.so"):
        load(encode(p), {"cpu": "/tmp/no_such.so"})
    with pytest.raises(LoadError, match="1 constants and got 0"):
        build(program((), Constant("w", 0), ret("w"), n_constants=1))


def test_extern_runs_without_autograd():
    p = program((tensor("x", 4, 4),), extern("aten::mm", Ref("x"), Ref("x"), outs=("o",)), ret("o"))
    x = torch.randn(4, 4, requires_grad=True)
    prog = build(p)
    assert not prog(x)[0].requires_grad
    assert torch.is_grad_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert prog(x)[0].dtype == torch.float32


def test_generator_and_opaque_inputs():
    g = torch.Generator().manual_seed(3)
    p = program(
        (OpaqueInput("g"),),
        extern("aten::rand.generator", ListOf((4,)), outs=("o",), generator=Ref("g")),
        Return((Ref("o"), Ref("g"))),
    )
    o, back = build(p)(g)
    assert torch.equal(o, torch.rand(4, generator=torch.Generator().manual_seed(3))) and back is g


def test_python_call():
    seen = []

    def hook(x, items, flag, *, scale, dtype):
        seen.append((items, flag, dtype))
        return x * scale, None, x.shape[0]

    call = CallPython(
        0,
        "hook",
        (Ref("x"), ListOf((1, Literal("none"), Literal("str", "s"))), Literal("bool", "True")),
        (("scale", Literal("float", "0x1p+1")), ("dtype", Literal("dtype", "bf16"))),
        ("o", None, "n"),
    )
    p = program(
        (tensor("x", 4),),
        call,
        alloc("r", 4),
        launch("k_inc", "o", "r", n=4),
        Return((Ref("r"), symbol("n"))),
        n_callables=1,
    )
    x = torch.randn(4)
    r, n = build(p, callables=[hook])(x)
    assert torch.equal(r, x * 2 + 1) and n == 4
    assert seen == [([1, None, "s"], True, torch.bfloat16)]


def test_python_call_sees_the_callers_dispatch_state():
    states = []

    def hook(x):
        states.append(torch.is_grad_enabled())
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (y * y).sum().backward()
        return y.grad

    p = program(
        (tensor("x", 4),), CallPython(0, "hook", (Ref("x"),), (), ("o",)), ret("o"), n_callables=1
    )
    x = torch.randn(4)
    assert torch.equal(build(p, callables=[hook])(x)[0], 2 * x)
    assert states == [False]


def test_python_calls_and_custom_operators_run_without_autocast():
    dtypes = []

    def hook(x):
        dtypes.append((x @ x).dtype)
        return x

    p = program(
        (tensor("x", 4, 4),),
        CallPython(0, "hook", (Ref("x"),), (), ("o",)),
        ret("o"),
        n_callables=1,
    )
    prog = build(p, callables=[hook])
    with torch.autocast("cpu", torch.bfloat16):
        prog(torch.randn(4, 4))
    assert dtypes == [torch.float32]


def test_seed_is_drawn_without_python():
    prog = build(
        program((), extern("plait::seed", Literal("device", "cpu"), outs=("s",)), ret("s"))
    )
    torch.manual_seed(7)
    want = [torch.randint(2**63 - 1, (), dtype=torch.int64) for _ in range(3)]
    torch.manual_seed(7)
    got = [prog()[0] for _ in range(3)]
    assert [g.item() for g in got] == [w.item() for w in want] and got[0].shape == ()
    assert prog.__name__ == "test" and prog.boxed.__name__ == "test"


def test_python_result_of_a_wrong_kind():
    p = program(
        (tensor("x", 4),), CallPython(0, "hook", (Ref("x"),), (), ("o",)), ret("o"), n_callables=1
    )
    with pytest.raises(RuntimeError, match="hook returned a str where a tensor was expected"):
        build(p, callables=[lambda x: "s"])(torch.randn(4))
