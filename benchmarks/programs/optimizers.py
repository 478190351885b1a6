"""Steps of optimizers over many parameters of mixed size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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


def _kind(device: str, fused: bool) -> dict[str, Any]:
    """How an optimizer works. fused: by the kernels that PyTorch has for it."""
    return {"fused": True} if fused else {"foreach": True, "capturable": device != "cpu"}


def adam(name: str, count: int, device: str) -> Program:
    """A step of Adam or AdamW."""
    given = parameters(count, device)

    def made(fused: bool) -> Callable[[], Any]:
        step: Callable[[], Any] = getattr(torch.optim, name)(
            given, lr=1e-3, **_kind(device, fused)
        ).step
        return step

    return Program(made(False), fused=lambda: made(True))


def momentum(count: int, device: str) -> Program:
    """A step of SGD with momentum."""
    given = parameters(count, device)

    def made(**kind: bool) -> Callable[[], Any]:
        step: Callable[[], Any] = torch.optim.SGD(given, lr=1e-3, momentum=0.9, **kind).step
        return step

    return Program(made(foreach=True), fused=lambda: made(fused=True))


def clipped(count: int, device: str) -> Program:
    """Gradients are brought back to scale and clipped by their norm before the step of AdamW."""
    given = parameters(count, device)
    grads = [p.grad for p in given if p.grad is not None]
    found, scale = torch.zeros(1, device=device), torch.ones(1, device=device)

    def made(fused: bool) -> Callable[[], Tensor]:
        optimizer = torch.optim.AdamW(given, lr=1e-3, **_kind(device, fused))

        def step() -> Tensor:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
            norm: Tensor = nn.utils.clip_grad_norm_(given, 1.0, foreach=True)
            optimizer.step()
            return norm

        return step

    return Program(made(False), fused=lambda: made(True))


def training(device: str) -> Program:
    """A whole step: forward and backward pass, and the step of AdamW."""
    layers = [m for _ in range(12) for m in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(64, 256, device=device)

    def loss_of() -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss.detach()

    def made(fused: bool) -> Callable[[], Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **_kind(device, fused))

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of()
            optimizer.step()
            return loss

        return step

    return Program(made(False), grad=True, fused=lambda: made(True))


PROGRAMS = {
    **{f"{name} of {n}": partial(adam, name, n) for name in ("AdamW", "Adam") for n in COUNTS},
    **{f"SGD of {n}": partial(momentum, n) for n in COUNTS},
    **{f"AdamW of {n}, clipped": partial(clipped, n) for n in COUNTS},
    "training step of 12 layers": training,
}
