"""Reductions in two stages: every kind gives what one stage gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.config import Config
from plait.devices import DEVICES
from plait.ir.dtypes import DType, b1, bf16, f16, f32
from plait.ir.expr import Size, evaluate, numel
from plait.ir.loops import LoopProgram
from plait.pipelines import schedule
from plait.schedule.deps import extent
from plait.schedule.plan import Reduce, Store, column_programs
from plait.schedule.text import plan_text, read_plan
from tests.schedule_tools import Builder, check, kernels

CFG = Config()


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min", "argmax", "argmin", "welford"])
@pytest.mark.parametrize("shape", [(1 << 18,), (16, 1 << 14), (3, 100003), (2, 3 * 50 * 2003)])
def test_full_and_row_reductions(kind: str, shape: tuple[int, ...]) -> None:
    b = Builder()
    x = b.input(*shape)
    outer, inner = (shape[:1], shape[1:]) if shape[0] < 4 else ((), shape)
    outs = (True, True, True) if kind == "welford" else (True,)

    def body(o, *i):  # type: ignore[no-untyped-def]
        return o.mul(o.load(x, *i), o.f(0.001)) if kind == "prod" else o.load(x, *i)

    b.reduce(outer, inner, kind, body, outs)
    b.output(*(n for n in b.results() if n))
    program = b.program()
    plan = schedule(program, CFG)
    check(plan, program)
    if shape != (3, 100003) or kind not in ("argmax", "argmin", "welford"):
        assert len(kernels(plan)) == 2


def test_columns_split_along_rows_with_their_producer() -> None:
    b = Builder()
    x = b.input(8192, 64)
    e = b.map("tanh", x)
    s = b.reduce((64,), (8192,), "sum", lambda o, i, r: o.load(e, r, i))
    b.output(e, s)
    program = b.program()
    plan = schedule(program, CFG)
    check(plan, program)
    first, second = kernels(plan)
    assert [s.kind for k in (first, second) for s in k.stmts if isinstance(s, Reduce)] == [
        "sum",
        "sum",
    ]
    assert e in first.outs


def test_small_and_wide_reductions_stay_whole() -> None:
    shapes: list[tuple[tuple[Size, ...], tuple[Size, ...]]] = [((), (1000,)), ((64,), (1 << 14,))]
    for outer, inner in shapes:
        b = Builder()
        x = b.input(*outer, *inner)
        b.output(b.reduce(outer, inner, "sum", lambda o, *i: o.load(x, *i)))  # noqa: B023
        program = b.program()
        assert len(kernels(schedule(program, CFG))) == 1


def test_what_is_read_once_a_result_does_not_split_rows() -> None:
    """The backward of batch norm: rows in memory, less a mean a channel, summed."""
    b = Builder()
    x, mean = b.input(4, 64, 1024), b.input(64)
    b.output(
        b.reduce(
            (64,), (4, 1024), "sum", lambda o, c, n, i: o.sub(o.load(x, n, c, i), o.load(mean, c))
        )
    )
    program = b.program()
    plan = schedule(program, CFG)
    check(plan, program)
    assert len(kernels(plan)) == 1


def test_on_a_gpu_a_mask_does_not_keep_columns_whole() -> None:
    """The backward of batch norm and relu, channels last: a mask is small, what it masks is not."""
    b = Builder()
    mask, x = b.input(3136, 256, dtype=b1), b.input(3136, 256, dtype=bf16)

    def body(o, c, n):  # type: ignore[no-untyped-def]
        zero = o.const(0.0, bf16)
        return o.cast(o.where(o.load(mask, n, c), zero, o.load(x, n, c)), f32)

    b.output(b.reduce((256,), (3136,), "sum", body))
    first, _ = kernels(schedule(on_gpu(b), CFG))
    assert numel(map(extent, first.vars)) > 8 * 256


def test_on_a_gpu_a_mean_of_more_bytes_does_not_part_sums() -> None:
    """The sums of batch norm's backward, channels last: one reads the mean, which is float32."""
    b = Builder()
    g, x = b.input(100352, 144, dtype=bf16), b.input(100352, 144, dtype=bf16)
    mean = b.input(144)

    def products(o, c, n):  # type: ignore[no-untyped-def]
        less = o.sub(o.cast(o.load(x, n, c), f32), o.load(mean, c))
        return o.mul(o.cast(o.load(g, n, c), f32), less)

    b.output(
        b.reduce((144,), (100352,), "sum", lambda o, c, n: o.cast(o.load(g, n, c), f32)),
        b.reduce((144,), (100352,), "sum", products),
    )
    assert len(kernels(schedule(on_gpu(b), CFG))) == 2


def on_gpu(b: Builder) -> LoopProgram:
    """The program of a builder with every buffer on a GPU."""
    program = b.program()
    return replace(
        program, buffers={n: replace(v, device="cuda:0") for n, v in program.buffers.items()}
    )


@pytest.mark.parametrize("kind", ["sum", "max", "argmin", "welford"])
@pytest.mark.parametrize(
    "outer, inner", [((), (6, 50257)), ((), (1 << 20,)), ((64,), (4096,)), ((2,), (3, 4, 1 << 16))]
)
def test_on_a_gpu_every_kind_gives_what_one_stage_gives(
    kind: str, outer: tuple[int, ...], inner: tuple[int, ...]
) -> None:
    b = Builder()
    x = b.input(*inner, *outer)
    n = len(inner)
    outs = (True, True, True) if kind == "welford" else (True,)
    b.reduce(outer, inner, kind, lambda o, *i: o.load(x, *i[-n:], *i[:-n]), outs)
    b.output(*(n for n in b.results() if n))
    program = on_gpu(b)
    plan = schedule(program, CFG)
    check(plan, program)
    first, second = kernels(plan)[0], kernels(plan)[-1]
    if kind == "argmin" and outer == (2,):  # positions are counted in one axis of chunks
        assert first is second
        return
    assert numel(map(extent, first.vars)) > 6 * max(numel(map(extent, second.vars)), 1)


def test_on_a_gpu_a_mean_of_logits_keeps_a_thousand_programs_busy() -> None:
    b = Builder()
    x = b.input(128, 50257)
    b.output(b.reduce((), (128, 50257), "sum", lambda o, i, j: o.exp(o.load(x, i, j))))
    first, second = kernels(schedule(on_gpu(b), CFG))
    assert [extent(v) for v in first.vars] == [1733] and [extent(v) for v in first.rvars] == [3712]
    assert not second.vars


def test_on_a_gpu_rows_enough_stay_whole() -> None:
    for outer, inner in ((8192, 50257), (128, 768), (1, 4096)):
        b = Builder()
        x = b.input(outer, inner)
        b.output(b.reduce((outer,), (inner,), "sum", lambda o, i, r: o.load(x, i, r)))  # noqa: B023
        assert len(kernels(schedule(on_gpu(b), CFG))) == 1


def test_on_a_gpu_columns_are_columns_where_their_address_has_divisions() -> None:
    """The bias gradient of an in-projection reads what heads wrote: neighbours in runs of 64."""
    b = Builder()
    x = b.input(32, 12, 197, 64)
    b.output(
        b.reduce((768,), (32, 197), "sum", lambda o, c, n, t: o.load(x, n, c // 64, t, c % 64))
    )
    program = on_gpu(b)
    plan = schedule(program, CFG)
    check(plan, program)
    first, second = kernels(plan)
    assert numel(map(extent, first.vars)) == 32 * 768 and numel(map(extent, second.vars)) == 768


def test_on_a_gpu_parts_of_columns_have_equal_lengths() -> None:
    """Those that a kernel's blocks divide if there are such, and others before any that need a
    condition: what is summed may be stored by the same kernel."""
    for rows, columns, rest in ((2048, 3072, 128), (6304, 768, 197), (6304, 3072, 197)):
        b = Builder()
        x = b.input(rows, columns)
        e = b.map("tanh", x)
        b.output(e, b.reduce((columns,), (rows,), "sum", lambda o, c, r: o.load(e, r, c)))  # noqa: B023
        program = on_gpu(b)
        first, second = kernels(schedule(program, CFG))
        assert [extent(v) for v in first.rvars] == [rest] and e in first.outs
        assert [extent(v) for v in second.rvars] == [rows // rest]


@pytest.mark.parametrize("dtype, parts", [(f32, 32), (bf16, 16)])
def test_on_a_gpu_programs_have_more_rows_of_narrow_elements(dtype: DType, parts: int) -> None:
    b = Builder()
    x = b.input(8192, 3072, dtype=dtype)
    b.output(b.reduce((3072,), (8192,), "sum", lambda o, c, r: o.load(x, r, c)))
    first, second = kernels(schedule(on_gpu(b), CFG))
    assert [extent(v) for k in (first, second) for v in k.rvars] == [8192 // parts, parts]


def norm_backward(
    rows: tuple[Size, ...], columns: int, chain: bool = False, builder: Builder | None = None
) -> LoopProgram:
    """What a norm's gradient needs: sums of rows, a result from them at every point, and sums of
    columns. chain: the columns of that result are summed too."""
    b = builder or Builder()
    dy, x, w = b.input(*rows, columns), b.input(*rows, columns), b.input(columns)
    shape = (*rows, columns)
    s = b.reduce(rows, (columns,), "sum", lambda o, *i: o.mul(o.load(dy, *i), o.load(w, i[-1])))
    t = b.reduce(rows, (columns,), "sum", lambda o, *i: o.mul(o.load(dy, *i), o.load(x, *i)))
    dx = b.pointwise(
        shape,
        lambda o, *i: o.sub(
            o.mul(o.load(x, *i), o.load(t, *i[:-1])), o.mul(o.load(dy, *i), o.load(s, *i[:-1]))
        ),
    )
    sums = [
        b.reduce(
            (columns,), rows, "sum", lambda o, c, *r: o.mul(o.load(dy, *r, c), o.load(x, *r, c))
        ),
        b.reduce((columns,), rows, "sum", lambda o, c, *r: o.load(dx if chain else dy, *r, c)),
    ]
    b.output(dx, *sums)
    return on_gpu(b)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize(
    "rows, found",
    [
        ((4096,), 512),
        ((8, 1024), 512),
        ((12608,), 394),
        ((64, 197), 394),
        ((6, 512), 384),
        ((4099,), 512),
    ],
)
def test_on_a_gpu_columns_are_summed_as_rows_are_walked(
    rows: tuple[int, ...], found: int, chain: bool
) -> None:
    first, *rest = kernels(schedule(norm_backward(rows, 768, chain), CFG))
    assert column_programs(first.stmts) == found and len(rest) == 1 and len(rest[0].outs) == 2
    assert numel(extent(v) for v in first.vars) == numel(rows)
    assert [s.mode for s in first.stmts if isinstance(s, Store)] == ["store", "sum", "sum"]


def test_on_a_gpu_walked_rows_give_what_two_kernels_give() -> None:
    for chain in (False, True):
        for rows in ((2, 2048), (4099,)):
            program = norm_backward(rows, 256, chain)
            plan = schedule(program, CFG)
            assert column_programs(kernels(plan)[0].stmts) == 512
            check(plan, program)


@pytest.mark.parametrize("sizes", [(3000,), (4, 700)])
def test_on_a_gpu_rows_of_unknown_number_are_walked(sizes: tuple[int, ...]) -> None:
    b = Builder()
    rows = tuple(b.size(f"s{k}", hint=4096 >> 6 * k) for k in range(len(sizes)))
    program = norm_backward(rows, 192, builder=b)
    plan = schedule(program, CFG)
    first, second = kernels(plan)
    assert column_programs(first.stmts) == 512 and len(second.outs) == 2
    check(plan, program, {f"s{k}": n for k, n in enumerate(sizes)})


@pytest.mark.parametrize("columns", [(), (20,)])
@pytest.mark.parametrize("kind", ["sum", "max"])
def test_on_a_gpu_reductions_of_unknown_length_have_two_ways(
    columns: tuple[int, ...], kind: str
) -> None:
    b = Builder()
    n = b.size("n", hint=9000)
    x = b.input(n, *columns)
    reduced = b.reduce(columns, (n,), kind, lambda o, *i: o.load(x, i[-1], *i[:-1]))
    b.output(b.map("tanh", str(reduced)))
    program = b.program()
    program = replace(
        program, buffers={n: replace(v, device="cuda:0") for n, v in program.buffers.items()}
    )
    plan = schedule(program, CFG)
    whole, first, second = kernels(plan)
    assert [k.form.at for k in (whole, first, second) if k.form] == [0, 1, 1]
    assert plan.frees[1:] == ((), (first.outs[0],)) and whole.form is not None
    assert [evaluate(whole.form.pick, {"n": k}) for k in (100, 10**6)] == [0, 1]
    assert read_plan(plan_text(plan), program) == plan
    for size in (2, 129, 9001):
        check(plan, program, {"n": size})


def test_what_has_no_second_way() -> None:
    """A position, and results of which nobody knows how many there are."""
    for kind, outer in (("argmax", False), ("sum", True)):
        b = Builder()
        n = b.size("n", hint=9000)
        shape = (b.size("m", hint=2),) if outer else ()
        x = b.input(*shape, n)
        b.output(b.reduce(shape, (n,), kind, lambda o, *i: o.load(x, *i)))  # noqa: B023
        program = b.program()
        program = replace(
            program, buffers={n: replace(v, device="cuda:0") for n, v in program.buffers.items()}
        )
        (kernel,) = kernels(schedule(program, CFG))
        assert kernel.form is None


@pytest.mark.parametrize("rows, columns", [((512,), 768), ((8192,), 16384), ((7,), 1 << 20)])
def test_on_a_gpu_rows_are_not_walked_where_they_are_few_or_long(
    rows: tuple[int, ...], columns: int
) -> None:
    stores = [
        s.mode
        for k in kernels(schedule(norm_backward(rows, columns), CFG))
        for s in k.stmts
        if isinstance(s, Store)
    ]
    assert set(stores) == {"store"}


def test_nothing_is_walked_on_a_cpu() -> None:
    program = norm_backward((4096,), 768)
    program = replace(
        program, buffers={n: replace(v, device="cpu") for n, v in program.buffers.items()}
    )
    stores = [
        s.mode for k in kernels(schedule(program, CFG)) for s in k.stmts if isinstance(s, Store)
    ]
    assert set(stores) == {"store"}


def test_on_a_gpu_sums_of_one_tensor_are_cut_alike() -> None:
    """The backward of batch norm in half precision: a float32 mean a channel is no reason to cut
    one of its sums."""
    b = Builder()
    dy, x, mean = b.input(1568, 512, dtype=bf16), b.input(1568, 512, dtype=bf16), b.input(512)
    s = b.reduce((512,), (1568,), "sum", lambda o, c, r: o.cast(o.load(dy, r, c), f32))
    t = b.reduce(
        (512,), (1568,), "sum", lambda o, c, r: o.sub(o.cast(o.load(x, r, c), f32), o.load(mean, c))
    )
    b.output(s, t)
    assert [len(k.stmts) for k in kernels(schedule(on_gpu(b), CFG))] == [2, 2]


def test_on_a_gpu_slices_of_large_tensors_are_tiny() -> None:
    """Tables that loops read a few rows of, as bags of embeddings do: one kernel for several."""
    b, n = Builder(), 3
    at = b.input(2048)

    def row(table: str) -> str:
        return b.pointwise((2048, 64), lambda o, k, c: o.add(o.load(table, k, c), o.load(at, k)))

    b.output(*(row(b.input(65536, 64)) for _ in range(n)))
    (kernel,) = kernels(schedule(on_gpu(b), CFG))
    assert len(kernel.outs) == n


def softmax(b: Builder, x: str, shape: tuple[int, ...], axis: int) -> str:
    """Along an axis: the maximum, the sum of exponentials below it, and the quotients."""
    keep = [k for k in range(len(shape)) if k != axis]
    outer = tuple(shape[k] for k in keep)

    def at(o, p):  # type: ignore[no-untyped-def]
        point = dict(zip([*keep, axis], p, strict=True))
        return o.cast(o.load(x, *(point[k] for k in range(len(shape)))), f32)

    def below(o, *p):  # type: ignore[no-untyped-def]
        return o.exp(o.sub(at(o, p), o.load(peak, *p[:-1])))

    peak = str(b.reduce(outer, (shape[axis],), "max", lambda o, *p: at(o, p)))
    total = str(b.reduce(outer, (shape[axis],), "sum", below))
    order = [*keep, axis]

    def quotient(o, *p):  # type: ignore[no-untyped-def]
        q = tuple(p[k] for k in order)
        return o.truediv(below(o, *q), o.load(total, *q[:-1]))

    return b.pointwise(shape, quotient)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("shape, axis", [((1, 1 << 20), 1), ((2, 300007), 1), ((1 << 17, 16), 0)])
def test_a_maximum_and_the_sum_below_it_are_cut_together(
    shape: tuple[int, ...], axis: int, device: str
) -> None:
    """Both of a part while it is near: what is reduced is read twice in all."""
    b = Builder()
    x = b.input(*shape)
    b.output(softmax(b, x, shape, axis))
    program = b.program()
    buffers = {n: replace(v, device=device) for n, v in program.buffers.items()}
    program = replace(program, buffers=buffers)
    plan = schedule(program, CFG)
    check(plan, program)
    assert [len([s for s in k.stmts if isinstance(s, Reduce)]) for k in kernels(plan)] == [2, 2, 0]


@pytest.mark.parametrize("dtype, lanes", [(f32, 4), (f16, 8)])
def test_on_a_gpu_columns_that_begin_anywhere_are_parts_by_lanes(
    dtype: DType, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many rows beside each other begin at a vector, as long as their number has no rest."""
    gpu = DEVICES["cuda"]
    small = replace(gpu.rates, cache_nbytes=1 << 10, min_units=1, split_nbytes=0, unit_nbytes=0)
    monkeypatch.setitem(DEVICES, "cuda", replace(gpu, rates=small))
    for rows, found in ((1024, [2 * lanes * 127, 2 * 127]), (1022, [2 * 127])):
        b = Builder()
        x = b.input(2, rows, 127, dtype=dtype)
        b.output(softmax(b, x, (2, rows, 127), 1))
        program = on_gpu(b)
        plan = schedule(program, CFG)
        check(plan, program)
        reduced = [k for k in kernels(plan) if any(isinstance(s, Reduce) for s in k.stmts)]
        assert [numel(map(extent, k.vars)) for k in reduced] == found
    b = Builder()
    x = b.input(2, 1024, 127, dtype=dtype)
    b.output(b.reduce((2, 127), (1024,), "sum", lambda o, n, c, r: o.cast(o.load(x, n, r, c), f32)))
    program = on_gpu(b)
    plan = schedule(program, CFG)
    check(plan, program)
    assert len(kernels(plan)) == (1 if dtype == f32 else 2)
