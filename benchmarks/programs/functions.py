"""Derivatives and types beyond plain training: torch.func, selective checkpoints, jagged tensors,
float8."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from programs import Program


def _net(device: str, width: int) -> nn.Module:
    layers = (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 16))
    return nn.Sequential(*layers).to(device)


def per_sample_gradients(device: str) -> Program:
    """Of 64 samples: vmap of grad of functional_call."""
    net = _net(device, 128)
    weights = {k: v.detach() for k, v in net.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, weights, (x[None],)), y[None])

    def fn(x: Tensor, y: Tensor) -> Any:
        return vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)

    x, y = torch.randn(64, 128, device=device), torch.randint(16, (64,), device=device)
    return Program(fn, (x, y))


def jacobian(device: str) -> Program:
    """By rows, of 16 results with respect to 128 numbers, for each of 32 samples."""
    net = _net(device, 128).requires_grad_(False)
    return Program(vmap(jacrev(net)), (torch.randn(32, 128, device=device),))


def checkpointed(device: str) -> Program:
    """Training of four blocks of which products alone are saved."""
    width = 1024 if device == "cuda" else 128
    blocks = [_block(device, width) for _ in range(4)]
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    policy = partial(create_selective_checkpoint_contexts, kept)

    def step(x: Tensor) -> Any:
        for block in blocks:
            x = x + checkpoint(block, x, use_reentrant=False, context_fn=policy)
        return torch.autograd.grad(x.square().mean(), [p for b in blocks for p in b.parameters()])

    return Program(step, (torch.randn(512, width, device=device),), grad=True)


def _block(device: str, width: int) -> nn.Module:
    wide = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return nn.Sequential(nn.LayerNorm(width), *wide).to(device)


def jagged(device: str) -> Program:
    """Training with rows of lengths of their own."""
    net = _net(device, 128)
    lengths = [3 + 7 * k % 61 for k in range(32)]
    rows = [torch.randn(n, 128, device=device) for n in lengths]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)

    def step(x: Tensor) -> Any:
        loss = net(x).to_padded_tensor(0.0).sum(1).square().mean()
        return torch.autograd.grad(loss, list(net.parameters()))

    return Program(step, (x,), grad=True)


def float8(device: str) -> Program:
    """A row's numbers by a scale to float8 and back, with what is added."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True) / 448
        codes = (x / scale).to(torch.float8_e4m3fn)
        return codes.to(torch.float32) * scale + y

    n = 4096 if device == "cuda" else 512
    return Program(fn, tuple(torch.randn(n, n, device=device) for _ in range(2)))


PROGRAMS = {f.__name__: f for f in (per_sample_gradients, jacobian, checkpointed, jagged, float8)}
