"""Products of few rows, on a CPU or as on a GPU (tests/interpreted.py)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.config import Config
from plait.runtime.tune import Contest, Outcome
from plait.wrapper.instructions import CallExtern, Launch
from plait.wrapper.program import CompileRecord
from tests.layer_programs import KERNELS, case
from tests.product_programs import (
    CASES,
    VERSIONS,
    Case,
    check,
    check_version,
    multiplying,
    observing,
)
from tests.rotary_programs import ROTARY

NEIGHBOURS = ("wait", "launch_dependents")
AS_GPU = "TRITON_INTERPRET" in os.environ or "PLAIT_GPU_ARCH" in os.environ


@pytest.mark.parametrize("name", list(CASES))
def test_as_eager(name: str) -> None:
    check(CASES[name], "python" if AS_GPU else "native", "cpu", AS_GPU)


@pytest.mark.skipif(not AS_GPU, reason="counts what a GPU launches")
@pytest.mark.parametrize("rows", [8, 72])
@pytest.mark.parametrize("name", list(KERNELS))
def test_kernels_of_a_layer(name: str, rows: int) -> None:
    check(case(name, rows), "python", "cpu", on_gpu=True)


@pytest.mark.skipif(not AS_GPU, reason="counts what a GPU launches")
@pytest.mark.parametrize("name", list(ROTARY))
def test_columns_in_pairs_and_parts(name: str) -> None:
    check(ROTARY[name], "python", "cpu", on_gpu=True)


@pytest.mark.skipif(not AS_GPU, reason="of a GPU's products")
@pytest.mark.parametrize("rival", [False, True])
def test_the_faster_one_is_taken(rival: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of versions of a kernel, and the vendor's product with a kernel beside it."""

    def tuned(contests: list[Contest], cfg: Config) -> list[Outcome]:
        ways = [(len(c.labels), c.rival is not None) for c in contests]
        return [
            Outcome((n if rival else 1) if has else 0, (3.0,) * n + (1.0,) * has) for n, has in ways
        ]

    monkeypatch.setattr("plait.kernel.triton.target.tune", tuned)
    case = replace(CASES["residual"], calls=int(rival))
    (record,) = check(case, "python", "cpu", True, autotune=True)
    assert ("operator" in "".join(record.tuned)) == rival, record.tuned
    assert ("columns=32," in record.kernel_source) == (not rival)


@pytest.mark.skipif(not AS_GPU, reason="of a GPU's products")
@pytest.mark.parametrize(
    ("name", "rival"),
    [
        ("layer", ("_addmm_activation", 1, True, 0, True)),
        ("layer of relu", ("_addmm_activation", 1, False, 0, True)),
        ("sum", ("addmm", 2, False, 0, True)),
        ("sum of fewer rows", ("mm", 0, False, 2 * (80 + 80 + 40) * 192, True)),
        ("layer of few rows", ("_addmm_activation", 1, True, 0, False)),
        ("plain", ("mm", 0, False, 0, False)),
        ("norm", ("mm", 0, False, 0, False)),  # its kernel adds the residual
    ],
)
def test_what_is_raced(
    name: str, rival: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator that is called without tuning, which stays where nothing is measured."""
    seen: list[Contest] = []

    def tuned(contests: list[Contest], cfg: Config) -> list[Outcome]:
        seen.extend(c for c in contests if c.rival)
        return [c.unmeasured("not now") for c in contests]

    monkeypatch.setattr("plait.kernel.triton.target.tune", tuned)
    raced = CASES[name]
    if name in ("layer", "layer of relu"):  # of more rows the vendor's is better
        raced = replace(raced, sizes=((2, 50, 256), *raced.sizes[1:]))
    (record,) = check(raced, "python", "cpu", True, autotune=True)
    found = {(r.name, r.dims, r.gelu, r.nbytes, r.is_usual) for c in seen if (r := c.rival)}
    assert found == {rival} and all(c.cold == (1,) for c in seen), record.tuned


@pytest.mark.skipif(not AS_GPU, reason="of a GPU's products")
@pytest.mark.parametrize(("before", "op"), [(False, "aten::mm"), (True, "aten::addmm")])
def test_a_product_does_not_wait_for_what_it_is_added_to(before: bool, op: str) -> None:
    """Its factors would live until then; the kernel that makes the other tensor adds."""

    def fn(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        made = r.exp() if before else None
        product = x @ w
        return product + (r.exp() if made is None else made)

    (record,) = check(
        Case(fn, ((80, 256), (256, 192), (80, 192)), 1, calls=1), "python", "cpu", True
    )
    (call,) = [i for i in record.wrapper.body if isinstance(i, CallExtern)]
    assert call.op.partition(".")[0] == op


@pytest.mark.skipif(not AS_GPU, reason="counts what a GPU launches")
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize("name", ["layer of relu", "layer"])
def test_layers_in_float32(name: str, precision: str) -> None:
    """What follows is a kernel's: the vendor's relu loses NaNs, its gelu is not that exact."""
    layer = replace(CASES[name], dtype=torch.float32, launches=1)
    with multiplying(precision):
        check(layer, "python", "cpu", True)


@pytest.mark.skipif(not AS_GPU, reason="counts what a GPU launches")
@pytest.mark.parametrize(("rows", "precision", "one"), [(12, "tf32", True), (80, "ieee", False)])
def test_chains_in_float32(rows: int, precision: str, one: bool) -> None:
    """One kernel, where factors may be rounded."""
    shapes = ((rows, 256), (128, 256), (128,), (rows, 128))
    given = Case(CASES["residual"].fn, shapes, 1, torch.float32).tensors("cpu")
    records: list[CompileRecord] = []
    with multiplying(precision), observing(records), torch.no_grad():
        compiled = torch.compile(CASES["residual"].fn, backend="plait")
        found, exact = compiled(*given), CASES["residual"].fn(*given)
    off = float((found - exact).abs().max())
    assert off < (1e-4 if one else 2e-6), off
    (record,) = records
    assert ("precision='tf32'" in record.kernel_source) == one
    calls = [i for i in record.wrapper.body if isinstance(i, CallExtern)]
    assert len(calls) == (0 if one else 1)


ENDS = ((3, 3, 9, 14), (0, 0, 0, 20), (20, 20, 20, 20), (0, 0, 0, 0))
"""Of rows of four matrices, of 20 rows: a matrix may have none, and what is behind the last end is
nobody's."""


@pytest.mark.skipif(not AS_GPU, reason="of a GPU's products")
@pytest.mark.parametrize("lies", ["nt", "nn"])
def test_matrices_with_rows_of_their_own(lies: str) -> None:
    def fn(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        gate, y = torch._grouped_mm(x, w, offs=ends).chunk(2, -1)
        mine = torch.arange(len(x), device=x.device)[:, None] < ends[-1]
        return torch.where(mine, F.silu(gate) * y, 0.0)

    records: list[CompileRecord] = []
    torch.compiler.reset()
    compiled = torch.compile(fn, backend="plait", options={"wrapper": "python"})
    x, w = torch.randn(20, 128).bfloat16(), torch.randn(4, 256, 128).bfloat16() / 11
    w = w.mT if lies == "nt" else w.mT.clone()
    with observing(records), torch.no_grad():
        for ends in ENDS:
            found, begin = compiled(x, w, torch.tensor(ends, dtype=torch.int32)), 0
            for end, matrix in zip(ends, w.double(), strict=True):
                gate, y = (x[begin:end].double() @ matrix).chunk(2, -1)
                torch.testing.assert_close(
                    found[begin:end].double(), F.silu(gate) * y, atol=0.02, rtol=0.02
                )
                begin = end
            assert not found[begin:].any()
    (record,) = records
    body = record.wrapper.body
    assert [sum(isinstance(i, k) for i in body) for k in (Launch, CallExtern)] == [1, 0]


@pytest.mark.skipif(not AS_GPU, reason="of a GPU's products")
def test_the_operator_of_an_activation_keeps_nans() -> None:
    """In float32 as well, in which some of the vendor's kernels do not."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch._addmm_activation(b, x, w, beta=0.5)

    (record,) = check(
        Case(fn, ((150, 256), (256, 192), (192,)), 1, torch.float32, calls=1), "python", "cpu", True
    )
    (call,) = [i for i in record.wrapper.body if isinstance(i, CallExtern)]
    assert call.op.partition(".")[0] == "aten::addmm"


@pytest.mark.skipif(not AS_GPU, reason="of a GPU's products")
@pytest.mark.parametrize("version", VERSIONS)
def test_versions_of_a_large_product(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_version(version, "python", "cpu", monkeypatch)


@pytest.mark.skipif(not AS_GPU, reason="of a GPU's products")
def test_the_next_kernel_comes_beside_a_product_if_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of the library, or of whoever runs behind the program, need not wait."""
    monkeypatch.setenv("PLAIT_GPU_ARCH", "sm_90")

    def library(x: Tensor, w: Tensor) -> Any:
        return torch.linalg.svdvals(F.linear(x, w).float())

    plain = CASES["plain"]
    for of, n in ((CASES["swiglu"], 1), (plain, 0), (replace(plain, fn=library, calls=1), 0)):
        (record,) = check(of, "python", "cpu", True)
        waits, releases = (record.kernel_source.count(f"gdc_{x}()") for x in NEIGHBOURS)
        assert (waits, releases) == (of.launches, n), record.kernel_source


@pytest.mark.skipif(AS_GPU, reason="each target is one of the CPU's")
@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_activations_in_every_target(wrapper: str) -> None:
    """The call that layers on a GPU become."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = torch._addmm_activation(b, x, w)
        return y, torch._addmm_activation(b, x, w, beta=0.5, use_gelu=True)

    given = (torch.randn(70, 128), torch.randn(128, 96), torch.randn(96))
    options = {"wrapper": wrapper, "small_matmul_flops": 0}
    compiled = torch.compile(fn, backend="plait", options=options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), fn(*given))
