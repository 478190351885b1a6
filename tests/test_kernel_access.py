"""Loads along the vector axis that are no plain rows: backwards, with steps, cut off, wrapped
around, by index.

Every kernel runs on every instruction set, on lengths around whole vectors, against the slow
reference; buffers end where their last element ends, so that reading past it can be seen in a page
of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.ir.dtypes import DTYPES, DType, b1, f32, i64
from plait.ir.expr import Expr, Size
from plait.ir.loops import apply, loop_vars
from plait.ir.record import Recorder
from plait.kernel.cpu.passes import plan_nest
from plait.kernel.cpu.target import emit_library
from plait.kernel.cpu.vectorize import Walk, faults_of_vectors, vectorize
from plait.kernel.null.run import run_kernel
from plait.runtime.toolchain import ISAS, Isa
from plait.schedule.legalize import legalize
from plait.schedule.plan import Kernel, Store
from tests.kernel_tools import Loaded, strided, usable_isas
from tests.store_cells import at_page_end

all_isas = pytest.mark.parametrize("isa", usable_isas(), ids=lambda i: i.name)
LENGTHS = (1, 15, 16, 33, 64)
NARROW = ("f32", "bf16", "i64", "u8", "b1")


def copy_kernel(
    name: str, d: DType, rows: int, n: int, n_in: int, index: Callable[[Expr], Size]
) -> Kernel:
    """out[i, j] = x[i, index(j)]."""
    i, j = loop_vars("i", (rows, n))
    value = Recorder().load("x", (i, index(j)), d)
    buffers = (strided("x", d, (rows, n_in)), strided("out", d, (rows, n)))
    return Kernel(name, (i, j), (), (Store("out", (i, j), value, True),), buffers, ("out",), ())


def values_of(d: DType, n: int) -> np.ndarray:
    rng = np.random.default_rng(n)
    if d == b1:
        return rng.integers(0, 2, n).astype(bool)
    if d.name == "bf16":
        return rng.integers(0, 1 << 14, n).astype(np.uint16)
    if d.is_float:
        return rng.standard_normal(n).astype(d.name.replace("f", "float"))
    return rng.integers(0, 100, n).astype({"i64": np.int64, "u8": np.uint8}[d.name])


def check_copies(
    kernels: list[tuple[Kernel, np.ndarray, np.ndarray]], isa: Isa, folder: Path
) -> None:
    """kernels: each with its input and what must come out."""
    loaded = Loaded([k for k, _, _ in kernels], isa, folder)
    for kernel, x, wanted in kernels:
        out = np.zeros(wanted.size, wanted.dtype)
        assert loaded(kernel, {"x": at_page_end(x), "out": out}) == 0
        np.testing.assert_array_equal(out.reshape(wanted.shape), wanted, err_msg=kernel.name)


@all_isas
@pytest.mark.parametrize("name", NARROW)
def test_backwards_and_every_second(isa: Isa, name: str, tmp_path: Path) -> None:
    d, kernels = DTYPES[name], []
    for n in LENGTHS:
        x = values_of(d, 3 * n)
        back = copy_kernel(f"back{n}", d, 3, n, n, lambda j, n=n: n - 1 - j)
        kernels.append((back, x, x.reshape(3, n)[:, ::-1]))
        x = values_of(d, 3 * (2 * n - 1))
        second = copy_kernel(f"second{n}", d, 3, n, 2 * n - 1, lambda j: 2 * j)
        kernels.append((second, x, x.reshape(3, -1)[:, ::2]))
    check_copies(kernels, isa, tmp_path)


@all_isas
@pytest.mark.parametrize("name", ("f32", "i64"))
def test_positions_that_wrap_around(isa: Isa, name: str, tmp_path: Path) -> None:
    d, kernels = DTYPES[name], []
    for n in LENGTHS:
        x = values_of(d, 2 * n)
        roll = copy_kernel(f"roll{n}", d, 2, n, n, lambda j, n=n: (j + n // 2) % n)
        kernels.append((roll, x, np.roll(x.reshape(2, n), -(n // 2), 1)))
        columns = np.arange(n) // 17 + np.arange(n) % 17
        both = copy_kernel(f"both{n}", d, 2, n, int(columns.max()) + 1, lambda j: j // 17 + j % 17)
        x = values_of(d, 2 * (int(columns.max()) + 1))
        kernels.append((both, x, x.reshape(2, -1)[:, columns]))
    check_copies(kernels, isa, tmp_path)


def test_views_of_views_need_no_division() -> None:
    (i,) = loop_vars("i", (4096,))
    flat = Recorder().load("x", (i // 512, i % 512), f32)
    buffers = (strided("x", f32, (8, 512)), strided("out", f32, (4096,)))
    kernel = Kernel("flat", (i,), (), (Store("out", (i,), flat, True),), buffers, ("out",), ())
    text = emit_library([kernel], ISAS["avx512"]).text
    assert "% (512)" not in text
    assert "ld_f32(" in text


@all_isas
@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge"])
def test_masks_of_positions(isa: Isa, op: str, tmp_path: Path) -> None:
    kernels, wanted = [], []
    compare = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}[op]
    for n in LENGTHS:
        for limit in (-1, 0, 1, n // 2, n - 1, n, n + 40, 1 << 40):
            for flipped in (False, True):
                ops = Recorder()
                i, j = loop_vars("i", (3, n))
                ends = (ops.index(j - i), ops.index(limit))
                mask = apply(op, *(ends[::-1] if flipped else ends))
                value = ops.masked(mask, lambda ops=ops, i=i, j=j: ops.load("x", (i, j), f32), -1.0)
                buffers = (strided("x", f32, (3, n)), strided("out", f32, (3, n)))
                store = Store("out", (i, j), value, True)
                name = f"mask{len(kernels)}"
                kernels.append(Kernel(name, (i, j), (), (store,), buffers, ("out",), ()))
                at = np.arange(n)[None, :] - np.arange(3)[:, None]
                wanted.append(compare(limit, at) if flipped else compare(at, limit))
    loaded = Loaded(kernels, isa, tmp_path)
    for kernel, on in zip(kernels, wanted, strict=True):
        x, out = values_of(f32, on.size), np.zeros(on.size, np.float32)
        assert loaded(kernel, {"x": at_page_end(x), "out": out}) == 0
        np.testing.assert_array_equal(out.reshape(on.shape), np.where(on, x.reshape(on.shape), -1))


def test_masks_of_short_rows_are_constants() -> None:
    """A padded row of a few vectors is one unit of work, its loop unrolled; a long one is shared by
    threads."""

    def text(n: int) -> str:
        i, j = loop_vars("i", (100, n + 2))
        ops = Recorder()
        inside = apply(
            "and", apply("ge", ops.index(j), ops.index(1)), apply("le", ops.index(j), ops.index(n))
        )
        value = ops.masked(inside, lambda: ops.load("x", (i, j - 1), f32), 0)
        buffers = (strided("x", f32, (100, n)), strided("out", f32, (100, n + 2)))
        kernel = Kernel(
            "pad", (i, j), (), (Store("out", (i, j), value, True),), buffers, ("out",), ()
        )
        return emit_library([kernel], ISAS["avx512"]).text

    short, long = text(56), text(300)
    assert "units = 100;" in short
    assert "GCC unroll" in short
    assert "units = 1900;" in long
    assert "GCC unroll" not in long


def take_kernel(d: DType, n: int, size: int, wrap: bool) -> Kernel:
    """out[i, j] = table[i, where[i, j]]; wrap: negative ones count from the end."""
    ops = Recorder()
    i, j = loop_vars("i", (2, n))
    at = ops.load("where", (i, j), i64)
    value = ops.load("x", (i, ops.checked(at, size, wrap)), d)
    buffers = (
        strided("where", i64, (2, n)), strided("x", d, (2, size)), strided("out", d, (2, n)),
    )  # fmt: skip
    store = Store("out", (i, j), value, True)
    return Kernel(f"take_{d}_{n}_{wrap}", (i, j), (), (store,), buffers, ("out",), ())


def patterns(n: int, size: int) -> dict[str, np.ndarray]:
    """Indices that lie far apart, near each other, in order, backwards."""
    row = np.arange(n)
    rng = np.random.default_rng(n)
    return {
        "far": rng.integers(0, size, n), "same": np.full(n, size - 1), "order": row % size,
        "slow": np.minimum(row // 2, size - 1), "back": size - 1 - row % size,
        "ends": (row % 2) * (size - 1), "near": (row + rng.integers(0, 3, n)) % size,
    }  # fmt: skip


def test_indices_that_memory_holds_are_not_spilled() -> None:
    """Lanes that a loop reads one by one come from where they were loaded."""
    source = emit_library([take_kernel(f32, 32, 41, False)], ISAS["avx512"]).text
    assert "in_memory" not in source
    assert "gather_f32" not in source


@all_isas
@pytest.mark.parametrize("wrap", [False, True])
def test_indices(isa: Isa, wrap: bool, tmp_path: Path) -> None:
    size = 41
    kernels = {
        (d, n): take_kernel(DTYPES[d], n, size, wrap)
        for d in ("f32", "bf16", "i64")
        for n in LENGTHS
    }
    loaded = Loaded(list(kernels.values()), isa, tmp_path)
    for (d, n), kernel in kernels.items():
        x = values_of(DTYPES[d], 2 * size)
        for name, row in patterns(n, size).items():
            where = np.stack([row, row[::-1]])
            if wrap:
                where = where - size * (np.arange(n) % 3 == 0)
            out = np.zeros(2 * n, x.dtype)
            arrays = {"where": at_page_end(where), "x": at_page_end(x), "out": out}
            assert loaded(kernel, arrays) == 0
            wanted = np.take_along_axis(x.reshape(2, size), where % size, 1)
            np.testing.assert_array_equal(out.reshape(2, n), wanted, err_msg=f"{d} {n} {name}")
            slow = np.zeros(2 * n, x.dtype)
            assert run_kernel(kernel, {"where": where.ravel(), "x": x, "out": slow}) == 0
            np.testing.assert_array_equal(slow, out)


@all_isas
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("bad", [41, -42, 1 << 31, (1 << 32) + 1, -(1 << 32), 1 << 62, -(1 << 62)])
def test_indices_that_32_bits_would_misread_are_reported(
    isa: Isa, wrap: bool, bad: int, tmp_path: Path
) -> None:
    kernel = take_kernel(f32, 33, 41, wrap)
    loaded = Loaded([kernel], isa, tmp_path)
    for at in (0, 20, 32):
        where = np.zeros((2, 33), np.int64)
        where[1, at] = bad
        arrays = {
            "where": where,
            "x": at_page_end(values_of(f32, 82)),
            "out": np.zeros(66, np.float32),
        }
        assert loaded(kernel, arrays) == 1


@all_isas
@pytest.mark.parametrize("n", [3, 33])
def test_an_index_into_an_empty_table_is_reported_and_reads_nothing(
    isa: Isa, n: int, tmp_path: Path
) -> None:
    kernel = take_kernel(f32, n, 0, True)
    arrays = {
        "where": np.zeros((2, n), np.int64),
        "x": at_page_end(np.zeros(0, np.float32)),
        "out": np.zeros(2 * n, np.float32),
    }
    assert Loaded([kernel], isa, tmp_path)(kernel, arrays) == 1


def test_a_later_pass_gathers_with_an_index_that_an_earlier_one_kept() -> None:
    """The index is in a buffer of the row, in 64 bits; the gather takes 32."""
    w, x, y = torch.randint(0, 116, (64, 200)), torch.randn(50), torch.randn(50)

    def fn(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        k = (w * 3) // 7
        return y[k] - x[k].amax(1, keepdim=True)

    assert torch.equal(torch.compile(fn, backend="plait")(w, x, y), fn(w, x, y))


def test_a_scan_whose_positions_nobody_wants() -> None:
    x = torch.randn(5, 70)
    compiled = torch.compile(lambda x: x.cummax(1)[0], backend="plait")
    assert torch.equal(compiled(x), x.cummax(1)[0])


def test_a_row_that_says_what_is_not_so_is_a_fault() -> None:
    i, j = loop_vars("i", (4, 64))
    x, out = strided("x", f32, (64, 4)), strided("out", f32, (4, 64))
    value = Recorder().load("x", (j, i), f32)  # 4 apart from lane to lane
    store = Store("out", (i, j), value, True)
    kernel = Kernel("k", (i, j), (), (store,), (x, out), ("out",), ())
    vectors = vectorize(plan_nest(legalize(kernel), 8, False))
    assert faults_of_vectors(vectors) == []
    rows = replace(vectors, loads=dict.fromkeys(vectors.loads, Walk.ROW))
    assert faults_of_vectors(rows) != []
    assert faults_of_vectors(replace(vectors, stores={})) == ["cannot store out as it says"]
