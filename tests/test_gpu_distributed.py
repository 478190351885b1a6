"""Training on two GPUs over NCCL against eager, and what it keeps in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import passes

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")


@pytest.mark.parametrize("module", ["distributed_programs", "distributed_training"])
def test_as_eager(module: str, tmp_path: Path) -> None:
    passes(f"tests.{module}", 2, tmp_path / "meet", "nccl")
