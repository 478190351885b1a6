"""Packages for GPUs, written on a machine without one: what is built for which GPU.

The tests run in a process that has Triton on its path (see test_cubin.py): `python -m
tests.test_package_gpu NAME`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.attention.flex_attention import flex_attention

from tests import warm
from tests.test_cubin import ROOT, TRITON
from tests.test_package import X, contents

MODULE = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32)).eval()


def every_gpu_has_kernels(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        c = contents(
            monkeypatch,
            MODULE,
            "unused",
            (X,),
            device="cuda",
            machines=["sm_80", "ptx_80", "sm_100", "sm_90"],
        )
    assert [v.machine for v in c.variants] == ["sm_100", "sm_90", "sm_80", "ptx_80"]
    assert len({v.plan for v in c.variants}) == 1 and {v.kernels for v in c.variants} == {None}
    *cubins, ptx = [v.cubins or b"" for v in c.variants]
    for capability, cubin in zip((100, 90, 80), cubins, strict=True):
        elf = cubin[cubin.index(b"\x7fELF") :]
        assert (
            elf[48] == capability or elf[49] == capability
        )  # of the flags in the head; Blackwell has moved it
    assert b".target sm_80\n" in ptx and b"\x7fELF" not in ptx
    assert c.inputs[-1] == ("tensor", 0, "f32", (6, 16), (16, 1), "cuda:0")
    assert all(w.device.type == "cpu" for w in c.weights.values())  # the bytes are the same


def sizes_vary_and_weights_fold(folder: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made_there = self.w.sin() * torch.arange(
                16, device=x.device
            )  # which cannot be computed here
            return x * self.w.exp() + made_there

    with pytest.MonkeyPatch.context() as monkeypatch:
        shapes = ({0: Dim("n", min=2)},)
        c = contents(
            monkeypatch,
            Scaled(),
            "unused",
            (X,),
            shapes,
            device="cuda",
            machines=["sm_90"],
            fold=True,
        )
    assert c.folded == ("w",) and len(c.constants) == 2  # w itself too
    assert set(c.constant_devices) == {"cuda:0"} and not c.weights
    (name, low, high), width = c.inputs[-1][3]
    assert isinstance(name, str) and (low, high, width) == (0, None, 16)


def what_has_no_kernels_runs_on_any_gpu(folder: Path) -> None:
    def branch(x: torch.Tensor, holds: torch.Tensor) -> torch.Tensor:
        return torch.cond(holds, lambda x: x.histc(8), lambda x: x.histc(8, -1, 1), (x,))

    with pytest.MonkeyPatch.context() as monkeypatch:
        c = contents(monkeypatch, branch, "unused", (X, torch.tensor(True)), device="cuda")
    assert [(v.machine, v.kernels, v.cubins) for v in c.variants] == [("ptx_0", None, None)]
    assert c.inputs[0] == ("tensor", 0, "f32", (6, 16), (16, 1), "cuda:0")
    assert c.variants[0].plan.count(b"PLAITNPL") == 3  # the program and its branches


def attention_alone_has_a_kernel_for_each_gpu(folder: Path) -> None:
    """A program without loop nests; kernels for GPUs with little memory have smaller blocks."""

    def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s))
        return out

    given = [torch.randn(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        machines = ["sm_86", "sm_90"]
        c = contents(monkeypatch, capped, "unused", tuple(given), device="cuda", machines=machines)
    assert {v.machine for v in c.variants} == {*machines}
    assert all((v.cubins or b"").count(b"attention_result") for v in c.variants)


CASES = {
    f.__name__: f
    for f in (
        every_gpu_has_kernels,
        sizes_vary_and_weights_fold,
        what_has_no_kernels_runs_on_any_gpu,
        attention_alone_has_a_kernel_for_each_gpu,
    )
}


@pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")
@pytest.mark.parametrize("name", CASES)
def test_package_for_gpus(name: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(TRITON), "PLAIT_CACHE_DIR": str(tmp_path / "cache")}
    done = warm.run("-m", "tests.test_package_gpu", name, tmp_path, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))
