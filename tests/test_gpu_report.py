"""Reports of programs on a GPU: kernels are timed by the device, beside a copy of as many bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import plait

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def data_of(page: Path) -> dict[str, Any]:
    """The data in a page."""
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.mark.parametrize("graphs", [False, True])
def test_kernels_of_a_gpu_are_timed(graphs: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + 1) @ x.softmax(-1)

    x = torch.randn(4096, 4096, device="cuda")
    with torch.no_grad(), plait.report(tmp_path / "page.html"):
        got = torch.compile(fn, backend="plait", options={"cuda_graphs": graphs})(x)
    torch.testing.assert_close(got, fn(x), rtol=1e-3, atol=1e-3)
    data = data_of(tmp_path / "page.html")
    (g,) = data["graphs"]
    assert {s["kind"] for s in g["steps"]} >= {"product", "reduction"} and not g["why_untimed"]
    for s in g["steps"]:
        assert 0 < s["time_ns"] and 0.3 < s["roofline"] < 1.5, (s["name"], s["time_ns"])
    assert list(data["copy_ns"]) == list(data["product_flops"]) == ["cuda:0"]
    assert data["product_flops"]["cuda:0"].keys() == {"f32"}
