"""Tuning on a GPU: results, what other processes find, and that nothing of the user's is
touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import plait
from plait.wrapper.program import CompileRecord, observers
from tests.test_models import close, double

MODE = "max-autotune-no-cudagraphs"


def some(x: torch.Tensor, at: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = F.layer_norm(torch.softmax(x, -1)[at] * w, w.shape)
    return rows, x.t() + 1, x.cumsum(-1), x.argmax(-1), (rows * rows).sum(0), (at // (at + 1)).sum()


def inputs(n: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(n, 500, device="cuda"),
        torch.randint(0, n, (n,), device="cuda"),
        torch.randn(500, device="cuda"),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_results(dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE_DIR", str(tmp_path))
    compiled = torch.compile(some, backend="plait", mode=MODE, dynamic=dynamic)
    records: list[CompileRecord] = []
    token = observers.set((records.append,))
    try:
        for n in (300, 700):
            args = inputs(n)
            state = torch.cuda.get_rng_state()
            got = compiled(*args)
            assert torch.equal(state, torch.cuda.get_rng_state())
            for k, sides in enumerate(zip(got, some(*args), some(*map(double, args)), strict=True)):
                close(*sides, f"result {k}")
    finally:
        observers.reset(token)
    assert records[0].tuned and all(" us, " in line for r in records for line in r.tuned)
    torch._dynamo.reset()
    report = plait.explain(some, *inputs(300), options={"autotune": True})
    assert dynamic or all(line.endswith("measured before") for line in report.graphs[0].tuned)
    assert "tuned:" in report.text


CODE = """
import torch
from tests.test_gpu_tune import MODE, inputs, some
torch.manual_seed(0)
with torch.no_grad():
    for t in torch.compile(some, backend="plait", mode=MODE)(*inputs(3000)):
        print(t.double().sum().item().hex(), t.flatten()[:3].tolist())
"""


def test_processes_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start at once: one measures, both run the same."""
    monkeypatch.setenv("PLAIT_CACHE_DIR", str(tmp_path))
    root = Path(__file__).parent.parent
    both = [
        subprocess.Popen([sys.executable, "-c", CODE], cwd=root, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    first, second = (p.communicate(timeout=120)[0] for p in both)
    assert first and first == second and not any(p.returncode for p in both)
