"""What an associative scan over a known number of slices is in ATen operators, for `write_out.py`.

In each round every slice is combined with the one that lies 1, 2, 4, ... slices before it, so
after as many rounds as the number has bits each holds the combination of all up to itself
(W. D. Hillis, G. L. Steele, Data Parallel Algorithms, CACM 29, 1986). Each round becomes a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from plait.graph.edit import value_of


def is_counted(node: Node) -> bool:
    """Whether the number of slices is known."""
    xs: Any = node.args[1]
    return isinstance(value_of(xs[0]).shape[0], int)


def associative_scan(
    combine: Callable[..., Any], xs: Sequence[Tensor], more: Sequence[Any], *, wanted: Any
) -> list[Tensor]:
    """The scans of xs along their first dimension. combine works element by element, so on any
    number of slices as on one."""
    step = 1
    while step < xs[0].shape[0]:
        made = combine(*(x[:-step] for x in xs), *(x[step:] for x in xs), *more)
        xs = [torch.cat((x[:step], y)) for x, y in zip(xs, made, strict=True)]
        step *= 2
    return list(xs)
