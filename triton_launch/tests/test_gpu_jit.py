"""Triton kernels launched from C++ on a GPU (triton_launch/src): their numbers for every kind of
argument, clusters, scratch memory, streams and graphs. Collected where torch has a CUDA device."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from triton_launch.tests.test_jit import HERE, ROOT, SOURCES, build

KERNELS = """\
import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


@triton.jit
def kinds(
    out, a, b, c, d, e: tl.float64, h: tl.float16, g: "bf16", flag, n: tl.int64, missing, t,
    kind: tl.constexpr, mode: tl.constexpr, f: tl.constexpr, last=0.5,
):
    tl.static_assert(
        missing is None and kind == tl.bfloat16 and mode == "mode" and b.dtype == tl.uint64
    )
    tl.store(out, a)
    tl.store(out + 1, (b // 16).to(tl.float64))
    tl.store(out + 2, c)
    tl.store(out + 3, d)
    tl.store(out + 4, e)
    tl.store(out + 5, h)
    tl.store(out + 6, g)
    if flag:
        tl.store(out + 7, n)
    tl.store(out + 8, t[0] + t[1][0])
    tl.store(out + 9, t[1][1])
    tl.store(out + 10, f)
    tl.store(out + 11, last)


@triton.jit
def described(x, out, n: tl.constexpr):
    p = tl.program_id(0)
    block = tl.make_tensor_descriptor(
        x, shape=[n, n], strides=[n, 1], block_shape=[16, n]
    ).load([16 * p, 0])
    i, j = 16 * p + tl.arange(0, 16), tl.arange(0, n)
    tl.store(out + i[:, None] * n + j[None, :], 2 * block)


@triton.jit
def doubled(x, out, BLOCK: tl.constexpr):
    tl.static_assert(x.dtype == out.dtype)
    i, j = tl.program_id(0) * x.block_shape[0], tl.program_id(1) * x.block_shape[1]
    out.store([i, j], x.load([i, j]) * 2)


@triton.autotune(
    [triton.Config({"BLOCK": b}, num_warps=w) for b in (64, 1024) for w in (1, 8)],
    key=["n"], reset_to_zero=["count"], restore_value=["x"],
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned(x, count, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = i < n
    tl.store(x + i, (tl.load(x + i) if EVEN else tl.load(x + i, keep)) + 1, keep)
    tl.atomic_add(count + i, 1, keep)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("jit")
    build("-shared", "-fPIC", "-o", folder / "library.so", HERE / "gpu_jit.cpp", *SOURCES, "-ldl")
    (folder / "kernels.py").write_text(KERNELS)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), before)) if before else str(ROOT)
    made = ctypes.CDLL(str(folder / "library.so"))
    made.setup(sys.executable.encode(), str(folder / "kernels.py").encode())
    yield made
    os.environ["PYTHONPATH"] = before


def call(fn: Any, *args: torch.Tensor | torch.cuda.Stream | int | bool) -> None:
    """Raises RuntimeError with the library's words."""
    fn.restype = ctypes.c_char_p

    def word(a: torch.Tensor | torch.cuda.Stream | int | bool) -> Any:
        if isinstance(a, torch.Tensor):
            return ctypes.c_void_p(a.data_ptr())
        if isinstance(a, torch.cuda.Stream):
            return ctypes.c_void_p(a.cuda_stream)
        return ctypes.c_bool(a) if isinstance(a, bool) else ctypes.c_int64(a)

    if (said := fn(*map(word, args))) is not None:
        raise RuntimeError(said.decode())


def three(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(n, device="cuda"),
        torch.randn(n, device="cuda"),
        torch.zeros(n, device="cuda"),
    )


@pytest.mark.parametrize("n", [1, 16, 1000, 1 << 20])
@pytest.mark.parametrize("shift", [0, 1])
def test_add(library: Any, n: int, shift: int) -> None:
    x, y, out = (t[shift:] for t in three(n + shift))
    call(library.add, x, y, out, n, torch.cuda.current_stream(), 256, False, 1)
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("pdl", [False, True])
def test_clusters(library: Any, pdl: bool) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters need Hopper")
    x, y, out = three(5000)
    call(library.add, x, y, out, 5000, torch.cuda.current_stream(), 512, pdl, 2)
    assert torch.equal(out, x + y)


def test_kinds_of_arguments(library: Any) -> None:
    out = torch.zeros(12, dtype=torch.float64, device="cuda")
    call(library.kinds, out)
    tenth = torch.tensor(0.1, dtype=torch.float64)
    cut = (tenth.float().view(torch.int32) & -65536).view(
        torch.float32
    )  # as Triton's launcher makes a bf16
    want = [
        -3,
        2.0**59,
        tenth.float(),
        tenth.float(),
        0.1,
        tenth.half(),
        cut,
        7,
        3.5,
        2.0**40,
        0.25,
        0.5,
    ]
    assert out.tolist() == [float(w) for w in want]


def test_scratch_memory(library: Any) -> None:
    """A descriptor that a kernel makes lies in memory that the launcher must provide."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("tensor descriptors need Hopper")
    x, out = torch.randn(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    call(library.described, x, out, stream)
    stream.synchronize()
    assert torch.equal(out, 2 * x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32])
def test_tensor_descriptors(library: Any, dtype: torch.dtype) -> None:
    """Rows of a wider tensor, and blocks that reach beyond the ends."""
    wide = torch.arange(100 * 80, device="cuda").view(100, 80).remainder(1000).to(dtype)
    out = torch.full((100, 80), 7, dtype=dtype, device="cuda")
    call(
        library.doubled,
        wide,
        out,
        100,
        72,
        80,
        {torch.int32: 1, torch.float16: 2, torch.float32: 3}[dtype],
    )
    assert torch.equal(out[:, :72], 2 * wide[:, :72]) and torch.equal(
        out[:, 72:], torch.full_like(out[:, 72:], 7)
    )


@pytest.mark.parametrize("n", [1000, 4096])
def test_tuning(library: Any, n: int) -> None:
    """Tensors that a kernel changes are as if only the chosen one had run, once."""
    x, count = torch.randn(n, device="cuda"), torch.full((n,), 5, dtype=torch.int32, device="cuda")
    want = x + 1
    with pytest.raises(RuntimeError, match="being captured"):
        in_graph(lambda: call(library.tuned, x, count, n, torch.cuda.current_stream()))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    call(library.tuned, x, count, n, stream)
    stream.synchronize()
    assert torch.equal(x, want) and count.eq(1).all()
    launch = lambda: call(library.tuned, x, count, n, torch.cuda.current_stream())
    in_graph(launch).replay()
    assert torch.equal(x, want + 1) and count.eq(2).all()


def test_bound_launches_change(library: Any) -> None:
    """As it is launched, and as a node of a graph that is updated."""
    x, y, out = three(2000)
    other = torch.zeros_like(out)
    call(library.nodes, x, y, out, other[1:], 1999)
    assert torch.equal(out[:1999], (x + y)[:1999]) and torch.equal(other[1:], (x + x)[:1999])


def in_graph(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def test_graphs(library: Any) -> None:
    x, y, out = three(1 << 12)
    launch = lambda: call(library.add_bound, x, y, out, 1 << 12, torch.cuda.current_stream())
    launch()
    graph = in_graph(launch)
    x.fill_(3)
    graph.replay()
    assert torch.equal(out, x + y)


def test_a_miss_in_a_graph(library: Any) -> None:
    x, y, out = three(64)
    said = []

    def launch() -> None:
        out.zero_()
        try:
            call(library.add, x, y, out, 64, torch.cuda.current_stream(), 64, False, 1)
        except RuntimeError as error:
            said.append(str(error))

    in_graph(launch).replay()
    assert len(said) == 1 and "being captured" in said[0] and "kernel add" in said[0]
    call(library.add, x, y, out, 64, torch.cuda.current_stream(), 64, False, 1)
    assert torch.equal(out, x + y)
