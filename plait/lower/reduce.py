"""Reductions: sums, products, extrema, tests, positions, variances and norms over any set of
dimensions.

Half types accumulate in f32, integers and bools in i64 (sum, prod); results are rounded once at the
end. A keepdim result is a view of the reduced one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.devices import facts_of
from plait.ir import expr
from plait.ir.dtypes import DType, b1, f64, i64
from plait.ir.expr import Expr, Size
from plait.ir.loops import Node
from plait.ir.maths import eq, isnan, maximum, ne, sqrt, where
from plait.ir.record import Recorder
from plait.ir.reductions import REDUCTIONS
from plait.lower.convert import convert
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.dtypes import compute_dtype
from plait.lower.elementwise import operand
from plait.lower.view import add_dim, wrap_dim

aten = torch.ops.aten

Value = Callable[[Recorder, Node], Node]  # what is reduced, from an element of the input


class Axes:
    """A split of a tensor's dimensions into kept and reduced ones."""

    def __init__(self, x: View, dims: int | Sequence[int] | None) -> None:
        rank = len(x.shape)
        given = [dims] if isinstance(dims, int) else dims
        self.reduced = (
            sorted({wrap_dim(d, rank) for d in given} if given else range(rank)) if rank else []
        )
        self.kept = [d for d in range(rank) if d not in self.reduced]
        self.x = x
        self.shape = tuple(x.shape[d] for d in self.kept)
        self.rshape = tuple(x.shape[d] for d in self.reduced)
        self.numel = expr.numel(self.rshape)

    def at(self, i: Sequence[Size], r: Sequence[Size]) -> tuple[Size, ...]:
        """The index into x of reduced point r of kept point i."""
        where = dict(zip(self.kept, i, strict=True)) | dict(zip(self.reduced, r, strict=True))
        return tuple(where[d] for d in range(len(where)))

    def kept_of(self, index: Sequence[Size]) -> tuple[Size, ...]:
        """The kept point that element `index` of x belongs to."""
        return tuple(index[d] for d in self.kept)

    def restore(self, out: View, keepdim: bool) -> View:
        """out with its reduced dimensions put back as dimensions of size 1, if asked to."""
        if keepdim:
            for d in self.reduced:
                out = add_dim(out, d)
        return out

    def reduce(self, ctx: Lowering, kind: str, value: Value) -> View:
        """x reduced by kind; `value` gives the term of an element, in the dtype to accumulate
        in."""
        (out,) = self.reduce_many(ctx, kind, value, (True,))
        assert out is not None, f"a reduction by {kind} that gives nothing"
        return out

    def accumulate(self, ctx: Lowering, kind: str, out: DType) -> View:
        """x reduced by kind, in the dtype in which it accumulates those of `out`. Elements are
        brought to `out` first, as eager does."""
        wide = REDUCTIONS[kind].accumulates(out)
        return self.reduce(ctx, kind, lambda ops, e: ops.cast(ops.cast(e, out), wide))

    def reduce_many(
        self, ctx: Lowering, kind: str, value: Value, outs: Sequence[bool]
    ) -> tuple[View | None, ...]:
        """As reduce, for kinds with several results."""
        x = self.x

        def body(ops: Recorder, i: tuple[Expr, ...], r: tuple[Expr, ...]) -> Node:
            return value(ops, x.load(ops, self.at(i, r)))

        return ctx.reduction(self.shape, self.rshape, kind, body, outs)


# -------------------------------------------------------------------------------- sums and products
@lower(aten.sum.default, aten.sum.dim_IntList)
def _sum(
    ctx: Lowering, x: View, dim: Sequence[int] | None = None, keepdim: bool = False, **_: Any
) -> View:
    out = ctx.out_dtype()
    axes = Axes(x, dim)
    total = axes.accumulate(ctx, "sum", out)
    return axes.restore(convert(ctx, total, out), keepdim)


@lower(aten.mean.default, aten.mean.dim)
def _mean(
    ctx: Lowering, x: View, dim: Sequence[int] | None = None, keepdim: bool = False, **_: Any
) -> View:
    out = ctx.out_dtype()
    axes = Axes(x, dim)
    total = axes.accumulate(ctx, "sum", out)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        count = ops.cast(ops.index(axes.numel), total.dtype)
        return ops.cast(total.load(ops, i) / count, out)

    return axes.restore(ctx.pointwise(axes.shape, out, body), keepdim)


@lower(aten.prod.default, aten.prod.dim_int)
def _prod(ctx: Lowering, x: View, dim: int | None = None, keepdim: bool = False, **_: Any) -> View:
    out = ctx.out_dtype()
    axes = Axes(x, dim)
    return axes.restore(convert(ctx, axes.accumulate(ctx, "prod", out), out), keepdim)


# -------------------------------------------------------------------------------- extrema and tests
def _extremum(ctx: Lowering, axes: Axes, kind: str) -> View:
    dtype = axes.x.dtype
    if dtype == b1:
        return axes.reduce(ctx, "any" if kind == "max" else "all", lambda ops, e: e)
    return convert(ctx, axes.accumulate(ctx, kind, dtype), dtype)


def _position(ctx: Lowering, axes: Axes, kind: str) -> View:
    return axes.accumulate(ctx, kind, axes.x.dtype)


_OF_SOMETHING = frozenset(
    "max min amax amin aminmax argmax argmin linalg_vector_norm norm dist".split()
)


def _need_elements(ctx: Lowering, axes: Axes) -> None:
    """Fails where nothing is reduced, which has no extremum. Decompositions look after that
    themselves."""
    asked: Any = ctx.node.meta.get("original_aten", ctx.node.target)
    name = asked._schema.name.removeprefix("aten::")
    if name not in _OF_SOMETHING:
        return
    if axes.numel == 0:
        raise NoRule("an extremum of nothing")  # eager's own error
    # Sizes that were 2 or more when the graph was traced can be 0 in a program that torch.export
    # made.
    sizes = {
        a: expr.symbol(a.name, 0, a.hi) for a in expr.free_symbols(axes.numel) if 0 < a.lo <= 2
    }
    numel = expr.substitute(axes.numel, sizes)
    ctx.assert_true(
        expr.compare("ne", numel, 0), f"{name}(): Expected a reduction of one or more elements"
    )


def _register_extrema(kind: str) -> None:
    def extremum(
        ctx: Lowering, x: View, dim: Sequence[int] | None = None, keepdim: bool = False
    ) -> View:
        axes = Axes(x, dim)
        _need_elements(ctx, axes)
        return axes.restore(_extremum(ctx, axes, kind), keepdim)

    def with_position(ctx: Lowering, x: View, dim: int, keepdim: bool = False) -> tuple[View, View]:
        axes = Axes(x, dim)
        _need_elements(ctx, axes)
        found = _extremum(ctx, axes, kind), _position(ctx, axes, f"arg{kind}")
        return axes.restore(found[0], keepdim), axes.restore(found[1], keepdim)

    def position(ctx: Lowering, x: View, dim: int | None = None, keepdim: bool = False) -> View:
        axes = Axes(x, dim)
        _need_elements(ctx, axes)
        return axes.restore(_position(ctx, axes, f"arg{kind}"), keepdim)

    lower(getattr(aten, f"a{kind}").default, getattr(aten, kind).default)(extremum)
    lower(getattr(aten, kind).dim)(with_position)
    lower(getattr(aten, f"arg{kind}").default)(position)


_register_extrema("max")
_register_extrema("min")


def _register_test(kind: str) -> None:
    def rule(
        ctx: Lowering, x: View, dim: int | Sequence[int] | None = None, keepdim: bool = False
    ) -> View:
        if isinstance(dim, (list, tuple)) and not dim:
            return convert(ctx, convert(ctx, x, b1), ctx.out_dtype())
        axes = Axes(x, dim)
        found = axes.reduce(ctx, kind, lambda ops, e: ops.cast(e, b1))
        return axes.restore(convert(ctx, found, ctx.out_dtype()), keepdim)

    packet = getattr(aten, kind)
    lower(packet.default, packet.dim, packet.dims)(rule)


_register_test("any")
_register_test("all")


# ------------------------------------------------------------------------------- variance and norms
def moments(ctx: Lowering, axes: Axes, compute: DType) -> tuple[View, View]:
    """Mean and sum of squared deviations, in `compute`."""
    mean, m2, _ = axes.reduce_many(
        ctx, "welford", lambda ops, e: ops.cast(e, compute), (True, True, False)
    )
    assert mean is not None and m2 is not None, "welford gives a mean and deviations"
    return mean, m2


def _variance(
    ctx: Lowering, axes: Axes, m2: View, correction: float | None, out: DType, root: bool
) -> View:
    by = 1.0 if correction is None else float(correction)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        count = ops.cast(ops.index(axes.numel), m2.dtype) - by
        var = m2.load(ops, i) / maximum(count, 0.0)
        return ops.cast(sqrt(var) if root else var, out)

    return ctx.pointwise(axes.shape, out, body)


def moments_dtype(ctx: Lowering, x: View) -> DType:
    """What variances are computed in: on a CPU in double, as eager's are, where a square does not
    overflow."""
    return f64 if facts_of(ctx.buffers[x.buf].device).eager_cpu else compute_dtype(x.dtype)


def _register_variance(name: str) -> None:
    root = name == "std"

    def alone(
        ctx: Lowering, x: View, dim: Sequence[int] | None = None, *,
        correction: float | None = None, keepdim: bool = False,
    ) -> View:  # fmt: skip
        axes = Axes(x, dim)
        _, m2 = moments(ctx, axes, moments_dtype(ctx, x))
        return axes.restore(_variance(ctx, axes, m2, correction, ctx.out_dtype(), root), keepdim)

    def with_mean(
        ctx: Lowering, x: View, dim: Sequence[int] | None = None, *,
        correction: float | None = None, keepdim: bool = False,
    ) -> tuple[View, View]:  # fmt: skip
        axes = Axes(x, dim)
        mean, m2 = moments(ctx, axes, moments_dtype(ctx, x))
        var = _variance(ctx, axes, m2, correction, ctx.out_dtype(0), root)
        mean = _mean_or_nan(ctx, axes, mean, m2, ctx.out_dtype(1))
        return axes.restore(var, keepdim), axes.restore(mean, keepdim)

    lower(getattr(aten, name).correction)(alone)
    lower(getattr(aten, f"{name}_mean").correction)(with_mean)


_register_variance("var")
_register_variance("std")


def _mean_or_nan(ctx: Lowering, axes: Axes, mean: View, m2: View, out: DType) -> View:
    """Welford's mean of nothing is 0 and that of an infinity infinite, eager's is NaN."""
    if axes.numel == 1:
        return convert(ctx, mean, out)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        lost = isnan(m2.load(ops, i))
        if expr.may_be_zero(axes.numel):
            # A float: of integers their ranges would decide.
            count = ops.cast(ops.index(axes.numel), mean.dtype)
            lost = lost | eq(count, ops.const(0, mean.dtype))
        nan = ops.const(float("nan"), mean.dtype)
        return ops.cast(where(lost, nan, mean.load(ops, i)), out)

    return ctx.pointwise(axes.shape, out, body)


@lower(aten.linalg_vector_norm.default)
def _vector_norm(
    ctx: Lowering,
    x: View,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    **_: Any,
) -> View:
    out = ctx.out_dtype()
    compute = compute_dtype(out)
    axes = Axes(x, dim)
    p = float(ord)
    kind = "max" if p == float("inf") else "min" if p == float("-inf") else "sum"
    if p < 0 or kind == "max":
        _need_elements(ctx, axes)

    def term(ops: Recorder, e: Node) -> Node:
        v = ops.cast(ops.cast(e, out), compute)
        if p == 0:
            return ops.cast(ne(v, 0.0), compute)
        if p == 2:
            return v * v
        return abs(v) if kind != "sum" or p == 1 else abs(v) ** p

    def size(ops: Recorder, e: Node) -> Node:
        return abs(ops.cast(ops.cast(e, out), compute))

    powers = kind == "sum" and p not in (0, 1)
    # The norm of one element is its size, of which no power overflows.
    if powers and axes.numel == 1:
        return axes.restore(convert(ctx, axes.reduce(ctx, "max", size), out), keepdim)
    total = axes.reduce(ctx, kind, term)
    one = axes.reduce(ctx, "max", size) if powers and not expr.known_lt(1, axes.numel) else None

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        v = total.load(ops, i)
        if powers:
            v = sqrt(v) if p == 2 else v ** (1.0 / p)
        if one is not None:
            alone = eq(ops.index(axes.numel), ops.const(1, i64))
            v = where(alone, one.load(ops, i), v)
        return ops.cast(v, out)

    return axes.restore(ctx.pointwise(axes.shape, out, body), keepdim)


@lower(aten.dist.default)
def _dist(ctx: Lowering, a: View, b: View, p: float = 2) -> View:
    rank = max(len(a.shape), len(b.shape))
    pairs = zip(*((1,) * (rank - len(x.shape)) + x.shape for x in (a, b)), strict=True)
    shape = tuple(m if n == 1 else n for n, m in pairs)
    dtype = ctx.out_dtype()

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        x, y = (operand(ctx, ops, v, i, shape, dtype) for v in (a, b))
        return ops.cast(x - y, dtype)

    out: View = _vector_norm(ctx, ctx.pointwise(shape, dtype, body), p)
    return out
