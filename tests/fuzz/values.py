"""Tensors of one operand of a random program: what values they hold and how they lie in memory.

`tensor(...)` is all that a generated program calls. Equal arguments give equal tensors. Layouts are
views of a base that is made first, so that they are the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan, prod

import torch
from torch import Tensor

Make = Callable[[Sequence[int]], Tensor]

SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    inf,
    -inf,
    nan,
    0.5,
    -0.5,
    1.5,
    2.5,
    88.8,
    -88.8,
    89.5,
    -104.0,
    1e30,
    -1e30,
    1e-30,
    3e36,
    -3e36,
    1e-40,
    -1e-45,
    65504.0,
    6.0,
    3.0,
    -3.0,
    2147483648.0,
    1e10,
)
"""No number is so large that the order of a sum decides whether it overflows."""
HUGE = (1e30, -1e30, 3e30, 1e30, 2e30, 0.0, 1.0)
ZEROS = (0.0, -0.0, -0.0, 0.0, -1.0)
"""Of which -0.0 and 0.0 are equal: the order of two decides whose sign a result has."""


def _plain(make: Make, s: Sequence[int]) -> Tensor:
    return make(s)


def _transposed(make: Make, s: Sequence[int]) -> Tensor:
    return make((*s[:-2], s[-1], s[-2])).transpose(-1, -2)


def _rotated(make: Make, s: Sequence[int]) -> Tensor:
    return make((*s[1:], s[0])).movedim(-1, 0)


def _stepped(make: Make, s: Sequence[int]) -> Tensor:
    return make((*s[:-1], 2 * s[-1]))[..., ::2]


def _shifted(make: Make, s: Sequence[int]) -> Tensor:
    return make((s[0] + 1, *s[1:]))[1:]


def _expanded(make: Make, s: Sequence[int]) -> Tensor:
    return make((1, *s[1:])).expand(s)


def _expanded_last(make: Make, s: Sequence[int]) -> Tensor:
    return make((*s[:-1], 1)).expand(s)


def _one(make: Make, s: Sequence[int]) -> Tensor:
    return make((1,) * len(s)).expand(s)


def _overlapping(make: Make, s: Sequence[int]) -> Tensor:
    return make((max(sum(s) - len(s) + 1, 1),)).as_strided(s, (1,) * len(s))


def _windows(make: Make, s: Sequence[int]) -> Tensor:
    """Rows that share all but two elements with the next."""
    strides = (2, 1) if len(s) == 2 else (1,) * len(s)
    return make((2 * sum(s) + 1,)).as_strided(s, strides)


def _channels_last(make: Make, s: Sequence[int]) -> Tensor:
    return make(s).to(memory_format=torch.channels_last) if len(s) == 4 else make(s)


LAYOUTS: dict[str, tuple[int, Callable[[Make, Sequence[int]], Tensor]]] = {
    "plain": (0, _plain),
    "transposed": (2, _transposed),
    "rotated": (2, _rotated),
    "stepped": (1, _stepped),
    "shifted": (1, _shifted),
    "expanded": (1, _expanded),
    "expanded_last": (1, _expanded_last),
    "one": (1, _one),
    "overlapping": (1, _overlapping),
    "windows": (2, _windows),
    "channels_last": (4, _channels_last),
}
"""Name: (fewest dimensions, view of a base)."""


def tensor(
    values: str,
    shape: Sequence[int],
    dtype: str = "float32",
    layout: str = "plain",
    seed: int = 0,
    mood: str = "mixed",
    bound: int = 0,
    device: str = "cpu",
) -> Tensor:
    """A tensor of that shape.

    values: whole (integers of -4..4), normal, special, huge, zeros (of both signs), index (of
    0..bound-1), signed (also negative indices), perm (indices that differ), bool. mood: "mixed";
    "none" holds nothing above 0 or true, "all" nothing else, "few" little of it.
    """
    gen = torch.Generator().manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)

    def make(s: Sequence[int]) -> Tensor:
        return _flat(values, prod(s), kind, gen, mood, bound).reshape(tuple(s)).to(device)

    return LAYOUTS[layout][1](make, shape)


def _flat(
    values: str, n: int, dtype: torch.dtype, gen: torch.Generator, mood: str, bound: int
) -> Tensor:
    if values in ("index", "signed", "perm"):
        return _indices(values, n, dtype, gen, bound)
    if values == "bool" or dtype == torch.bool:
        ones = {"none": torch.zeros(n), "all": torch.ones(n), "few": torch.arange(n) == n // 2}
        return ones.get(mood, torch.rand(n, generator=gen) < 0.5).to(dtype)
    if values == "special":
        return _special(n, dtype, gen)
    if values in ("huge", "zeros"):
        table = torch.tensor(HUGE if values == "huge" else ZEROS, dtype=torch.float64)
        return table[torch.randint(len(table), (n,), generator=gen)].to(dtype)
    low = 0 if dtype == torch.uint8 else -4
    if values == "whole" or not (dtype.is_floating_point or dtype.is_complex):
        x = torch.randint(low, 5, (n,), generator=gen).to(torch.float64)
    else:
        x = torch.randn(n, generator=gen, dtype=torch.float64)
    if mood != "mixed" and low:
        x = -x.abs() if mood != "all" else x.abs() + 1
        if mood == "few" and n:
            x[n // 2] = 2
    if dtype.is_complex:
        x = torch.complex(x, x.roll(1))
    return x.to(dtype)


def _indices(values: str, n: int, dtype: torch.dtype, gen: torch.Generator, bound: int) -> Tensor:
    if n == 0 or bound <= 0:
        return torch.zeros(n, dtype=dtype)
    if values == "perm":
        turns = [torch.randperm(bound, generator=gen) for _ in range(-(-n // bound))]
        return torch.cat(turns)[:n].to(dtype)
    low = -bound if values == "signed" else 0
    return torch.randint(low, bound, (n,), generator=gen).to(dtype)


def _special(n: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        table = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    else:
        limits = torch.iinfo(dtype)
        found = (limits.min, limits.max, limits.min + 1, 0, 1, 2, 3, limits.max // 2)
        table = torch.tensor(found, dtype=dtype)
    return table[torch.randint(len(table), (n,), generator=gen)]
