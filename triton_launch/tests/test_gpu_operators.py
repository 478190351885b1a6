"""plait's operators on a GPU, from Python and from C++, against float64; what needs 64-bit indices;
graphs, packs, autocast and programs. Collected where torch has a CUDA device."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plait.ops as ops
from plait.tools.pack import triton_pack
from triton_launch.tests import ops_cases
from triton_launch.tests.test_ops import ROOT, TORCH, build_api

# The process that compiles finds plait where this one does.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

CUDA = partial(ops_cases.moved, device="cuda")


@pytest.fixture(autouse=True)
def _untuned() -> None:
    ops.use_tiles("first")


@pytest.mark.parametrize("case", ops_cases.CASES, ids=str)
def test_against_float64(case: ops_cases.Case) -> None:
    ops_cases.check(case, CUDA, Tensor.cpu)


def test_from_cpp(tmp_path: Path) -> None:
    program = build_api(tmp_path)
    command = [str(program), "cuda", str(TORCH / "lib"), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_graphs_and_streams() -> None:
    x, r, w = (torch.randn(*s, device="cuda") for s in ((64, 128), (64, 128), (128,)))

    def step() -> Tensor:
        y, z = ops.add_rms_norm(x, r, [128], w)
        return ops.softmax(ops.matmul(y, z.t()), -1)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    x.normal_()
    graph.replay()
    torch.testing.assert_close(
        out, torch.softmax(F.rms_norm(x + r, (128,), w) @ (x + r).t(), -1), atol=1e-4, rtol=1e-4
    )


THIN = [
    (1, 4096, 1024), (1, 1000, 333), (4096, 1, 4096), (7, 250, 5000), (16, 1024, 4096),
    (33, 2048, 1032), (40, 24, 9001), (1024, 5, 2048), (64, 1024, 4096), (128, 130, 20000),
]  # fmt: skip
"""m, n, k: vectors, and products whose programs share sums, of regular sizes and others."""


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", THIN, ids=str)
def test_thin_products(sizes: tuple[int, int, int], dtype: torch.dtype, turned: bool) -> None:
    """The same bits each time, on streams side by side and in a graph too."""
    m, n, k = sizes
    a, b = (
        torch.randn(*s, device="cuda", dtype=dtype) for s in ((m, k), (n, k) if turned else (k, n))
    )
    b = b.t() if turned else b
    first = ops.matmul(a, b)
    precise = a.double() @ b.double()
    scale = 1e-2 if dtype == torch.bfloat16 else 2e-5
    assert float((first.double() - precise).abs().max()) <= scale * float(precise.abs().max())
    assert all(torch.equal(ops.matmul(a, b), first) for _ in range(20))

    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(ops.matmul(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(out, first) for out in found)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.matmul(a, b)
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert torch.equal(out, first)


def test_thin_tiles_are_tuned() -> None:
    ops.use_tiles("tune")
    for m, n, k in ((1, 640, 4096), (3, 640, 4096), (640, 3, 4096)):
        a, b = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n)))
        torch.testing.assert_close(ops.matmul(a, b), a @ b, atol=0.5, rtol=1e-2)


def test_tiles_are_tuned() -> None:
    a, b = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((300, 256), (256, 500)))
    graph = torch.cuda.CUDAGraph()
    ops.use_tiles("tune")
    ops.matmul(a, b)
    with torch.cuda.graph(graph):
        out = ops.matmul(a[:290], b[:, :490])  # sizes like those
    graph.replay()
    torch.testing.assert_close(out, a[:290] @ b[:, :490])


def test_autocast() -> None:
    x, w = torch.randn(16, 32, device="cuda"), torch.randn(32, 8, device="cuda")
    target = torch.randint(8, (16,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y = ops.matmul(x, w)
        assert y.dtype == torch.bfloat16
        assert ops.softmax(y, 1).dtype == ops.cross_entropy(y, target).dtype == torch.float32
        assert ops.rms_norm(y, [8]).dtype == ops.add_rms_norm(y, y, [8])[1].dtype == torch.float32


@pytest.mark.parametrize("backend", ["aot_eager", "plait"])
def test_in_a_program(backend: str) -> None:
    def model(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        y, z = ops.add_rms_norm(x, 2 * x, [32], w)
        return ops.cross_entropy(ops.matmul(ops.add(y, z), w.diag()), target)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for n in (5, 9):
        x, w = (torch.randn(*s, device="cuda", requires_grad=True) for s in ((n, 32), (32,)))
        target = torch.randint(32, (n,), device="cuda")
        grads = [torch.autograd.grad(f(x, w, target), (x, w)) for f in (compiled, model)]
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_errors() -> None:
    x = torch.randn(4, 4, device="cuda")
    with pytest.raises(RuntimeError, match="other is on cpu"):
        ops.matmul(x, x.cpu())
    with pytest.raises(RuntimeError, match="weight is on cpu"):
        ops.rms_norm(x, [4], torch.ones(4))
    assert ops.cross_entropy(x, torch.tensor([0, 4, 1, 2], device="cuda")).isnan()  # no such class


@pytest.mark.skipif(
    torch.cuda.get_device_properties(0).total_memory < 60 << 30, reason="not enough memory"
)
def test_more_than_32_bits() -> None:
    n = (1 << 31) + 16
    x = torch.ones(n, dtype=torch.int8, device="cuda")
    x[-3:] = 5
    y = ops.add(x, x)
    assert y[-4:].tolist() == [2, 10, 10, 10] and int(y[: 1 << 20].max()) == 2
    del y
    wide = x.view(16, -1).t()  # the sum is written through other strides
    assert torch.equal(ops.add(wide, wide[:1])[-1], wide[-1] + wide[0])
    del x, wide
    gc.collect()
    rows = torch.zeros(70_000, 32_000, dtype=torch.bfloat16, device="cuda")
    rows[-1, 7] = 20
    y = ops.softmax(rows, 1)
    assert y[-1, 7] > 0.99 and float(y[-2, 0]) == pytest.approx(1 / 32_000, rel=1e-2)
    del y
    target = torch.full((70_000,), 7, device="cuda")
    loss = ops.cross_entropy(rows, target, None, 0)
    torch.testing.assert_close(loss[-3:], F.cross_entropy(rows[-3:], target[-3:], reduction="none"))
    assert float(ops.rms_norm(rows, [32_000])[-1, 7]) == pytest.approx(32_000**0.5, rel=1e-2)


def test_a_pack(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    x = torch.randn(3, 40, device="cuda")
    ops.softmax(x, 1)
    signatures = [s for s in ops.signatures() if s.startswith("softmax_kernel *fp32:D,*fp32:D,")]
    try:
        triton_pack(tmp_path / "ops.pack", ops.KERNELS, signatures, [10 * major + minor])
        ops.use_pack(tmp_path / "ops.pack")
        torch.testing.assert_close(ops.softmax(x, 1), torch.softmax(x, 1))
        with pytest.raises(RuntimeError, match="pack it with 'softmax_kernel"):
            ops.softmax(x.double(), 1)
    finally:
        ops.use_python()
