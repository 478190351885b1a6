"""Gradients that look for what is equal to a result: what is compared is saved, not made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from plait import compat

ROW = torch.arange(6) // 2
CASES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "amax": ("gelu", lambda x: F.gelu(x, approximate="tanh").amax(-1)),
    "of all": ("div", lambda x: (x.exp() / 3).max()),
    "norm": ("mul", lambda x: torch.linalg.vector_norm(F.silu(x), float("inf"), -1)),
    "scattered": ("add", lambda x: torch.zeros(6, 4).index_reduce(0, ROW, x.exp() + x, "amax")),
    "part": ("mul", lambda x: (x.sin() * 2).split(2, -1)[1].amax(-1)),
    "of many results": ("getitem", lambda x: torch.linalg.norm(x, 2)),
    "of the input": ("", lambda x: x[:3].amax(-1)),
    "of others": ("", lambda x: torch.maximum(x.exp(), x.flip(0).exp())),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", CASES)
def test_what_is_compared_is_saved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[str] = []
    cut = compat.tracing.min_cut_partition

    def noted(joint: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        nodes = [n for n in joint.graph.nodes if "recompute" in n.meta]
        marked.extend(n.target.__name__.split(".")[0] for n in nodes)
        return cut(joint, *args, **kwargs)

    monkeypatch.setattr(compat.tracing, "min_cut_partition", noted)
    kept, fn = CASES[name]
    x = torch.randn(6, 4, requires_grad=True)
    (got,) = torch.autograd.grad(torch.compile(fn, backend="plait")(x).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(fn(x).sum(), x)[0])
    assert marked == [kept] * (kept != "")
