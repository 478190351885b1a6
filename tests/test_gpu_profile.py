"""plait.profile on a GPU: the device's times, by module and line."""

from __future__ import annotations

import pytest
import torch

import plait
from tests.test_profile import Stack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_devices_times_of_a_call_and_its_backward_pass() -> None:
    model, x = Stack().cuda().train(), torch.randn(512, 64, device="cuda")
    found = plait.profile(model, x, calls=3, quiet=True)
    assert found.on_gpu and found.wall_us > 0
    assert all(us > 0 for i, us, _ in found.steps if i.name.startswith("plait_"))
    assert any("blocks.*.up" in r.what and r.us > 0 for r in found.by_module)
    graphs = {i.graph.partition("_")[0] for i, _, _ in found.steps}
    assert graphs == {"forward", "backward"}
    assert "launching" in {r.what for r in found.gaps}
