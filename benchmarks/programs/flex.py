"""FlexAttention: masks and scores that people write, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from programs import Program

WINDOW, PREFIX, DOCUMENT = 256, 128, 300


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < WINDOW)


def _document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i // DOCUMENT == j // DOCUMENT)


def _prefix(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j < PREFIX) | (i >= j)


def _alibi(slopes: Tensor, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + (j - i) * slopes[h]


def _soft_cap(slopes: Tensor, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 20 * torch.tanh(s / 20)


KINDS: dict[str, tuple[Callable[..., Tensor] | None, Callable[..., Tensor]]] = {
    "causal": (None, _causal),
    "window": (None, _window),
    "document": (None, _document),
    "prefix": (None, _prefix),
    "alibi": (_alibi, _causal),
    "soft_cap": (_soft_cap, _causal),
}
"""By name, what changes scores and what masks them."""


def attention(kind: str, length: int, width: int, training: bool, device: str) -> Program:
    """16 heads of bfloat16 and 16 k tokens on a GPU, 4 heads of one sequence on a CPU."""
    on_gpu = device != "cpu"
    batch, heads = (max(1, (1 << 14) // length), 16) if on_gpu else (1, 4)
    sizes, dtype = (batch, heads, length, width), torch.bfloat16 if on_gpu else torch.float32
    q, k, v, grad = (torch.randn(sizes, dtype=dtype, device=device) for _ in range(4))
    score, mask = KINDS[kind]
    slopes = torch.exp2(-torch.arange(1, heads + 1, device=device) / 2)
    blocks = create_block_mask(mask, None, None, length, length, device=device)
    changed = score and partial(score, slopes)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex_attention(q, k, v, score_mod=changed, block_mask=blocks)
        return out

    def train(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.autograd.grad(forward(q, k, v), (q, k, v), grad)

    def error(found: Any) -> float:
        """Of the first sequence and two of its heads."""
        given = [x.detach()[:1, :2].double().requires_grad_(training) for x in (q, k, v)]
        exact: Any = flex_attention(*given, score_mod=changed, block_mask=blocks)
        if training:
            exact = torch.autograd.grad(exact, given, grad[:1, :2].double())
        pairs = zip(found, exact, strict=True) if training else [(found, exact)]
        return max(((x[:1, :2] - e).abs().max() / e.abs().max()).item() for x, e in pairs)

    exact = error if on_gpu and length <= 1 << 12 else None
    if not training:
        return Program(forward, (q, k, v), exact=exact)
    return Program(train, tuple(x.requires_grad_() for x in (q, k, v)), grad=True, exact=exact)


def decode(batch: int, length: int, device: str) -> Program:
    """A query each of 32 heads, which share 8 of keys; the last eighth of the cache is empty."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.randn(batch, 32, 1, 128, dtype=dtype, device=device)
    k, v = (torch.randn(batch, 8, length, 128, dtype=dtype, device=device) for _ in range(2))
    last = torch.tensor(length - length // 8, device=device)
    seen = lambda b, h, i, j: j <= last
    blocks = create_block_mask(seen, None, None, 1, length, device=device)
    return Program(partial(flex_attention, block_mask=blocks, enable_gqa=True), (q, k, v))


def learned(length: int, width: int, device: str) -> Program:
    """Causal, with a bias by head and distance that is trained too."""
    given = attention("causal", length, width, True, device).args
    bias = torch.randn(given[0].shape[1], length, device=device, requires_grad=True)
    grad = torch.randn_like(given[0])
    blocks = create_block_mask(_causal, None, None, length, length, device=device)

    def train(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        score = lambda s, b, h, i, j: s + bias[h, (i - j).abs()]
        out = flex_attention(q, k, v, score_mod=score, block_mask=blocks)
        return torch.autograd.grad(out, (q, k, v, bias), grad)

    return Program(train, (*given, bias), grad=True)


def _named(
    kind: str, length: int, width: int, training: bool
) -> tuple[str, Callable[[str], Program]]:
    def make(device: str) -> Program:
        return attention(kind, length, width, training, device)

    ending = "_training" if training else ""
    make.__doc__ = f"{kind}, {length} positions, heads of {width}"
    return f"{kind}_{length}_{width}{ending}", make


PROGRAMS = {
    **dict(
        _named(kind, length, width, training)
        for kind in KINDS
        for length in (1 << 10, 1 << 12, 1 << 14)
        for width in (64, 128)
        for training in (False, True)
    ),
    **{f"decode_{b}x{n}": partial(decode, b, n) for b, n in ((1, 1 << 14), (16, 1 << 12))},
    "bias_1024_64_training": partial(learned, 1 << 10, 64),
}
"""PyTorch refuses training on a CPU."""
