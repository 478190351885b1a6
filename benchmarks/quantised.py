"""Patterns of quantised models in plain PyTorch, as libraries such as torchao have them: weights of
8 and 4 bits, activations that are quantised by row or by block, norms before a quantisation, and
mixtures of experts.

`quantised_gpu.py` races them, tests check them. Given float64, a program computes its truth: codes
and what is made of them are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

GROUP = 128  # numbers of a row that share a scale
MX = 32  # the same of MX formats
TOP = 2  # experts of a token
INT8, FP8 = 127.0, 448.0
i8, e4m3, e5m2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
Program = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A program, and what makes its inputs for m rows, n columns and sums of k numbers.

    codes: which results are codes, and which the scales of these.
    steps: kernels of ours and calls of a library that it takes on a GPU, for many rows.
    few: the same for few.
    """

    fn: Program
    inputs: Callable[[Random, int, int, int], list[Tensor]]
    codes: tuple[tuple[int, int], ...] = ()
    steps: tuple[int, int] = (1, 0)
    few: tuple[int, int] | None = None


class Random:
    """Draws tensors of a device and a dtype."""

    def __init__(self, device: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.to(dtype or self.dtype)

    def codes(self, *shape: int, kind: torch.dtype = i8) -> Tensor:
        if kind.is_floating_point:
            return self.normal(*shape, dtype=torch.float32).mul(100).clamp(-FP8, FP8).to(kind)
        low = -127 if kind == i8 else 0
        return torch.randint(
            low, 256 + low, shape, generator=self.generator, device=self.device
        ).to(kind)

    def scales(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        drawn = torch.rand(shape, generator=self.generator, device=self.device)
        return ((drawn + 0.5) / 1000).to(dtype)

    def powers(self, *shape: int) -> Tensor:
        """Scales of MX formats."""
        drawn = torch.randint(
            118, 124, shape, generator=self.generator, device=self.device, dtype=torch.uint8
        )
        return drawn.view(torch.float8_e8m0fnu)


# --------------------------------------------------------------------------------- scales and codes
def quantised(x: Tensor, kind: torch.dtype, limit: float) -> tuple[Tensor, Tensor]:
    """Codes of the last dimension of x, and its scales, in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / limit
    return coded(wide, scale, kind, limit), scale


def coded(x: Tensor, scale: Tensor, kind: torch.dtype, limit: float) -> Tensor:
    y = x / scale
    return (y if kind.is_floating_point else y.round()).clamp(-limit, limit).to(kind)


def in_blocks(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size))


def halves(packed: Tensor) -> Tensor:
    """Numbers below 16 of bytes that hold two, the first in the low bits."""
    return torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)


def mx_scale(x: Tensor, largest: int) -> Tensor:
    """The scale of each block: a power of two. largest: the exponent of the format's largest
    number."""
    wide = x if x.dtype == torch.float64 else x.float()
    most = wide.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    bits = most.float().view(torch.int32)
    return (((bits >> 23) & 0xFF) - largest).to(torch.uint8).view(torch.float8_e8m0fnu)


def mx_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = in_blocks(x, MX)
    scale = mx_scale(blocks, 8)
    y = blocks.float() / scale.float()
    return y.clamp(-FP8, FP8).to(e4m3).flatten(-2), scale.squeeze(-1)


def mx_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of 4 bits a byte: a sign, two bits of exponent, one of mantissa."""
    blocks = in_blocks(x, MX)
    scale = mx_scale(blocks, 2)
    y = blocks.float() / scale.float()
    size = y.abs().clamp(max=6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded = (size / step).round() * step
    code = torch.where(
        rounded < 2, rounded * 2, torch.where(rounded < 4, rounded + 2, rounded / 2 + 4)
    )
    code = (code.to(torch.uint8) | ((y < 0).to(torch.uint8) << 3)).flatten(-2)
    pairs = in_blocks(code, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), scale.squeeze(-1)


# ----------------------------------------------------------------------------------------- products
def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def scaled_mm(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of float8 a (m, k) and b (n, k), by scales of rows of both."""
    if dtype == torch.float64:
        return (a.double() @ b.double().t()) * rows * columns
    return torch._scaled_mm(a, b.t(), rows, columns.t().contiguous().t(), out_dtype=dtype)


def int8_weights(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * scale + bias


def int8_before(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype) * scale[:, None])


def int4_weights(x: Tensor, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    codes = in_blocks(halves(w), GROUP).to(x.dtype)
    return F.linear(x, ((codes - zero[..., None]) * scale[..., None]).flatten(-2))


def fp8_weights(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.silu(F.linear(x, w.to(x.dtype)) * scale)


def mx_fp8_weights(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    blocks = in_blocks(w.to(x.dtype), MX) * scale.to(x.dtype)[..., None]
    return F.linear(x, blocks.flatten(-2))


def mx_fp4_weights(x: Tensor, w: Tensor, scale: Tensor, numbers: Tensor) -> Tensor:
    blocks = in_blocks(numbers[halves(w).int()], MX) * scale.to(x.dtype)[..., None]
    return F.linear(x, blocks.flatten(-2))


def dynamic_int8(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    q, rows = quantised(x, i8, INT8)
    product = torch._int_mm(q, w.t())
    return F.gelu((product * rows * scale).to(x.dtype) + bias, approximate="tanh")


def dynamic_fp8(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    q, rows = quantised(x, e4m3, FP8)
    return F.silu(scaled_mm(q, w, rows, scale[None], x.dtype))


def norm_fp8_product(x: Tensor, norm: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return dynamic_fp8(rms_norm(x, norm), w, scale)


def block_fp8(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """Activations by 1 x 128, weights by 128 x 128, multiplied as what they stand for."""
    q, rows = quantised(in_blocks(x, GROUP), e4m3, FP8)
    back = (q.to(x.dtype) * rows.to(x.dtype)).flatten(-2)
    n, k = w.shape
    blocks = w.to(x.dtype).view(n // GROUP, GROUP, k // GROUP, GROUP)
    return F.linear(back, (blocks * scale[:, None, :, None].to(x.dtype)).view(n, k))


# ------------------------------------------------------------------------------------------- chains
def rms_int8(x: Tensor, w: Tensor) -> Any:
    return quantised(rms_norm(x, w), i8, INT8)


def rms_fp8(x: Tensor, w: Tensor) -> Any:
    return quantised(rms_norm(x, w), e4m3, FP8)


def rms_static_fp8(x: Tensor, w: Tensor, scale: Tensor) -> Any:
    y = rms_norm(x, w)
    return coded(y if y.dtype == torch.float64 else y.float(), scale, e4m3, FP8), scale


def layer_fp8(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return quantised(F.layer_norm(x, x.shape[-1:], w, b), e4m3, FP8)


def residual_fp8(x: Tensor, rest: Tensor, w: Tensor) -> Any:
    y = x + rest
    return (*quantised(rms_norm(y, w), e4m3, FP8), y)


def silu_fp8(gate: Tensor, up: Tensor) -> Any:
    return quantised(F.silu(gate) * up, e4m3, FP8)


def silu_e5m2(gate: Tensor, up: Tensor) -> Any:
    return quantised(F.silu(gate) * up, e5m2, 57344.0)


def silu_int8(gate: Tensor, up: Tensor) -> Any:
    return quantised(F.silu(gate) * up, i8, INT8)


def silu_blocks(gate: Tensor, up: Tensor) -> Any:
    q, scale = quantised(in_blocks(F.silu(gate) * up, GROUP), e4m3, FP8)
    return q.flatten(-2), scale.squeeze(-1)


def rms_mx_fp8(x: Tensor, w: Tensor) -> Any:
    return mx_fp8(rms_norm(x, w))


def rms_mx_fp4(x: Tensor, w: Tensor) -> Any:
    return mx_fp4(rms_norm(x, w))


def silu_mx_fp4(gate: Tensor, up: Tensor) -> Any:
    return mx_fp4(F.silu(gate) * up)


# ------------------------------------------------------------------------------------------ experts
def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows up to each end by the weights (n, k) of one expert."""
    if rows.dtype != torch.float64:
        return torch._grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    parts = rows.tensor_split(ends.cpu().long()[:-1])
    return torch.cat([F.linear(x, w) for x, w in zip(parts, weights, strict=True)])


def routed(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of each token's experts, the order of choices by expert, and where each expert's
    end."""
    wide = torch.promote_types(x.dtype, torch.float32)
    chances, chosen = F.softmax(F.linear(x, router), -1, dtype=wide).topk(TOP, -1)
    weights = chances / chances.sum(-1, keepdim=True)
    flat = chosen.flatten()
    counts = (flat[:, None] == torch.arange(len(router), device=x.device)).sum(0)
    return weights, flat.argsort(stable=True), counts.cumsum(0).to(torch.int32)


def experts(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Combined by the inverse of the permutation."""
    weights, order, ends = routed(x, router)
    gate, rest = grouped_mm(x[order // TOP], up, ends).chunk(2, -1)
    y = grouped_mm(F.silu(gate) * rest, down, ends)
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
    return (y[back].unflatten(0, (-1, TOP)) * weights[..., None]).sum(1).to(x.dtype)


def experts_added(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Combined by adding up."""
    weights, order, ends = routed(x, router)
    gate, rest = grouped_mm(x[order // TOP], up, ends).chunk(2, -1)
    y = grouped_mm(F.silu(gate) * rest, down, ends) * weights.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, order // TOP, y.to(x.dtype))


def route(x: Tensor, router: Tensor) -> Any:
    return routed(x, router)


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPERTS = 8


def _experts(r: Random, m: int, n: int, k: int) -> list[Tensor]:
    up = r.normal(EXPERTS, 2 * n, k) * k**-0.5
    return [r.normal(m, k), r.normal(EXPERTS, k), up, r.normal(EXPERTS, k, n) * n**-0.5]


def _rows(*kinds: str) -> Callable[[Random, int, int, int], list[Tensor]]:
    """Inputs of a chain: matrices and rows."""
    return lambda r, m, n, k: [r.normal(m, k) if kind == "m" else r.normal(k) for kind in kinds]


CASES: dict[str, Case] = {
    # ---- weights
    "int8 weights": Case(
        int8_weights,
        lambda r, m, n, k: [r.normal(m, k), r.codes(n, k), r.scales(n, dtype=r.dtype), r.normal(n)],
        steps=(2, 1), few=(2, 0),
    ),
    "int8 weights, scaled before": Case(
        int8_before,
        lambda r, m, n, k: [r.normal(m, k), r.codes(n, k), r.scales(n, dtype=r.dtype)],
        steps=(1, 1), few=(2, 0),
    ),
    "int4 weights": Case(
        int4_weights,
        lambda r, m, n, k: [
            r.normal(m, k), r.codes(n, k // 2, kind=torch.uint8),
            r.scales(n, k // GROUP, dtype=r.dtype), r.normal(n, k // GROUP) + 8,
        ],
        steps=(1, 1), few=(2, 0),
    ),
    "fp8 weights": Case(
        fp8_weights,
        lambda r, m, n, k: [r.normal(m, k), r.codes(n, k, kind=e4m3), r.scales(n, dtype=r.dtype)],
        steps=(2, 1), few=(2, 0),
    ),
    "mxfp8 weights": Case(
        mx_fp8_weights,
        lambda r, m, n, k: [r.normal(m, k), r.codes(n, k, kind=e4m3), r.powers(n, k // MX)],
        steps=(1, 1), few=(2, 0),
    ),
    "mxfp4 weights": Case(
        mx_fp4_weights,
        lambda r, m, n, k: [
            r.normal(m, k), r.codes(n, k // 2, kind=torch.uint8), r.powers(n, k // MX),
            torch.tensor([*_FP4, *(-x for x in _FP4)], device=r.device, dtype=r.dtype),
        ],
        steps=(1, 1), few=(2, 0),
    ),
    # ---- both
    "int8": Case(
        dynamic_int8,
        lambda r, m, n, k: [r.normal(m, k), r.codes(n, k), r.scales(n), r.normal(n)],
        steps=(2, 0),
    ),
    "fp8": Case(
        dynamic_fp8,
        lambda r, m, n, k: [r.normal(m, k), r.codes(n, k, kind=e4m3), r.scales(n)],
        steps=(2, 1), few=(3, 0),
    ),
    "rms norm, fp8": Case(
        norm_fp8_product,
        lambda r, m, n, k: [
            r.normal(m, k), r.normal(k), r.codes(n, k, kind=e4m3), r.scales(n)
        ],
        steps=(2, 1), few=(3, 0),
    ),
    "fp8 blocks": Case(
        block_fp8,
        lambda r, m, n, k: [
            r.normal(m, k), r.codes(n, k, kind=e4m3), r.scales(n // GROUP, k // GROUP)
        ],
        steps=(2, 1), few=(3, 0),
    ),
    # ---- chains
    "rms norm, to int8": Case(rms_int8, _rows("m", "r"), ((0, 1),)),
    "rms norm, to fp8": Case(rms_fp8, _rows("m", "r"), ((0, 1),)),
    "rms norm, to fp8 by a given scale": Case(
        rms_static_fp8, lambda r, m, n, k: [r.normal(m, k), r.normal(k), r.scales(1)], ((0, 1),)
    ),
    "layer norm, to fp8": Case(layer_fp8, _rows("m", "r", "r"), ((0, 1),)),
    "residual, rms norm, to fp8": Case(residual_fp8, _rows("m", "m", "r"), ((0, 1),)),
    "silu, to fp8": Case(silu_fp8, _rows("m", "m"), ((0, 1),)),
    "silu, to e5m2": Case(silu_e5m2, _rows("m", "m"), ((0, 1),)),
    "silu, to int8": Case(silu_int8, _rows("m", "m"), ((0, 1),)),
    "silu, to fp8 by blocks": Case(silu_blocks, _rows("m", "m"), ((0, 1),)),
    "rms norm, to mxfp8": Case(rms_mx_fp8, _rows("m", "r"), ((0, 1),)),
    "rms norm, to mxfp4": Case(rms_mx_fp4, _rows("m", "r"), ((0, 1),)),
    "silu, to mxfp4": Case(silu_mx_fp4, _rows("m", "m"), ((0, 1),)),
    # ---- experts
    "routing": Case(
        route, lambda r, m, n, k: [r.normal(m, k), r.normal(EXPERTS, k)], steps=(7, 2)
    ),
    "experts": Case(experts, _experts, steps=(12, 4), few=(14, 1)),
    "experts, added": Case(experts_added, _experts, steps=(13, 4), few=(14, 1)),
}  # fmt: skip


# ------------------------------------------------------------------------------------------- errors
def distance(name: str, found: Any, exact: Any) -> float:
    """How far results are from the exact ones, relative to these."""
    ours, truth = tree_leaves(found), tree_leaves(exact)
    of_codes = dict(CASES[name].codes)
    scales = set(of_codes.values())
    worst = 0.0
    for k, (a, b) in enumerate(zip(ours, truth, strict=True)):
        if k in scales or not b.is_floating_point() and k not in of_codes:
            continue
        if k in of_codes:
            a, b = (numbers_of(x, s) for x, s in ((a, ours[of_codes[k]]), (b, truth[of_codes[k]])))
        worst = max(worst, float((a.double() - b.double()).norm() / b.double().norm()))
    return worst


def numbers_of(codes: Tensor, scale: Tensor) -> Tensor:
    """What codes and their scales stand for."""
    wide = codes.double()
    if codes.dtype == torch.uint8:  # two of 4 bits
        low, high = (codes & 0xF).long(), (codes >> 4).long()
        sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
        table = torch.cat([sizes, -sizes]).double()
        wide = torch.stack([table[low], table[high]], -1).flatten(-2)
    return wide.unflatten(-1, (scale.shape[-1], -1)) * scale.double()[..., None]


def in_float64(t: Tensor) -> Tensor:
    """An input of the exact program: codes stay."""
    return t.double() if t.is_floating_point() and t.itemsize > 1 else t
