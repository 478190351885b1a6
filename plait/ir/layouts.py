"""Where elements of a buffer lie, and the memory order of what it is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from plait.ir.expr import Atom, Expr, Size, coefficient, smax, total
from plait.ir.loops import Buffer

Index = tuple[Size, ...]


def flat_index(b: Buffer, index: Index) -> Size:
    """The linear position of an element, in elements."""
    return _position(index, b.strides)


@lru_cache(1 << 12)
def _position(index: Index, strides: Index) -> Size:
    return total(e * s for e, s in zip(index, strides, strict=True))


def dense_strides(shape: Sequence[Size], order: Iterable[int]) -> tuple[Size, ...]:
    """Strides without gaps; order: dimensions from outermost to innermost."""
    strides: list[Size] = [1] * len(shape)
    step: Size = 1
    for d in reversed(list(order)):
        strides[d] = step
        step = step * smax(shape[d], 1)
    return tuple(strides)


def follow(
    out: Buffer, index: Index, sources: Sequence[tuple[Buffer, Index]], hint: Callable[[Size], int]
) -> Buffer:
    """out with the memory order of the largest source that is read at every point of out's index,
    if there is one.

    index, sources: where out is stored and sources are loaded, over the same variables. hint: a
    plausible value of a size."""
    if out.fixed or len(out.shape) < 2:
        return out
    vars_ = [_only_var(e) for e in index]
    if any(v is None and e != 0 for v, e in zip(vars_, index, strict=True)):
        return out
    vars_ = [None if v is not None and v.extent == 1 else v for v in vars_]
    best: tuple[int, list[int]] | None = None
    for b, at in sources:
        strides = _strides_of(vars_, flat_index(b, at), hint)
        if strides is None:
            continue
        size = prod(max(hint(n), 0) for n in b.shape) * b.dtype.nbytes
        if best is None or size > best[0]:
            best = size, strides
    if best is None:
        return out
    keys = best[1]
    order = sorted(range(len(keys)), key=lambda d: (-keys[d], d))
    dense = dense_strides(out.shape, order)
    return out if dense == out.strides else replace(out, strides=dense)


def _only_var(e: Size) -> Atom | None:
    if isinstance(e, Expr):
        return e.symbol
    return None


def _strides_of(
    vars_: Sequence[Atom | None], flat: Size, hint: Callable[[Size], int]
) -> list[int] | None:
    """The strides of variables in an address; None where one of them (of more than one value) does
    not count."""
    out = []
    for v in vars_:
        if v is None:
            out.append(0)
            continue
        s = coefficient(flat, v)
        if s is None or s == 0:
            return None
        out.append(abs(hint(s)))
    return out
