"""The pure random operators of plait, their bits, and their slow reference.

    plait::seed(device) -> Tensor
        One int64 on the device, drawn from torch's default generator there.
    plait::philox_uniform(seed, offset, size, dtype) -> Tensor
        Floats in [0, 1).
    plait::philox_normal(seed, offset, size, dtype) -> Tensor
        Standard normal floats.
    plait::philox_randint(seed, offset, low, high, size, dtype) -> Tensor
        Integers in [low, high).
    plait::within(x, low, high, message) -> Tensor
        x; RuntimeError if an element is outside.

All results are contiguous, on the seed's device. `plait::seed(d)` equals `aten::randint(2**63 - 1,
[], device=d)`, and may be run as that. `offset` tells the random operators of one graph apart.

The bits, for whoever emits kernels: let `i` be the linear (row-major) index of an element. Its four
words are
    (w0, w1, w2, w3) = Philox4x32-10(key, counter)
        with key = (seed & M, seed >> 32 & M), counter = (i & M, i >> 32 & M, offset, 0)
with M = 2**32 - 1, multipliers 0xD2511F53 and 0xCD9E8D57 and key increments 0x9E3779B9 and
0xBB67AE85. Then
    uniform  f32: (w0 >> 8) * 2**-24      f64: ((w0 >> 5) * 2**26 + (w1 >> 6)) * 2**-53
             f16: (w0 >> 21) * 2**-11     bf16: (w0 >> 24) * 2**-8
    normal   f32, f16, bf16 (in f32, rounded at the end): sqrt(-2 * log(a)) * cos(2 * pi * b)
             with a = ((w0 >> 8) + 1) * 2**-24 and b = (w1 >> 8) * 2**-24
             f64: the same with a = u(w0, w1) + 2**-53 and b = u(w2, w3), u being the f64
             uniform above
    randint  low + ((w1 & 0x7fffffff) << 32 | w0) % (high - low), converted to dtype
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.errors import UserError
from plait.runtime.operators import register_fake

_M32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _mul_wide(multiplier: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, held in int64."""
    high = (multiplier * (x >> 16) + ((multiplier * (x & 0xFFFF)) >> 16)) >> 16
    return high, (multiplier * x) & _M32


def philox_words(seed: torch.Tensor, index: torch.Tensor, offset: int) -> Words:
    """The four words of every index, each in an int64 tensor of index's shape."""
    k0, k1 = seed & _M32, (seed >> 32) & _M32
    c0, c1 = index & _M32, (index >> 32) & _M32
    c2, c3 = torch.full_like(index, offset & _M32), torch.zeros_like(index)
    for _ in range(ROUNDS):
        high0, low0 = _mul_wide(_MULTIPLIERS[0], c0)
        high1, low1 = _mul_wide(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _INCREMENTS[0]) & _M32, (k1 + _INCREMENTS[1]) & _M32
    return c0, c1, c2, c3


def _words(seed: torch.Tensor, offset: int, size: Sequence[int]) -> Words:
    index = torch.arange(math.prod(size), dtype=torch.int64, device=seed.device).reshape(list(size))
    return philox_words(seed, index, offset)


def _double(w0: torch.Tensor, w1: torch.Tensor) -> torch.Tensor:
    return ((w0 >> 5) * 2**26 + (w1 >> 6)).to(torch.float64) * 2.0**-53


_UNIFORM_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _uniform(
    seed: torch.Tensor, offset: int, size: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    w0, w1, _, _ = _words(seed, offset, size)
    if dtype == torch.float64:
        return _double(w0, w1)
    bits = _UNIFORM_BITS[dtype]
    return ((w0 >> (32 - bits)).to(torch.float32) * 2.0**-bits).to(dtype)


def _normal(
    seed: torch.Tensor, offset: int, size: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    w0, w1, w2, w3 = _words(seed, offset, size)
    if dtype == torch.float64:
        a, b = _double(w0, w1) + 2.0**-53, _double(w2, w3)
    else:
        a = ((w0 >> 8) + 1).to(torch.float32) * 2.0**-24
        b = (w1 >> 8).to(torch.float32) * 2.0**-24
    return (torch.sqrt(-2.0 * torch.log(a)) * torch.cos(2.0 * math.pi * b)).to(dtype)


def _randint(
    seed: torch.Tensor, offset: int, low: int, high: int, size: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    if low >= high:
        raise UserError(f"random integers from the empty range [{low}, {high})")
    w0, w1, _, _ = _words(seed, offset, size)
    return (low + (((w1 & 0x7FFFFFFF) << 32) | w0) % (high - low)).to(dtype)


def _within(x: torch.Tensor, low: float, high: float, message: str) -> torch.Tensor:
    if not bool(((x >= low) & (x <= high)).all()):
        raise RuntimeError(message)
    return x.clone()


def _fake_within(x: torch.Tensor, low: float, high: float, message: str) -> torch.Tensor:
    return torch.empty_like(x)


def _seed(device: torch.device) -> torch.Tensor:
    drawn: torch.Tensor = torch.ops.aten.randint.default(2**63 - 1, [], device=device)
    return drawn


def _fake_seed(device: torch.device) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


def _fake_float(
    seed: torch.Tensor, offset: int, size: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return seed.new_empty(size, dtype=dtype)


def _fake_randint(
    seed: torch.Tensor, offset: int, low: int, high: int, size: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return seed.new_empty(size, dtype=dtype)


def _register() -> Any:
    library: Any = torch.library.Library("plait", "DEF")  # type: ignore[no-untyped-call]
    floats = "(Tensor seed, int offset, SymInt[] size, ScalarType dtype) -> Tensor"
    ints = (
        "(Tensor seed, int offset, SymInt low, SymInt high, SymInt[] size, ScalarType dtype) -> "
        "Tensor"
    )
    checked = "(Tensor x, float low, float high, str message) -> Tensor"
    library.define("seed(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("seed", _seed, "CompositeExplicitAutograd")
    register_fake(library, "seed", _fake_seed)
    for name, schema, run, fake in (
        ("philox_uniform", floats, _uniform, _fake_float),
        ("philox_normal", floats, _normal, _fake_float),
        ("philox_randint", ints, _randint, _fake_randint),
        ("within", checked, _within, _fake_within),
    ):
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, run, "CompositeExplicitAutograd")
        register_fake(library, name, fake)
    return library


_LIBRARY = _register()  # the operators live as long as this object
