"""Tiles of products whose rows keep their bits, on a GPU: `python -m benchmarks.row_tiles_gpu
[float32 [few]]`, else in bfloat16. Prints microseconds of each tile for each shape, eager's kernels
first, and how far eager and the tiles are off float64, as a share of it in the 2-norm. Fails where
one tile has other bits than another.

Shapes are those of GPT-2 and Llama, with what follows each product there; few: of 1, 32 and 64
rows. A tile is rows x columns, warps, stages, steps of one turn of the loop, and "stays" where
programs take one tile after the other and load by descriptors. Times are the least of a CUDA graph
of 24 calls with sets of factors for which the cache is too small.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import plait.kernel.triton.product as written
import plait.lower.product as lowered
from benchmarks.on_device import least_us
from plait.ir.product import Cut
from plait.log import watched


def qkv(x: Tensor, w: Tensor, b: Tensor, rest: Tensor) -> Tensor:
    return torch.addmm(b, x, w)


def up(x: Tensor, w: Tensor, b: Tensor, rest: Tensor) -> Tensor:
    """As GPT-2 has gelu."""
    y = torch.addmm(b, x, w)
    cubed = y + 0.044715 * torch.pow(y, 3.0)
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubed))


def down(x: Tensor, w: Tensor, b: Tensor, rest: Tensor) -> Tensor:
    return rest + torch.addmm(b, x, w)


def plain(x: Tensor, w: Tensor, b: Tensor, rest: Tensor) -> Tensor:
    return F.linear(x, w)


def gated(x: Tensor, w: Tensor, b: Tensor, rest: Tensor) -> Tensor:
    return F.silu(rest) * F.linear(x, w)


def added(x: Tensor, w: Tensor, b: Tensor, rest: Tensor) -> Tensor:
    return rest + F.linear(x, w)


SHAPES = {
    "gpt2 qkv": (2048, 2304, 768, qkv), "gpt2 proj": (2048, 768, 768, down),
    "gpt2 up": (2048, 3072, 768, up), "gpt2 down": (2048, 768, 3072, down),
    "llama gate": (1024, 5632, 2048, plain), "llama up": (1024, 5632, 2048, gated),
    "llama q": (1024, 2048, 2048, plain), "llama down": (1024, 2048, 5632, added),
    "llama logits": (1024, 32000, 2048, plain),
}  # fmt: skip
"""Rows, columns and length of sums, and the layer."""
ACROSS = (qkv, up, down)
"""Whose right factors have their rows side by side in memory."""
STAYING = (
    (128, 256, 8, 4), (128, 128, 8, 5), (128, 128, 8, 4), (128, 128, 4, 4), (256, 128, 8, 3),
    (64, 256, 4, 4), (64, 256, 8, 4),
)  # fmt: skip
OTHERS = ((128, 128, 8, 4), (128, 128, 8, 3), (64, 128, 4, 6), (64, 64, 4, 6))
IN_TWO = ((128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 8, 3))
"""Of float32."""
FEW_IN_TWO = (
    (32, 64, 4, 6, 1), (32, 16, 2, 6, 1), (16, 64, 4, 6, 1), (16, 32, 4, 4, 2), (16, 16, 2, 6, 1),
)  # fmt: skip
"""The same of few rows."""
FEW, FEW_SHAPES = (1, 32, 64), ("gpt2 proj", "gpt2 down", "llama gate", "llama q", "llama down")
CALLS, CACHE_NBYTES = 24, 128 << 20


def by_tile(
    fn: Callable[..., Tensor], tile: tuple[int, ...], stays: bool, folder: str,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:  # fmt: skip
    """The function, compiled with one tile for all products of this type."""
    rows, columns, warps, stages, *at_once = tile
    in_two = dtype == torch.float32
    cut = Cut(rows, columns, 32, tf32=3) if in_two else Cut(rows, columns, 64)
    version = written._Version(cut, warps, stages, False, stays, *at_once)
    setattr(lowered, "_row_tile", lambda *_: cut)  # noqa: B010
    setattr(written._Writer, "_versions", lambda _: [version])  # noqa: B010
    torch._dynamo.reset()
    options = {"batch_invariant": True, "strict": True, "cache_dir": folder}
    return torch.compile(fn, backend="plait", dynamic=False, options=options)


def one_us(fn: Callable[..., Tensor], args: list[tuple[Tensor, ...]]) -> float:
    """Microseconds of a call."""
    return least_us({"fn": lambda some: fn(*some)}, args, CALLS)["fn"]


def off(x: Tensor, exact: Tensor) -> float:
    """How far x is from what is exact."""
    return ((x.double() - exact).norm() / exact.norm()).item()


def main() -> None:
    """Command line: see the module's docstring."""
    dtype = torch.float32 if "float32" in sys.argv[1:] else torch.bfloat16
    shapes = [(name, *others) for name, others in SHAPES.items()]
    tiles = [(t, True) for t in STAYING] + [(t, False) for t in OTHERS]
    if dtype == torch.float32:
        few = "few" in sys.argv[1:]
        tiles = [(t, False) for t in (FEW_IN_TWO if few else IN_TWO)]
        if few:
            shapes = [(name, m, *SHAPES[name][1:]) for name in FEW_SHAPES for m in FEW]
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for name, m, n, k, fn in watched("shapes", shapes):
            args = []
            for _ in range(min(CALLS, max(4, CACHE_NBYTES // (n * k * dtype.itemsize)))):
                sizes = (m, k), (k, n) if fn in ACROSS else (n, k), (n,), (m, n)
                x, w, b, rest = (torch.randn(s, device="cuda").to(dtype) for s in sizes)
                args.append((x, w / 32, b, rest))
            exact, bits = fn(*(x.double() for x in args[0])), None
            words = [f"eager {one_us(fn, args):.1f}, off by {off(fn(*args[0]), exact):.2e}"]
            for number, (tile, stays) in enumerate(tiles):
                run = by_tile(fn, tile, stays, f"{folder}/{name}/{m}/{number}", dtype)
                got = run(*args[0]).clone()
                assert bits is None or torch.equal(got, bits), f"{name} {m}: {tile} has other bits"
                bits = got
                rows, columns, *others = tile
                how = " stays" if stays else ""
                words.append(f"{rows}x{columns}{others}{how} {one_us(run, args):.1f}")
            words.append(f"off by {off(bits, exact):.2e}")
            print(f"{name} {m}x{n}x{k}: {', '.join(words)}", flush=True)


if __name__ == "__main__":
    main()
