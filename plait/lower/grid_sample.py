"""Rules for `grid_sample`: images read at positions that a tensor holds, and the gradients.

The arithmetic is that of ATen's kernels for GPUs: positions in [-1, 1] are unfolded to those of
elements, moved into the image as the padding says, and the elements around them are mixed. What
lies outside counts as 0. The image's gradient is a scatter, as ATen's is; the positions' gradient
sums over channels. Where eager calls cuDNN, which has rules of its own for positions that are no
finite numbers, compiled programs do, too. On a CPU ATen is called: its vectors hold many positions
and go through the channels, where a loop over results finds the same elements again for each
channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from itertools import product
from operator import add, mul
from typing import Any, NamedTuple

import torch

from plait.ir.dtypes import i64
from plait.ir.expr import Expr, Size
from plait.ir.loops import Node
from plait.ir.maths import floor, fmod, minimum, rounded, where
from plait.ir.record import Recorder
from plait.lower.core import Index, Lowering, NoRule, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import all_of, compare, result
from plait.lower.extern import call_extern
from plait.lower.resample import cubic_slopes, cubic_weights
from plait.lower.scatter import scatter_loop

aten = torch.ops.aten

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)


class Tap(NamedTuple):
    """One element that takes part along a dimension.

    at: where it is, as a number; it counts where that lies in the image.
    weight: of its value.
    slope: what the weight changes by where the position grows by 1."""

    at: Node
    weight: Node
    slope: Node


class _Sampler(NamedTuple):
    """How positions become elements.

    mode, padding: ATen's numbers of the interpolation and of what lies outside.
    align: align_corners.
    """

    mode: int
    padding: int
    align: bool

    def taps(self, ops: Recorder, place: Node, size: Size) -> list[Tap]:
        """The elements of a dimension of `size` elements that the position `place` mixes."""
        dtype = place.dtype
        one = ops.const(1.0, dtype)
        n = ops.cast(ops.index(size), dtype)
        scale = n - one if self.align else n
        at, moved = self._unfolded(place, n), scale * 0.5
        if self.mode == BICUBIC:
            low = floor(at)
            off = at - low
            weights, slopes = cubic_weights(ops, off, dtype), cubic_slopes(ops, off, dtype)
            places = [self._into(ops, low + float(k), n)[0] for k in range(-1, 3)]
            return [Tap(p, w, s * moved) for p, w, s in zip(places, weights, slopes, strict=True)]
        at, sign = self._into(ops, at, n)
        if self.mode == NEAREST:
            return [Tap(rounded(at), one, ops.const(0.0, dtype))]
        moved = moved * sign
        low = floor(at)
        off = at - low
        return [Tap(low, low + one - at, -moved), Tap(low + one, off, moved)]

    def _unfolded(self, place: Node, n: Node) -> Node:
        if self.align:
            return (place + 1.0) * 0.5 * (n - 1.0)
        return ((place + 1.0) * n - 1.0) * 0.5

    def _into(self, ops: Recorder, at: Node, n: Node) -> tuple[Node, Node]:
        """A position where the padding puts it, and 1, -1 or 0: the direction in which it moves
        there when it grows."""
        one, zero = ops.const(1.0, at.dtype), ops.const(0.0, at.dtype)
        sign = one
        if self.padding == REFLECTION:
            at, sign = self._reflected(ops, at, n)
        if self.padding != ZEROS:
            last = n - one
            sign = where((at > zero) & (at < last), sign, zero)
            at = where(at > zero, at, zero)  # NaN too
            at = where(at < last, at, last)
        far = ~((at < 2.0**31 - 1.0) & (at >= -(2.0**31)))
        return where(far, ops.const(-100.0, at.dtype), at), sign

    def _reflected(self, ops: Recorder, at: Node, n: Node) -> tuple[Node, Node]:
        """The position folded at the middles of the ends (align_corners) or at their borders."""
        zero = ops.const(0.0, at.dtype)
        low, span = (zero, n - 1.0) if self.align else (zero - 0.5, n)
        off = at - low
        distance = where(off < zero, -off, off)
        some = where(span > zero, span, ops.const(1.0, at.dtype))
        extra = fmod(distance, some)
        odd = fmod(floor(distance / some), ops.const(2.0, at.dtype)) > 0.5
        folded = where(odd, some - extra, extra) + low
        sign = where(odd ^ (off < zero), ops.const(-1.0, at.dtype), ops.const(1.0, at.dtype))
        return where(span > zero, folded, zero), where(span > zero, sign, zero)


def _all_taps(
    ops: Recorder, x: Sequence[Size], grid: View, how: _Sampler, point: Index
) -> list[tuple[Tap, ...]]:
    """For the output point (n, y, x): the elements it mixes, a tap a dimension of the image x."""
    compute = compute_dtype(grid.dtype)
    dims = []
    for d, size in enumerate(x):
        place = grid.load(ops, (*point, len(x) - 1 - d))
        dims.append(how.taps(ops, ops.cast(place, compute), size))
    return list(product(*dims))


def _element(ops: Recorder, taps: Sequence[Tap], x: Sequence[Size]) -> tuple[Index, list[Node]]:
    """Where an element is, in the image whatever the taps say, and the conditions under which it
    is theirs."""
    index: list[Expr] = []
    inside: list[Node] = []
    for tap, size in zip(taps, x, strict=True):
        last = ops.cast(ops.index(size - 1), tap.at.dtype)
        zero = ops.const(0.0, tap.at.dtype)
        within = (tap.at >= zero) & (tap.at <= last)
        inside.append(within)
        at = minimum(ops.cast(where(within, tap.at, zero), i64), ops.index(size - 1))
        index.append(ops.indirect(at, size))
    return tuple(index), inside


def _value(ops: Recorder, x: View, lead: Index, taps: Sequence[Tap]) -> Node:
    at, inside = _element(ops, taps, x.shape[2:])
    load = partial(x.load, ops, (*lead, *at))
    return ops.cast(ops.masked(all_of(ops, inside), load, 0), compute_dtype(x.dtype))


def _agree(x: View, grid: View) -> None:
    if x.dtype != grid.dtype or not x.dtype.is_float:
        raise NoRule("an image and positions of different types")


@lower(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(ctx: Lowering, x: View, grid: View, mode: int, padding: int, align: bool) -> Any:
    if ctx.facts().eager_cpu:
        return call_extern(ctx, (x, grid, mode, padding, align), {})
    _agree(x, grid)
    how = _Sampler(mode, padding, align)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        taps = _all_taps(ops, x.shape[2:], grid, how, (i[0], *i[2:]))
        shares = []
        for several in taps:
            weight = reduce(mul, (tap.weight for tap in several))
            value = _value(ops, x, i[:2], several)
            shares.append(value if how.mode == NEAREST else value * weight)
        return ops.cast(reduce(add, shares), x.dtype)

    return result(ctx, body)


@lower(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    ctx: Lowering,
    grad: View,
    x: View,
    grid: View,
    mode: int,
    padding: int,
    align: bool,
    output_mask: Sequence[bool],
) -> Any:
    if ctx.facts().eager_cpu:
        return call_extern(ctx, (grad, x, grid, mode, padding, align, output_mask), {})
    if torch.are_deterministic_algorithms_enabled():
        raise NoRule("eager has no deterministic gradient of grid_sample")
    _agree(x, grid)
    _agree(grad, grid)
    how = _Sampler(mode, padding, align)
    image = _image_gradient(ctx, grad, x, grid, how) if output_mask[0] else None
    places = _grid_gradient(ctx, grad, x, grid, how) if output_mask[1] else None
    return image, places


def _image_gradient(ctx: Lowering, grad: View, x: View, grid: View, how: _Sampler) -> View:
    """Every output adds to the elements that it was mixed of: the last coordinate of the loop is
    which of them."""
    rank = len(x.shape) - 2
    many = {BILINEAR: 2, NEAREST: 1, BICUBIC: 4}[how.mode] ** rank
    compute = compute_dtype(x.dtype)
    zeros = ctx.pointwise(x.shape, x.dtype, lambda ops, i: ops.const(0.0, x.dtype), like=x.buf)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> tuple[Index, Node]:
        *point, which = i
        taps = _all_taps(ops, x.shape[2:], grid, how, (point[0], *point[2:]))
        chosen = taps[0]
        for k, several in enumerate(taps[1:], start=1):
            mine = compare(ops, "eq", which, k)
            chosen = tuple(
                Tap(*(where(mine, p, q) for p, q in zip(a, b, strict=True)))
                for a, b in zip(several, chosen, strict=True)
            )
        at, inside = _element(ops, chosen, x.shape[2:])
        weight = reduce(mul, (tap.weight for tap in chosen))
        share = ops.cast(grad.load(ops, point), compute) * weight
        share = where(all_of(ops, inside), share, ops.const(0.0, compute))
        return (*point[:2], *at), ops.cast(share, x.dtype)

    return scatter_loop(ctx, zeros, (*grad.shape, many), "add", body)


def _grid_gradient(ctx: Lowering, grad: View, x: View, grid: View, how: _Sampler) -> View:
    """For each coordinate a sum over channels."""
    rank, compute = len(x.shape) - 2, compute_dtype(x.dtype)
    points = (grad.shape[0], *grad.shape[2:])

    def along(d: int) -> View:
        def body(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
            lead = (i[0], r[0])
            shares = []
            for several in _all_taps(ops, x.shape[2:], grid, how, i):
                slopes = (t.slope if k == d else t.weight for k, t in enumerate(several))
                shares.append(_value(ops, x, lead, several) * reduce(mul, slopes))
            out = ops.cast(grad.load(ops, (*lead, *i[1:])), compute)
            return reduce(add, shares) * out

        return ctx.reduce(points, (x.shape[1],), "sum", body)

    if how.mode == NEAREST:
        return ctx.pointwise(
            grid.shape, grid.dtype, lambda ops, i: ops.const(0.0, grid.dtype), like=grid.buf
        )
    sums = [along(rank - 1 - k) for k in range(rank)]

    def stacked(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        *point, which = i
        out = sums[0].load(ops, point)
        for k, total in enumerate(sums[1:], start=1):
            out = where(compare(ops, "eq", which, k), total.load(ops, point), out)
        return ops.cast(out, grid.dtype)

    return ctx.pointwise(grid.shape, grid.dtype, stacked)
