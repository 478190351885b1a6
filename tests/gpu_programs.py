"""A program of every kind of kernel for a GPU, small: what a sanitizer looks at (`python -m
tests.gpu_programs`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import plait
from plait.log import watched

Maker = Callable[..., torch.Tensor]


def _norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), w)


def _scatter(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.index_add(0, i, x[i]).scatter_reduce(
        0, i[:, None].expand(-1, x.shape[1]), x[i], "amax"
    )


# name -> function, shapes of its float inputs, whether an index into the first input's rows follows
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], bool]] = {
    "pointwise": (lambda x, y: F.gelu(x + y), ((33, 65), (65,)), False),
    "transposition": (lambda x, y: x.t() + y, ((130, 70), (70, 130)), False),
    "rows": (lambda x: F.softmax(x, -1), ((37, 1000),), False),
    "long rows": (lambda x: F.log_softmax(x, -1), ((3, 20011),), False),
    "norm": (_norm, ((64, 250), (250,)), False),
    "columns": (lambda x: torch.var_mean(x, 0), ((3000, 37),), False),
    "parts": (lambda x: (x.sum(), x.amax(), x.argmax()), ((301, 1007),), False),
    "running": (lambda x: (x.cumsum(1), x.cummax(1)), ((7, 300),), False),
    "scatter": (_scatter, ((40, 9),), True),
    "gather": (lambda x, i: F.embedding(i, x) * 2, ((40, 9),), True),
    "random": (lambda x: F.dropout(x, 0.5) + torch.rand_like(x), ((65, 33),), False),
    "pool": (lambda x: F.max_pool2d(F.pad(x, (1, 2, 1, 2)), 3, 2), ((2, 3, 17, 19),), False),
}


def inputs(name: str, device: str) -> list[torch.Tensor]:
    """Inputs of a program, always the same."""
    _, shapes, indexed = PROGRAMS[name]
    gen = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=gen).to(device) for s in shapes]
    return [*made, torch.arange(0, shapes[0][0], 3, device=device) // 2] if indexed else made


def main() -> None:
    """Compiles and runs all of them, and waits."""
    for name, (fn, _, _) in watched("programs", PROGRAMS.items()):
        args = inputs(name, "cuda")
        plait.compile(fn, tuple(args))(*args)
    torch.cuda.synchronize()
    print(f"{len(PROGRAMS)} programs run")


if __name__ == "__main__":
    main()
