"""Reductions of segments of rows, beside those of the rows: random programs, on a CPU or as on a
GPU (tests/interpreted.py), where both are one kernel."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ir.expr import symbol
from plait.schedule.plan import kernels_of, segment_axes
from plait.wrapper.program import CompileRecord
from tests.product_programs import observing

AS_GPU = "TRITON_INTERPRET" in os.environ or "PLAIT_GPU_ARCH" in os.environ
Maker = Callable[[Tensor, Tensor], Tensor]


def rms(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5).to(x.dtype) * w


def centred(x: Tensor, w: Tensor) -> Tensor:
    return (x - x.amax(-1, keepdim=True)) / (1 + x.abs().sum(-1, keepdim=True))


ROWS: dict[str, Maker] = {
    "rms": rms,
    "softmax": lambda x, w: x.softmax(-1),
    "layer norm": lambda x, w: F.layer_norm(x, w.shape, w),
    "running": lambda x, w: x.cumsum(-1) * 0.1,
    "place": lambda x, w: x + x.argmax(-1, keepdim=True) * 0.1,
    "centred": centred,
    "none": lambda x, w: torch.sigmoid(x) * w,
}
SEGMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda b: b.abs().amax(-1, keepdim=True),
    "sum": lambda b: b.float().sum(-1, keepdim=True).to(b.dtype),
    "amin": lambda b: b.amin(-1, keepdim=True),
    "mean": lambda b: b.mean(-1, keepdim=True),
    "var": lambda b: b.float().var(-1, keepdim=True).to(b.dtype),
    "argmax": lambda b: b.argmax(-1, keepdim=True).to(b.dtype),
    "logsumexp": lambda b: b.float().logsumexp(-1, keepdim=True).to(b.dtype),
}
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "quotient": lambda b, s: b / (s.abs() + 1),
    "codes": lambda b, s: (b / (s.abs() + 0.5) * 20).round().clamp(-127, 127).to(torch.int8),
    "again": lambda b, s: b + (b * s).float().amax(-1, keepdim=True).to(b.dtype),
    "row": lambda b, s: (b * s).flatten(-2).sum(-1),
    "stored": lambda b, s: s.squeeze(-1) * 2,
}


def program(seed: int) -> tuple[Callable[..., Any], Tensor, Tensor]:
    """A program and its inputs."""
    r = random.Random(seed)
    n, points, rows = r.choice([2, 3, 4, 7, 16]), r.choice([2, 4, 8, 16, 32, 128]), r.choice([1, 5])
    row, of, use = (r.choice([*table.values()]) for table in (ROWS, SEGMENTS, USES))
    packed, stores = r.choice([0, 0, 2, 4]), r.random() < 0.5
    packed = packed if n * points % 4 == 0 else 0

    def fn(x: Tensor, w: Tensor) -> Any:
        y = row(x, w)
        blocks = y.unflatten(-1, (n, points))
        s = of(blocks)
        outs = [use(blocks, s), *([s * 3] if stores else [])]
        if packed:
            codes = (y * 7).round().clamp(0, 15).to(torch.uint8).unflatten(-1, (-1, packed))
            byte = codes[..., 0]
            for k in range(1, packed):
                byte = byte | (codes[..., k] << (8 // packed * k))
            outs.append(byte)
        return outs

    gen = torch.Generator().manual_seed(seed)
    dtype = r.choice([torch.float32, torch.bfloat16])
    x = torch.randn(rows, n * points, generator=gen).to(dtype)
    return fn, x, torch.randn(n * points, generator=gen).to(dtype)


def check(seed: int) -> bool:
    """Whether a program has segments; it is as near to float64 as eager."""
    fn, x, w = program(seed)
    records: list[CompileRecord] = []
    torch.compiler.reset()
    with observing(records), torch.no_grad():
        found = torch.compile(fn, backend="plait", dynamic=False)(x, w)
    for a, b, exact in zip(found, fn(x, w), fn(x.double(), w.double()), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), seed
        if not a.is_floating_point():  # a number in the middle of two codes may be either
            assert (a != b).float().mean() <= 0.08, seed
            continue
        far, limit = ((t.double() - exact).abs().max() for t in (a, b))
        unit = 2e-2 if a.dtype == torch.bfloat16 else 2e-4
        assert far <= 3 * limit + unit * (exact.abs().max() + 1e-2), seed
    return any(s.segment for r in records for k in kernels_of(r.plan) for s in k.stmts)


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(seed: int) -> None:
    check(seed)


@pytest.mark.slow
def test_many_random_programs() -> None:
    segmented = [seed for seed in range(4, 64) if check(seed)]
    assert bool(segmented) == AS_GPU, segmented


def test_axes_of_sizes_that_a_call_tells_are_no_segments() -> None:
    n = symbol("n", lo=1)
    outer, inner = (symbol(f"r{k}", extent=e) for k, e in enumerate((n, 32)))
    assert segment_axes((outer, inner), 32) == (inner,)
    assert segment_axes((inner, outer), 32) is None


def test_two_images_are_read_where_parts_of_a_row_say() -> None:
    """Deformable attention: of both parts of a row a kernel loads where it reads the image."""

    def levels(a: Tensor, b: Tensor, p: Tensor, w: Tensor) -> Tensor:
        parts = [
            F.grid_sample(x, q, align_corners=False)
            for x, q in zip((a, b), p.split(4, 2), strict=True)
        ]
        return (torch.cat(parts, -1) * w).sum(-1)

    x = [torch.randn(2, 3, k, k) for k in (8, 4)]
    p, w = torch.rand(2, 6, 8, 2) * 2 - 1, torch.rand(2, 1, 6, 8)
    compiled = torch.compile(levels, backend="plait")
    torch.testing.assert_close(compiled(*x, p, w), levels(*x, p, w))
