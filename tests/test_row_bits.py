"""Rows that keep their bits (`batch_invariant`): results are eager's, and what a kernel for a GPU
does to a row does not depend on how many there are. What a device gives is in
tests/test_gpu_invariance.py."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from plait import compat
from plait.compat import precision
from plait.compile import compile_texts
from plait.config import Config
from plait.graph.captured import Captured
from plait.wrapper.instructions import Alloc, CallExtern, Literal, Place, Ref, View, WrapperProgram
from tests.test_triton_kernels import needs_triton, run

Program = Callable[..., Any]
FEW, MANY = 1, 4096
ALL = torch.finfo(torch.float32).min


def program(
    fn: Program, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, gpu: str = "sm_90"
) -> tuple[WrapperProgram, str]:
    """A function of tensors on a GPU: what it does, and its kernels."""
    with FakeTensorMode(), torch.no_grad():
        xs = [torch.empty(s, device="cuda", dtype=dtype) for s in shapes]
        table = compat.decompositions.decomposition_table()
        graph = make_fx(torch.func.functionalize(fn), table)(*xs)
    cfg = Config(gpu_arch=gpu, verify=True, batch_invariant=True)
    wrapper, made = compile_texts(Captured(graph, "rows_0", "inference"), cfg)
    return wrapper, made.sources["cuda"].text


def source(fn: Program, *shapes: tuple[int, ...], **how: Any) -> str:
    """The kernels of a function of tensors on a GPU."""
    return program(fn, *shapes, **how)[1]


def compiled(fn: Program, dynamic: bool = False) -> Program:
    torch._dynamo.reset()
    options = {"batch_invariant": True}
    return torch.compile(fn, backend="plait", dynamic=dynamic, options=options)


def check(fn: Program, *xs: Tensor, tolerance: float, run: Program | None = None) -> None:
    with torch.no_grad():
        got = (run or compiled(fn))(*xs)
        torch.testing.assert_close(got, fn(*xs), rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------- reductions
def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def log_shares(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def running(x: Tensor) -> Tensor:
    return x.cumsum(-1) + (x / 9).exp().cumprod(-1)


def columns(x: Tensor) -> Tensor:
    return x.unflatten(1, (-1, 32)).mean(1)


def walks(text: str) -> set[tuple[str, ...]]:
    """How kernels walk along their rows, and how they bring lanes together."""
    loops = re.findall(r"for offset in (.*):", text)
    bases = re.findall(r"rbase = (.*)\.to", text)
    sums = re.findall(r"(tl\.sum|p_tree_add|p_exp_sum)\(", text.split("def plait_", 1)[1])
    return {("loops", *loops), ("bases", *bases), ("sums", *sums)}


@pytest.mark.parametrize("length", [96, 8192, 9600, 50272])
@pytest.mark.parametrize("fn", [norm, log_shares, columns])
def test_walks_do_not_depend_on_how_many_rows_there_are(fn: Program, length: int) -> None:
    few, many = (source(fn, (rows, length)) for rows in (FEW, MANY))
    assert walks(few) == walks(many)
    assert "p_tree_add(" in few and "tl.sum(" not in few.split("def plait_", 1)[1]


def test_long_rows_are_cut_by_their_length_alone() -> None:
    def total(x: Tensor) -> Tensor:
        return x.sum(-1)

    texts = [source(total, (rows, n)) for n in (1 << 14, 1 << 22) for rows in (FEW, 300)]
    assert [text.count("def plait_") for text in texts] == [1, 1, 2, 2]


def test_what_is_approximated_does_not_depend_on_what_is_computed_beside_it() -> None:
    def forms(fn: Program, *shapes: tuple[int, ...]) -> set[str]:
        text = source(fn, *shapes, dtype=torch.bfloat16)
        bodies = re.split(r"\ndef (?:plait_|finish\()", text)[1:]
        names = r"p_near_tanh|p_ex2|p_rcp|p_inverse|tl\.div_rn|tl\.fma|libdevice\.\w+"
        return {*re.findall(names, "".join(bodies))}

    assert forms(lambda x: x.softmax(-1), (64, 100)) == {"libdevice.exp"}
    assert forms(lambda x: x.tanh(), (64, 100)) == {"p_near_tanh"}
    assert forms(lambda x: x.tanh().softmax(-1), (64, 100)) == {"p_near_tanh", "libdevice.exp"}
    assert forms(lambda x, w: (x @ w).tanh(), (64, 128), (128, 128)) == {"p_near_tanh"}

    def check_activation(fn: Program, inverse: str) -> None:
        how = {"libdevice.exp", inverse}
        assert forms(fn, (64, 100)) == forms(lambda x: fn(x) * 2 + x, (64, 100)) == how
        assert forms(lambda x, w: fn(x @ w), (64, 128), (128, 128)) == how

    check_activation(lambda x: F.silu(x), "p_inverse")
    check_activation(lambda x: F.gelu(x, approximate="tanh"), "p_rcp")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "fn", [norm, log_shares, columns, running, lambda x: (x / 9).exp().prod(-1)]
)
def test_reductions_are_eagers(fn: Program, dynamic: bool) -> None:
    run = compiled(fn, dynamic)
    for rows, length in ((3, 96), (2, 160)):
        check(fn, torch.randn(rows, length), tolerance=1e-5, run=run)


def test_rows_of_several_blocks_are_eagers() -> None:
    check(norm, torch.randn(2, 8800), tolerance=1e-5)
    check(lambda x: x.sum(0), torch.randn(300, 16), tolerance=1e-4)
    check(lambda x: x.cumsum(0), torch.randn(300, 16), tolerance=1e-4)
    check(lambda x: x.cumsum(-1), torch.randn(2, 8800), tolerance=1e-4)


@needs_triton
def test_no_order_of_a_sum_is_tritons() -> None:
    out = run("-m", "tests.gpu_row_orders")
    assert int(out.split()[0]) > 400 and out.endswith(" sums of two\n")


def test_what_sizes_divide_by_is_the_same_where_they_are_known() -> None:
    """A compiler rounds the reciprocal of a number that it knows otherwise than a GPU does."""

    def quotients(fn: Program) -> list[str]:
        body = source(fn, (64, 768), (64, 768), dtype=torch.bfloat16).split("def plait_", 1)[1]
        return re.findall(r"tl\.div_rn|\(v\d+ / v\d+\)", body)

    assert quotients(lambda x, y: x.mean(-1)) == ["tl.div_rn"]
    (near,) = quotients(lambda x, y: x / y)
    assert near != "tl.div_rn"


# ------------------------------------------------------------------------------------------- images
@pytest.mark.parametrize(("side", "copied"), [(7, 1), (8, 0)])
def test_images_are_convolved_alike(side: int, copied: int) -> None:
    """By kernels that add in one order, which the vendor chooses by where an image starts too: one
    that is not at a multiple of 64 bytes is copied."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x.relu(), w, padding=1, groups=4)

    wrapper, _ = program(fn, (3, 8, side, side), (16, 2, 3, 3))
    calls = [i for i in wrapper.body if isinstance(i, CallExtern)]
    deterministic = [i.text for i in (call.args[10] for call in calls) if isinstance(i, Literal)]
    assert [c.op for c in calls] == ["aten::_convolution"] * 3 and deterministic == ["True"] * 3
    views = {i.name for i in wrapper.body if isinstance(i, View)}
    found = [call.args[0] for call in calls]
    assert sum(isinstance(x, Ref) and x.name not in views for x in found) == copied


def test_images_of_the_caller_are_copied() -> None:
    """They begin wherever the caller has them."""
    wrapper, _ = program(lambda x, w: F.conv2d(x, w), (2, 8, 8, 8), (16, 8, 3, 3))
    given = {i.args[0] for i in wrapper.body if isinstance(i, CallExtern)}
    made = {i.name for i in wrapper.body if isinstance(i, Place | Alloc)}
    assert len(given) == 2 and all(isinstance(x, Ref) and x.name in made for x in given)


@pytest.mark.parametrize("rows", [1, 16, 64, 100, 4096])
def test_products_of_8_bits_walk_once(rows: int) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        a, b = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
        one = torch.ones((), device=x.device)
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    wrapper, text = program(fn, (rows, 4096), (1024, 4096))
    assert not any(isinstance(i, CallExtern) for i in wrapper.body)
    (call,) = re.findall(r"\n    (?:described_)?product\(p0.*", text)
    assert "parts=1" in call or "described" in call


@pytest.mark.parametrize("how", ["ieee", "tf32"])
def test_the_flag_of_convolutions_is_noted(how: str) -> None:
    """It is a constant of the call, so a guard has to ask for it."""
    flags = {"cuda conv": how}
    with precision.noting_flags(flags):
        wrapper, _ = program(lambda x, w: F.conv2d(x, w).relu(), (1, 8, 9, 9), (16, 8, 3, 3))
    (call,) = [i for i in wrapper.body if isinstance(i, CallExtern)]
    assert call.args[12] == Literal("bool", str(how == "tf32"))
    with precision.noting_flags(noted := {}):
        program(lambda x, w: F.conv2d(x, w).relu(), (1, 8, 9, 9), (16, 8, 3, 3))
    assert [*noted] == ["cuda conv"]


# ----------------------------------------------------------------------------------------- products
def layer(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh") + y


@pytest.mark.parametrize("rows", [1, 3, 33, 200, 2048])
@pytest.mark.parametrize(("k", "n"), [(768, 3072), (3072, 768), (40, 24)])
def test_products_are_one_kernel_and_one_walk(k: int, n: int, rows: int) -> None:
    shapes = (rows, k), (n, k), (n,), (rows, n)
    text = source(layer, *shapes, dtype=torch.bfloat16)
    (call,) = re.findall(r"\n    (?:described_)?product\(p0.*", text)
    assert "parts=1" in call or "described" in call
    assert text.count("def plait_") == 0 and text.count("def product_") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_products_of_any_size_are_eagers(dtype: torch.dtype) -> None:
    w, b = torch.randn(40, 48).to(dtype), torch.randn(40).to(dtype)
    run, tolerance = compiled(layer, dynamic=True), 1e-2 if dtype == torch.float16 else 1e-4
    for rows in (3, 40):
        x, y = torch.randn(rows, 48).to(dtype), torch.randn(rows, 40).to(dtype)
        check(layer, x, w, b, y, tolerance=tolerance, run=run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_of_batches_are_eagers(dtype: torch.dtype) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v[..., ::2]

    run = compiled(fn, dynamic=True)
    for n in (5, 40):
        xs = (torch.randn(3, n, 16).to(dtype) for _ in range(3))
        check(fn, *xs, tolerance=1e-2 if dtype == torch.float16 else 1e-4, run=run)


# ---------------------------------------------------------------------------------------- attention
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_is_eagers(dtype: torch.dtype, causal: bool) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, is_causal=causal, scale=0.3)

    run = compiled(fn, dynamic=True)
    for n in (5, 150):
        xs = (torch.randn(2, 3, n, 16).to(dtype) for _ in range(3))
        check(fn, *xs, tolerance=1e-2 if dtype == torch.float16 else 1e-4, run=run)


@pytest.mark.parametrize("kind", ["bits", "numbers", "one for all", "nothing counts"])
def test_masked_attention_is_eagers(kind: str) -> None:
    q, k, v = (torch.randn(2, 3, n, 16) for n in (5, 40, 40))
    mask = {
        "bits": torch.rand(2, 1, 5, 40) > 0.5,
        "numbers": torch.randn(2, 3, 5, 40),
        "one for all": torch.randn(5, 40),
        "nothing counts": torch.full((2, 1, 5, 40), ALL),
    }[kind]
    check(attend, q, k, v, mask, tolerance=1e-4)


def test_blocks_of_attention_do_not_depend_on_lengths() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash(q, k, v, 0.0, True)[0]
        return out

    def blocks(n: int) -> list[str]:
        text = source(fn, *[(1, 4, n, 64)] * 3, dtype=torch.float16)
        names = "ROWS|COLUMNS|PARTS|BEFORE|AFTER|CAUSAL"
        return re.findall(rf"^((?:{names}): .*)", text, re.M)

    assert blocks(1) == blocks(7) == blocks(2000)
    assert f"BEFORE: tl.constexpr = tl.constexpr({1 / math.sqrt(64)})" in blocks(1)


def test_what_is_added_is_loaded_before_scores_are_made_where_its_rows_begin_anywhere() -> None:
    """A row of scores would have a warp, or four, and be made twice otherwise."""

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, False)[0]

    for n, first in ((301, True), (304, False)):
        text = source(fn, *[(1, 4, n, 64)] * 3, (1, 4, n, n), dtype=torch.bfloat16)
        (loads,) = re.findall(r"def loads_of_score_of\(.*?return", text, re.S)
        assert ("tl.load(given[0]" in loads) == first


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_leave_room_for_their_results(dtype: torch.dtype, precision: str) -> None:
    """The widest are finished by pieces, which pass through memory that is beside that of steps."""
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        text = source(lambda x, y: x @ y.mT, (4096, 128), (8192, 128), dtype=dtype)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    names = "rows", "columns", "depth", "stages", "piece"
    found = {name: int(n) for name, n in re.findall(rf"({'|'.join(names)})=(\d+)", text)}
    described = dtype == torch.bfloat16
    assert (found["columns"] == 256) == described == ("piece" in found)
    steps = found["stages"] * (found["rows"] + found["columns"]) * found["depth"] * dtype.itemsize
    passing = 4 * found["rows"] * found.get("piece", found["columns"])
    assert (steps + passing if described else max(steps, passing)) <= 227 << 10


ops: Any = torch.ops.aten


def by_flash(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    out, logs, *sizes, noise, other, _ = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    given = (grad, q, k, v, out, logs, *sizes, 0.0, True, noise, other)
    return [out, logs, *ops._scaled_dot_product_flash_attention_backward(*given)]


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    made = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    out, logs, *sizes, noise, other, _ = made
    given = (grad, q, k, v, out, logs, noise, other, None, *sizes, 0.0, True)
    return [out, logs, noise, *ops._scaled_dot_product_cudnn_attention_backward(*given)]


def by_efficient(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    bias = q.new_zeros(q.shape[0], 1, q.shape[2], k.shape[2])
    out, *more = ops._scaled_dot_product_efficient_attention(q, k, v, bias, True)
    wanted = 0.0, [True, True, True, False]
    given = (grad, q, k, v, bias, out, *more, *wanted)
    return [out, *more, *ops._scaled_dot_product_efficient_attention_backward(*given)[:3]]


@pytest.mark.parametrize("fn", [by_flash, by_cudnn, by_efficient])
def test_attention_that_is_trained_is_no_call(fn: Program) -> None:
    """Of any kernel that eager chooses on a GPU."""
    made, text = program(fn, *((2, 4, 300, 64),) * 4, dtype=torch.bfloat16)
    assert not [i for i in made.body if isinstance(i, CallExtern)]
    assert {"attention_result", "attention_queries", "attention_keys"} <= {
        name.rpartition("_")[0] for name in re.findall(r"def (attention_\w+)\(", text)
    }


def test_gradients_know_what_sums_of_large_scores_lose() -> None:
    """Scores of a row are rounded to steps of 64 beside -1e9: no share of it may be 2 ** 64."""
    text = source(by_efficient, *((2, 4, 128, 64),) * 4)
    assert "-4194304.0" in text and "BY_ROW and CHANGES" in text


def test_one_batch_of_keys_is_not_for_all_queries() -> None:
    """As eager refuses it: gradients of its keys would be those of one batch."""
    one, two = (1, 4, 40, 64), (2, 4, 40, 64)
    made, _ = program(lambda *xs: [2 * x for x in by_flash(*xs)], two, one, one, two)
    assert len([i for i in made.body if isinstance(i, CallExtern)]) == 2


@pytest.mark.parametrize(("gpu", "least"), [("sm_75", 8), ("gfx942", 8), ("sm_80", 16)])
def test_small_memories_hold_gradients_of_wide_rows(gpu: str, least: int) -> None:
    """Keys, values, queries and gradients of 16 rows would fill 64 KB (`tests/gpu_room.py`)."""
    text = source(by_efficient, *((2, 4, 128, 256),) * 4, gpu=gpu)
    sizes = re.findall(r"^(?:ROWS|COLUMNS): tl.constexpr = tl.constexpr\((\d+)\)", text, re.M)
    assert min(map(int, sizes)) == least


@pytest.mark.parametrize(("gpu", "products"), [("sm_75", 0), ("sm_80", 3), ("gfx942", 0)])
def test_tensor_cores_that_can_multiply_float32(gpu: str, products: int) -> None:
    """In so many products of rounded numbers."""
    text = source(F.linear, (130, 300), (500, 300), gpu=gpu)
    assert f"tf32={products}," in text and ("def p_tf32" in text) == (products > 0)
    text = source(by_efficient, *((2, 4, 128, 64),) * 4, gpu=gpu)
    assert f"TF32: tl.constexpr = tl.constexpr({products})" in text


@needs_triton
@pytest.mark.parametrize(
    "what",
    [
        "rows sm_90 bits,across,attention 64",
        pytest.param("rows sm_90,sm_80,sm_86", marks=pytest.mark.slow),
        pytest.param("usual sm_90,sm_86", marks=pytest.mark.slow),
        pytest.param("tuned sm_90", marks=pytest.mark.slow),
    ],
)
def test_kernels_fit_in_what_a_multiprocessor_has(what: str) -> None:
    assert " kernels fit" in run("-m", "tests.gpu_room", *what.split())
