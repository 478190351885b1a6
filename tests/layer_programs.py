"""Layers of language models, and how many kernels they take on a GPU: what goes into kernels of
products, for few rows, and what stands beside calls of the vendor's, for many."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.product_programs import Case, Program

Sizes = tuple[tuple[int, ...], ...]
D, H = 128, 32  # of a model, and of a head


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's norm."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def geglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, gate), approximate="tanh") * F.linear(x, up), down)


def turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + turned(x) * sin


def residual_and_norm(x: Tensor, w: Tensor, rest: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rest = rest + F.linear(x, w)
    return rest, normed(rest, weight)


def llama_heads(
    x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    heads = [F.linear(x, w).view(*x.shape[:2], -1, H).transpose(1, 2) for w in (q, k, v)]
    return rotated(heads[0], cos, sin), rotated(heads[1], cos, sin), heads[2]


def neox_heads(x: Tensor, w: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Of one matrix, of whose heads a part is rotated."""
    q, k, v = F.linear(x, w, b).view(*x.shape[:2], -1, 3 * H).transpose(1, 2).chunk(3, -1)
    n = cos.shape[-1]
    q, k = (torch.cat((rotated(t[..., :n], cos, sin), t[..., n:]), -1) for t in (q, k))
    return q, k, v


def neox_branches(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor, rest: Tensor) -> Tensor:
    """A layer, both of whose branches are added."""
    return F.linear(F.gelu(F.linear(x, w, b)), v, c) + rest + x


def mlp(rows: int) -> Sizes:
    return (2, rows // 2, D), (4 * D, D), (4 * D, D), (D, 4 * D)


def programs(rows: int) -> dict[str, tuple[Program, Sizes]]:
    x, angles, some = (2, rows // 2, D), (rows // 2, H), (rows // 2, H // 4)
    return {
        "swiglu": (swiglu, mlp(rows)),
        "geglu": (geglu, mlp(rows)),
        "residual and norm": (residual_and_norm, (x, (D, D), x, (D,))),
        "llama's heads": (llama_heads, (x, (D, D), (D, D), (D, D), angles, angles)),
        "neox's heads": (neox_heads, (x, (3 * D, D), (3 * D,), some, some)),
        "neox's branches": (neox_branches, (x, (4 * D, D), (4 * D,), (D, 4 * D), (D,), x)),
    }


# Launches where products are kernels of ours, and beside the vendor's calls. A rotation of few rows
# is part of the product, a norm, which reads all of a row, is a kernel of its own.
KERNELS = {
    "swiglu": (3, 1), "geglu": (3, 1), "residual and norm": (2, 1), "llama's heads": (3, 1),
    "neox's heads": (1, 2), "neox's branches": (2, 2),
}  # fmt: skip
CALLS = {"swiglu": 3, "geglu": 3, "llama's heads": 3, "neox's branches": 2}


def case(name: str, rows: int) -> Case:
    """A layer over so many rows, with what it takes on a GPU."""
    fn, sizes = programs(rows)[name]
    few = rows <= 64
    return Case(fn, sizes, KERNELS[name][not few], calls=0 if few else CALLS.get(name, 1))
