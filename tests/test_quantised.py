"""Patterns of quantised models (benchmarks/quantised.py), on a CPU or as on a GPU
(tests/interpreted.py): as near to float64 as eager, and of as many kernels as they say."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from benchmarks.quantised import CASES, Case, Random, distance, e4m3, e5m2, in_float64
from plait import compat
from plait.config import Config
from plait.graph.captured import Captured
from plait.schedule.plan import kernels_of
from plait.schedule.text import plan_text, read_plan
from plait.wrapper.instructions import CallExtern, Launch
from plait.wrapper.program import CompileRecord
from tests.against_eager import poison
from tests.flex_programs import WRAPPERS
from tests.interpreted import on_gpu
from tests.product_programs import observing
from tests.test_cuda_programs import compile_only, pipeline  # noqa: F401

AS_GPU = "TRITON_INTERPRET" in os.environ or "PLAIT_GPU_ARCH" in os.environ
FEW, MANY = (24, 256, 256), (96, 128, 384)
# Eager divides by a number on a CPU and multiplies by its reciprocal on a GPU: where the last bit
# of a scale differs, a number in the middle of two codes becomes the other one.
FARTHER = 2.0 if AS_GPU else 1.3


def close(name: str, found: Any, eager: Any, exact: Any) -> None:
    """Results are of eager's dtypes and strides, and no farther from float64 than eager's."""
    for a, b in zip(tree_leaves(found), tree_leaves(eager), strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    far, limit = distance(name, found, exact), distance(name, eager, exact)
    assert far <= FARTHER * limit + 1e-4, f"off by {far}, eager by {limit}"


def check(
    name: str, sizes: tuple[int, int, int], device: str, wrapper: str, dtype: torch.dtype
) -> CompileRecord:
    """A compiled program is right, for other numbers than it was compiled with too."""
    case: Case = CASES[name]
    records: list[CompileRecord] = []
    torch.compiler.reset()
    with observing(records), torch.no_grad():
        compiled = torch.compile(case.fn, backend="plait", options={"wrapper": wrapper})
        for seed in range(2):
            given: list[Tensor] = case.inputs(Random(device, seed, dtype), *sizes)
            exact = case.fn(*map(in_float64, given))
            eager = case.fn(*given)
            poison(eager)
            close(name, compiled(*given), eager, exact)
    (record,) = records
    return record


def steps(record: CompileRecord) -> tuple[int, int]:
    """Kernels of ours and calls of a library."""
    body = record.wrapper.body
    kinds = [sum(isinstance(i, kind) for i in body) for kind in (Launch, CallExtern)]
    return kinds[0], kinds[1]


@pytest.mark.parametrize("name", list(CASES))
def test_as_eager(name: str) -> None:
    check(name, FEW, "cpu", "python" if AS_GPU else "native", torch.bfloat16)


@pytest.mark.parametrize("name", ["mxfp8 weights", "mxfp4 weights"])
def test_more_rows(name: str) -> None:
    """Of which tiles of codes that share scales are multiplied transposed, or not."""
    check(name, (40, 128, 256), "cpu", "python" if AS_GPU else "native", torch.bfloat16)


@pytest.mark.skipif(AS_GPU, reason="the interpreter has one target")
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("wrapper", WRAPPERS[1:])
def test_every_target(wrapper: str, name: str) -> None:
    check(name, FEW, "cpu", wrapper, torch.bfloat16)


def _without_gpu(name: str, m: int) -> CompileRecord:
    """What is compiled for a GPU of a program of so many rows."""
    case = CASES[name]
    mode = FakeTensorMode()
    given = [mode.from_tensor(t) for t in case.inputs(Random("cpu"), m, 4096, 2048)]
    with mode, torch.no_grad():
        table = compat.decompositions.decomposition_table()
        graph = make_fx(torch.func.functionalize(case.fn), table)(*given)
    with on_gpu(graph):
        cfg = Config(gpu_arch="sm_90", verify=True)
        made: CompileRecord = pipeline.compile_graph(
            Captured(graph, "test", "inference"), cfg
        ).record
    return made


@pytest.mark.parametrize("name", list(CASES))
def test_kernels_on_a_gpu(compile_only: None, name: str) -> None:  # noqa: F811
    """A program takes as many kernels and calls as it says."""
    many = _without_gpu(name, 4096)
    assert steps(many) == CASES[name].steps, many.wrapper
    if CASES[name].few is not None:
        few = _without_gpu(name, 16)
        assert steps(few) == CASES[name].few, few.wrapper


@pytest.mark.parametrize("name", ["rms norm, to mxfp8", "rms norm, to mxfp4"])
def test_rows_that_no_block_holds(name: str) -> None:
    """Segments of rows along which a kernel walks."""
    check(name, (2, 0, 40960), "cpu", "python" if AS_GPU else "native", torch.bfloat16)


def test_segments_are_written_and_read(compile_only: None) -> None:  # noqa: F811
    plan = _without_gpu("rms norm, to mxfp4", 16).plan
    (kernel,) = kernels_of(plan)
    assert {s.segment for s in kernel.stmts} == {0, 2, 32}, plan_text(plan)
    assert plan_text(read_plan(plan_text(plan), plan.program)) == plan_text(plan)


def test_a_byte_of_two_numbers_is_loaded_once(compile_only: None) -> None:  # noqa: F811
    source = _without_gpu("int4 weights", 1024).kernel_source
    assert source.count("tl.load(") == 3 and "other=0" not in source, source


@pytest.mark.parametrize("name", ["rms norm, to fp8", "silu, to e5m2", "fp8 weights"])
def test_floats_of_8_bits_have_instructions(compile_only: None, name: str) -> None:  # noqa: F811
    source = _without_gpu(name, 16).kernel_source
    assert re.search(r"p_(to|of|one|four)_e\dm\d\w*\(v\d+\)|p_(number_)?of_e4m3\(t\d+\)", source), (
        source
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, e4m3, e5m2], ids=str)
def test_codes_are_eagers(kind: torch.dtype, dtype: torch.dtype) -> None:
    """To the last bit, however a step between codes divides."""
    check_codes(kind, "cpu", dtype)


def check_codes(kind: torch.dtype, device: str, dtype: torch.dtype = torch.float32) -> None:
    clamps = dtype == torch.bfloat16  # the instructions do it

    def fn(x: Tensor, scale: Tensor) -> Any:
        y = x.float() / scale
        if not kind.is_floating_point:
            y = y.round().clamp(0 if kind == torch.uint8 else -128, 127)
        elif clamps:
            limit = torch.finfo(kind).max
            y = y.clamp(-limit, limit)
        return y.to(kind), x.abs().amax(-1)

    gen = torch.Generator().manual_seed(3)
    x = torch.randn(12, 1200, generator=gen)
    scale = torch.rand(12, 1, generator=gen) / 50 + 1e-3
    x[1], scale[1] = x[1] * 1e-30, scale[1] * 1e-30
    x[2], scale[2] = x[2] * 1e30, scale[2] * 1e30
    x[3], scale[3] = x[3] * 1e-38, scale[3] * 1e-38
    x[4:8, :8] = torch.tensor([0.0, -0.0, 1e-40, -1e-20, 1e20, 3e38, -1e-9, 1e9])
    scale[5:8, 0] = torch.tensor([1e-42, 1e38, 0.1])
    if kind.is_floating_point:  # of which integers know nothing
        x[9, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
        scale[10], scale[11] = torch.inf, 0.0
        x = torch.where(torch.rand(x.shape, generator=gen) < 0.5, x, (x / scale).round() * scale)
        x = x.clamp(-400 * scale, 400 * scale) if kind == e4m3 and not clamps else x
    torch.compiler.reset()
    given = x.to(device, dtype), scale.to(device)
    found, want = torch.compile(fn, backend="plait")(*given)[0], fn(*given)[0]
    a, b = (t.view(torch.uint8) for t in (found, want))
    differ = (a != b) & ~(found.float().isnan() & want.float().isnan())
    assert not differ.any(), [
        (x[k, j], scale[k], a[k, j], b[k, j]) for k, j in differ.nonzero()[:4].tolist()
    ]
