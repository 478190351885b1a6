"""Kernels of products in the IR: their text reads back, what is wrong with one is said, and how
products are cut."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from plait.errors import InternalError
from plait.ir.calls import Extern, Operator, Rival, TensorArg, UserKernel
from plait.ir.checks import OUT_OF_RANGE, Bound
from plait.ir.dtypes import DType, bf16, f32, i8, i64
from plait.ir.expr import Expr, Size, symbol
from plait.ir.loops import (
    Buffer,
    Load,
    LoopProgram,
    Node,
    Pointwise,
    arg_symbol,
    cast,
    const,
    loop_vars,
    node,
)
from plait.ir.product import PARTNER, PRODUCT, Cut, Pair, Panels, Part, Product, Window
from plait.ir.text import program_text, read_program
from plait.ir.verify import verify
from plait.kernel.triton.dialects import GPUS
from plait.kernel.triton.product import Around, write_product
from plait.lower.product import cut_of, medium_cut
from plait.schedule.deps import Bodies
from plait.schedule.join_operands import join_operands
from plait.schedule.join_readers import join_readers
from tests.interned import stay

P, B, I, J = (symbol(name, extent=n) for name, n in zip("pbij", (1, 1, 6, 128), strict=True))
LOADED = node("load", (), Load(PRODUCT, ()), f32)
UNKNOWN = node("load", (), Load("given0", ()), f32)
RESULT = Pointwise("y", (P, B, I, J), LOADED, (I, J))
MM = Operator("mm")
KERNEL = Product("product.0", (RESULT,), Cut(16, 64, 128), operator=MM)


def buffer(name: str, *shape: int, dtype: object = bf16) -> Buffer:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return Buffer(name, dtype, shape, tuple(strides), "cuda:0", True)  # type: ignore[arg-type]


def program(kernel: Product, *loops: Pointwise, given: tuple[Buffer, ...] = ()) -> LoopProgram:
    """x (6, 256) @ w (256, 128) = y, and loops that give the last results."""
    x, w, y = buffer("x", 6, 256), buffer("w", 256, 128), buffer("y", 6, 128, dtype=f32)
    args = tuple(TensorArg(b.name, b.shape, b.strides, 0) for b in (x, w))
    call = Extern(("y",), "aten::matmul", args, may_keep=False, kernel=kernel, fallback=False)
    made = [buffer(loop.out, *(int(v.symbol.extent) for v in loop.vars)) for loop in loops]  # type: ignore[arg-type,union-attr]
    outs = made or [y]
    results = tuple(TensorArg(b.name, b.shape, b.strides, 0) for b in outs)
    buffers = {b.name: b for b in (x, w, *given, y, *made)}
    inputs = ("x", "w", *(b.name for b in given))
    return LoopProgram(inputs, buffers, {}, (call, *loops), results, {}, (), {}, ())


def call_of(p: LoopProgram) -> Extern:
    call = p.ops[0]
    assert isinstance(call, Extern)
    return call


def reader(out: str, sizes: tuple[int, ...], row: object, column: Size, more: object) -> Pointwise:
    """out = y[row, column] + more, of loops over these sizes."""
    y = node("load", (), Load("y", (row, column)), f32)  # type: ignore[arg-type]
    return Pointwise(out, loop_vars("i", sizes), cast(y + more, bf16))  # type: ignore[operator]


def test_text_reads_back() -> None:
    p = program(KERNEL)
    verify(p, "test")
    assert read_program(program_text(p)) == p


BESIDE = replace(RESULT, body=node("load", (), Load(PARTNER, ()), f32))
PAIRS = replace(KERNEL, results=(BESIDE,), half=16, parts=(Part(32, 32, 64),))


def test_text_of_pairs_and_parts_reads_back() -> None:
    p = program(PAIRS)
    verify(p, "test")
    assert read_program(program_text(p)) == p


def test_text_of_a_packed_one_reads_back() -> None:
    window = Window((3, 3), (1, 1), (1, 0), (1, 1))
    for how, n in ((Panels(256, 128, 64), 1), (Panels(28, 128, 64, window), 5)):
        p = program(replace(KERNEL, how=how))
        call = call_of(p)
        p = replace(p, ops=(replace(call, args=(*call.args, *range(n))),))
        verify(p, "test")
        assert read_program(program_text(p)) == p


def test_a_pair_reads_back_and_what_is_wrong_with_it_is_said() -> None:
    middle = Pointwise("m", (P, B, I, J), LOADED, (I, J))
    first = Product("one", (middle,), Panels(256, 128, 64))
    second = Product("two", (RESULT,), Panels(128, 128, 64))
    p = program(KERNEL)
    panels = TensorArg("w", (256, 128), (128, 1), 0)
    pair = Pair("both", first, second, 2)
    args = (*call_of(p).args, panels, 6)
    buffers = {**p.buffers, "m": buffer("m", 6, 128, dtype=f32)}
    call = replace(call_of(p), outs=("m", "y"), args=args, kernel=pair)
    p = replace(p, ops=(call,), buffers=buffers)
    verify(p, "test")
    assert read_program(program_text(p)) == p
    for wrong, said in (
        (replace(pair, second=KERNEL), "no two products"),
        (replace(pair, operands=1), "unknown kind"),
        (replace(pair, second=first), "other results"),
    ):
        with pytest.raises(InternalError, match=said):
            verify(replace(p, ops=(replace(call, kernel=wrong),)), "test")


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (replace(KERNEL, results=()), "unknown kind"),
        (replace(KERNEL, how=Cut(16, 48, 128)), "unknown kind"),
        (replace(KERNEL, how=Cut(16, 64, 128, 0)), "unknown kind"),
        (replace(KERNEL, how=Cut(16, 64, 128, matrices=-1)), "unknown kind"),
        (replace(KERNEL, how=Cut(16, 64, 128, matrices=4)), "unknown kind"),  # without ends
        (replace(KERNEL, how=Panels(256, 128, 64)), "other sizes"),
        (replace(KERNEL, results=(replace(RESULT, out="z"),)), "other results"),
        (replace(KERNEL, results=(replace(RESULT, index=None),)), "no operand"),
        (replace(KERNEL, results=(replace(RESULT, body=UNKNOWN),)), "no operand"),
        (replace(PAIRS, half=0), "no operand"),
        (replace(PAIRS, half=24), "other pairs"),
        (replace(PAIRS, how=Cut(128, 128, 64)), "does not compute"),
        (replace(PAIRS, how=Panels(256, 128, 64)), "other sizes"),
        (replace(PAIRS, parts=(None, None)), "other parts"),
        (replace(PAIRS, parts=(Part(48, 32, 64),)), "other columns"),
        (replace(PAIRS, parts=(Part(0, 32, 96),)), "other columns"),
    ],
)
def test_what_is_wrong_is_said(kernel: Product, said: str) -> None:
    with pytest.raises(InternalError, match=said):
        verify(program(kernel), "test")


def test_only_points_of_an_image_are_scaled() -> None:
    point, more = (Window((n, n), (1, 1), (0, 0), (1, 1)) for n in (1, 2))
    assert not Panels(28, 128, 64, point, scaled=True).fault()
    for how in (Panels(28, 128, 64, more, scaled=True), Panels(28, 128, 64, scaled=True)):
        assert "numbers for channels" in how.fault()


def joined(p: LoopProgram) -> LoopProgram:
    made = join_readers(p, Bodies(), in_rows=False)
    verify(made, "test")
    assert read_program(program_text(made)) == made
    return made


def test_a_loop_in_another_shape_is_taken_in() -> None:
    i0, i1, i2 = loop_vars("i", (2, 3, 128))
    rest = buffer("rest", 2, 3, 128)
    more = cast(node("load", (), Load("rest", (i0, i1, i2)), bf16), f32)
    made = joined(program(KERNEL, reader("z", (2, 3, 128), 3 * i0 + i1, i2, more), given=(rest,)))
    (call,) = made.ops
    assert isinstance(call, Extern) and isinstance(call.kernel, Product)
    (result,) = call.kernel.results
    assert result.out == "z" and result.index == (I // 3, I % 3, J)
    assert [a.buf for a in call.args if isinstance(a, TensorArg)] == ["x", "w", "rest"]


def beside(out: str, sizes: tuple[int, ...], column: Size, other: object, at: object) -> Pointwise:
    """A loop that mixes columns of y: other[at] is where the condition is not false."""
    row = loop_vars("i", sizes)[0]
    loaded = Load("y", (row, other), at is not None)  # type: ignore[arg-type]
    y = node("load", () if at is None else (at,), loaded, f32)  # type: ignore[arg-type]
    return reader(out, sizes, row, column, y)


def test_pairs_of_columns() -> None:
    """Each column beside its partner, in either half of a head, in all columns or a part."""
    _, h, d = loop_vars("i", (6, 4, 8))
    at, left = 32 * h + d, node("lt", (node("index", (), d, i64), const(4, i64)))
    right = node("le", (const(4, i64), node("index", (), d, i64)))
    sizes, half = (6, 4, 8), loop_vars("i", (6, 64))[1]
    for loop, apart, part in (
        (beside("z", sizes, at, at + 4, left), 4, Part(0, 8, 32)),
        (beside("z", sizes, at, at - 4, right), 4, Part(0, 8, 32)),
        (beside("z", sizes, at + 24, at + 28, left), 4, Part(24, 8, 32)),
        (beside("z", (6, 64), half, half + 64, None), 64, Part(0, 64, 128)),
        (beside("z", (6, 64), half + 64, half, None), 64, Part(64, 64, 128)),
        (beside("z", (6, 64), 2 * half, 2 * half + 1, None), 1, Part(0, 1, 2)),
    ):
        (call,) = joined(program(KERNEL, loop)).ops
        assert isinstance(call, Extern) and isinstance(call.kernel, Product)
        assert (call.kernel.half, call.kernel.parts) == (apart, (part,))


def test_columns_that_make_no_pairs_stay_apart() -> None:
    """Without the condition there is none beside, or another than the partner; tiles of large
    products load other columns."""
    _, h, d = loop_vars("i", (6, 4, 8))
    at, left = 32 * h + d, node("lt", (node("index", (), d, i64), const(4, i64)))
    sizes, large_ = (6, 4, 8), replace(KERNEL, how=Cut(128, 128, 64))
    for kernel, loop in (
        (KERNEL, beside("z", sizes, at, at + 4, None)),
        (KERNEL, beside("z", sizes, at + 4, at + 8, left)),
        (KERNEL, beside("z", sizes, at, at + 3, left)),
        (KERNEL, beside("z", sizes, at, 31 - at, left)),
        (large_, beside("z", sizes, at, at + 4, left)),
        (replace(KERNEL, half=8), beside("z", sizes, at, at + 4, left)),
    ):
        p = program(kernel, loop)
        assert join_readers(p, Bodies(), in_rows=False).ops == p.ops


def test_what_others_read_is_stored_beside_what_is_mixed() -> None:
    _, h, d = loop_vars("i", (6, 4, 8))
    at, left = 32 * h + d, node("lt", (node("index", (), d, i64), const(4, i64)))
    p = program(KERNEL, beside("z", (6, 4, 8), at, at + 4, left))
    p = replace(p, outputs=(*p.outputs, TensorArg("y", (6, 128), (128, 1), 0)))
    (call,) = joined(p).ops
    assert isinstance(call, Extern) and isinstance(call.kernel, Product)
    assert call.outs == ("y", "z") and call.kernel.parts == (None, Part(0, 8, 32))


def test_what_is_no_permutation_stays() -> None:
    i0, i1 = loop_vars("i", (6, 128))
    turned = loop_vars("i", (12, 128))
    for loop in (
        reader("z", (12, 128), turned[0] // 2, turned[1], 1.0),  # each row twice
        reader("z", (6, 128), 5 - i0, i1, 1.0),
    ):
        p = program(KERNEL, loop)
        assert join_readers(p, Bodies(), in_rows=False).ops == p.ops


def test_a_product_that_leaves_stays() -> None:
    i0, i1 = loop_vars("i", (6, 128))
    p = program(KERNEL, reader("z", (6, 128), i0, i1, 1.0))
    y = p.buffers["y"]
    p = replace(p, outputs=(*p.outputs, TensorArg("y", y.shape, y.strides, 0)))
    assert join_readers(p, Bodies(), in_rows=False).ops == p.ops


def test_a_reader_of_another_reader_stays() -> None:
    """One kernel cannot read what it writes."""
    i0, i1 = loop_vars("i", (6, 128))
    z = cast(node("load", (), Load("z", (i0, i1)), bf16), f32)
    loops = (reader("z", (6, 128), i0, i1, 1.0), reader("t", (6, 128), i0, i1, z))
    p = program(KERNEL, *loops)
    assert join_readers(p, Bodies(), in_rows=False).ops == p.ops


def test_a_product_that_moved_is_read_after_it() -> None:
    """One that takes in a loop is computed where that stood: its other results come later, too."""
    i0, i1 = loop_vars("i", (6, 128))
    more = cast(node("load", (), Load("r", (i0, i1)), f32), f32)
    loops = (
        reader("a", (6, 128), i0, i1, 1.0),
        replace(
            reader("c", (6, 128), i0, i1, 1.0), body=node("load", (), Load("t", (i0, i1)), f32)
        ),
        reader("b", (6, 128), i0, i1, more),
    )
    p = program(KERNEL, *loops)
    results = tuple(replace(RESULT, out=out) for out in ("r", "t"))
    kernel = Product("product.1", results, KERNEL.how)
    first = replace(call_of(p), outs=("r", "t"), kernel=kernel)
    made = {n: replace(p.buffers["y"], name=n) for n in ("r", "t")}
    c = {"c": replace(p.buffers["c"], dtype=f32)}
    out = TensorArg("r", (6, 128), (128, 1), 0)
    p = replace(
        p, ops=(first, *p.ops), buffers={**p.buffers, **made, **c}, outputs=(*p.outputs, out)
    )
    verify(p, "test")
    joined(p)


def test_versions_to_be_measured() -> None:
    """Of what is planned first; they differ in how they are cut, and compute the same."""
    p = program(KERNEL)
    planned, several = (
        write_product(call_of(p), p.buffers, GPUS["sm_90"], Around(), tunes).kernel
        for tunes in (False, True)
    )
    assert isinstance(planned, UserKernel) and isinstance(several, UserKernel)
    assert planned.rival is None and several.rival is not None
    assert (planned.cold, several.cold) == ((), (1,)), "weights are cold"
    launched = replace(p, ops=(replace(call_of(p), kernel=several),))
    assert read_program(program_text(launched)) == launched
    assert planned.text == several.text and planned.variants == several.variants[:1]
    calls = [(v.call, v.options) for v in several.variants]
    assert len({*calls}) == len(calls) > 4
    assert all("rows=16" in call and "gdc_wait" in call for call, _ in calls)


def bias_of(value: Node, columns: int = 128) -> Node:
    """A sum with a row of numbers, given0."""
    j = symbol("j", extent=columns)
    return value + cast(node("load", (), Load("given0", (j,)), bf16), f32)


RELU = node("max", (bias_of(LOADED), const(0.0, f32)))
ERF = node("erf", (bias_of(LOADED),))
REST = LOADED + cast(node("load", (), Load("given0", (I, J)), bf16), f32)
MADE = 6 * 128 * 2  # bytes of a result of 16 bits


@pytest.mark.parametrize(
    ("operator", "body", "given", "place", "nbytes"),
    [
        (MM, LOADED, (), (I, J), 0),
        (MM, LOADED, (), (J, I), 2 * MADE),  # turned
        (MM, node("tanh", (LOADED,)), (), (I, J), 2 * MADE),
        (Operator("mm", is_followed=True), node("tanh", (LOADED,)), (), (I, J), 0),
        (MM, bias_of(LOADED), (128,), (I, J), 2 * MADE + 256),
        (Operator("addmm", 1), bias_of(LOADED), (128,), (I, J), 0),
        (Operator("addmm", 1), ERF, (128,), (I, J), 2 * MADE + 256),
        (Operator("addmm", 1), RELU, (128,), (I, J), 2 * MADE + 256),
        (Operator("_addmm_activation", 1), RELU, (128,), (I, J), 0),
        (Operator("addmm", 2), REST, (6, 128), (I, J), 0),
    ],
)
def test_what_a_kernel_beside_the_operator_moves(
    operator: Operator, body: Node, given: tuple[int, ...], place: tuple[Expr, Expr], nbytes: int
) -> None:
    p = program(replace(KERNEL, operator=operator))
    sizes = tuple(6 if e is I else 128 for e in place)
    y, more = buffer("y", *sizes), [buffer("more", *given)] if given else []
    kernel = Product(
        "product.0", (replace(RESULT, body=cast(body, bf16), index=place),), KERNEL.how,
        operator=operator,
    )  # fmt: skip
    args = (*call_of(p).args, *(TensorArg(b.name, b.shape, b.strides, 0) for b in more))
    call = replace(call_of(p), kernel=kernel, args=args)
    buffers = {**p.buffers, "y": y, **{b.name: b for b in more}}
    made = write_product(call, buffers, GPUS["sm_90"], Around(), tunes=True).kernel
    assert isinstance(made, UserKernel) and made.rival == Rival(operator, nbytes)


def test_results_in_float32_are_made_by_another_kernel() -> None:
    """The vendor's has the type of its factors."""
    p = program(KERNEL)
    made = write_product(call_of(p), p.buffers, GPUS["sm_90"], Around(), tunes=True).kernel
    assert isinstance(made, UserKernel) and made.rival == Rival(MM, 3 * MADE)


@pytest.mark.parametrize(
    ("gpu", "waits", "columns", "released"),
    [
        ("sm_90", True, 128, True),
        ("sm_90", False, 128, False),
        ("sm_90", True, 1 << 15, False),  # takes longer than the next one takes to come
        ("sm_80", True, 128, False),
    ],
)
def test_who_waits_comes_beside(gpu: str, waits: bool, columns: int, released: bool) -> None:
    p = program(KERNEL)
    call, w = call_of(p), buffer("w", 256, columns)
    wide = TensorArg("w", w.shape, w.strides, 0)
    call = replace(call, args=(call.args[0], wide))
    made = write_product(call, {**p.buffers, "w": w}, GPUS[gpu], Around(waits)).kernel
    assert isinstance(made, UserKernel)
    lines = [line.strip() for line in made.variants[0].call.splitlines()]
    calls = ["tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"]
    assert lines[:-1] == (calls[: 1 + released] if gpu == "sm_90" else [])


@pytest.mark.parametrize(
    ("sizes", "cut"),  # batch, m, n, k
    [
        ((1, 16, 4096, 4096), Cut(16, 64, 128)),
        ((1, 16, 4096, 14336), Cut(16, 64, 256)),
        ((1, 16, 14336, 14336), Cut(16, 64, 128)),
        ((1, 16, 768, 3072), Cut(16, 64, 128, 8)),
        ((1, 64, 768, 768), Cut(16, 64, 128)),
        ((1, 64, 4096, 4096), Cut(64, 32, 128)),
        ((1, 16, 16, 32768), Cut(16, 16, 256, 64)),
        ((1, 128, 128, 32768), Cut(64, 64, 128, 32)),
        ((1, 128, 768, 3072), Cut(64, 64, 128, 5)),
        ((1, 128, 768, 2048), None),
        ((1, 512, 512, 32768), None),
        ((1, 1, 4096, 4096), Cut(16, 64, 128)),
        ((1, 256, 256, 16384), None),
        ((1, 16, 32, 256), None),
        ((64, 16, 1024, 128), Cut(16, 64, 128)),
    ],
)
def test_cuts(sizes: tuple[int, int, int, int], cut: Cut | None) -> None:
    assert cut_of(*sizes) == cut


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [
        ((4096, 768), Cut(128, 128, 64)),
        ((1024, 768), Cut(64, 128, 64)),
        ((128, 3072), Cut(64, 64, 128)),
        ((128, 768), Cut(32, 64, 128)),
        ((80, 192), None),
    ],
)
def test_cuts_of_some_rows(sizes: tuple[int, int], cut: Cut | None) -> None:
    assert medium_cut(*sizes) == cut


# ------------------------------------------------------------------------------ made right matrices
def converted(*, returned: bool = False, checked: bool = False, group: int = 128) -> LoopProgram:
    """x (6, 256) @ w (256, 128) = y, where w is codes that a loop makes bfloat16 and scales by
    groups. returned: the program gives w back, too. checked: a check is made on the way."""
    p = program(KERNEL)
    codes, scale = buffer("codes", 256, 128, dtype=i8), buffer("scale", 256 // group, 128)
    k, j = loop_vars("i", (256, 128))
    code = node("load", (), Load("codes", (k, j)), i8)
    if checked:
        place = node("bounded", (cast(code, i64),), Bound(128, OUT_OF_RANGE), i64)
        code = node("load", (place,), Load("codes", (k, arg_symbol(0, 128))), i8)
    scale_of = cast(node("load", (), Load("scale", (k // group, j)), bf16), f32)
    loop = Pointwise("w", (k, j), cast(cast(code, f32) * scale_of, bf16))
    buffers = {**p.buffers, "codes": codes, "scale": scale}
    given = ("x", "codes", "scale")
    w = p.buffers["w"]
    outs = (*p.outputs, *([TensorArg("w", w.shape, w.strides, 0)] if returned else []))
    return replace(p, inputs=given, buffers=buffers, ops=(loop, *p.ops), outputs=outs)


def test_a_matrix_is_made_as_it_is_loaded() -> None:
    p = join_operands(converted(), Bodies())
    call = call_of(p)
    verify(p, "test")
    assert read_program(program_text(p)) == p
    assert isinstance(call.kernel, Product) and call.kernel.right is not None
    assert [a.buf for a in call.args if isinstance(a, TensorArg)] == ["x", "codes", "scale"]
    text = write_product(call, p.buffers, GPUS["sm_90"], Around()).kernel
    assert isinstance(text, UserKernel)
    assert "def right_tile(b, step, j, j_inside, right, given)" in text.text
    assert "tl.load(given[0] + (j + " in text.text, "a scale a step, not one an element"


def test_a_scale_of_a_group_is_loaded_once() -> None:
    """Of a step of 128 codes that share one by 32: four for each column, which are spread."""
    p = join_operands(converted(group=32), Bodies())
    made = write_product(call_of(p), p.buffers, GPUS["sm_90"], Around(), tunes=True).kernel
    assert isinstance(made, UserKernel)
    (function,) = re.findall(r"def right_tile.*?return", made.text, re.DOTALL)
    assert "q32 = tl.arange(0, 4)[None, :]" in function
    assert len(re.findall(r"tl\.load\(given\[0\] \+ [^\n]*q32", function)) == 1
    assert "// 32" not in function and function.count("p_spread(") == 1
    assert "def p_spread(" in made.text


def test_a_matrix_that_is_both_factors_is_stored() -> None:
    """x (256, 256) @ x, of which a loop makes x: of bytes that it converts."""
    p = program(KERNEL)
    k, j = loop_vars("i", (256, 256))
    loop = Pointwise("x", (k, j), cast(node("load", (), Load("codes", (k, j)), i8), bf16))
    x = buffer("x", 256, 256)
    whole = TensorArg("x", x.shape, x.strides, 0)
    given = {"codes": buffer("codes", 256, 256, dtype=i8), "x": x, "y": buffer("y", 256, 256)}
    call = replace(call_of(p), args=(whole, whole))
    y = TensorArg("y", (256, 256), (256, 1), 0)
    p = replace(p, inputs=("codes",), buffers=given, ops=(loop, call), outputs=(y,))
    verify(p, "test")
    assert join_operands(p, Bodies()) == p


@pytest.mark.parametrize("how", ["returned", "checked"])
def test_a_matrix_that_others_need_is_stored(how: str) -> None:
    p = converted(returned=how == "returned", checked=how == "checked")
    verify(p, "test")
    assert join_operands(p, Bodies()) == p


def test_a_right_matrix_loads_operands_alone() -> None:
    vars_ = tuple(symbol(name, extent=n) for name, n in zip("bkj", (1, 256, 128), strict=True))
    for loaded, said in ((PRODUCT, "of itself"), ("given7", "no operand")):
        right = Pointwise("right", vars_, node("load", (), Load(loaded, ()), f32))
        with pytest.raises(InternalError, match=said):
            verify(program(replace(KERNEL, right=right)), "test")


# ----------------------------------------------------------------------------------- large products
WIDE = Cut(128, 256, 64)


def large(
    m: int, n: int, *, gpu: str = "sm_90", aligned: bool = True, cut: Cut = WIDE, half: int = 0,
    across: bool = False, tunes: bool = True, by_row: bool = False, dtype: DType = bf16,
    k: int = 256, rest: bool = False,
) -> UserKernel:  # fmt: skip
    """All versions of a large product with columns of w far apart, or across: with its rows. rest:
    a matrix is added to it."""
    out = tuple(symbol(name, extent=e) for name, e in zip("pbij", (1, 1, m, n), strict=True))
    added = cast(node("load", (), Load("given0", out[2:]), bf16), f32)
    body = BESIDE.body if half else LOADED + added if rest else LOADED
    kernel = Product("product.2", (Pointwise("y", out, cast(body, bf16), out[2:]),), cut, half=half)
    x, y, z = buffer("x", m, k, dtype=dtype), buffer("y", m, n), buffer("z", m, n)
    w = replace(buffer("w", k, n, dtype=dtype), strides=(n, 1) if across else (1, k))
    given = (x, w, z) if rest else (x, w)
    args = tuple(TensorArg(b.name, b.shape, b.strides, 0) for b in given)
    call = Extern(("y",), "aten::matmul", args, may_keep=False, kernel=kernel, fallback=False)
    around = Around(aligned=aligned, by_row=by_row)
    made = write_product(call, {b.name: b for b in (*given, y)}, GPUS[gpu], around, tunes).kernel
    assert isinstance(made, UserKernel)
    return made


def test_pairs_are_in_tiles_that_load_them_together() -> None:
    """Neither descriptors nor tiles of rows of one alignment do."""
    for n, half in ((512, 16), (513 * 2, 9)):
        made = large(2048, n, cut=Cut(64, 64, 128), half=half)
        assert len(made.variants) > 4 and all(f"half={half}," in v.call for v in made.variants)
        assert "def described" not in made.text and "def finish_aligned" not in made.text


def test_rows_that_start_anywhere_are_written_aligned() -> None:
    """Where there are enough rows of each kind."""
    kinds = {n: {*re.findall(r"kinds=(\d)", str(large(2048, n).variants))} for n in range(512, 520)}
    assert kinds == {
        512: {"1"}, 513: {"1", "8"}, 514: {"1", "4"}, 515: {"1", "8"}, 516: {"1", "2"},
        517: {"1", "8"}, 518: {"1", "4"}, 519: {"1", "8"},
    }  # fmt: skip
    assert "kinds=8" not in str(large(256, 513).variants)
    text = large(2048, 513).text
    assert text.count("tl.multiple_of(outs[0]") == 1 and "def finish_aligned(" in text


def test_factors_are_described_where_they_are_aligned() -> None:
    for made, able in (
        (large(2048, 512), True),
        (large(2048, 512, gpu="sm_80"), False),
        (large(2048, 512, aligned=False), False),
        (large(2048, 512, across=True), True),
        (large(2048, 516, across=True), False),  # rows of it are 8 bytes off
        (large(2048, 512, dtype=i8), True),
        (large(2048, 512, across=True, dtype=i8), False),
    ):
        found = [v for v in made.variants if "described_product(" in v.call]
        assert bool(found) == ("def described_product" in made.text) == able
        assert len(found) < len(made.variants) and "described" not in made.variants[0].call
    narrow = [large(128, n, cut=Cut(128, 128, 64)).variants[0].call for n in (1026, 1027)]
    assert ["described" in call for call in narrow] == [False, True], "numbers are written apart"
    grids = {v.grid for v in large(2048, 50257).variants if "described" in v.call}
    assert grids == {132, 264}, "programs stay"


@pytest.mark.parametrize("across", [False, True])
def test_programs_stay_where_there_are_more_tiles_than_multiprocessors(across: bool) -> None:
    """Of short sums with nothing much behind them two share a multiprocessor instead."""

    def chosen(n: int, k: int, rest: bool = False) -> str:
        how = partial(large, cut=Cut(128, 128, 64), tunes=False, by_row=True)
        (made,) = how(2048, n, across=across, k=k, rest=rest).variants
        return made.call

    for n, k, rest in ((3072, 2048, False), (3072, 768, True)):
        assert "described" in chosen(n, k, rest)
    assert "described" not in chosen(768, 2048) and "stages=4" in chosen(768, 2048)
    assert "described" not in chosen(3072, 768) and "stages=3" in chosen(3072, 768)


nodes_stay = stay()
