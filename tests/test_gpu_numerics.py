"""Eager's bits on a GPU: kernels over op samples, and models in inference and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.kernel.triton.dialects import GPUS, NVIDIA
from plait.kernel.triton.ops import prelude_for
from plait.runtime.triton_worker import load_module
from tests import bits
from tests import opinfo_tools as tools
from tests.test_numerics import KERNELS, MODELS, has_eagers_bits, network

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


COMPARE = """
@triton.jit
def compare(first, out, block: tl.constexpr):
    at = first + tl.program_id(0) * block + tl.arange(0, block)
    d = at.to(tl.float32, bitcast=True)
    ours = p_inverse(d).to(tl.int32, bitcast=True)
    theirs = tl.div_rn(1.0, d).to(tl.int32, bitcast=True)
    tl.store(out + tl.program_id(0), tl.max(tl.abs(ours - theirs)))
"""
ONE, NORMAL, INFINITE = 127 << 23, 253 << 23, 255 << 23
"""The bits of 1, of 2**126, up to which inverses are normal numbers, and of infinity."""


def norms() -> nn.Module:
    """The network of convolutions with norms of groups alone."""
    parts = list(network())
    parts[1] = nn.GroupNorm(4, 16)
    return nn.Sequential(*parts)


@pytest.mark.parametrize("op", KERNELS, ids=tools.name_of)
def test_kernels_have_eagers_bits(op: Any) -> None:
    assert bits.together([op], (torch.float32, torch.bfloat16, torch.int64), most=2, device="cuda")


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*MODELS, "norms"])
def test_models_have_eagers_bits(name: str, dtype: torch.dtype, train: bool) -> None:
    if name == "network" and train:
        pytest.skip("PyTorch traces batch norms of cuDNN as its own operator (docs/use.md)")
    torch.manual_seed(0)
    make, inputs = MODELS[name] if name in MODELS else (norms, MODELS["network"][1])
    module = make().to("cuda", dtype).train(train)
    x = inputs().cuda()
    x = x.to(dtype) if x.is_floating_point() else x
    assert has_eagers_bits(module, x, train)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_those_that_eager_calls(dtype: torch.dtype) -> None:
    """cuBLASLt has others for odd lengths, one column, and what a batch is added to."""

    def products(*xs: Tensor) -> list[Tensor]:
        x, words, b, one, q, k, bias = xs
        y = torch.baddbmm(bias, q, k.mT, beta=1.0, alpha=0.125)
        return [x @ words.T, torch.addmm(b, x, one), y, torch.bmm(q, k.mT)]

    torch.manual_seed(0)
    shapes = (2048, 768), (50257, 768), (1,), (768, 1), (32, 512, 64), (32, 512, 64), (32, 1, 512)
    xs = [torch.randn(*shape, device="cuda", dtype=dtype) for shape in shapes]
    same = torch.compile(products, backend="plait", options={"numerics": "eager"})
    assert all(map(torch.equal, products(*xs), same(*xs)))


def test_products_and_sums_are_rounded_one_by_one() -> None:
    """Their results in one kernel, where a GPU would like to round both at once."""
    x, y, z = (torch.randn(1 << 16, device="cuda") for _ in range(3))

    def fn(x: Any, y: Any, z: Any) -> Any:
        return x * y + z, z - x * y, (x * y + z).to(torch.bfloat16) * 3 + 1

    wants = [*fn(x, y, z)]
    assert bits.equal(wants, [*bits.compiled(fn, strict=True)(x, y, z)])


def gradients(table: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
    """Sums into few rows, of an embedding, a scatter and an index."""
    table, x = (t.detach().requires_grad_() for t in (table, x))

    def fn(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.embedding(i, table) * x
        put = x.scatter_add(0, i[:, None].expand(-1, 64), x * 2)
        return rows.sum() + (x[i % 7] * x.cos()).sum() + (put * x.sin()).sum()

    torch._dynamo.reset()
    options = {"strict": True}
    torch.compile(fn, backend="plait", options=options)(table, x).backward()
    return [table.grad, x.grad]  # type: ignore[list-item]


def test_deterministic_algorithms_give_the_same_bits_each_time() -> None:
    torch.manual_seed(0)
    table, x = torch.randn(7, 64, device="cuda"), torch.randn(20000, 64, device="cuda")
    i = torch.randint(0, 7, (20000,), device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (gradients(table, x, i) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(bits.equal(first, other) for other in others)


def test_inverses_are_what_division_gives(tmp_path: Path) -> None:
    """Of all numbers from 1 on: the same, and where results are not normal, the same or the next
    one."""
    helpers = prelude_for("p_inverse", NVIDIA.instructions(GPUS["sm_80"]))
    text = f"{NVIDIA.head}{helpers}\n\n{COMPARE}"
    compare = load_module("compare", text, tmp_path).compare
    for first, last, most in ((ONE, NORMAL, 0), (NORMAL, INFINITE, 1)):
        programs = (last - first) // 4096
        out = torch.empty(programs, dtype=torch.int32, device="cuda")
        compare[(programs,)](first + 1, out, block=4096)  # as far as the last one
        assert out.max() <= most
