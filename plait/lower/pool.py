"""Rules for pooling: windows small enough are written out, larger ones are reductions.

Gradients gather: each input element sums over the windows that hold it, so nothing collides and any
number of threads may run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from math import prod
from typing import Any

import torch

from plait.ir import expr
from plait.ir.checks import Check
from plait.ir.dtypes import DType
from plait.ir.expr import Expr, Size
from plait.ir.loops import Node, apply
from plait.ir.maths import eq, isnan, where
from plait.ir.record import Recorder
from plait.lower.core import Lowering, NoRule, Rule, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import inside, load_if, result
from plait.lower.scatter import scatter_loop, unless_empty
from plait.lower.view import unflatten

aten = torch.ops.aten

# 3 x 3 x 3: a bound on a body's size, not a result of measuring.
_MAX_TAPS = 27  # windows with more elements become reductions
Point = tuple[Size, ...]
Bounds = tuple[tuple[Size, Size], ...]  # (first, end) by dimension


def _of_images(name: str) -> Callable[[Rule], Rule]:
    """Registers a rule, whose first argument is the number of dimensions, for 2 and 3 of them."""

    def register(rule: Rule) -> Rule:
        for n in (2, 3):
            lower(getattr(aten, name.format(n)).default)(partial(rule, n))
        return rule

    return register


def _spread(value: Any, n: int) -> tuple[int, ...]:
    """An int or a list of 1 or n ints as n ints. Raises NoRule for symbolic ones."""
    items = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(v, int) for v in items):
        raise NoRule("a window of unknown size")
    return items * n if len(items) == 1 else items


def _lowest(dtype: DType) -> float | int:
    if dtype.is_float:
        return float("-inf")
    return 0 if dtype.kind != "i" else -(2 ** (8 * dtype.nbytes - 1))


def _tap(
    ops: Recorder, x: View, lead: Point, at: Point, bounds: Bounds, other: float | int
) -> Node:
    """x[lead, at] in its compute dtype, `other` outside of bounds."""
    compute = compute_dtype(x.dtype)

    def load() -> Node:
        return ops.cast(x.load(ops, (*lead, *at)), compute)

    return load_if(ops, inside(ops, at, bounds), load, other)


def _sum(ops: Recorder, values: Iterator[Node]) -> Node:
    first = next(values)
    if first.dtype.is_float:  # a sum begins at 0, so that of -0 is 0
        first = first + ops.const(0.0, first.dtype)
    return sum(values, first)


# ------------------------------------------------------------------------------------------ windows
class _Window:
    """The geometry of n-dimensional pooling: the window at output point o begins at o*stride -
    padding and has a tap every `dilation` positions.

    counts: how many taps of a window are looked at. Where a window is longer than the input, these
    begin at the window's first position in the input, and there are as many as the input has room
    for."""

    def __init__(
        self,
        n: int,
        kernel: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        sizes: Sequence[Size],
        outs: Sequence[Size],
    ) -> None:
        self.kernel = _spread(kernel, n)
        self.stride = _spread(stride, n) if stride != [] and stride != () else self.kernel
        self.padding, self.dilation = _spread(padding, n), _spread(dilation, n)
        self.sizes, self.outs = tuple(sizes), tuple(outs)
        large = prod(self.kernel) > _MAX_TAPS
        rooms = [expr.ceildiv(size, d) for size, d in zip(self.sizes, self.dilation, strict=True)]
        self.counts: Point = tuple(
            expr.smin(k, room) if large or isinstance(room, int) else k
            for k, room in zip(self.kernel, rooms, strict=True)
        )

    @property
    def is_small(self) -> bool:
        """Whether the taps are few enough to be written out."""
        return expr.product(self.counts) in range(_MAX_TAPS + 1)

    @property
    def taps(self) -> list[Point]:
        """All taps that are looked at, row-major. Raises NoRule if they are many or unknown."""
        counts = [c for c in self.counts if isinstance(c, int)]
        if not self.is_small:
            raise NoRule("a large window")
        return list(itertools.product(*map(range, counts)))

    def start(self, o: Point) -> Point:
        """Where the window begins, which may be before the input."""
        return tuple(e * s - p for e, s, p in zip(o, self.stride, self.padding, strict=True))

    def bounds(self, o: Point) -> Bounds:
        """The positions of the input that the window may reach."""
        return tuple(
            (0, size if n == k else expr.smin(size, b + ((k - 1) * d + 1)))
            for b, k, n, d, size in zip(
                self.start(o), self.kernel, self.counts, self.dilation, self.sizes, strict=True
            )
        )  # fmt: skip

    def at(self, o: Point, k: Sequence[Size]) -> Point:
        """The input position of tap k."""
        begins = zip(self.start(o), self.first(o), self.kernel, self.counts, strict=True)
        return tuple(
            (start if count == kernel else first) + t * d
            for (start, first, kernel, count), t, d in zip(begins, k, self.dilation, strict=True)
        )

    def first(self, o: Point) -> Point:
        """The input position of the first tap that lies in the input."""
        return tuple(
            expr.smax(b, 0) if d == 1 else b + expr.ceildiv(expr.smax(-b, 0), d) * d
            for b, d in zip(self.start(o), self.dilation, strict=True)
        )

    def holders(self, i: Point) -> Iterator[tuple[Point, Bounds]]:
        """Output points whose window may hold input position i, each with the bounds that say
        whether it does."""
        spans = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        reach = [-(-span // s) for span, s in zip(spans, self.stride, strict=True)]
        counts = [
            min(n, size) if isinstance(size, int) else n
            for n, size in zip(reach, self.outs, strict=True)
        ]
        if prod(counts) > _MAX_TAPS:
            raise NoRule("windows that overlap too much")
        for back in itertools.product(*map(range, counts)):
            o: list[Size] = []
            bounds: list[tuple[Size, Size]] = []
            for k, (e, a, size) in enumerate(zip(i, back, self.outs, strict=True)):
                s, p, span = self.stride[k], self.padding[k], spans[k]
                last = (e + p) // s
                least = expr.smax(expr.ceildiv(e + (p - span + 1), s), 0)
                if counts[k] < reach[k]:  # there are fewer points than a window could reach
                    o.append(a)
                    bounds.append((least, expr.smin(size, last + 1)))
                    continue
                o.append(last - a)
                bounds.append((least if (a + 1) * s > span else 0, size))
            yield tuple(o), tuple(bounds)


# ------------------------------------------------------------------------------------------ maximum
@_of_images("max_pool{}d_with_indices")
def _max_pool(
    n: int, ctx: Lowering, x: View, kernel: Any, stride: Any = (), padding: Any = 0,
    dilation: Any = 1, ceil_mode: bool = False,
) -> tuple[View, View]:  # fmt: skip
    lead = len(x.shape) - n
    sizes = x.shape[lead:]
    window = _Window(n, kernel, stride, padding, dilation, sizes, ctx.out_shape(0)[lead:])

    def taps(i: Point) -> list[tuple[Point, Bounds]]:
        return [(window.at(i[lead:], k), window.bounds(i[lead:])) for k in window.taps]

    return _maximum(ctx, x, lead, taps, lambda i: window.first(i[lead:]))


def _maximum(
    ctx: Lowering,
    x: View,
    lead: int,
    taps: Callable[[Point], list[tuple[Point, Bounds]]],
    first: Callable[[Point], Point],
) -> tuple[View, View]:
    """The greatest tap of each window and its position in the input, row-major; the first one of
    equals, a NaN before all."""
    low = _lowest(x.dtype)
    strides = expr.contiguous_strides(x.shape[lead:])

    def position(ops: Recorder, at: Point) -> Node:
        return ops.index(expr.total(e * s for e, s in zip(at, strides, strict=True)))

    def values(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        found = (_tap(ops, x, i[:lead], at, bounds, low) for at, bounds in taps(i))
        return ops.cast(reduce(partial(apply, "max_first"), found), x.dtype)

    def positions(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        compute = compute_dtype(x.dtype)
        best, place = ops.const(low, compute), position(ops, first(i))
        for at, bounds in taps(i):
            value = _tap(ops, x, i[:lead], at, bounds, low)
            better = value > best
            if compute.is_float:
                better = better | isnan(value)
            best = where(better, value, best)
            place = where(better, position(ops, at), place)
        return place

    return result(ctx, values, 0), result(ctx, positions, 1)


@_of_images("max_pool{}d_with_indices_backward")
def _max_pool_backward(
    n: int, ctx: Lowering, grad: View, x: View, kernel: Any, stride: Any, padding: Any,
    dilation: Any, ceil_mode: bool, indices: View,
) -> View:  # fmt: skip
    lead = len(x.shape) - n
    sizes = x.shape[lead:]
    window = _Window(n, kernel, stride, padding, dilation, sizes, grad.shape[lead:])
    return _chosen(ctx, grad, x, indices, lead, lambda i: list(window.holders(i[lead:])))


def _chosen(
    ctx: Lowering,
    grad: View,
    x: View,
    indices: View,
    lead: int,
    holders: Callable[[Point], list[tuple[Point, Bounds]]],
) -> View:
    """The gradient of a maximum: each input element sums over the windows that hold it and chose
    it."""
    strides = expr.contiguous_strides(x.shape[lead:])
    compute = compute_dtype(grad.dtype)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        mine = ops.index(expr.total(e * s for e, s in zip(i[lead:], strides, strict=True)))

        def share(o: Point, bounds: Bounds) -> Node:
            best = _tap(ops, indices, i[:lead], o, bounds, -1)
            given = _tap(ops, grad, i[:lead], o, bounds, 0)
            return where(eq(best, mine), given, ops.const(0, compute))

        return ops.cast(_sum(ops, (share(o, b) for o, b in holders(i))), grad.dtype)

    return result(ctx, body)


# ------------------------------------------------------------------------------------------ average
def _divisor(window: _Window, o: Point, include_pad: bool, override: int | None) -> Size:
    """By how much the sum of the window at o is divided."""
    if override is not None:
        return override
    out: Size = 1
    for b, k, p, size in zip(
        window.start(o), window.kernel, window.padding, window.sizes, strict=True
    ):
        end = expr.smin(b + k, size + p)
        if not include_pad:
            b, end = expr.smax(b, 0), expr.smin(end, size)
        out = out * (end - b)
    return out


def _divided(ops: Recorder, value: Node, divisor: Size) -> Node:
    by = ops.cast(ops.index(divisor), value.dtype)
    return apply("truediv" if value.dtype.is_float else "truncdiv", value, by)


@_of_images("avg_pool{}d")
def _avg_pool(
    n: int, ctx: Lowering, x: View, kernel: Any, stride: Any = (), padding: Any = 0,
    ceil_mode: bool = False, include_pad: bool = True, override: int | None = None,
) -> View:  # fmt: skip
    lead = len(x.shape) - n
    window = _Window(n, kernel, stride, padding, 1, x.shape[lead:], ctx.out_shape()[lead:])

    def tap(ops: Recorder, i: Point, k: Sequence[Size]) -> Node:
        o = i[lead:]
        return _tap(ops, x, i[:lead], window.at(o, k), window.bounds(o), 0)

    summed = None if window.is_small else ctx.reduce(ctx.out_shape(), window.counts, "sum", tap)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        if summed is not None:
            total = summed.load(ops, i)
        else:
            total = _sum(ops, (tap(ops, i, k) for k in window.taps))
        return ops.cast(
            _divided(ops, total, _divisor(window, i[lead:], include_pad, override)), x.dtype
        )

    return result(ctx, body)


@_of_images("avg_pool{}d_backward")
def _avg_pool_backward(
    n: int, ctx: Lowering, grad: View, x: View, kernel: Any, stride: Any, padding: Any,
    ceil_mode: bool, include_pad: bool, override: int | None,
) -> View:  # fmt: skip
    lead = len(x.shape) - n
    window = _Window(n, kernel, stride, padding, 1, x.shape[lead:], grad.shape[lead:])

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        def share(o: Point, bounds: Bounds) -> Node:
            given = _tap(ops, grad, i[:lead], o, bounds, 0)
            return _divided(
                ops, given, override or expr.smax(_divisor(window, o, include_pad, None), 1)
            )

        return ops.cast(_sum(ops, (share(o, b) for o, b in window.holders(i[lead:]))), grad.dtype)

    return result(ctx, body)


# --------------------------------------------------------------------------------- adaptive windows
class _Parts:
    """`of` positions cut into `into` equal, overlapping parts by dimension: part i holds those from
    floor(i*of/into) up to ceil((i+1)*of/into)."""

    def __init__(self, of: Sequence[Size], into: Sequence[Size]) -> None:
        self.of, self.into = tuple(of), tuple(into)
        self.counts = tuple(map(_most, self.of, self.into))

    def bounds(self, i: Point) -> Bounds:
        """The positions of part i."""
        return tuple(
            (e * a // b, expr.ceildiv((e + 1) * a, b))
            for e, a, b in zip(i, self.of, self.into, strict=True)
        )

    def at(self, i: Point, tap: Sequence[Size]) -> Point:
        """Position number `tap` of part i, which may lie beyond its end."""
        return tuple(first + k for (first, _), k in zip(self.bounds(i), tap, strict=True))

    def size(self, i: Point) -> Size:
        """How many positions part i holds."""
        return expr.product(end - first for first, end in self.bounds(i))

    @property
    def is_small(self) -> bool:
        """Whether the parts are small enough to be written out."""
        return expr.product(self.counts) in range(_MAX_TAPS + 1)

    def taps(self, i: Point) -> list[tuple[Point, Bounds]]:
        """All positions of part i. Raises NoRule if they are many or unknown."""
        counts = [c for c in self.counts if isinstance(c, int)]
        if not self.is_small:
            raise NoRule("a large window")
        return [(self.at(i, tap), self.bounds(i)) for tap in itertools.product(*map(range, counts))]


def _most(of: Size, into: Size) -> Size:
    """The size of the largest part."""
    whole = expr.exact_div(of, into)
    return expr.ceildiv(of, into) + 1 if whole is None else whole


def _sum_of_parts(
    ctx: Lowering, x: View, lead: int, parts: _Parts, shape: Point, weigh: bool
) -> View:
    """The sum of x over each part. weigh: every element is first divided by the number of parts'
    elements it was averaged with (a gradient), instead of the whole sum by the size of the part."""
    back = _Parts(parts.into, parts.of)

    def tap(ops: Recorder, i: Point, at: Point) -> Node:
        value = _tap(ops, x, i[:lead], at, parts.bounds(i[lead:]), 0)
        return _divided(ops, value, expr.smax(back.size(at), 1)) if weigh else value

    summed = None
    if not parts.is_small:
        summed = ctx.reduce(
            shape, parts.counts, "sum", lambda ops, i, r: tap(ops, i, parts.at(i[lead:], r))
        )

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        if summed is not None:
            total = summed.load(ops, i)
        else:
            total = _sum(ops, (tap(ops, i, at) for at, _ in parts.taps(i[lead:])))
        return ops.cast(total if weigh else _divided(ops, total, parts.size(i[lead:])), x.dtype)

    return result(ctx, body)


def _check_some(*shapes: Point) -> None:
    """Raises NoRule where one has no elements: eager knows which of these it refuses."""
    if any(0 in shape for shape in shapes):
        raise NoRule("windows of nothing")


@_of_images("_adaptive_avg_pool{}d")
def _adaptive_avg(n: int, ctx: Lowering, x: View, output_size: Any) -> View:
    shape = ctx.out_shape()
    _check_some(x.shape, shape)
    lead = len(shape) - n
    return _sum_of_parts(ctx, x, lead, _Parts(x.shape[lead:], shape[lead:]), shape, weigh=False)


@_of_images("_adaptive_avg_pool{}d_backward")
def _adaptive_avg_backward(n: int, ctx: Lowering, grad: View, x: View) -> View:
    _check_some(x.shape, grad.shape)
    lead = len(x.shape) - n
    parts = _Parts(grad.shape[lead:], x.shape[lead:])
    pairs = zip(parts.of, parts.into, strict=True)
    even = not any(expr.exact_div(b, a) is expr.exact_div(a, b) is None for a, b in pairs)
    if even or not ctx.facts().is_host:  # a GPU divides integers while it waits for memory
        return _sum_of_parts(ctx, grad, lead, parts, ctx.out_shape(), weigh=True)
    return _dealt_out(ctx, grad, lead, parts)


def _dealt_out(ctx: Lowering, grad: View, lead: int, parts: _Parts) -> View:
    """The gradient of averages, dimension by dimension, the last one first: most of what is
    computed then has positions that change along outer loops alone. parts: of windows, into which
    the positions of the input are cut."""
    back, compute = _Parts(parts.into, parts.of), compute_dtype(grad.dtype)

    def share(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        value = ops.cast(grad.load(ops, i), compute)
        return _divided(ops, value, expr.smax(back.size(i[lead:]), 1))

    dealt = ctx.pointwise(grad.shape, compute, share)
    for k in reversed(range(len(parts.of))):
        axis, part = lead + k, _Parts(parts.of[k : k + 1], parts.into[k : k + 1])
        shape = (*dealt.shape[:axis], parts.into[k], *dealt.shape[axis + 1 :])
        dealt = _sums_along(ctx, dealt, shape, axis, part)
    whole = dealt
    return result(ctx, lambda ops, i: ops.cast(whole.load(ops, i), grad.dtype))


def _sums_along(ctx: Lowering, x: View, shape: Point, axis: int, part: _Parts) -> View:
    """The sums of x over the parts of one dimension."""

    def tap(ops: Recorder, i: Point, at: Point) -> Node:
        within = inside(ops, at, part.bounds(i[axis : axis + 1]))
        return load_if(ops, within, lambda: x.load(ops, (*i[:axis], *at, *i[axis + 1 :])), 0)

    def at(i: Point, r: Sequence[Size]) -> Point:
        return part.at(i[axis : axis + 1], r)

    if not part.is_small:
        return ctx.reduce(shape, part.counts, "sum", lambda ops, i, r: tap(ops, i, at(i, r)))

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        return _sum(ops, (tap(ops, i, at) for at, _ in part.taps(i[axis : axis + 1])))

    return ctx.pointwise(shape, x.dtype, body)


@_of_images("adaptive_max_pool{}d")
def _adaptive_max(n: int, ctx: Lowering, x: View, output_size: Any) -> tuple[View, View]:
    _check_some(x.shape, ctx.out_shape(0))
    lead = len(x.shape) - n
    parts = _Parts(x.shape[lead:], ctx.out_shape(0)[lead:])
    return _maximum(
        ctx, x, lead, lambda i: parts.taps(i[lead:]), lambda i: parts.at(i[lead:], [0] * n)
    )


@_of_images("adaptive_max_pool{}d_backward")
def _adaptive_max_backward(n: int, ctx: Lowering, grad: View, x: View, indices: View) -> View:
    _check_some(x.shape, grad.shape)
    lead = len(x.shape) - n
    parts = _Parts(grad.shape[lead:], x.shape[lead:])
    return _chosen(ctx, grad, x, indices, lead, lambda i: parts.taps(i[lead:]))


# ---------------------------------------------------------------------------------------- unpooling
@lower(aten.max_unpool2d.default, aten.max_unpool3d.default)
def _max_unpool(ctx: Lowering, x: View, indices: View, size: Sequence[Size], *_: Any) -> View:
    lead = len(x.shape) - len(size)
    dtype, shape = x.dtype, (*x.shape[:lead], *size)
    wrong = Check("RuntimeError", "Found an invalid max index")

    def body(ops: Recorder, i: tuple[Expr, ...]) -> tuple[Point, Node]:
        at = ops.checked(indices.load(ops, i), expr.numel(shape[lead:]), wrap=False, check=wrong)
        return (*i[:lead], *unflatten(shape[lead:], at)), x.load(ops, i)

    zeros = ctx.pointwise(shape, dtype, lambda ops, i: ops.const(0, dtype))
    return scatter_loop(ctx, zeros, unless_empty(ctx, x.shape, expr.numel(size)), "store", body)
