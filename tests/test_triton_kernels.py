"""Kernels for GPUs, without one: every op has a row, random kernels run in Triton's interpreter and
compile to cubins.

Triton is never imported by this process: torch would find it and change what it loads. It lies in a
folder of its own beside the environment (`make env`), and runs in processes that get that folder as
PYTHONPATH.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plait.config import Config
from plait.errors import Unsupported
from plait.ir.checks import ZERO_DIVISION
from plait.ir.dtypes import DType, bf16, f16, f32, i16, i64
from plait.ir.expr import Expr, contiguous_strides, evaluate, free_symbols, smin, symbol
from plait.ir.loops import Buffer, Load, cast, const, loop_vars, node
from plait.ir.ops import OPS, SPECIAL
from plait.kernel.triton.ops import _FUNCTIONS, literal
from plait.kernel.triton.target import TritonTarget, emit_kernel
from plait.kernel.triton.tiles import Tile, plan_tile
from plait.kernel.triton.user import TritonKernel
from plait.schedule.legalize import legalize
from plait.schedule.plan import Kernel, Reduce, Store
from tests import warm
from tests.gpu_rows import kernel_of
from tests.kernel_tools import emitted

ROOT = Path(__file__).parent.parent
TRITON = Path(sys.prefix) / "triton"
needs_triton = pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")


def run(*args: str, **env: str) -> str:
    """The output of a Python process that has Triton."""
    env = {**os.environ, "PYTHONPATH": str(TRITON), **env}
    done = warm.run(*args, env=env, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_op_has_a_row() -> None:
    assert set(TritonTarget.table) == {*OPS, *SPECIAL}


CONSTANTS = """
import re, sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

namespace, path = {}, sys.argv[1]
exec(compile(open(path).read(), path, "exec"), namespace)
for name in sorted(k for k in namespace if k.startswith("constant_")):
    source = ASTSource(fn=namespace[name], signature={"p": "*fp32"}, constexprs={})
    found = re.search(
        r"mov.b32[^,]*, (-?\\d+);",
        triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"],
    )
    print(found[1])
"""


@needs_triton
def test_constants_are_what_they_say(tmp_path: Path) -> None:
    """In what Triton compiles: its interpreter makes them otherwise."""
    wanted: list[float] = []
    source = "import triton\nimport triton.language as tl\n"
    for k, (d, dtype) in enumerate(
        [(bf16, torch.bfloat16), (f16, torch.float16), (f32, torch.float32)]
    ):
        for n, value in enumerate((1e-8, -1e-6, 1e-30, 3.5, 1e30, 7e-5)):
            number = literal(value, d)
            source += (
                f"@triton.jit\ndef constant_{k}{n}(p):\n"
                f"    tl.store(p, ({number}).to(tl.float32))\n"
            )
            wanted.append(torch.tensor(value).to(dtype).item())
    (tmp_path / "kernels.py").write_text(source)
    found = run("-c", CONSTANTS, str(tmp_path / "kernels.py")).split()
    assert [struct.unpack("f", struct.pack("I", int(n) & 0xFFFFFFFF))[0] for n in found] == wanted


@needs_triton
@pytest.mark.parametrize("first, n", [(8000, 2), pytest.param(7000, 24, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gpu", ["sm_80", "gfx942"])
def test_random_kernels_in_the_interpreter(first: int, n: int, gpu: str) -> None:
    out = run("-m", "tests.gpu_kernels", str(first), str(n), gpu, TRITON_INTERPRET="1")
    assert f"{n} kernels interpreted, 0 wrong" in out


@needs_triton
@pytest.mark.parametrize("every, n", [(30, 4), pytest.param(1, 97, marks=pytest.mark.slow)])
def test_rows_and_columns_too_long_for_a_block_in_the_interpreter(every: int, n: int) -> None:
    assert f"{n} reductions, 0 wrong" in run(
        "-m", "tests.gpu_rows", str(every), TRITON_INTERPRET="1"
    )


@needs_triton
@pytest.mark.parametrize("gpu", ["sm_75", "sm_80", "sm_90", "sm_100", "gfx942", "gfx1100"])
def test_random_kernels_compile(gpu: str, tmp_path: Path) -> None:
    first = "15" if gpu == "sm_75" else "9000"  # with one that rounds to bfloat16
    out = run("-m", "tests.gpu_compile", gpu, first, "8", TRITON_CACHE_DIR=str(tmp_path))
    assert f"8 kernels for {gpu}" in out


@pytest.mark.parametrize("name, loops", [("layer_norm", 2), ("fourth_power", 3)])
def test_deviations_are_known_with_the_sum(name: str, loops: int) -> None:
    """In one walk along the row; but not deviations from what comes of deviations."""
    assert emit_kernel(kernel_of(name, 40_000), "k").text.count("for offset in") == loops


@pytest.mark.parametrize(
    "arch, early", [("sm_80", False), ("ptx_80", False), ("sm_90", True), ("ptx_100", True)]
)
def test_kernels_that_can_wait_start_early(arch: str, early: bool) -> None:
    """Launched so without waiting, a kernel would read what is not written yet."""
    (job,) = emitted(TritonTarget(), [kernel_of("softmax", 700)], Config(gpu_arch=arch)).units
    first = job.text.rpartition("def ")[2].splitlines()[1]
    assert (first == "    tl.extra.cuda.gdc_wait()", job.text.count("gdc_wait"), job.early) == (
        early,
        early,
        early,
    )
    assert json.loads(job.frame())["options"]["launch_pdl"] is early


def _helper(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """A helper of kernels on float32 arrays, by what it says."""
    tl = SimpleNamespace(
        abs=np.abs,
        where=np.where,
        fma=lambda *xs: np.float32(
            np.multiply(*(np.asarray(x, np.float64) for x in xs[:2])) + np.float32(xs[2])
        ),
    )
    scope: dict[str, Any] = {
        "tl": tl,
        "libdevice": np,
        "p_rcp": lambda x: np.float32(1) / x,
        "p_ex2": np.exp2,
    }
    exec(_FUNCTIONS[name], scope)
    fn: Callable[[np.ndarray], np.ndarray] = scope[name]
    return fn


@pytest.mark.parametrize(
    "name, true", [("near_tanh", torch.tanh), ("near_one_more_than_erf", torch.special.erfc)]
)
def test_where_16_bits_show_functions_are_near_enough(
    name: str, true: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = np.concatenate([np.linspace(-9, 9, 100001), np.logspace(-30, 0, 1000)]).astype(np.float32)
    sign = -1 if "erf" in name else 1
    want = true(torch.from_numpy(sign * x).double()).numpy()
    got = _helper(f"p_{name}")(x)
    kept = np.abs(want) > 1e-35  # what is smaller than a float32 is 0
    assert (
        np.abs(got / np.where(kept, want, 1) - 1)[kept].max() < 2.0**-16 and got.dtype == np.float32
    )
    with np.errstate(all="ignore"):
        ends = _helper(f"p_{name}")(np.float32([-np.inf, np.inf, np.nan]))
    assert np.array_equal(
        ends, true(torch.tensor([-np.inf, np.inf, np.nan]) * sign).numpy(), equal_nan=True
    )


def test_only_what_shows_in_16_bits_is_near() -> None:
    text = {
        name: emit_kernel(kernel_of(name, 700), "k").text
        for name in ("near_bf16", "gate", "softmax_bf16")
    }
    assert all(
        f"p_{f}(" in text["near_bf16"]
        for f in ("near_tanh", "near_one_more_than_erf", "as_bf16", "rcp")
    )
    assert "libdevice.exp" in text["near_bf16"]  # its sum is a float32 that others see
    assert "p_near" not in text["gate"] and "libdevice.exp" in text["softmax_bf16"]


def test_blocks_of_rows_that_begin_anywhere_begin_where_lines_do() -> None:
    text = {
        n: emit_kernel(kernel_of(*n), "k").text
        for n in (("softmax", 40003), ("softmax_bf16", 65537))
    }
    assert [t.count("// 32 * 32") + t.count("// 64 * 64") for t in text.values()] == [1, 1]
    assert "for offset in range(8192, 32768, 8192):" in text["softmax", 40003]
    for whole in (("softmax", 40003, 40008), ("softmax", 40000), ("softmax", 20001)):
        assert "along" not in emit_kernel(kernel_of(*whole), "k").text


def test_the_ends_of_rows_that_begin_anywhere_are_masked_though_blocks_divide_rows() -> None:
    text = emit_kernel(kernel_of("softmax", 65536, 65537), "k").text
    assert text.count("tl.load(p0 + (i4 + along), rmask, other=0") == 2  # a pass over memory each
    assert text.count("tl.store(p1 + (i4 + along)") == 2
    assert ", rmask)" in text[text.rindex("tl.store(") :]


def test_a_share_of_a_softmax_is_the_nearest_float32() -> None:
    """What the kernel computes, where a fused product and sum has 64 bits: no further off than a
    division."""
    text = emit_kernel(kernel_of("softmax", 700), "k").text
    (total,) = re.findall(r"(\w+) = tl.div_rn\(1.0, \w+\)", text)
    assert re.search(rf"tl.fma\((\w+), {total}, \1 \* \w+\)", text)
    random = np.random.default_rng(0)
    b = (1 + random.random(1 << 20) * 40000).astype(np.float32)
    a = np.exp(-20 * random.random(1 << 20)).astype(np.float32)
    high = np.float32(1) / b
    low = np.float32(1 - np.longdouble(b) * high) * high
    share = np.float32(np.longdouble(a) * high + a * low)
    true = a.astype(np.longdouble) / b
    assert np.abs((share - true) / np.spacing(share)).max() < 0.5 + 2.0**-20


def kernel(*stmts: Store | Reduce, vars_: tuple, rvars: tuple = (), args: tuple) -> Kernel:
    outs = tuple(s.buf for s in stmts if isinstance(s, Store))
    return Kernel("k", vars_, rvars, stmts, args, outs, ())


def buffer(name: str, *shape: int, dtype: object = f32) -> Buffer:
    strides = tuple(
        int.__mul__(1, 1) if k == len(shape) - 1 else shape[-1] for k in range(len(shape))
    )
    return Buffer(name, dtype, shape, strides)  # type: ignore[arg-type]


def test_rows_that_share_single_elements_have_threads_of_fewer_points() -> None:
    """A quotient of what is an approximation is one, where 16 bits show of it."""

    def shares(n: int, dtype: DType, of: str) -> TritonKernel:
        i, _, k = vars_ = loop_vars("i", (32, 4096, n))
        x = cast(node("load", (), Load("x", vars_), dtype), f32)
        peak, total = (node("load", (), Load(name, (i, k)), f32) for name in ("peak", "total"))
        above = node("exp", (node("sub", (x, peak)),)) if of == "exp" else node("sub", (x, peak))
        store = Store("out", vars_, cast(node("truediv", (above, total)), dtype), True)
        shapes = {"x": (32, 4096, n), "peak": (32, n), "total": (32, n), "out": (32, 4096, n)}
        args = tuple(
            Buffer(name, dtype if len(shape) == 3 else f32, shape, contiguous_strides(shape))
            for name, shape in shapes.items()
        )
        return emit_kernel(kernel(store, vars_=vars_, args=args), "k")

    cases = ((4095, bf16, "exp"), (4096, bf16, "exp"), (4095, f32, "exp"), (4095, bf16, "sub"))
    made = [shares(*case) for case in cases]
    assert [k.num_warps for k in made] == [8, 4, 4, 8]
    assert ["tl.div_rn(" in k.text for k in made] == [False, False, True, True]


def test_a_scatter_without_an_atomic_is_refused() -> None:
    (i,) = loop_vars("i", (8,))
    store = Store("out", (i,), const(1, i16), True, mode="add")
    with pytest.raises(Unsupported, match="combines i16 by 'add'"):
        emit_kernel(kernel(store, vars_=(i,), args=(buffer("out", 8, dtype=i16),)), "k")


def test_integers_may_be_divided_by_zero() -> None:
    """On a GPU eager gives some number; a failed check would take the device from the process."""
    (i,) = loop_vars("i", (8,))
    x, by = (node("load", (), Load(name, (i,)), i64) for name in ("x", "by"))
    quotient = node("floordiv", (x, node("nonzero", (by,), ZERO_DIVISION, i64)), None, i64)
    args = tuple(buffer(name, 8, dtype=i64) for name in ("x", "by", "out"))
    text = emit_kernel(kernel(Store("out", (i,), quotient, True), vars_=(i,), args=args), "k").text
    assert "device_assert" not in text and "== 0, 1," in text


def test_a_transposition_gets_a_square_tile() -> None:
    i, j = loop_vars("i", (512, 384))
    x = node("load", (), Load("x", (j, i)), f32)
    made = emit_kernel(
        kernel(
            Store("out", (i, j), x, True),
            vars_=(i, j),
            args=(buffer("x", 384, 512), buffer("out", 512, 384)),
        ),
        "k",
    )
    assert made.grid == 8 * 6 and "xmask" not in made.text  # blocks of 64 x 64 divide it


def test_sums_of_columns_get_columns_though_what_rows_have_is_wider() -> None:
    (i,), (r,) = loop_vars("i", (16384,)), loop_vars("r", (512,))
    x = cast(node("load", (), Load("x", (r, i)), bf16), f32)
    scaled = node("mul", (x, node("load", (), Load("scale", (r,)), f32)))
    value = node("sub", (scaled, node("load", (), Load("mean", (r,)), f32)))
    stmts = (Reduce("s", "sum", value), Store("out", (i,), node("acc", (), "s", f32), False))
    args = (
        buffer("x", 512, 16384, dtype=bf16),
        buffer("scale", 512),
        buffer("mean", 512),
        buffer("out", 16384),
    )
    tile = plan_tile(legalize(kernel(*stmts, vars_=(i,), rvars=(r,), args=args)))
    assert {g.name: g.block for g in tile.groups}["x"] == 64  # 128 bytes of a row of x


def _columns(rows: int, columns: int, dtype: DType, parts: int = 1) -> Tile:
    """The tile of sums over `rows` rows of each of `parts`, less a mean that each row has."""
    (p, i), (r,) = loop_vars("i", (parts, columns)), loop_vars("r", (rows,))
    x = cast(node("load", (), Load("x", (p, r, i)), dtype), f32)
    value = node("sub", (x, node("load", (), Load("mean", (p, r)), f32)))
    stmts = (Reduce("s", "sum", value), Store("out", (p, i), node("acc", (), "s", f32), False))
    args = (
        buffer("x", parts, rows, columns, dtype=dtype),
        buffer("mean", parts, rows),
        buffer("out", parts, columns),
    )
    return plan_tile(legalize(kernel(*stmts, vars_=(p, i), rvars=(r,), args=args)))


def test_blocks_of_columns() -> None:
    def blocks(tile: Tile) -> tuple[int, int, bool]:
        x, r = tile.groups
        return x.block, r.block, tile.looped

    assert blocks(_columns(32, 768, bf16, parts=197)) == (
        64,
        32,
        False,
    )  # a mean a row has no part in their width
    assert blocks(_columns(197, 3072, bf16, parts=32)) == (
        64,
        32,
        True,
    )  # 64 would be 59 rows too many
    assert blocks(_columns(197, 768, bf16, parts=32)) == (
        64,
        128,
        True,
    )  # where programs are few, rows in flight count
    assert blocks(_columns(1024, 64, f32)) == (
        8,
        1024,
        False,
    )  # the device would wait for two programs of 32 columns
    assert blocks(_columns(1024, 1024, bf16)) == (16, 512, True)
    # No more columns than a program has results: four rows of 64 want 256 otherwise.
    assert blocks(_columns(4, 64, bf16, parts=2048)) == (64, 4, False)
    tile = _columns(392, 256, bf16, parts=256)
    assert blocks(tile) == (64, 64, True) and tile.num_warps == 4
    for kept, block, warps in (
        (bf16, (64, 128, False), 4),
        (f32, (32, 128, False), 4),
    ):  # 64 or 32 points a thread
        tile = _columns(112, 64, kept, parts=896)
        assert blocks(tile) == block and tile.num_warps == warps


@pytest.mark.parametrize(
    "rows, blocks, warps", [(128, (64, 128, False), 8), (512, (64, 32, True), 8)]
)
def test_a_sum_of_columns_that_are_stored_has_many_threads(
    rows: int, blocks: tuple[int, int, bool], warps: int
) -> None:
    """As in the gradients of GELU and of the bias before it: 16 parts of 2048 or 8192 rows."""
    (p, i), (r,) = loop_vars("i", (16, 3072)), loop_vars("r", (rows,))
    x = cast(node("load", (), Load("x", (p, r, i)), bf16), f32)
    value = node("mul", (x, cast(node("load", (), Load("y", (p, r, i)), bf16), f32)))
    full = Store("d", (p, r, i), cast(value, bf16), True)
    stmts = (
        full,
        Reduce("s", "sum", value),
        Store("out", (p, i), node("acc", (), "s", f32), False),
    )
    large = [buffer(n, 16, rows, 3072, dtype=bf16) for n in "xyd"]
    tile = plan_tile(
        legalize(kernel(*stmts, vars_=(p, i), rvars=(r,), args=(*large, buffer("out", 16, 3072))))
    )
    x_, r_ = tile.groups
    assert (x_.block, r_.block, tile.looped) == blocks and tile.num_warps == warps


def test_few_long_rows_have_large_blocks() -> None:
    for rows, block in ((8, 8192), (131, 8192), (1048, 4096)):
        (i,), (r,) = loop_vars("i", (rows,)), loop_vars("r", (32000,))
        stmts = (
            Reduce("s", "max", node("load", (), Load("x", (i, r)), f32)),
            Store("out", (i,), node("acc", (), "s", f32), False),
        )
        tile = plan_tile(
            legalize(
                kernel(
                    *stmts,
                    vars_=(i,),
                    rvars=(r,),
                    args=(buffer("x", rows, 32000), buffer("out", rows)),
                )
            )
        )
        assert (tile.groups[1].block, tile.num_warps) == (block, 16)


@pytest.mark.parametrize(
    "rows, length, pitch, block, warps",
    [
        (2048, 50257, 50257, 4096, 32),
        (2048, 50257, 50264, 8192, 32),  # rows begin at vectors
        (131, 50257, 50257, 8192, 32),  # fewer rows than multiprocessors
        (2048, 32768, 32769, 32768, 16),  # a block holds whole rows
    ],
)
def test_rows_that_begin_anywhere_and_are_read_twice_have_short_blocks(
    rows: int, length: int, pitch: int, block: int, warps: int
) -> None:
    (i,), (r,) = loop_vars("i", (rows,)), loop_vars("r", (length,))
    x = cast(node("load", (), Load("x", (i, r)), bf16), f32)
    off = node("sub", (x, node("acc", (), "peak", f32)))
    stmts = (Reduce("peak", "max", x), Store("out", (i, r), cast(off, bf16), True))
    args = tuple(Buffer(n, bf16, (rows, length), (pitch, 1)) for n in ("x", "out"))
    tile = plan_tile(legalize(kernel(*stmts, vars_=(i,), rvars=(r,), args=args)))
    assert (tile.groups[1].block, tile.num_warps, tile.looped) == (block, warps, block < length)


def test_the_end_of_a_row_is_a_block_of_its_own_where_its_mask_would_cut_vectors() -> None:
    spans = {(50257, 50264): "0, 49152", (50257, 50257): "8192, 49152", (50264, 50264): "0, 50264"}
    for (length, pitch), span in spans.items():
        text = emit_kernel(kernel_of("softmax_bf16", length, pitch), "k").text
        assert f"range({span}, 8192)" in text and text.count("tl.load") == (
            2 if length == 50264 else 4
        )


def test_a_sum_of_one_choice_takes_no_pass() -> None:
    text = emit_kernel(kernel_of("choice_bf16", 50264), "k").text
    assert text.count("for offset") == 1 and "tl.sum" not in text


def test_one_more_than_a_tanh_is_made_without_it() -> None:
    text = emit_kernel(kernel_of("gate", 700), "k").text
    assert "p_one_more_than_tanh(v" in text and "libdevice.tanh" not in text


def test_indices_are_wide_only_where_a_range_needs_it() -> None:
    for n, wide in ((1 << 20, False), (1 << 32, True)):
        (i,) = loop_vars("i", (n,))
        x = node("load", (), Load("x", (i,)), f32)
        made = emit_kernel(
            kernel(
                Store("out", (i,), x, True), vars_=(i,), args=(buffer("x", n), buffer("out", n))
            ),
            "k",
        )
        assert ("tl.int64" in made.text) is wide


def test_values_made_of_sizes_are_as_wide_as_they_get() -> None:
    """What a point stores, and what is on the way to it, though all places of the tensor are
    near."""
    near, far = symbol("s0", 0, 1000), symbol("w", lo=-math.inf)
    values = {near: False, far: True, near * 10**9: True, far // 2**40: True, smin(far, 7): True}
    for value, wide in values.items():
        (i,) = loop_vars("i", (4,))
        x = node("index", (), value, i64)
        sizes = tuple(Expr(0, (((a,), 1),)) for a in free_symbols(value))
        out = Buffer("out", i64, (4,), (1,))
        k = Kernel("k", (i,), (), (Store("out", (i,), x, True),), (out,), ("out",), sizes)
        assert ("to(tl.int32)" in emit_kernel(k, "k").text) is not wide, value


def test_the_grid_of_an_empty_tensor_is_empty() -> None:
    n = symbol("s0", 0, 1 << 20)
    (i,) = loop_vars("i", (n,))
    x = node("index", (), i, i64)
    out = Buffer("out", i64, (n,), (1,))
    made = emit_kernel(
        Kernel("k", (i,), (), (Store("out", (i,), x, True),), (out,), ("out",), (n,)), "k"
    )
    assert evaluate(made.grid, {"s0": 0}) == 0
    assert evaluate(made.grid, {"s0": 1025}) * 128 >= 1025
