"""Kernels for GPUs, without one: every op has a row, random kernels run in Triton's interpreter and compile to cubins.

Triton is never imported by this process: torch would find it and change what it loads. It lies in a folder of its own
beside the environment (`make env`), and runs in processes that get that folder as PYTHONPATH.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.errors import Unsupported
from plait.ir.dtypes import DType, bf16, f32, i16, i64
from plait.ir.loops import Buffer, Load, cast, const, loop_vars, node
from plait.ir.ops import OPS, SPECIAL
from plait.ir.sizes import evaluate, symbol
from plait.kernel.space import linear_space
from plait.kernel.triton import TritonTarget, emit_kernel
from plait.kernel.triton_tiles import Tile, plan_tile
from plait.schedule.plan import Kernel, Reduce, Store
from tests.gpu_rows import kernel_of

ROOT = Path(__file__).parent.parent
TRITON = Path(sys.prefix) / "triton"
needs_triton = pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")


def run(*args: str, **env: str) -> str:
    """The output of a Python process that has Triton."""
    done = subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(TRITON), **env},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_op_has_a_row() -> None:
    assert set(TritonTarget.table) == {*OPS, *SPECIAL}


@needs_triton
@pytest.mark.parametrize("first", [pytest.param(7000, marks=pytest.mark.slow), 8000])
def test_random_kernels_in_the_interpreter(first: int) -> None:
    out = run("-m", "tests.gpu_kernels", str(first), "12", TRITON_INTERPRET="1")
    assert "12 kernels interpreted, 0 wrong" in out


@needs_triton
def test_rows_and_columns_too_long_for_a_block_in_the_interpreter() -> None:
    assert "62 reductions, 0 wrong" in run("-m", "tests.gpu_rows", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_random_kernels_compile(capability: str, tmp_path: Path) -> None:
    out = run(
        "-m", "tests.gpu_compile", capability, "9000", "8", TRITON_CACHE_DIR=str(tmp_path)
    )  # fmt: skip
    assert f"8 kernels for sm_{capability}" in out


def kernel(*stmts: Store | Reduce, vars_: tuple, rvars: tuple = (), args: tuple) -> Kernel:
    outs = tuple(s.buf for s in stmts if isinstance(s, Store))
    return Kernel("k", vars_, rvars, stmts, args, outs, ())


def buffer(name: str, *shape: int, dtype: object = f32) -> Buffer:
    strides = tuple(int.__mul__(1, 1) if k == len(shape) - 1 else shape[-1] for k in range(len(shape)))
    return Buffer(name, dtype, shape, strides)  # type: ignore[arg-type]


def test_a_scatter_without_an_atomic_is_refused() -> None:
    (i,) = loop_vars("i", (8,))
    store = Store("out", (i,), const(1, i16), True, mode="add")
    with pytest.raises(Unsupported, match="combines i16 by 'add'"):
        emit_kernel(kernel(store, vars_=(i,), args=(buffer("out", 8, dtype=i16),)), "k")


def test_a_transposition_gets_a_square_tile() -> None:
    i, j = loop_vars("i", (512, 384))
    x = node("load", (), Load("x", (j, i)), f32)
    made = emit_kernel(
        kernel(Store("out", (i, j), x, True), vars_=(i, j), args=(buffer("x", 384, 512), buffer("out", 512, 384))), "k"
    )
    assert made.grid == 8 * 6 and "xmask" not in made.text  # blocks of 64 x 64 divide it


def test_sums_of_columns_get_columns_though_what_rows_have_is_wider() -> None:
    (i,), (r,) = loop_vars("i", (16384,)), loop_vars("r", (512,))
    x = cast(node("load", (), Load("x", (r, i)), bf16), f32)
    scaled = node("mul", (x, node("load", (), Load("scale", (r,)), f32)))
    value = node("sub", (scaled, node("load", (), Load("mean", (r,)), f32)))
    stmts = (Reduce("s", "sum", value), Store("out", (i,), node("acc", (), "s", f32), False))
    args = (buffer("x", 512, 16384, dtype=bf16), buffer("scale", 512), buffer("mean", 512), buffer("out", 16384))
    tile = plan_tile(linear_space(kernel(*stmts, vars_=(i,), rvars=(r,), args=args)))
    assert {g.name: g.block for g in tile.groups}["x"] == 64  # 128 bytes of a row of x


def _columns(rows: int, columns: int, dtype: DType, parts: int = 1) -> Tile:
    """The tile of sums over `rows` rows of each of `parts`, less a mean that each row has."""
    (p, i), (r,) = loop_vars("i", (parts, columns)), loop_vars("r", (rows,))
    x = cast(node("load", (), Load("x", (p, r, i)), dtype), f32)
    value = node("sub", (x, node("load", (), Load("mean", (p, r)), f32)))
    stmts = (Reduce("s", "sum", value), Store("out", (p, i), node("acc", (), "s", f32), False))
    args = (buffer("x", parts, rows, columns, dtype=dtype), buffer("mean", parts, rows), buffer("out", parts, columns))
    return plan_tile(linear_space(kernel(*stmts, vars_=(p, i), rvars=(r,), args=args)))


def test_blocks_of_columns() -> None:
    def blocks(tile: Tile) -> tuple[int, int, bool]:
        x, r = tile.groups
        return x.block, r.block, tile.looped

    assert blocks(_columns(32, 768, bf16, parts=197)) == (64, 32, False)  # a mean a row has no part in their width
    assert blocks(_columns(197, 3072, bf16, parts=32)) == (64, 32, True)  # 64 would be 59 rows too many
    assert blocks(_columns(197, 768, bf16, parts=32)) == (64, 64, True)  # where programs are few, rows in flight count
    assert blocks(_columns(1024, 64, f32)) == (8, 1024, False)  # the device would wait for two programs of 32 columns
    assert blocks(_columns(1024, 1024, bf16)) == (16, 256, True)
    assert blocks(_columns(392, 256, bf16, parts=256)) == (64, 32, True)
    for kept, block, warps in ((bf16, (64, 128, False), 4), (f32, (32, 128, False), 4)):  # 64 or 32 points a thread
        tile = _columns(112, 64, kept, parts=896)
        assert blocks(tile) == block and tile.num_warps == warps


def test_the_end_of_a_row_is_a_block_of_its_own_where_its_mask_would_cut_vectors() -> None:
    for length, pitch, apart in ((50257, 50264, True), (50257, 50257, False), (50264, 50264, False)):
        text = emit_kernel(kernel_of("softmax_bf16", length, pitch), "k").text
        assert ("range(0, 49152, 8192)" in text) is apart
        assert text.count("tl.load") == (4 if apart else 2)


def test_a_sum_of_one_choice_takes_no_pass() -> None:
    text = emit_kernel(kernel_of("choice_bf16", 50257), "k").text
    assert text.count("for offset") == 1 and "tl.sum" not in text


def test_one_more_than_a_tanh_is_made_without_it() -> None:
    text = emit_kernel(kernel_of("gate", 700), "k").text
    assert "p_one_more_than_tanh(v" in text and "libdevice.tanh" not in text


def test_indices_are_wide_only_where_a_range_needs_it() -> None:
    for n, wide in ((1 << 20, False), (1 << 32, True)):
        (i,) = loop_vars("i", (n,))
        x = node("load", (), Load("x", (i,)), f32)
        made = emit_kernel(
            kernel(Store("out", (i,), x, True), vars_=(i,), args=(buffer("x", n), buffer("out", n))), "k"
        )
        assert ("tl.int64" in made.text) is wide


def test_the_grid_of_an_empty_tensor_is_empty() -> None:
    n = symbol("s0", 0, 1 << 20)
    (i,) = loop_vars("i", (n,))
    x = node("index", (), i, i64)
    out = Buffer("out", i64, (n,), (1,))
    made = emit_kernel(Kernel("k", (i,), (), (Store("out", (i,), x, True),), (out,), ("out",), (n,)), "k")
    assert evaluate(made.grid, {"s0": 0}) == 0
    assert evaluate(made.grid, {"s0": 1025}) * 128 >= 1025
