"""Products of few rows or results on a GPU: as near to float64 as eager's, in every target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.flex_programs import WRAPPERS
from tests.layer_programs import KERNELS, case
from tests.product_programs import CASES, VERSIONS, Case, check, check_version, multiplying
from tests.rotary_programs import ROTARY


@pytest.mark.parametrize("name", list(CASES))
def test_as_eager(name: str) -> None:
    check(CASES[name], "native", "cuda", on_gpu=True)


@pytest.mark.parametrize("name", ["residual", "parts", "layer"])
@pytest.mark.parametrize("wrapper", WRAPPERS[1:])
def test_every_target(wrapper: str, name: str) -> None:
    check(CASES[name], wrapper, "cuda", on_gpu=wrapper != "fx")


LAYERS = [(name, t) for name in ("layer", "layer of relu") for t in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), [*LAYERS, ("layer of relu", torch.float32)])
def test_a_layer_keeps_nans(name: str, dtype: torch.dtype) -> None:
    """In half precision it is one kernel, activation included."""
    fn = CASES[name].fn
    x, w, b = (torch.randn(s, device="cuda").to(dtype) for s in ((256, 256), (512, 256), (512,)))
    x[3, 5], x[7, 9] = torch.nan, torch.inf
    with torch.no_grad(), multiplying("tf32"):
        compiled = torch.compile(fn, backend="plait")
        found, eager = compiled(x, w, b), fn(x, w, b)
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as seen:
            compiled(x, w, b)
            torch.cuda.synchronize()
    names = [e.name for e in seen.events() if str(e.device_type).endswith("CUDA")]
    n_kernels = len([n for n in names if "mem" not in n.lower()])
    assert n_kernels == 1 or (dtype == torch.float32 and n_kernels == 2), names
    assert torch.equal(found.isnan(), eager.isnan()) and found[3].isnan().all()


def test_chains_in_float32() -> None:
    """Factors are rounded as the vendor's are, not cut off."""
    shapes = ((16, 768), (3072, 768), (3072,), (16, 3072))
    with multiplying("tf32"):
        check(Case(CASES["residual"].fn, shapes, 1, torch.float32), "native", "cuda", True)


@pytest.mark.parametrize("rows", [8, 72])
@pytest.mark.parametrize("name", list(KERNELS))
def test_kernels_of_a_layer(name: str, rows: int) -> None:
    check(case(name, rows), "native", "cuda", on_gpu=True)


@pytest.mark.parametrize("name", list(ROTARY))
def test_columns_in_pairs_and_parts(name: str) -> None:
    check(ROTARY[name], "native", "cuda", on_gpu=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_versions_of_a_large_product(
    wrapper: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_CACHE_DIR", str(tmp_path))  # what was chosen is not remembered
    check_version(version, wrapper, "cuda", monkeypatch)
