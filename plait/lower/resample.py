"""Rules for resampling: nearest, linear and cubic interpolation, gradients of replicated borders.

A gradient gathers: each input element sums over the outputs that were made from it, one dimension
at a time, with the weights of the forward pass, so nothing collides and any number of threads may
run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import product
from operator import add

import torch

from plait.ir.dtypes import DType, f32, f64, i64
from plait.ir.expr import Expr, Size, exact_div, smax
from plait.ir.loops import Node
from plait.ir.maths import eq, floor, maximum, minimum, where
from plait.ir.record import Recorder
from plait.lower.core import Body, Lowering, NoRule, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import compare, inside, load_if, result

aten = torch.ops.aten

# A bound on a body's size, not a result of measuring.
_MAX_TAPS = 24  # outputs of one input element, by dimension; more stay calls
Taps = list[tuple[Node, Node]]  # (position, weight)


def _load(ops: Recorder, x: View, at: Sequence[Size], d: int) -> Node:
    """x[at] in its compute dtype, 0 where coordinate d lies outside."""

    def load() -> Node:
        return ops.cast(x.load(ops, tuple(at)), compute_dtype(x.dtype))

    return load_if(ops, inside(ops, at[d : d + 1], [(0, x.shape[d])]), load)


# ------------------------------------------------------------------------------------------ nearest
@lower(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
)
def upsample_nearest_backward(
    ctx: Lowering,
    grad: View,
    output_size: Sequence[Size],
    input_size: Sequence[Size],
    *scales: float | None,
) -> View:
    """Where every input element was repeated a whole number of times, its gradient is the sum over
    its copies."""
    lead = 2
    times = [exact_div(o, i) for o, i in zip(output_size, input_size[lead:], strict=True)]
    whole = [t for t in times if isinstance(t, int)]
    if len(whole) < len(times) or any(
        s is not None and s != t for s, t in zip(scales, whole, strict=False)
    ):
        raise NoRule("resampling by a factor that is not whole")

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        copies = (
            tuple(e * t + k for e, t, k in zip(i[lead:], whole, tap, strict=True))
            for tap in product(*map(range, whole))
        )
        compute = compute_dtype(grad.dtype)
        taps = (ops.cast(grad.load(ops, (*i[:lead], *at)), compute) for at in copies)
        return ops.cast(reduce(add, taps), grad.dtype)

    return result(ctx, body)


# ------------------------------------------------------------------------------------ interpolation
@lower(aten.upsample_bilinear2d.default, aten.upsample_trilinear3d.default)
def upsample_linear(
    ctx: Lowering, x: View, output_size: Sequence[Size], align_corners: bool, *scales: float | None
) -> View:
    """Neighbours are mixed from the last dimension to the first, as ATen does it (of floats: bytes
    it weighs in fixed point and rounds after each dimension)."""
    if not x.dtype.is_float:
        raise NoRule("linear interpolation of integers")
    compute = f64 if x.dtype == f64 else f32
    axes = _axes(x.shape[2:], ctx.out_shape()[2:], align_corners, scales)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        pairs = [axis.between(ops, e, compute) for axis, e in zip(axes, i[2:], strict=True)]

        def mixed(d: int, at: tuple[Size, ...]) -> Node:
            if d == len(axes):
                return ops.cast(x.load(ops, (*i[:2], *at)), compute)
            low, high, f = pairs[d]
            rest = ops.const(1.0, compute) - f
            a, b = (mixed(d + 1, (*at, ops.indirect(p, axes[d].size))) for p in (low, high))
            return a * rest + b * f

        return ops.cast(mixed(0, ()), x.dtype)

    return result(ctx, body)


@lower(aten.upsample_bicubic2d.default)
def upsample_bicubic2d(
    ctx: Lowering, x: View, output_size: Sequence[Size], align_corners: bool, *scales: float | None
) -> View:
    if not x.dtype.is_float:
        raise NoRule("cubic interpolation of integers")
    compute = compute_dtype(x.dtype)
    axes = _axes(x.shape[2:], ctx.out_shape()[2:], align_corners, scales)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        rows, columns = (
            [(ops.indirect(at, axis.size), w) for at, w in axis.cubic(ops, e, compute)]
            for axis, e in zip(axes, i[2:], strict=True)
        )

        def row(y: Expr) -> Node:
            loads = ((ops.cast(x.load(ops, (*i[:2], y, z)), compute), w) for z, w in columns)
            return reduce(add, (v * w for v, w in loads))

        return ops.cast(reduce(add, (row(y) * w for y, w in rows)), x.dtype)

    return result(ctx, body)


class _Axis:
    """How one dimension is resampled, in ATen's arithmetic."""

    def __init__(self, size: Size, out: Size, align: bool, scale: float | None) -> None:
        self.size, self.out, self.align = size, out, align
        self.scale = scale if scale is not None and scale > 0 else None

    def position(self, ops: Recorder, o: Size, compute: DType) -> Node:
        """Where output position o lies between the input positions."""

        def number(e: Size) -> Node:
            return ops.cast(ops.index(e), compute)

        def const(v: float) -> Node:
            return ops.const(v, compute)

        if self.align:
            steps = self.out - 1
            if steps == 0:
                return const(0.0)
            step = number(self.size - 1) / number(smax(steps, 1))
            return step * number(o)
        step = (
            const(1.0 / self.scale)
            if self.scale is not None
            else number(self.size) / number(self.out)
        )
        middle = step * (number(o) + const(0.5))
        return middle - const(0.5)

    def between(self, ops: Recorder, o: Size, compute: DType) -> tuple[Node, Node, Node]:
        """The two input positions around output position o and the weight of the second."""
        position = maximum(self.position(ops, o, compute), ops.const(0.0, compute))
        last = ops.index(self.size - 1)
        low = minimum(ops.cast(floor(position), i64), last)
        high = minimum(low + ops.const(1, i64), last)
        off = position - ops.cast(low, compute)
        off = minimum(maximum(off, ops.const(0.0, compute)), ops.const(1.0, compute))
        return low, high, off

    def linear(self, ops: Recorder, o: Size, compute: DType) -> Taps:
        """The input positions that output position o mixes, and their weights."""
        low, high, f = self.between(ops, o, compute)
        return [(low, ops.const(1.0, compute) - f), (high, f)]

    def cubic(self, ops: Recorder, o: Size, compute: DType) -> Taps:
        """As linear, of a cubic through four positions; those beyond the ends are the ends."""
        position = self.position(ops, o, compute)
        low = floor(position)
        t = position - low
        first, last = ops.cast(low, i64), ops.index(self.size - 1)
        out = []
        for k, weight in enumerate(cubic_weights(ops, t, compute), start=-1):
            at = first + ops.const(k, i64)
            out.append((maximum(minimum(at, last), ops.const(0, i64)), weight))
        return out

    def readers(self, reach: int) -> tuple[Callable[[Recorder, Expr], Size], int]:
        """The first output position that may have been made from an input position, where positions
        less than `reach` away count, and how many there are. Raises NoRule where that is unknown or
        too much."""
        if not isinstance(self.size, int) or not isinstance(self.out, int):
            raise NoRule("the gradient of resampling between unknown sizes")
        times = exact_div(self.out, self.size)
        start: Callable[[Recorder, Expr], Size]
        if isinstance(times, int) and not self.align and self.scale in (None, times):
            lead = reach * times - (times - 1) // 2 - 1
            count = 2 * reach * times - times % 2
            start = partial(_times, times=times, lead=lead)
        else:
            step = self._step()
            count = min(math.ceil(2 * reach / step) + 2, self.out) if step > 0 else self.out
            start = partial(self._first, reach=reach, step=step, count=count)
        if count > _MAX_TAPS:
            raise NoRule("the gradient of resampling to a much larger size")
        return start, count

    def _step(self) -> float:
        assert isinstance(self.size, int) and isinstance(self.out, int), self.size
        if self.align:
            return (self.size - 1) / (self.out - 1) if self.out > 1 else 0.0
        return 1.0 / self.scale if self.scale is not None else self.size / self.out

    def _first(self, ops: Recorder, j: Expr, reach: int, step: float, count: int) -> Size:
        """A first position such that `count` of them lie in the output."""
        assert isinstance(self.out, int), self.out
        most = self.out - count
        if most == 0:
            return 0
        shift = 0.0 if self.align else 0.5
        edge = ops.cast(ops.index(j - reach), f64)
        at = edge + ops.const(shift, f64)
        at = at * ops.const(1 / step, f64) - ops.const(shift, f64)
        first = ops.cast(floor(at), i64)
        inside = maximum(minimum(first, ops.const(most, i64)), ops.const(0, i64))
        return ops.indirect(inside, most + 1)


def _times(_: Recorder, j: Expr, times: int, lead: int) -> Size:
    return j * times - lead


def _axes(
    sizes: Sequence[Size], outs: Sequence[Size], align: bool, scales: Sequence[float | None]
) -> list[_Axis]:
    given = [*scales, *[None] * (len(sizes) - len(scales))]
    return [_Axis(s, o, align, f) for s, o, f in zip(sizes, outs, given, strict=True)]


_NEAR, _FAR = (1.25, -2.25, 0.0, 1.0), (-0.75, 3.75, -6.0, 3.0)
"""A cubic convolution (A=-0.75), less than 1 away and from there to 2: coefficients, the highest
power first."""


def _polynomial(ops: Recorder, x: Node, coefficients: Sequence[float]) -> Node:
    out = ops.const(coefficients[0], x.dtype)
    for c in coefficients[1:]:
        out = out * x + ops.const(c, x.dtype)
    return out


def cubic_weights(ops: Recorder, t: Node, compute: DType) -> list[Node]:
    """The weights of the four positions around a point that lies t after the second."""
    one = ops.const(1.0, compute)
    rest = one - t
    return [
        _polynomial(ops, t + one, _FAR),
        _polynomial(ops, t, _NEAR),
        _polynomial(ops, rest, _NEAR),
        _polynomial(ops, rest + one, _FAR),
    ]


def cubic_slopes(ops: Recorder, t: Node, compute: DType) -> list[Node]:
    """By how much these weights change as t grows."""
    one = ops.const(1.0, compute)
    rest = one - t
    near, far = (
        tuple(c * power for c, power in zip(p, (3, 2, 1), strict=False)) for p in (_NEAR, _FAR)
    )
    return [
        _polynomial(ops, t + one, far),
        _polynomial(ops, t, near),
        -_polynomial(ops, rest, near),
        -_polynomial(ops, rest + one, far),
    ]


def _upsample_backward(
    reach: int,
    weigh: Callable[[_Axis, Recorder, Size, DType], Taps],
    ctx: Lowering,
    grad: View,
    output_size: Sequence[Size],
    input_size: Sequence[Size],
    align_corners: bool,
    *scales: float | None,
) -> View:
    """The gradient of resampling, dimension by dimension from the last."""
    compute = compute_dtype(grad.dtype)
    axes = _axes(input_size[2:], grad.shape[2:], align_corners, scales)
    found = [axis.readers(reach) for axis in axes]

    def along(x: View, d: int, dtype: DType) -> Body:
        axis, (start, count) = axes[d - 2], found[d - 2]

        def share(ops: Recorder, i: tuple[Expr, ...], o: Size) -> Node:
            mine, zero = ops.index(i[d]), ops.const(0.0, compute)
            mixed = (where(eq(at, mine), w, zero) for at, w in weigh(axis, ops, o, compute))
            value = _load(ops, x, (*i[:d], o, *i[d + 1 :]), d)
            return value * reduce(add, mixed)

        def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
            first = start(ops, i[d])
            return ops.cast(reduce(add, (share(ops, i, first + k) for k in range(count))), dtype)

        return body

    return _by_dimension(ctx, grad, 2, input_size[2:], along)


lower(
    aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
)(partial(_upsample_backward, 1, _Axis.linear))
lower(aten.upsample_bicubic2d_backward.default)(partial(_upsample_backward, 2, _Axis.cubic))


def _by_dimension(
    ctx: Lowering,
    x: View,
    first: int,
    sizes: Sequence[Size],
    along: Callable[[View, int, DType], Body],
) -> View:
    """x with its dimensions from `first` on made `sizes` long, one by one from the last."""
    for d in reversed(range(first, len(x.shape))):
        if d == first:
            x = result(ctx, along(x, d, ctx.out_dtype()))
        else:
            dtype = compute_dtype(x.dtype)
            shape = (*x.shape[:d], sizes[d - first], *x.shape[d + 1 :])
            x = ctx.pointwise(shape, dtype, along(x, d, dtype))
    return x


# ------------------------------------------------------------------------------------------ borders
@lower(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def replication_pad_backward(ctx: Lowering, grad: View, x: View, padding: Sequence[Size]) -> View:
    """Inner elements were copied once, those at the ends once more for every border element beyond
    them."""
    pads = [p for p in padding if isinstance(p, int)]
    if len(pads) < len(padding) or max(pads) > _MAX_TAPS:
        raise NoRule("the gradient of a wide border")
    rank = len(x.shape)
    first = rank - len(pads) // 2

    def along(g: View, d: int, dtype: DType) -> Body:
        low, high = pads[2 * (rank - 1 - d) : 2 * (rank - 1 - d) + 2]
        size = x.shape[d]

        def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
            def at(o: Size) -> Node:
                return _load(ops, g, (*i[:d], o, *i[d + 1 :]), d)

            starts, ends = compare(ops, "eq", i[d], 0), compare(ops, "eq", i[d], size - 1)
            beyond: list[tuple[Node, Size]] = [(starts, k) for k in range(low)]
            after = size + low
            beyond += [(ends, after + k) for k in range(high)]
            more = (ops.masked(hit, partial(at, o), 0) for hit, o in beyond)
            return ops.cast(reduce(add, (at(i[d] + low), *more)), dtype)

        return body

    return _by_dimension(ctx, grad, first, x.shape[first:], along)
