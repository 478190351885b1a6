"""Compiling and running, training included, loads nothing of the compiler that PyTorch ships; and
nothing of plait's own compiler is loaded before the first graph.

The exceptions are torch's own doing and are stated here: `torch.cond`, `flex_attention`, user
Triton kernels and compiled optimiser steps.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parent.parent
FORBIDDEN = tuple(
    f"torch._inductor.{name}"
    for name in (
        "graph", "lowering", "scheduler", "ir", "compile_fx", "select_algorithm", "pattern_matcher",
        "decomposition", "codegen.wrapper", "codegen.triton", "codegen.cpp",
    )
)  # fmt: skip

MODEL = """
import sys, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.conv = nn.Conv1d(16, 8, 3)
        self.norm = nn.BatchNorm1d(8)
    def forward(self, i):
        x = self.body(self.embed(i))
        return self.norm(self.conv(x.transpose(1, 2))).relu().mean()
model = Model()
tokens = torch.randint(0, 20, (3, 7))
"""
RUNS = {
    "inference": """
fn = torch.compile(model.eval(), backend="plait")
with torch.no_grad():
    fn(tokens)
""",
    "training": """
fn = torch.compile(model, backend="plait")
for _ in range(2):
    fn(tokens).backward()
""",
    "dynamic training": """
fn = torch.compile(model, backend="plait", dynamic=True)
for n in (3, 4):
    fn(torch.randint(0, 20, (n, 7))).backward()
""",
    "checkpointing": """
from torch.utils.checkpoint import checkpoint
def f(x):
    return checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False).sum()
torch.compile(f, backend="plait")(torch.randn(8, requires_grad=True)).backward()
""",
    "training of a scan": """
from torch._higher_order_ops.scan import scan
def f(h, x):
    return scan(lambda h, x: (h * x.sin(), h + x), h, x)[1].sum()
h, x = torch.ones(3, requires_grad=True), torch.randn(4, 3)
torch.compile(f, backend="plait")(h, x).backward()
""",
    "an FX graph": """
fn = torch.compile(model, backend="plait", dynamic=True, options={"wrapper": "fx"})
for n in (3, 4):
    fn(torch.randint(0, 20, (n, 7))).backward()
assert "triton" not in sys.modules
""",
    "plait.compile": """
import plait
plait.compile(model.eval(), (tokens,))(tokens)
n = torch.export.Dim("n")
plait.compile(
    lambda x: x.exp(), (torch.randn(4, 3),), dynamic_shapes={"x": {0: n}}
)(torch.randn(5, 3))
""",
}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_forbidden_is_loaded(name: str) -> None:
    code = MODEL + RUNS[name] + "\nprint([m for m in sys.argv[1:] if m in sys.modules])\n"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = warm.run("-c", code, *FORBIDDEN, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_the_check_would_find_them() -> None:
    code = "import sys, torch._inductor.ir\nprint([m for m in sys.argv[1:] if m in sys.modules])"
    done = warm.run("-c", code, *FORBIDDEN, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert "torch._inductor.ir" in done.stdout, done.stderr


LOOKED_UP = """
import sys, torch, plait
def own():
    return {m for m in sys.modules if m.startswith("plait.")}
assert not own(), own()
fn = torch.compile(lambda x: x + 1, backend="plait")
compiler = {"plait.compile", "plait.pipelines", "plait.ir.loops", "plait.lower.core"}
rooms = ("plait.schedule.", "plait.kernel.")
print(sorted(m for m in own() if m in compiler or m.startswith(rooms)))
fn(torch.ones(3))
assert compiler < own()
"""


def test_the_compiler_is_loaded_by_the_first_graph() -> None:
    done = warm.run("-c", LOOKED_UP, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
