"""Steps of optimizers over many parameters of mixed size."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from programs import Program

COUNTS = 60, 300, 1000


def parameters(count: int, device: str) -> list[nn.Parameter]:
    """As of layers: a third are vectors; with gradients."""
    made = []
    for k in range(count):
        rows, columns = 64 + k * 37 % 448, 64 + k * 53 % 192
        p = nn.Parameter(torch.randn((rows,) if k % 3 == 0 else (rows, columns), device=device))
        p.grad = torch.randn_like(p)
        made.append(p)
    return made


def adamw(count: int, device: str, fused: bool = False) -> Program:
    """A step of AdamW. fused: the kernels that PyTorch has for it."""
    kind = {"fused": True} if fused else {"foreach": True, "capturable": device != "cpu"}
    return Program(torch.optim.AdamW(parameters(count, device), lr=1e-3, **kind).step)


def momentum(count: int, device: str) -> Program:
    """A step of SGD with momentum."""
    made = torch.optim.SGD(parameters(count, device), lr=1e-3, momentum=0.9, foreach=True)
    return Program(made.step)


def clipped(count: int, device: str) -> Program:
    """Gradients are clipped by their norm before the step."""
    given = parameters(count, device)
    kind = {"foreach": True, "capturable": device != "cpu"}
    optimizer = torch.optim.AdamW(given, lr=1e-3, **kind)

    def step() -> Tensor:
        norm = nn.utils.clip_grad_norm_(given, 1.0, foreach=True)
        optimizer.step()
        return norm

    return Program(step)


def training(device: str) -> Program:
    """A whole step: forward and backward pass, and the step of AdamW."""
    layers = [m for _ in range(12) for m in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(64, 256, device=device)
    kind = {"foreach": True, "capturable": device != "cpu"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kind)

    def loss_of() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        optimizer.step()
        return loss

    return Program(step, grad=True)


PROGRAMS = {
    **{f"AdamW of {n}": partial(adamw, n) for n in COUNTS},
    "AdamW of 300, fused": partial(adamw, 300, fused=True),
    "SGD of 300": partial(momentum, 300),
    "AdamW of 300, clipped": partial(clipped, 300),
    "training step of 12 layers": training,
}
