"""Data parallel training, distributed tensors and tensor parallel training against eager, in one
process and in two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer

from plait.capture.backend import plait_backend
from plait.wrapper.program import CompileRecord, observers
from tests.ranks import passes


def test_the_optimizer_of_data_parallel_training_without_processes() -> None:
    """It runs each of its graphs with fake tensors once, if it knows that AOTAutograd was
    called."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 4)
        )

    graphs: list[int] = []

    def compiler(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(len(inputs))
        return plait_backend(gm, inputs)

    split = DDPOptimizer(
        bucket_bytes_cap=8_000, backend_compile_fn=compiler, first_bucket_cap=3_000
    )
    eager, model = build(), build()
    fn = torch.compile(model, backend=split.compile_fn)
    made: list[CompileRecord] = []
    token = observers.set((made.append,))
    for _ in range(2):
        x, y = torch.randn(6, 40), torch.randint(0, 4, (6,))
        want, got = F.cross_entropy(eager(x), y), F.cross_entropy(fn(x), y)
        torch.testing.assert_close(got, want)
        for m, loss in ((eager, want), (model, got)):
            m.zero_grad()
            loss.backward()
        for p, q in zip(eager.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
    observers.reset(token)
    assert len(graphs) >= 2
    # Steps run without Python around them: a fourth of a small model's time.
    assert not [r.wrapper_reason for r in made if r.wrapper_reason], made


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_as_eager(processes: int, tmp_path: Path) -> None:
    passes("tests.distributed_programs", processes, tmp_path / "meet")


def test_training_as_eager(tmp_path: Path) -> None:
    passes("tests.distributed_training", 2, tmp_path / "meet")
