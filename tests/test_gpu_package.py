"""Packages with control flow on a GPU: written, loaded and run there, without Python between
branches and loops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.utils._pytree as pytree
from torch.export import export

import plait
from tests.test_gpu import CUDA
from tests.test_package_control import PROGRAMS, N


@pytest.mark.parametrize("name", PROGRAMS)
def test_control_flow(name: str, tmp_path: Path) -> None:
    module = PROGRAMS[name].to(CUDA)
    x = torch.randn(5, 4, device=CUDA)
    with torch.device(CUDA):
        plait.package(module, tmp_path / "p.plait", (x,))
        exported = export(module, (x,), dynamic_shapes={"x": {0: N}}, strict=name == "nested")
        plait.package(exported, tmp_path / "q.plait")
    static, dynamic = plait.load(tmp_path / "p.plait"), plait.load(tmp_path / "q.plait")
    for loaded, given in (
        (static, (x, x.abs(), -x.abs())),
        (dynamic, (x, -torch.rand(8, 4, device=CUDA))),
    ):
        for a in given:
            results = []
            for call in (module, loaded):
                torch.manual_seed(0)
                with torch.no_grad(), torch.device(CUDA):
                    results.append(pytree.tree_leaves(call(a)))
            for want, got in zip(*results, strict=True):
                if name != "drawn":  # a kernel draws other numbers than eager
                    torch.testing.assert_close(got, want)
