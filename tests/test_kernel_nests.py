"""Loop nests by hand: what the random kernels do not reach, or reach too seldom."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from plait.ir.dtypes import b1, f32, i64
from plait.ir.expr import Size, evaluate, symbol
from plait.ir.loops import Buffer, Load, Node, apply, loop_vars, node
from plait.ir.record import Recorder
from plait.kernel.cpu.target import emit_library, structure
from plait.kernel.null.run import run_kernel
from plait.runtime.toolchain import ISAS, Isa
from plait.schedule.plan import Kernel, Reduce, Store
from tests.kernel_tools import Loaded, strided, usable_isas

all_isas = pytest.mark.parametrize("isa", usable_isas(), ids=lambda i: i.name)


def acc(name: str) -> Node:
    return node("acc", (), name, f32)


def softmax(
    rows: Size,
    columns: Size,
    names: tuple[str, str, str] = ("softmax", "x", "y"),
    sizes: tuple = (),
) -> Kernel:
    ops = Recorder()
    kernel, x, y = names
    (i,), (r,) = loop_vars("i", (rows,)), loop_vars("r", (columns,))
    value = ops.load(x, (i, r), f32)
    e = apply("exp", apply("sub", value, acc("m")))
    stmts = (
        Reduce("m", "max", value),
        Reduce("s", "sum", e),
        Store(y, (i, r), apply("truediv", e, acc("s")), True),
    )
    buffers = (strided(x, f32, (rows, columns)), strided(y, f32, (rows, columns)))
    return Kernel(kernel, (i,), (r,), stmts, buffers, (y,), sizes)


def truth_softmax(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    e = np.exp(wide - wide.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reduce_kernel(kind: str, shape: tuple[int, int], axis: int, suffix: str = "") -> Kernel:
    """out = kind of x over one axis."""
    ops = Recorder()
    (i,), (r,) = loop_vars("i", (shape[1 - axis],)), loop_vars("r", (shape[axis],))
    index = (i, r) if axis == 1 else (r, i)
    out = i64 if kind.startswith("arg") else f32
    stmts = (
        Reduce("a", kind, ops.load("x", index, f32)),
        Store("out", (i,), node("acc", (), "a" + suffix, out), False),
    )
    buffers = (strided("x", f32, shape), strided("out", out, (shape[1 - axis],)))
    return Kernel(f"{kind}{axis}", (i,), (r,), stmts, buffers, ("out",), ())


# --------------------------------------------------------------------------------------------- text
def test_equal_input_gives_equal_text() -> None:
    texts = {
        emit_library([softmax(7, 130), reduce_kernel("sum", (9, 8), 0)], ISAS["avx512"]).text
        for _ in range(3)
    }
    assert len(texts) == 1


def test_kernels_that_differ_in_names_only_share_a_symbol() -> None:
    kernels = [
        softmax(7, 130),
        softmax(7, 130, ("other", "p", "q")),
        softmax(7, 131, ("third", "x", "y")),
    ]
    source = emit_library(kernels, ISAS["avx512"])
    assert source.entry_points == {"softmax": "softmax", "other": "softmax", "third": "third"}
    assert source.text.count('extern "C" i64') == 2
    assert structure(kernels[0]) == structure(kernels[1]) != structure(kernels[2])


def test_names_that_are_no_identifiers_get_symbols_of_their_own() -> None:
    kernels = [softmax(7, 130, ("a.b", "x", "y")), softmax(7, 131, ("a b", "x", "y"))]
    assert emit_library(kernels, ISAS["portable"]).entry_points == {"a.b": "a_b", "a b": "a_b_1"}


def test_nothing_is_included() -> None:
    for isa in ISAS.values():
        assert "#include" not in emit_library([softmax(7, 130)], isa).text


# ------------------------------------------------------------------------------------------- memory
@all_isas
@pytest.mark.parametrize("columns", [1, 16, 133])
def test_softmax_in_place(isa: Isa, columns: int, tmp_path: Path) -> None:
    """An output may be the memory of the input it replaces, several passes or not."""
    kernel = softmax(21, columns)
    x = np.random.default_rng(0).normal(size=(21, columns)).astype(np.float32)
    want = truth_softmax(x)
    Loaded([kernel], isa, tmp_path)(kernel, {"x": x, "y": x}, threads=2)
    np.testing.assert_allclose(x, want, rtol=2e-6, atol=1e-9)


@all_isas
@pytest.mark.parametrize("columns", [3, 16, 35])
def test_a_product_that_is_summed_is_there_for_a_later_pass(
    isa: Isa, columns: int, tmp_path: Path
) -> None:
    """A multiply-add would compute it without keeping it."""
    ops = Recorder()
    (i,), (r,) = loop_vars("i", (5,)), loop_vars("r", (columns,))
    product = apply("mul", apply("exp", ops.load("x", (i, r), f32)), ops.load("x", (i, r), f32))
    stmts = (Reduce("s", "sum", product), Store("y", (i, r), apply("sub", product, acc("s")), True))
    buffers = (strided("x", f32, (5, columns)), strided("y", f32, (5, columns)))
    kernel = Kernel("kept", (i,), (r,), stmts, buffers, ("y",), ())
    x = np.random.default_rng(2).normal(size=(5, columns)).astype(np.float32)
    y = np.full_like(x, 9)
    Loaded([kernel], isa, tmp_path)(kernel, {"x": x, "y": y})
    p = np.exp(x.astype(np.float64)) * x
    np.testing.assert_allclose(y, p - p.sum(-1, keepdims=True), rtol=1e-5, atol=1e-5)


@all_isas
def test_nothing_is_written_past_the_end(isa: Isa, tmp_path: Path) -> None:
    for columns in (1, 3, 15, 17):
        kernel = softmax(3, columns)
        y = np.full(3 * columns + 64, 7, np.float32)
        x = np.random.default_rng(1).normal(size=(3, columns)).astype(np.float32)
        Loaded([kernel], isa, tmp_path)(kernel, {"x": x, "y": y})
        assert (y[3 * columns :] == 7).all()
        np.testing.assert_allclose(
            y[: 3 * columns].reshape(3, columns), truth_softmax(x), rtol=2e-6, atol=1e-9
        )


@all_isas
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_ranges(isa: Isa, shape: tuple[int, int], tmp_path: Path) -> None:
    """A sum over nothing is 0; no point writes nothing."""
    kernels = [reduce_kernel("sum", shape, axis) for axis in (0, 1)]
    loaded = Loaded(kernels, isa, tmp_path)
    for kernel in kernels:
        out = np.full(8, 7, np.float32)
        assert loaded(kernel, {"x": np.zeros(1, np.float32), "out": out}, threads=2) == 0
        n = kernel.args[1].shape[0]
        assert (out[:n] == 0).all()
        assert (out[n:] == 7).all()


@all_isas
@pytest.mark.parametrize("threads", [1, 2, 5, 64])
def test_threads_share_every_point_once(isa: Isa, threads: int, tmp_path: Path) -> None:
    """An update in place counts how often each point runs, whatever the number of threads."""
    (i, j) = loop_vars("i", (7, 37))
    one = node("const", (), 1.0, f32)
    buffer = Buffer("out", f32, (7, 37), (41, 1))  # padded rows: the axes cannot be merged
    kernel = Kernel(
        "count", (i, j), (), (Store("out", (i, j), one, True, "add"),), (buffer,), ("out",), ()
    )
    out = np.zeros((7, 41), np.float32)
    Loaded([kernel], isa, tmp_path)(kernel, {"out": out}, threads=threads)
    assert (out[:, :37] == 1).all()
    assert (out[:, 37:] == 0).all()


@all_isas
@pytest.mark.parametrize("threads", [1, 2, 5, 64])
@pytest.mark.parametrize("along", [0, 1])
def test_threads_share_scatters_where_points_stay_apart(
    isa: Isa, along: int, threads: int, tmp_path: Path
) -> None:
    """Rows into which elements go anywhere, or columns of rows that go anywhere: no sum depends on
    the threads."""
    shape, rng = (9, 37), np.random.default_rng(along)
    i, j = loop_vars("i", shape)
    ops = Recorder()
    where = ops.load("where", (i, j) if along else (i,), i64)
    at = ops.indirect(where, 5)
    index, args = ops.take_args((i, at) if along else (at, j))
    out_shape = (9, 5) if along else (5, 37)
    store = Store("out", index, ops.load("x", (i, j), f32), True, "add", args)
    where_shape = shape if along else shape[:1]
    buffers = (
        strided("where", i64, where_shape),
        strided("x", f32, shape),
        strided("out", f32, out_shape),
    )
    kernel = Kernel("scatter", (i, j), (), (store,), buffers, ("out",), (), True)
    assert kernel.apart == ((i,) if along else (j,))
    places, x = rng.integers(0, 5, where_shape), rng.standard_normal(shape).astype(np.float32)
    wanted, out = np.zeros(out_shape, np.float32), np.zeros(out_shape, np.float32)
    for a in range(9):
        for b in range(37):
            wanted[(a, places[a, b]) if along else (places[a], b)] += x[a, b]
    loaded = Loaded([kernel], isa, tmp_path)
    assert "tid != 0" not in loaded.source.text
    assert loaded(kernel, {"where": places, "x": x, "out": out}, threads=threads) == 0
    np.testing.assert_array_equal(out, wanted)


@all_isas
def test_atomic_updates_from_real_threads(isa: Isa, tmp_path: Path) -> None:
    n = 20000
    (i,) = loop_vars("i", (n,))
    at = symbol("$0", extent=3)
    arg = node("load", (), Load("where", (i,)), i64)
    one = node("const", (), 1.0, f32)
    store = Store("out", (at,), one, True, "add", (arg,), None, True)
    buffers = (strided("where", i64, (n,)), strided("out", f32, (3,)))
    kernel = Kernel("histogram", (i,), (), (store,), buffers, ("out",), ())
    loaded = Loaded([kernel], isa, tmp_path)
    where = np.random.default_rng(0).integers(0, 3, n)
    out = np.zeros(3, np.float32)
    workers = [
        threading.Thread(target=loaded.part, args=(kernel, {"where": where, "out": out}, t, 4))
        for t in range(4)
    ]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    np.testing.assert_array_equal(out, np.bincount(where, minlength=3))


def transpose_and_add(
    rows: Size, columns: Size, values: dict[str, int], isa: Isa, folder: Path
) -> None:
    """x.T + y in a kernel of these sizes, x of shape (rows, columns); values: of the symbols in
    them."""
    ops = Recorder()
    (i, j) = loop_vars("i", (columns, rows))
    value = apply("add", ops.load("x", (j, i), f32), ops.load("y", (i, j), f32))
    buffers = (
        strided("x", f32, (rows, columns)),
        strided("y", f32, (columns, rows)),
        strided("z", f32, (columns, rows)),
    )
    sizes = tuple(symbol(s, 0, 1 << 20) for s in values)
    kernel = Kernel("t", (i, j), (), (Store("z", (i, j), value, True),), buffers, ("z",), sizes)
    m, n = evaluate(rows, values), evaluate(columns, values)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(m, n)).astype(np.float32), rng.normal(size=(n, m)).astype(np.float32)
    z = np.zeros((n, m), np.float32)
    Loaded([kernel], isa, folder)(kernel, {"x": x, "y": y, "z": z}, values, threads=3)
    np.testing.assert_array_equal(z, x.T + y)


@all_isas
@pytest.mark.parametrize("shape", [(16, 16), (33, 50), (5, 129), (64, 3)])
def test_transpose_and_add(isa: Isa, shape: tuple[int, int], tmp_path: Path) -> None:
    """Loads along one axis, stores along the other: whole tiles, ragged edges, thin matrices."""
    transpose_and_add(*shape, {}, isa, tmp_path)


@all_isas
@pytest.mark.parametrize("n", [12, 80, 135])
def test_transpose_of_sizes_that_are_computed(isa: Isa, n: int, tmp_path: Path) -> None:
    """Sizes that are variables of the kernel must not be confused with the tile's own."""
    rows = symbol("s0", 0, 1 << 20) // 4
    transpose_and_add(rows, rows * rows, {"s0": n}, isa, tmp_path)


# --------------------------------------------------------------------------------------- reductions
@all_isas
@pytest.mark.parametrize("axis", [0, 1])
def test_long_sums_are_as_accurate_as_pairwise_ones(isa: Isa, axis: int, tmp_path: Path) -> None:
    """Against numpy's pairwise sum on the same float32 data: the error may be a few times larger,
    not length times."""
    shape = (300000, 3) if axis == 0 else (3, 300000)
    x = (np.random.default_rng(0).normal(size=shape) + 3).astype(np.float32)
    kernel = reduce_kernel("sum", shape, axis)
    out = np.zeros(3, np.float32)
    Loaded([kernel], isa, tmp_path)(kernel, {"x": x, "out": out})
    truth = x.astype(np.float64).sum(axis)
    assert (np.abs(out - truth) / truth).max() < 2e-6


@all_isas
@pytest.mark.parametrize("axis", [0, 1])
def test_variance_far_from_zero(isa: Isa, axis: int, tmp_path: Path) -> None:
    """Mean 1e4, deviation 1: a sum of squares less the squared mean would lose every digit."""
    shape = (1000, 40) if axis == 0 else (40, 1000)
    x = (np.random.default_rng(0).normal(size=shape) + 1e4).astype(np.float32)
    kernel = reduce_kernel("welford", shape, axis, ".m2")
    out = np.zeros(40, np.float32)
    Loaded([kernel], isa, tmp_path)(kernel, {"x": x, "out": out})
    wide = x.astype(np.float64)
    truth = ((wide - wide.mean(axis, keepdims=True)) ** 2).sum(axis)
    np.testing.assert_allclose(out, truth, rtol=1e-4)


@all_isas
@pytest.mark.parametrize("kind", ["argmax", "argmin"])
@pytest.mark.parametrize("axis", [0, 1])
def test_positions_take_the_first_and_nan_wins(
    isa: Isa, kind: str, axis: int, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).integers(0, 4, (70, 70)).astype(np.float32)  # many ties
    x[3, 40], x[3, 50], x[20, 5], x[44, 5] = (np.nan,) * 4
    x[6, :] = x[:, 6] = np.inf if kind == "argmin" else -np.inf
    kernel = reduce_kernel(kind, x.shape, axis)
    out = np.zeros(70, np.int64)
    Loaded([kernel], isa, tmp_path)(kernel, {"x": x, "out": out})
    np.testing.assert_array_equal(out, (np.argmax if kind == "argmax" else np.argmin)(x, axis=axis))


@all_isas
@pytest.mark.parametrize("kind", ["max", "min"])
def test_nan_wins_in_every_lane(isa: Isa, kind: str, tmp_path: Path) -> None:
    kernel = reduce_kernel(kind, (67, 67), 1)
    loaded = Loaded([kernel], isa, tmp_path)
    x = np.random.default_rng(0).normal(size=(67, 67)).astype(np.float32)
    np.fill_diagonal(x, np.nan)
    out = np.zeros(67, np.float32)
    loaded(kernel, {"x": x, "out": out})
    assert np.isnan(out).all()


@all_isas
@pytest.mark.parametrize("n", [5, 200, 40000])
def test_dynamic_rows_longer_and_shorter_than_the_buffer(isa: Isa, n: int, tmp_path: Path) -> None:
    columns = symbol("s0", 0, 1 << 40)
    kernel = softmax(2, columns, sizes=(columns,))
    x = np.random.default_rng(0).normal(size=(2, n)).astype(np.float32)
    y = np.zeros_like(x)
    Loaded([kernel], isa, tmp_path)(kernel, {"x": x, "y": y}, {"s0": n})
    np.testing.assert_allclose(y, truth_softmax(x), rtol=5e-6, atol=1e-12)


@all_isas
@pytest.mark.parametrize("n", [1, 15, 100])
@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
def test_scans(isa: Isa, kind: str, n: int, tmp_path: Path) -> None:
    ops = Recorder()
    (i,), (r,) = loop_vars("i", (9,)), loop_vars("r", (n,))
    stmts = (
        Reduce("run", kind, ops.load("x", (i, r), f32), running=True),
        Store("y", (i, r), acc("run"), True),
    )
    buffers = (strided("x", f32, (9, n)), strided("y", f32, (9, n)))
    kernel = Kernel("scan", (i,), (r,), stmts, buffers, ("y",), ())
    x = np.random.default_rng(0).uniform(0.8, 1.2, (9, n)).astype(np.float32)
    y, want = np.zeros_like(x), np.zeros(9 * n, np.float32)
    Loaded([kernel], isa, tmp_path)(kernel, {"x": x, "y": y}, threads=2)
    run_kernel(kernel, {"x": x.reshape(-1), "y": want})
    np.testing.assert_allclose(y.reshape(-1), want, rtol=3e-7)


# ------------------------------------------------------------------------------------------- checks
@all_isas
@pytest.mark.parametrize("at", [0, 17, 36])
def test_an_index_out_of_range_is_reported_and_touches_nothing(
    isa: Isa, at: int, tmp_path: Path
) -> None:
    ops = Recorder()
    (i,) = loop_vars("i", (37,))
    k = ops.checked(ops.load("where", (i,), i64), 5)
    buffers = (
        strided("where", i64, (37,)),
        strided("table", f32, (5,)),
        strided("out", f32, (37,)),
    )
    store = Store("out", (i,), ops.load("table", (k,), f32), True)
    kernel = Kernel("take", (i,), (), (store,), buffers, ("out",), ())
    loaded = Loaded([kernel], isa, tmp_path)
    where = np.random.default_rng(0).integers(-5, 5, 37)
    table, out = np.arange(5, dtype=np.float32), np.zeros(37, np.float32)
    assert loaded(kernel, {"where": where, "table": table, "out": out}) == 0
    np.testing.assert_array_equal(out, table[where])
    for bad in (5, -6, 1 << 62, -(1 << 62)):
        where[at] = bad
        assert loaded(kernel, {"where": where, "table": table, "out": out}) == 1


@all_isas
def test_a_masked_index_may_be_anything(isa: Isa, tmp_path: Path) -> None:
    ops = Recorder()
    (i,) = loop_vars("i", (37,))
    mask = ops.load("mask", (i,), b1)

    def body() -> Node:
        k = ops.checked(ops.load("where", (i,), i64), 5)
        return ops.load("table", (k,), f32)

    value = ops.masked(mask, body, -1.0)
    buffers = (
        strided("mask", b1, (37,)), strided("where", i64, (37,)), strided("table", f32, (5,)),
        strided("out", f32, (37,)),
    )  # fmt: skip
    kernel = Kernel("take", (i,), (), (Store("out", (i,), value, True),), buffers, ("out",), ())
    rng = np.random.default_rng(0)
    on = rng.integers(0, 2, 37).astype(bool)
    where = np.where(on, rng.integers(0, 5, 37), 1 << 60)
    table, out = np.arange(5, dtype=np.float32), np.zeros(37, np.float32)
    code = Loaded([kernel], isa, tmp_path)(
        kernel, {"mask": on, "where": where, "table": table, "out": out}
    )
    assert code == 0
    np.testing.assert_array_equal(out, np.where(on, table[np.where(on, where, 0)], -1))
