"""Products of matrices on a GPU by cuBLASLt's plans against eager, with float64 as the judge:
collected where torch has a CUDA device."""

from __future__ import annotations

import ctypes
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ir.dtypes import DType, bf16, f16, f32
from plait.ir.expr import Size, symbol
from plait.runtime.load import Program
from plait.wrapper.instructions import (
    Alloc,
    CallExtern,
    Instr,
    Literal,
    Ref,
    SizeOf,
    Symbol,
    TensorInput,
    View,
)
from tests.native_tools import build, contiguous, extern, program, ret

CUDA = "cuda:0"
DTYPES = {f32: torch.float32, f16: torch.float16, bf16: torch.bfloat16}
# Of the largest element of the result: a rounding of it and what sums of a thousand terms lose.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def dtype_of(t: Tensor) -> DType:
    return next(d for d, torch_dtype in DTYPES.items() if torch_dtype == t.dtype)


def given(name: str, t: Tensor) -> TensorInput:
    return TensorInput(name, dtype_of(t), tuple(t.shape), t.stride(), CUDA)


def made(name: str, dtype: DType, *shape: Size) -> Alloc:
    return Alloc(name, dtype, shape, contiguous(shape), CUDA)


def into(op: str, *args: str, **numbers: float) -> CallExtern:
    kwargs = tuple((k, Literal("float", float(v).hex())) for k, v in numbers.items())
    return CallExtern(
        f"aten::{op}.out",
        tuple(map(Ref, args)),
        (*kwargs, ("out", Ref("o"))),
        (),
        ("o",),
        may_keep=False,
    )


def product(op: str, *tensors: Tensor, **numbers: float) -> Program:
    """A program of one product into memory of its own."""
    names = ["c", "a", "b"][-len(tensors) :]
    a, b = tensors[-2:]
    inputs = tuple(given(n, t) for n, t in zip(names, tensors, strict=True))
    out = made("o", dtype_of(a), *a.shape[:-1], b.shape[-1])
    return build(program(inputs, out, into(op, *names, **numbers), ret("o")))


def by_plan(run: Program, *args: Tensor) -> bool:
    """Whether the product passes by the dispatcher, which would record the shapes of its
    operands."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as seen:
        run(*args)
    (call,) = [
        e
        for e in seen.events()
        if e.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
    ]
    return not call.input_shapes


def close(got: Tensor, eager: Tensor, exact: Tensor, tolerance: float = 0) -> None:
    assert got.dtype == eager.dtype and got.shape == eager.shape
    assert got.stride() == eager.stride() or got.numel() == 0
    scale = float(exact.abs().max()) if exact.numel() else 0.0
    allowed = (tolerance or TOLERANCE[eager.dtype]) * scale
    error, eagers = ((t.double() - exact).abs().max() if t.numel() else 0 for t in (got, eager))
    assert error <= eagers + allowed, (
        f"{float(error)} from float64, eager {float(eagers)}, allowed {allowed}"
    )


def agrees(op: str, *tensors: Tensor, planned: bool | None = True, **numbers: float) -> None:
    """planned: whether a plan of ours has to compute it; None: either."""
    run, eager = product(op, *tensors, **numbers), getattr(torch, op)
    want, exact = eager(*tensors, **numbers), eager(*(t.double() for t in tensors), **numbers)
    for _ in range(2):
        close(run(*tensors)[0], want, exact)
    assert planned is None or by_plan(run, *tensors) == planned


def stored(rows: int, cols: int, how: str, dtype: torch.dtype) -> Tensor:
    match how:
        case "rows":
            return r(rows, cols, dtype=dtype)
        case "columns":
            return r(cols, rows, dtype=dtype).t()
        case "part of rows":
            return r(rows, cols + 8, dtype=dtype)[:, :cols]
        case "part of columns":
            return r(cols, rows + 8, dtype=dtype).t()[:rows]
        case _:
            return r(rows, 2 * cols, dtype=dtype)[:, ::2]


LAYOUTS = ("rows", "columns", "part of rows", "part of columns", "every other")


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("b_how", LAYOUTS)
@pytest.mark.parametrize("a_how", LAYOUTS)
def test_layouts(a_how: str, b_how: str, dtype: torch.dtype) -> None:
    for m, k, n in ((64, 96, 48), (5, 7, 3), (1, 64, 33)):
        a, b = stored(m, k, a_how, dtype), stored(k, n, b_how, dtype)
        planned = None if "every other" in (a_how, b_how) else True
        agrees("mm", a, b, planned=planned)
        agrees("addmm", r(n, dtype=dtype), a, b, planned=planned, alpha=2)


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize(
    "m, k, n", [(1, 1, 1), (1, 300, 1), (300, 1, 2), (2, 1, 300), (128, 768, 2304), (17, 4096, 9)]
)
def test_sizes(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    a, b = r(m, k, dtype=dtype), r(k, n, dtype=dtype)
    agrees("mm", a, b)
    agrees("addmm", r(n, dtype=dtype), a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "m, k, n", [(8, 768, 50257), (333, 768, 50257), (2048, 768, 20001), (1500, 512, 10003)]
)
def test_odd_rows_are_computed_in_parts(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    """An output head and its gradients, with rows that start anywhere and with aligned ones."""
    x, w, g = r(m, k, dtype=dtype), r(n, k, dtype=dtype), r(m, n + 8 - n % 8, dtype=dtype)[:, :n]
    agrees("mm", x, w.t(), planned=None)
    agrees("mm", g, w, planned=None)
    agrees("mm", g.t(), x, planned=None)
    agrees("addmm", r(n, dtype=dtype), x, w.t(), planned=None)
    out = torch.compile(lambda x, w: F.relu(x @ w.t()) @ w, backend="plait")
    close(out(x, w), F.relu(x @ w.t()) @ w, F.relu(x.double() @ w.double().t()) @ w.double())


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_addends(dtype: torch.dtype) -> None:
    a, b = r(24, 40, dtype=dtype), r(40, 56, dtype=dtype)
    row, full = r(56, dtype=dtype), r(24, 56, dtype=dtype)
    for addend in (row, row[None], full, r(56, 24, dtype=dtype).t()):
        planned = addend.dim() == 1 or addend.stride(-1) == 1
        agrees("addmm", addend, a, b, planned=planned)
        agrees("addmm", addend, a, b, planned=planned, alpha=0.5)
        agrees("addmm", addend, a, b, planned=planned and addend is full, beta=2)
        agrees("addmm", addend * float("nan"), a, b, beta=0)
    agrees("addmm", r(24, 1, dtype=dtype), a, b, planned=False)
    agrees("addmm", r(1, dtype=dtype), a, b, planned=False)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_batches(dtype: torch.dtype) -> None:
    for batch in (1, 6):
        a, b = r(batch, 24, 40, dtype=dtype), r(batch, 40, 56, dtype=dtype)
        agrees("bmm", a, b)
        agrees("bmm", a.mT.contiguous().mT, b.mT.contiguous().mT)
        agrees("bmm", a[:1].expand(batch, -1, -1), b)
        agrees("bmm", a.transpose(0, 1).contiguous().transpose(0, 1), b)
        agrees("baddbmm", r(batch, 24, 56, dtype=dtype), a, b, beta=0.5, alpha=2)
        agrees("baddbmm", r(24, 56, dtype=dtype), a, b)
        agrees("baddbmm", r(56, dtype=dtype), a, b)
        agrees("baddbmm", r(batch, 1, 56, dtype=dtype), a, b)


def test_empty() -> None:
    for m, k, n in ((0, 5, 6), (4, 0, 6), (4, 5, 0)):
        a, b = r(m, k), r(k, n)
        agrees("mm", a, b, planned=False)
        agrees("addmm", r(n), a, b, planned=False)
        agrees("bmm", a[None], b[None], planned=False)
    agrees("bmm", r(0, 4, 5), r(0, 5, 6), planned=False)


def test_results_of_their_own() -> None:
    a, b, c = r(24, 40), r(40, 56), r(56)
    cases: list[tuple[str, tuple[Tensor, ...]]] = [
        ("mm", (a, b)), ("addmm", (c, a, b)), ("bmm", (a[None], b[None])),
        ("baddbmm", (c, a[None], b[None])),
    ]  # fmt: skip
    for op, tensors in cases:
        names = ["c", "a", "b"][-len(tensors) :]
        call = extern(f"aten::{op}", *map(Ref, names), outs=("o",))
        inputs = tuple(given(n, t) for n, t in zip(names, tensors, strict=True))
        run, eager = build(program(inputs, call, ret("o"))), getattr(torch, op)
        got = run(*tensors)[0]
        close(got, eager(*tensors), eager(*(t.double() for t in tensors)))
        assert by_plan(run, *tensors)
        assert got.device == a.device and got.is_leaf and not got.requires_grad
        got.requires_grad_().sum().backward()
        assert got.grad is not None and run(*tensors)[0].data_ptr() != got.data_ptr()


def test_views_that_start_anywhere() -> None:
    for offset in range(9):
        x, b = r(40 * 40, dtype=torch.float16), r(32, 24, dtype=torch.float16)
        view = View("v", "a", f16, (32, 32), (40, 1), offset)
        p = program(
            (given("a", x), given("b", b)),
            view,
            made("o", f16, 32, 24),
            into("mm", "v", "b"),
            ret("o"),
        )
        a = x.as_strided((32, 32), (40, 1), offset)
        run = build(p)
        close(run(x, b)[0], a @ b, a.double() @ b.double())
        assert by_plan(run, x, b)


def test_settings_count_at_each_call() -> None:
    a, b = r(512, 512), r(512, 512)
    run, exact = product("mm", a, b), a.double() @ b.double()
    scale = float(exact.abs().max())

    def error() -> float:
        return float((run(a, b)[0].double() - exact).abs().max()) / scale

    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            assert (error() > 1e-5) == (precision == "high")
    finally:
        torch.set_float32_matmul_precision(before)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert not by_plan(run, a, b)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.cuda.tunable.enable(True)
    try:
        torch.cuda.tunable.tuning_enable(False)
        assert not by_plan(run, a, b)
    finally:
        torch.cuda.tunable.enable(False)
    assert by_plan(run, a, b)
    half, other = r(16, 8192, dtype=torch.float16), r(8192, 16, dtype=torch.float16)
    matmul = torch.backends.cuda.matmul
    run, want = product("mm", half, other), half @ other
    try:
        for allowed in (False, True):
            matmul.allow_fp16_reduced_precision_reduction = allowed
            close(run(half, other)[0], want, half.double() @ other.double())
            assert by_plan(run, half, other)
        matmul.allow_fp16_accumulation = True
        assert not by_plan(run, half, other)
    finally:
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_fp16_accumulation = True, False


def test_names_in_torch() -> None:
    """What plans look up in torch's libraries by name."""
    library = ctypes.CDLL("libtorch_cuda.so", os.RTLD_NOW | os.RTLD_NOLOAD)
    source = (Path(__file__).parent.parent / "native" / "torch" / "blaslt.cpp").read_text()
    names = re.findall(r'"(_ZN\w+)"', source)
    assert len(names) == 4 and all(hasattr(library, name) for name in (*names, "cublasLtMatmul"))


def test_ever_new_sizes() -> None:
    s0 = symbol("s0")
    w, c = r(48, 40), r(40)
    body: tuple[Instr, ...] = (Symbol("s0", SizeOf("a", "size", 0)), made("o", f32, s0, 40))
    x = TensorInput("a", f32, (s0, 48), (48, 1), CUDA)
    run = build(
        program((x, given("b", w), given("c", c)), *body, into("addmm", "c", "a", "b"), ret("o"))
    )
    for n in (*range(1, 90), 1, 0, 1000):
        a = r(n, 48)
        close(
            run(a, w, c)[0], torch.addmm(c, a, w), torch.addmm(c.double(), a.double(), w.double())
        )


def split(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Factors whose product is divided along k, which takes memory to work in."""
    return r(64, 16384, dtype=dtype), r(16384, 64, dtype=dtype)


def test_streams() -> None:
    pairs = [split() for _ in range(4)]
    run = product("mm", *pairs[0])
    exact = [a.double() @ b.double() for a, b in pairs]
    want = [a @ b for a, b in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[] for _ in pairs]
    for _ in range(20):
        for k, (a, b) in enumerate(pairs):
            with torch.cuda.stream(streams[k]):
                results[k].append(run(a, b)[0])
    torch.cuda.synchronize()
    for k, many in enumerate(results):
        for got in many:
            close(got, want[k], exact[k])


def test_threads() -> None:
    a, b = r(64, 128), r(128, 64)
    run = product("addmm", r(64), a, b)

    def work(k: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            bias = torch.full((64,), float(k), device=CUDA)
            want = torch.addmm(bias, a, b)
            for _ in range(200):
                torch.testing.assert_close(run(bias, a, b)[0], want, rtol=1e-4, atol=1e-4)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.parametrize("warm", [True, False])
def test_capture(warm: bool) -> None:
    a, b = split()
    x, w, c = r(32, 64), r(64, 48), r(48)
    runs = product("mm", a, b), product("addmm", c, x, w)
    _ = a @ b  # torch's own library is ready
    if warm:
        runs[0](a, b), runs[1](c, x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = runs[0](a, b)[0], runs[1](c, x, w)[0]
    del runs
    noise = [r(64, 16384) for _ in range(8)]  # takes what memory the capture gave back
    for _ in range(3):
        a.normal_(), x.normal_(), c.normal_()
        graph.replay()
        close(first, a @ b, a.double() @ b.double())
        close(second, torch.addmm(c, x, w), torch.addmm(c.double(), x.double(), w.double()))
    assert len(noise) == 8
