"""What an associative scan is in ATen operators, for `write_out.py`.

In each round every slice is combined with the one that lies 1, 2, 4, ... slices before it, so
after as many rounds as the number of slices has bits each holds the combination of all up to itself
(W. D. Hillis, G. L. Steele, Data Parallel Algorithms, CACM 29, 1986). Each round becomes a kernel;
over a number of slices that is not known they are a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def associative_scan(
    combine: Callable[..., Any], xs: Sequence[Tensor], more: Sequence[Any], *, wanted: Any
) -> list[Tensor]:
    """The scans of xs along their first dimension. combine works element by element, so on any
    number of slices as on one."""
    slices: Any = xs[0].shape[0]
    if not isinstance(slices, int):
        return _in_a_loop(combine, xs, more)
    step = 1
    while step < slices:
        made = combine(*(x[:-step] for x in xs), *(x[step:] for x in xs), *more)
        xs = [torch.cat((x[:step], y)) for x, y in zip(xs, made, strict=True)]
        step *= 2
    return list(xs)


def _in_a_loop(
    combine: Callable[..., Any], xs: Sequence[Tensor], more: Sequence[Any]
) -> list[Tensor]:
    def goes_on(step: Any, first: Tensor, *rest: Any) -> Any:
        return step < first.shape[0]

    def combine_at(step: Any, *given: Any) -> tuple[Any, ...]:
        xs, more = given[:n], given[n:]
        places = torch.arange(xs[0].shape[0], device=xs[0].device)
        before = (places - step).clamp(min=0)
        made = combine(*(x.index_select(0, before) for x in xs), *xs, *more)
        first = places < step  # slices that have none so far before them
        together = (torch.where(_like(first, x), x, y) for x, y in zip(xs, made, strict=True))
        return step * 2, *(_in_order(x) for x in together)

    n = len(xs)
    carried = (1, *(_in_order(x) for x in xs))
    return list(torch.ops.higher_order.while_loop(goes_on, combine_at, carried, tuple(more))[1:])


def _in_order(x: Tensor) -> Tensor:
    """x with the strides of a new tensor. `contiguous` keeps others where a size is 1, and what a
    loop carries has the same ones in every round."""
    return x.clone(memory_format=torch.contiguous_format)


def _like(places: Tensor, x: Tensor) -> Tensor:
    """places, to be read along the first dimension of x."""
    return places.view(-1, *(1 for _ in x.shape[1:]))
