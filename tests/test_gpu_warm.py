"""Warm starts on a GPU: each program runs in two processes over one folder, and its first frame
starts warm in the second one; with another global that the trace read it does not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm as processes

ROOT = Path(__file__).resolve().parent.parent
MODE = ("default", "reduce-overhead")
SETUP = """
import json, sys
import torch
import torch.nn.functional as F
from torch import nn
import plait
from plait.capture.warm import frames

torch.backends.cudnn.allow_tf32 = False
K = float(sys.argv[3])

class Block(nn.Module):
    def __init__(self, n=64):
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(n, 3 * n), nn.LayerNorm(n), nn.Linear(n, n)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if hasattr(x, "of_no_tensor"):
            return x
        return K * x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.gelu(x) @ self.table.weight.T

class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)

    def forward(self, ids):
        x = ids[:, :1, None, None].float() * torch.ones(3, 9, 9, device=ids.device) / 50 * K
        return self.norm(self.conv(x)).relu().mean((2, 3))

name, mode = sys.argv[1:3]
torch.manual_seed(0)
model = (Image if name == "image" else Model)().cuda()
sizes = (12, 7, 30) if name == "sizes" else (12, 12, 12)
fn = torch.compile(model, backend="plait", mode=mode, dynamic=name == "sizes" or None)
worst = 0.0
for n in sizes:
    ids = torch.randint(50, (4, n), device="cuda")
    if name == "infer":
        with torch.no_grad():
            got, want = fn(ids), model(ids)
        worst = max(worst, float((got - want).abs().max()))
        continue
    grads = []
    for call in (fn, model):
        loss = call(ids).square().mean()
        grads.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for got, want in zip(*grads):
        worst = max(worst, float((got - want).abs().max() / want.abs().max()))
print(json.dumps([[o.how for o in frames.outcomes], worst]))
"""


def run(name: str, mode: str, k: float, folder: Path) -> tuple[list[str], float]:
    """What became of the frames of a process, and its greatest distance from eager."""
    env = os.environ | {
        "PLAIT_WARM_START": "1", "PLAIT_CACHE_DIR": str(folder), "PLAIT_STRICT": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }  # fmt: skip
    done = processes.run("-c", SETUP, name, mode, str(k), env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found: Any = json.loads(done.stdout.splitlines()[-1])
    return found[0], found[1]


@pytest.mark.parametrize("mode", MODE)
@pytest.mark.parametrize("name", ["infer", "train", "sizes", "image"])
def test_second_process(name: str, mode: str, tmp_path: Path) -> None:
    how, error = run(name, mode, 2.0, tmp_path)
    assert how == ["kept"] and error < 1e-3
    how, error = run(name, mode, 2.0, tmp_path)
    assert how == ["warm"] and error < 1e-3
    how, error = run(name, mode, 3.0, tmp_path)
    # With dynamic=True, Dynamo makes numbers arguments of the graph.
    assert how == ["warm" if name == "sizes" else "kept"] and error < 1e-3
