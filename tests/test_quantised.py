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

from benchmarks.quantised import CASES, Case, Random, distance, in_float64
from plait import compat
from plait.config import Config
from plait.graph.captured import Captured
from plait.wrapper.instructions import CallExtern, Launch
from plait.wrapper.program import CompileRecord
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
            close(name, compiled(*given), case.fn(*given), exact)
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


@pytest.mark.parametrize("name", ["rms norm, to fp8", "silu, to e5m2", "fp8 weights"])
def test_floats_of_8_bits_have_instructions(compile_only: None, name: str) -> None:  # noqa: F811
    source = _without_gpu(name, 16).kernel_source
    assert re.search(r"p_(to|of)_e\dm\d\w*\(v\d+\)|p_of_e4m3\(t\d+\)", source), source
