"""From plans to instructions: memory, views, symbols, calls and mutation, each on a small hand-made
plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from plait.errors import InternalError
from plait.ir.calls import Extern, ListArg, Scalar, TensorArg
from plait.ir.dtypes import DType, f32, i64
from plait.ir.expr import Size, compare, contiguous_strides, symbol
from plait.ir.loops import Alias, Assert, Buffer, Item, LoopProgram, Mutate
from plait.pipelines import run_passes
from plait.schedule.plan import Kernel, MemoryPlan, Plan, Step
from plait.wrapper.build import build
from plait.wrapper.text import line
from plait.wrapper.verify import verify

s0 = symbol("s0", lo=2)


def buf(name: str, shape: tuple[Size, ...] = (8,), dtype: DType = f32) -> Buffer:
    return Buffer(name, dtype, shape, contiguous_strides(shape))


def whole(b: Buffer) -> TensorArg:
    return TensorArg(b.name, b.shape, b.strides, 0)


def kernel(
    name: str,
    reads: Sequence[Buffer],
    writes: Sequence[Buffer],
    sizes: Sequence[Any] = (),
    **more: Any,
) -> Kernel:
    outs = tuple(b.name for b in writes)
    return Kernel(name, (), (), (), (*reads, *writes), outs, tuple(sizes), work_ns=7, **more)


def plan(
    inputs: Sequence[Any],
    steps: Sequence[Step],
    outputs: Sequence[Any],
    buffers: Sequence[Buffer],
    memory: MemoryPlan | None = None,
    constants: Sequence[str] = (),
    symbols: Mapping[str, Any] | None = None,
) -> Plan:
    table = {b.name: b for b in buffers}
    numbers = {name: k for k, name in enumerate(constants)}
    program = LoopProgram(tuple(inputs), table, numbers, (), tuple(outputs), symbols or {})
    return Plan(program, tuple(steps), ((),) * len(steps), table, memory or MemoryPlan())


def lines(p: Plan, **more: Any) -> list[str]:
    """The instructions as text, without kernel definitions; the program is legal, also after the
    passes."""
    program = build(p, "g", **more)
    verify(program)
    run_passes(program, check=True)
    return [text for i in program.body if not (text := line(i)).startswith("kernel(")]


X, Y, Z, W = buf("x"), buf("y"), buf("z"), buf("w")


def test_what_nobody_writes_is_there_from_the_start() -> None:
    empty = buf("e", (0, 4))
    p = plan(["x"], [kernel("k0", [X], [Y])], [whole(Y), whole(empty)], [X, Y, empty])
    assert build(p, "g").name == "g"
    assert lines(p)[0].startswith("e = alloc(") and lines(p)[-1] == "return (y, e)"


def test_outputs_are_allocated_and_intermediates_placed() -> None:
    p = plan(
        ["x"],
        [kernel("k0", [X], [Y]), kernel("k1", [Y], [Z])],
        [whole(Z)],
        [X, Y, Z],
        MemoryPlan(32, {"y": 0}),
    )
    assert lines(p) == [
        "arena = take_arena(32)",
        "y = place(arena, 0, f32[8] @ (1,))",
        "launch('k0', (x, y), (), (y,), 7)",
        "z = alloc(f32[8] @ (1,))",
        "launch('k1', (y, z), (), (z,), 7)",
        "return (z,)",
    ]


def test_equal_kernels_share_a_definition_and_sequential_ones_are_not_split() -> None:
    steps = [kernel("k", [X], [Y], sequential=True), kernel("k", [Y], [Z])]
    body = [line(i) for i in build(plan(["x"], steps, [whole(Z)], [X, Y, Z]), "g").body]
    assert body.count("kernel('k', 2, 0)") == 1
    assert "launch('k', (x, y), (), (y,), 7, parallel=False)" in body


@pytest.mark.parametrize(
    ("old", "made"),
    [
        ("alloc", "z = reuse(y, f32[8] @ (1,))"),
        ("place", "z = place(arena, 64, f32[8] @ (1,))"),
        ("input", "z = view(x, f32[8] @ (1,), 0)"),
        ("result", "z = view(y, f32[8] @ (1,), 0)"),
    ],
)
def test_a_buffer_takes_over_dying_memory(old: str, made: str) -> None:
    first: Step = kernel("k0", [X], [Y])
    offsets: dict[str, Size] = {}
    if old == "place":
        offsets = {"y": 64}
    if old == "result":
        first = Extern(("y",), "aten::neg", (whole(X),))
    dying = "x" if old == "input" else "y"
    source = X if old == "input" else Y
    p = plan(
        ["x"], [first, kernel("k1", [source], [Z]), kernel("k2", [Z], [W])], [whole(W)],
        [X, Y, Z, W], MemoryPlan(128, offsets, {"z": dying}),
    )  # fmt: skip
    assert made in lines(p)


def test_takeovers_in_a_row_keep_the_first_place() -> None:
    steps = [
        kernel("k0", [X], [Y]),
        kernel("k1", [Y], [Z]),
        kernel("k2", [Z], [W]),
        kernel("k3", [W], [buf("o")]),
    ]
    p = plan(
        ["x"],
        steps,
        [whole(buf("o"))],
        [X, Y, Z, W, buf("o")],
        MemoryPlan(96, {"y": 64}, {"z": "y", "w": "z"}),
    )
    assert [s for s in lines(p) if " = place" in s] == [
        f"{n} = place(arena, 64, f32[8] @ (1,))" for n in "yzw"
    ]


def test_views_of_operands_are_shared_and_whole_buffers_are_named() -> None:
    m, out = buf("m", (4, 2)), buf("out", (4, 4))
    t = TensorArg("m", (2, 4), (1, 2), 0)
    calls = [
        Extern(("out",), "aten::mm", (whole(m), t), may_keep=False),
        Extern(("y",), "aten::cat", (ListArg((t, t)), 1), (("flag", Scalar("bool", "True")),)),
    ]
    assert lines(plan(["m"], calls, [whole(out), whole(Y)], [m, out, Y])) == [
        "view0 = view(m, f32[2, 4] @ (1, 2), 0)",
        "out, = call('aten::mm', may_keep=False)(m, view0)",
        "require_layout(out, opaque[4, 4] @ (4, 1), origin='aten::mm', copies=True)",
        "y, = call('aten::cat')([view0, view0], 1, flag=True)",
        "require_layout(y, opaque[8] @ (1,), origin='aten::cat', copies=True)",
        "return (out, y)",
    ]


def test_operands_that_differ_in_a_stride_of_a_single_row_are_no_view_but_outputs_are_exact() -> (
    None
):
    m = buf("m", (1, 4))
    odd = TensorArg("m", (1, 4), (99, 1), 0)
    p = plan(["m"], [Extern(("y",), "aten::neg", (odd,))], [odd, whole(Y)], [m, Y])
    assert lines(p) == [
        "y, = call('aten::neg')(m)",
        "require_layout(y, opaque[8] @ (1,), origin='aten::neg', copies=True)",
        "view0 = view(m, f32[1, 4] @ (99, 1), 0)",
        "return (view0, y)",
    ]


def test_operands_with_offset_and_another_type() -> None:
    part = TensorArg("x", (2,), (1,), 3)
    bits = TensorArg("x", (4,), (1,), 0, i64)
    p = plan(["x"], [Extern(("y",), "aten::cat", (ListArg((part, bits)),))], [whole(Y)], [X, Y])
    assert lines(p)[:2] == [
        "view0 = view(x, f32[2] @ (1,), 3)",
        "view1 = view(x, i64[4] @ (1,), 0)",
    ]


def test_calls_write_into_planned_memory() -> None:
    neg = Extern(
        ("y",), "aten::neg", (whole(X),), may_keep=False, out_op="aten::neg.out", out_names=("out",)
    )
    p = plan(["x"], [neg, kernel("k", [Y], [Z])], [whole(Z)], [X, Y, Z], MemoryPlan(32, {"y": 0}))
    assert lines(p)[1:3] == [
        "y = place(arena, 0, f32[8] @ (1,))",
        "call('aten::neg.out', into=(y,), may_keep=False)(x, out=y)",
    ]
    unplanned = plan(["x"], [neg, kernel("k", [Y], [Z])], [whole(Z)], [X, Y, Z])
    assert lines(unplanned)[0] == "y, = call('aten::neg', may_keep=False)(x)"


def test_results_nobody_wants_and_symbols_of_calls() -> None:
    u0 = symbol("u0", lo=float("-inf"))
    call = Extern((None, "y"), "aten::sort", (whole(X),))
    count = Extern((), "mylib::count", (whole(X),), symbols=((0, "u0"),))
    p = plan(["x"], [call, count], [whole(Y), u0 * 2], [X, Y], symbols={"u0": None})
    assert lines(p) == [
        "_, y = call('aten::sort')(x)",
        "require_layout(y, opaque[8] @ (1,), origin='aten::sort', copies=True)",
        "u0, = call('mylib::count')(x)",
        "return (y, 2*u0)",
    ]


def test_python_callables() -> None:
    call = Extern(("y",), "mylib.scale", (whole(X),), callable_index=1)
    program = build(plan(["x"], [call], [whole(Y)], [X, Y]), "g")
    assert program.n_callables == 2
    assert line(program.body[0]) == "y, = call_python(1, 'mylib.scale')(x)"


def test_symbols_are_defined_when_their_source_exists() -> None:
    u0, m = symbol("u0", lo=float("-inf")), buf("m", (s0, 3))
    n, k = buf("n", (u0,)), buf("k", (), i64)
    table: dict[str, Any] = {
        "s1": s0 * 3, "s0": ("m", "size", 0), "s2": ("n", "stride", 0), "u0": None, "s3": u0 + s0,
        "i0": None,
    }  # fmt: skip
    steps = [
        Item("u0", "k"),
        Assert(compare("le", u0, 9), "few"),
        Extern(("n",), "aten::f", (whole(m), u0)),
    ]
    s3 = symbol("s3", lo=float("-inf"))
    p = plan(
        ["m", ("sym", "i0"), "k", None],
        steps,
        [whole(n), s3, symbol("s1")],
        [m, n, k],
        symbols=table,
    )
    assert lines(p) == [
        "s0 = read(m, 'size', 0)",
        "s1 = let(3*s0)",
        "u0 = item(k)",
        "s3 = let(s0 + u0)",
        "require((u0 <= 9), 'few')",
        "n, = call('aten::f')(m, u0)",
        "s2 = read(n, 'stride', 0)",
        "require_layout(n, opaque[u0] @ (1,), origin='aten::f', copies=True)",
        "return (n, s3, s1)",
    ]
    assert [line(i) for i in build(p, "g").inputs] == [
        "m = tensor_input(f32[s0, 3] @ (3, 1))",
        "i0 = int_input()",
        "k = tensor_input(i64[()] @ ())",
        "opaque3 = object_input()",
    ]


def test_a_symbol_whose_source_never_comes_is_our_bug() -> None:
    with pytest.raises(InternalError, match="the sources of symbols s0 never come to exist"):
        build(plan(["x"], [], [], [X], symbols={"s0": ("y", "size", 0)}), "g")


def test_an_arena_must_know_its_size_at_the_start() -> None:
    u0 = symbol("u0")
    p = plan(["x"], [], [], [X], MemoryPlan(u0 * 4, {"y": 0}), symbols={"u0": None})
    with pytest.raises(
        InternalError, match=r"the arena's size 4[*]u0 is not known when the program starts"
    ):
        build(p, "g")


def test_aliases_are_views() -> None:
    half = buf("half", (4,))
    steps = [Alias("half", "x", 2), Alias("z", "x", 1, relative=False), kernel("k", [half], [Y])]
    p = plan(["x"], steps, [whole(Y), whole(Z)], [X, Y, Z, half])
    assert lines(p)[:2] == [
        "half = view(x, f32[4] @ (1,), 2)",
        "z = view(x, f32[8] @ (1,), 1, relative=False)",
    ]


def test_mutation_copies_or_happens_in_place() -> None:
    steps = [kernel("k", [X], [Y]), Mutate("x", "y")]
    copied = plan(["x"], steps, [], [X, Y])
    assert lines(copied)[-2:] == ["copy(x, y, bump=False)", "return ()"]
    assert lines(copied, bumped_inputs=(0,))[-2:] == ["copy(x, y)", "return ()"]
    in_place = plan(["x"], steps, [], [X, Y], MemoryPlan(in_place={"y": "x"}))
    assert lines(in_place) == [
        "y = view(x, f32[8] @ (1,), 0)",
        "launch('k', (x, y), (), (y,), 7)",
        "return ()",
    ]
    assert lines(in_place, bumped_inputs=(0,))[-2:] == ["bump_version(x)", "return ()"]


def test_constants_and_literals_and_inputs_are_returned() -> None:
    c = buf("c")
    p = plan(
        ["x"],
        [],
        [whole(c), whole(X), Scalar("none"), s0 * 2 - s0 * 2 + 5],
        [X, c],
        constants=["c"],
    )
    assert lines(p) == ["c = constant(0)", "return (c, x, None, 5)"]


def test_notes_and_origins() -> None:
    program = build(
        plan(
            ["x"],
            [kernel("k", [X], [Y], origin=("model.py:3 aten.relu", "aten.add"))],
            [whole(Y)],
            [X, Y],
        ),
        "g",
    )
    assert line(program.body[1]) == "note('model.py:3 aten.relu; aten.add')"
    assert program.origins == (("k", "model.py:3 aten.relu; aten.add"),)


def test_names_of_views_avoid_buffers() -> None:
    taken = buf("view0")
    t = TensorArg("view0", (4,), (2,), 0)
    p = plan(["view0"], [Extern(("y",), "aten::neg", (t,))], [whole(Y)], [taken, Y])
    assert lines(p)[0] == "view1 = view(view0, f32[4] @ (2,), 0)"


def test_a_takeover_of_nothing_is_our_bug() -> None:
    p = plan(["x"], [kernel("k", [X], [Y])], [whole(Y)], [X, Y, Z], MemoryPlan(in_place={"y": "z"}))
    with pytest.raises(InternalError, match="y takes over z, which does not exist yet"):
        build(p, "g")
