"""Convolutions on a GPU: cuDNN with rows and with channels innermost, forward and both gradients;
and plait against eager and PyTorch's default back end, as it is and by CUDA graphs.

What `plait/graph/conv_cost.py` knows comes from `layouts`: microseconds on the device, eight calls
in one CUDA graph, least of several replays. `race` compiles one convolution and what follows it,
and says how far results are from float64, relative to their largest element. float32 has PyTorch's
default flags, by which cuDNN may round to TF32. Usage: conv_gpu.py layouts|race [CASE ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from table import render
from torch import Tensor

from plait.log import watched

aten = torch.ops.aten
f32, bf16 = torch.float32, torch.bfloat16
Case = tuple[tuple[int, ...], tuple[int, ...], Any, Any, bool, Any, int]
# Sizes of the input and the filters, stride, padding, transposed, output padding, groups.
CASES: dict[str, Case] = {
    "stem 7x7": ((32, 3, 224, 224), (64, 3, 7, 7), 2, 3, False, 0, 1),
    "3x3, 64 of 56": ((32, 64, 56, 56), (64, 64, 3, 3), 1, 1, False, 0, 1),
    "3x3, 256 of 14": ((32, 256, 14, 14), (256, 256, 3, 3), 1, 1, False, 0, 1),
    "3x3, 512 of 7": ((32, 512, 7, 7), (512, 512, 3, 3), 1, 1, False, 0, 1),
    "one image, 64 of 56": ((1, 64, 56, 56), (64, 64, 3, 3), 1, 1, False, 0, 1),
    "one image, 256 of 14": ((1, 256, 14, 14), (256, 256, 3, 3), 1, 1, False, 0, 1),
    "U-Net, 320 of 64": ((4, 320, 64, 64), (320, 320, 3, 3), 1, 1, False, 0, 1),
    "U-Net, 1280 of 16": ((4, 1280, 16, 16), (1280, 1280, 3, 3), 1, 1, False, 0, 1),
    "point, 256 to 64": ((32, 256, 56, 56), (64, 256, 1, 1), 1, 0, False, 0, 1),
    "point, 64 to 256": ((32, 64, 56, 56), (256, 64, 1, 1), 1, 0, False, 0, 1),
    "point, stride 2": ((32, 256, 56, 56), (512, 256, 1, 1), 2, 0, False, 0, 1),
    "3x3, stride 2": ((32, 128, 56, 56), (128, 128, 3, 3), 2, 1, False, 0, 1),
    "16 channels": ((8, 16, 128, 128), (16, 16, 3, 3), 1, 1, False, 0, 1),
    "3 to 64": ((8, 3, 128, 128), (64, 3, 3, 3), 1, 1, False, 0, 1),
    "3 to 16, stride 2": ((32, 3, 224, 224), (16, 3, 3, 3), 2, 1, False, 0, 1),
    "8 to 3": ((8, 8, 128, 128), (3, 8, 3, 3), 1, 1, False, 0, 1),
    "patches of 16": ((32, 3, 224, 224), (768, 3, 16, 16), 16, 0, False, 0, 1),
    "32 groups": ((32, 128, 56, 56), (128, 4, 3, 3), 1, 1, False, 0, 32),
    "40 groups of 8": ((32, 320, 28, 28), (320, 8, 3, 3), 1, 1, False, 0, 40),
    "14 groups of 24": ((32, 336, 28, 28), (336, 24, 3, 3), 1, 1, False, 0, 14),
    "7 groups of 48": ((32, 336, 28, 28), (336, 48, 3, 3), 1, 1, False, 0, 7),
    "2 groups": ((8, 256, 28, 28), (256, 128, 3, 3), 1, 1, False, 0, 2),
    "depthwise 3x3": ((32, 144, 56, 56), (144, 1, 3, 3), 1, 1, False, 0, 144),
    "depthwise 3x3, stride 2": ((32, 96, 112, 112), (96, 1, 3, 3), 2, 1, False, 0, 96),
    "depthwise 5x5": ((32, 672, 14, 14), (672, 1, 5, 5), 1, 2, False, 0, 672),
    "depthwise 7x7": ((32, 96, 56, 56), (96, 1, 7, 7), 1, 3, False, 0, 96),
    "transposed 4x4": ((8, 256, 32, 32), (256, 128, 4, 4), 2, 1, True, 0, 1),
    "transposed 4x4, large": ((8, 64, 128, 128), (64, 32, 4, 4), 2, 1, True, 0, 1),
    "transposed 3x3, padded": ((8, 128, 64, 64), (128, 64, 3, 3), 2, 1, True, 1, 1),
    "transposed 2x2": ((8, 256, 64, 64), (256, 128, 2, 2), 2, 0, True, 0, 1),
    "transposed 3x3": ((16, 64, 64, 64), (64, 64, 3, 3), 2, 0, True, 0, 1),
    "transposed, to 3": ((8, 64, 128, 128), (64, 3, 4, 4), 2, 1, True, 0, 1),
    "transposed, 32 groups": ((8, 256, 64, 64), (256, 8, 4, 4), 2, 1, True, 0, 32),
    "sequence": ((16, 256, 4096), (256, 256, 3), 1, 1, False, 0, 1),
    "sequence of speech": ((8, 512, 8000), (512, 512, 3), 2, 0, False, 0, 1),
    "sound": ((8, 1, 80000), (512, 1, 10), 5, 0, False, 0, 1),
    "positions of speech": ((8, 768, 499), (768, 48, 128), 1, 64, False, 0, 16),
    "depthwise sequence": ((8, 1536, 2048), (1536, 1, 4), 1, 3, False, 0, 1536),
    "transposed sequence": ((8, 256, 1000), (256, 128, 16), 8, 4, True, 0, 1),
    "volume": ((2, 64, 16, 56, 56), (64, 64, 3, 3, 3), 1, 1, False, 0, 1),
    "patches of video": ((8, 3, 16, 224, 224), (768, 3, 2, 16, 16), (2, 16, 16), 0, False, 0, 1),
    "transposed volume": ((2, 128, 8, 28, 28), (128, 64, 2, 2, 2), 2, 0, True, 0, 1),
}
CALLS = 8


# ------------------------------------------------------------------------------------------- timing
def recorded(fn: Callable[[], Any], calls: int = CALLS) -> torch.cuda.CUDAGraph:
    """Several calls as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    return graph


def us_a_call(fn: Callable[[], Any], calls: int, rounds: int = 5) -> float:
    """Microseconds on the device, the least of several rounds of calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    fn()
    for _ in range(rounds):
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / calls)
    return 1000 * best


def us_recorded(fn: Callable[[], Any]) -> float:
    """The same of calls that are replayed."""
    return us_a_call(recorded(fn).replay, 2) / CALLS


# ------------------------------------------------------------------------------------------ layouts
def made(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Any]]:
    """An input, filters, and the other arguments of aten.convolution."""
    shape, filters, stride, padding, transposed, more, groups = case
    n = len(shape) - 2

    def each(value: Any) -> list[int]:
        return list(value) if isinstance(value, tuple) else [value] * n

    x = torch.randn(shape, device="cuda", dtype=dtype)
    w = torch.randn(filters, device="cuda", dtype=dtype) / 10
    return x, w, [each(stride), each(padding), [1] * n, transposed, each(more), groups]


def last(x: Tensor) -> Tensor:
    """A copy with channels innermost."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def as_images(x: Tensor, w: Tensor, rest: list[Any]) -> tuple[Tensor, Tensor, list[Any]]:
    """A convolution of sequences as cuDNN has it: of images of height 1."""
    if x.dim() > 3:
        return x, w, rest
    stride, padding, dilation, transposed, more, groups = rest
    rest = [[1, *stride], [0, *padding], [1, *dilation], transposed, [0, *more], groups]
    return x.unsqueeze(2), w.unsqueeze(2), rest


def layouts(names: list[str]) -> None:
    """Prints what cuDNN takes in either layout."""
    rows = []
    for name in watched("cases", names):
        for dtype in (f32, bf16):
            x, w, rest = as_images(*made(CASES[name], dtype))
            row = [f"{name}, {str(dtype)[6:]}"]
            times = [_times(a, b, rest) for a, b in ((x, w), (last(x), last(w)))]
            for rows_first, channels_last in zip(*times, strict=True):
                row += [f"{rows_first:.0f}", f"{channels_last:.0f}"]
            rows.append(row)
    heads = ("us: rows, channels last", "forward", "", "of input", "", "of filter", "")
    print(render(heads, rows))


def _times(x: Tensor, w: Tensor, rest: list[Any]) -> list[float]:
    forward = partial(aten.convolution, x, w, None, *rest)
    gradient = torch.randn_like(forward())
    backward = partial(aten.convolution_backward, gradient, x, w, None, *rest)
    masks = ([True, False, False], [False, True, False])
    return [us_recorded(forward), *(us_recorded(partial(backward, m)) for m in masks)]


# --------------------------------------------------------------------------------------------- race
def program(rest: list[Any]) -> Callable[..., Tensor]:
    """A convolution with what stands around it in models."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(aten.convolution(x * 2, w, b, *rest)) + 0.5

    return fn


def peers(fn: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Eager and compiled forms, each with Dynamo's memory of its own."""
    yield "eager", fn
    for backend in ("inductor", "plait"):
        for mode in ("default", "reduce-overhead"):
            torch._dynamo.reset()
            name = backend + ("-graphs" if mode != "default" else "")
            yield name, torch.compile(fn, backend=backend, mode=mode)


def race(names: list[str]) -> None:
    """Prints times and errors of one convolution by each."""
    rows, heads = [], [""]
    for name in watched("cases", names):
        for dtype in (f32, bf16):
            x, w, rest = made(CASES[name], dtype)
            b = torch.randn(w.shape[1] * rest[-1] if rest[3] else w.shape[0]).to(x)
            fn = program(rest)
            exact = fn(x[:1].double(), w.double(), b.double())
            row, heads = [f"{name}, {str(dtype)[6:]}"], [""]
            for peer, f in peers(fn):
                with torch.no_grad():
                    for _ in range(4):
                        y = f(x, w, b)
                    error = ((y[:1].double() - exact).abs().max() / exact.abs().max()).item()
                    row.append(f"{us_a_call(partial(f, x, w, b), 10):.0f} ({error:.0e})")
                heads.append(peer)
            rows.append(row)
            print(*row, file=sys.stderr, flush=True)
    print(render(tuple(heads), rows))


if __name__ == "__main__":
    what, *chosen = sys.argv[1:] or ["layouts"]
    {"layouts": layouts, "race": race}[what](chosen or list(CASES))
