"""Control flow: loops, branches, scans and regions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs import Program


def while_loop(device: str) -> Program:
    """20 rounds of a layer and a softmax, 64 x 256."""
    x, w = torch.randn(64, 256, device=device), torch.randn(256, 256, device=device) / 16
    start = torch.zeros((), dtype=torch.int64, device=device)

    def body(i: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return i + 1, torch.softmax(torch.tanh(x @ w) * 2, -1) + x * 0.5, w.clone()

    def fn(x: Tensor, w: Tensor) -> Any:
        return torch.while_loop(lambda i, x, w: i < 20, body, (start, x, w))[1]

    return Program(fn, (x, w))


def branch(device: str) -> Program:
    """A branch of pointwise operators, 256 x 1024."""
    x = torch.rand(256, 1024, device=device)

    def fn(x: Tensor) -> Any:
        y = torch.cond(
            x.sum() > 0, lambda x: F.gelu(x).tanh() * x.sigmoid(), lambda x: x.cos() - x, (x,)
        )
        return y.softmax(-1)

    return Program(fn, (x,))


def scan(device: str) -> Program:
    """A recurrent layer over 64 steps, batch 16, 128 wide."""
    from torch._higher_order_ops.scan import scan as scanned

    x = torch.randn(64, 16, 128, device=device)
    h, w = torch.zeros(16, 128, device=device), torch.randn(128, 128, device=device) / 12

    def fn(h: Tensor, x: Tensor, w: Tensor) -> Any:
        def step(h: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
            new = torch.tanh(h @ w + a)
            return new, new.clone()

        return scanned(step, h, x)[1]

    return Program(fn, (h, x, w))


class Block(nn.Module):
    """A transformer block, d 128."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(128), nn.LayerNorm(128)
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def regions(device: str) -> Program:
    """8 transformer blocks, each a compiled region, 4 x 64 tokens."""
    model = nn.Sequential(*(Block() for _ in range(8))).to(device).eval()
    return Program(model, (torch.randn(4, 64, 128, device=device),))


PROGRAMS = {f.__name__: f for f in (while_loop, branch, scan, regions)}
