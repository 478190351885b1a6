"""Tensors made of others by moving elements: tril, flip, roll, repeat, pad, cat, stack.

Comes in: Views and Sizes. Goes out: Pointwise loops (several with one `out` for a long cat).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.ir.dtypes import DType
from plait.ir.expr import Expr, Size, known_le, product, smax, smin
from plait.ir.loops import Node, Pointwise, loop_vars
from plait.ir.maths import where
from plait.ir.record import Recorder
from plait.lower.core import Index, Lowering, View, lower
from plait.lower.creation import fill
from plait.lower.elementwise import all_of, compare, load_if, result, scalar, wrap
from plait.lower.view import reshape, wrap_dim

aten = torch.ops.aten


@lower(aten.tril.default)
def tril(ctx: Lowering, x: View, diagonal: Size = 0) -> View:
    return _triangle(ctx, x, lambda ops, r, c: compare(ops, "le", c - r, diagonal))


@lower(aten.triu.default)
def triu(ctx: Lowering, x: View, diagonal: Size = 0) -> View:
    return _triangle(ctx, x, lambda ops, r, c: compare(ops, "ge", c - r, diagonal))


def _triangle(ctx: Lowering, x: View, keep: Callable[[Recorder, Size, Size], Node]) -> View:
    return result(
        ctx, (lambda ops, i: where(keep(ops, i[-2], i[-1]), x.load(ops, i), ops.const(0, x.dtype)))
    )


# -------------------------------------------------------------------------------------- rearranging
def _gathered(ctx: Lowering, x: View, fn: Callable[[tuple[Expr, ...]], Index]) -> View:
    """A new tensor whose element i is x[fn(i)]."""
    return result(ctx, lambda ops, i: x.load(ops, fn(i)))


# A run: so many indices of a dimension, and what the v-th of them reads.
Run = tuple[Size, Callable[[Size], Size]]
# A bound on kernels: copies run by run were two to three times as fast (pad and roll of
# benchmarks/kernels_cpu.py).
_MAX_RUNS = 9


def _mirror(last: Size) -> Callable[[Size], Size]:
    return lambda v: last - v


def _only(at: Size) -> Callable[[Size], Size]:
    return lambda v: at


def _in_runs(ctx: Lowering, runs: Sequence[Sequence[Run]]) -> bool:
    """Whether a gather is better written run by run, each with an affine index: it is a tensor of
    its own then, which readers that are loops could not inline."""
    lengths = [n for of_dim in runs for n, _ in of_dim]
    known = all(isinstance(n, int) and n >= 0 for n in lengths)
    n_loops = math.prod(sum(n != 0 for n, _ in of_dim) for of_dim in runs)
    return known and 1 < n_loops <= _MAX_RUNS and not _read_by_loops(ctx.node)


def _from_runs(ctx: Lowering, x: View, runs: Sequence[Sequence[Run]]) -> View:
    """The tensor whose dimension d is made of runs[d], one after the other."""
    buf = ctx.new_buffer(x.dtype, ctx.out_shape(), ctx.out_strides())
    placed = []
    for of_dim in runs:
        starts: list[Size] = [0]
        for n, _ in of_dim:
            starts.append(starts[-1] + n)
        placed.append([(at, n, f) for at, (n, f) in zip(starts, of_dim, strict=False) if n != 0])
    for pieces in itertools.product(*placed):
        ops = Recorder()
        vars_ = loop_vars("i", tuple(n for _, n, _ in pieces))
        at = tuple(f(v) for v, (_, _, f) in zip(vars_, pieces, strict=True))
        index = tuple(v + start for v, (start, _, _) in zip(vars_, pieces, strict=True))
        ctx.ops.append(Pointwise(buf, vars_, x.load(ops, at), index, ctx.origin))
    return ctx.whole(buf)


@lower(aten.flip.default)
def flip(ctx: Lowering, x: View, dims: Sequence[int]) -> View:
    flipped = {wrap_dim(d, len(x.shape)) for d in dims} if x.shape else set()

    def fn(i: tuple[Expr, ...]) -> Index:
        last = [s - 1 for s in x.shape]
        return tuple(last[d] - v if d in flipped else v for d, v in enumerate(i))

    return _gathered(ctx, x, fn)


@lower(aten.roll.default)
def roll(ctx: Lowering, x: View, shifts: Sequence[Size], dims: Sequence[int] = ()) -> View:
    if isinstance(shifts, (int, Expr)):
        shifts = [shifts]
    if not dims:
        flat = reshape(x, (product(x.shape),))
        return reshape(_rolled(ctx, flat, shifts[0], 0, (1,)), ctx.out_shape())
    for s, d in zip(shifts[:-1], dims[:-1], strict=True):
        x = _rolled(ctx, x, s, wrap_dim(d, len(x.shape)), ctx.out_strides())
    last = wrap_dim(dims[-1], len(x.shape))
    runs: list[list[Run]] = [[(n, lambda v: v)] for n in x.shape]
    size, start = x.shape[last], shifts[-1] % x.shape[last] if x.shape[last] != 0 else 0
    rest = size - start
    runs[last] = [(start, lambda v: rest + v), (rest, lambda v: v)]
    if _in_runs(ctx, runs):
        return _from_runs(ctx, x, runs)
    return _rolled(ctx, x, shifts[-1], last, ctx.out_strides())


def _rolled(ctx: Lowering, x: View, shift: Size, d: int, strides: tuple[Size, ...] | None) -> View:
    """x rolled along one dimension: two slices side by side, which loads without division."""
    size = x.shape[d]
    if size == 0:
        return x
    start = shift % size

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        def moved(by: Size) -> Callable[[], Node]:
            return lambda: x.load(ops, (*i[:d], i[d] + by, *i[d + 1 :]))

        front = compare(ops, "lt", i[d], start)
        early = ops.masked(front, moved(size - start), 0)
        late = ops.masked(compare(ops, "ge", i[d], start), moved(-start), 0)
        return where(front, early, late)

    return ctx.pointwise(x.shape, x.dtype, body, strides)


@lower(aten.repeat.default)
def repeat(ctx: Lowering, x: View, repeats: Sequence[Size]) -> View:
    """A copy with a dimension of its own for every repetition (so that no index divides), seen with
    these joined."""
    lead = len(repeats) - len(x.shape)
    sizes = (*(1,) * lead, *x.shape)
    apart = tuple(n for pair in zip(repeats, sizes, strict=True) for n in pair)
    made = ctx.pointwise(apart, x.dtype, lambda ops, i: x.load(ops, i[2 * lead + 1 :: 2]))

    def fn(v: tuple[Expr, ...]) -> Index:
        return tuple(
            e
            for p, s in zip(v, sizes, strict=True)
            for e in ((p // s, p % s) if s != 0 else (p, p))
        )

    return made.remap(ctx.out_shape(), fn)


# ------------------------------------------------------------------------------------------ padding
@lower(aten.constant_pad_nd.default)
def constant_pad_nd(ctx: Lowering, x: View, pad: Sequence[Size], value: Any = 0) -> View:
    lows, highs = _pads(len(x.shape), pad)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        at = tuple(v - lo for v, lo in zip(i, lows, strict=True))
        sides = []
        for d, (lo, hi) in enumerate(zip(lows, highs, strict=True)):
            if not known_le(lo, 0):
                sides.append(compare(ops, "ge", at[d], 0))
            if not known_le(hi, 0):
                sides.append(compare(ops, "lt", at[d], x.shape[d]))
        if isinstance(value, (bool, int, float)):
            return load_if(ops, sides, lambda: x.load(ops, at), wrap(value, x.dtype))
        if not sides:
            return x.load(ops, at)
        other = scalar(ctx, ops, value, x.dtype)
        return where(all_of(ops, sides), load_if(ops, sides, lambda: x.load(ops, at)), other)

    return result(ctx, body)


def _pads(rank: int, pad: Sequence[Size]) -> tuple[list[Size], list[Size]]:
    """PyTorch's (last low, last high, one before low, ...) as lows and highs by dimension."""
    lows: list[Size] = [0] * rank
    highs: list[Size] = [0] * rank
    for k in range(len(pad) // 2):
        lows[rank - 1 - k], highs[rank - 1 - k] = pad[2 * k], pad[2 * k + 1]
    return lows, highs


def reflected(j: Size, size: Size) -> Size:
    """Index j mirrored at the ends of [0, size), the border elements not repeated."""
    last = size - 1
    t = last - smax(j, -j)
    return last - smax(t, -t)


@lower(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(ctx: Lowering, x: View, padding: Sequence[Size]) -> View:
    lows, highs = _pads(len(x.shape), padding)
    first = len(x.shape) - len(padding) // 2
    runs: list[list[Run]] = [
        [(lo, _mirror(lo)), (n, lambda v: v), (hi, _mirror(n - 2))]
        for lo, hi, n in zip(lows, highs, x.shape, strict=True)
    ]
    if _in_runs(ctx, runs):
        return _from_runs(ctx, x, runs)

    def fn(i: tuple[Expr, ...]) -> Index:
        moved = [v - lo for v, lo in zip(i, lows, strict=True)]
        return tuple(v if d < first else reflected(v, x.shape[d]) for d, v in enumerate(moved))

    return _gathered(ctx, x, fn)


@lower(
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default
)
def replication_pad(ctx: Lowering, x: View, padding: Sequence[Size]) -> View:
    lows, highs = _pads(len(x.shape), padding)
    runs: list[list[Run]] = [
        [(lo, _only(0)), (n, lambda v: v), (hi, _only(n - 1))]
        for lo, hi, n in zip(lows, highs, x.shape, strict=True)
    ]
    if _in_runs(ctx, runs):
        return _from_runs(ctx, x, runs)

    def fn(i: tuple[Expr, ...]) -> Index:
        return tuple(
            smin(smax(v - lo, 0), s - 1) for v, lo, s in zip(i, lows, x.shape, strict=True)
        )

    return _gathered(ctx, x, fn)


# ------------------------------------------------------------------------------------------ joining
# Ops that only rename memory: a reader behind them counts as the reader.
_VIEWS = frozenset(
    "view permute transpose unsqueeze squeeze expand slice select alias reshape _unsafe_view "
    "t".split()
)
_EXTERN_READERS = frozenset(
    "mm addmm bmm baddbmm convolution _scaled_dot_product_flash_attention_for_cpu sort topk".split()
)
# A bound on a body's size, not a result of measuring.
_MAX_CHAIN = 4
_MAX_RUN = 8  # parts in memory that one launch on a GPU copies


@lower(aten.cat.default)
def cat(ctx: Lowering, tensors: Sequence[View], dim: int = 0) -> View:
    nodes = ctx.node.args[0] if ctx.node.target is aten.cat.default else ()
    if not isinstance(nodes, (list, tuple)) or len(nodes) != len(tensors):
        return join(ctx, tensors, dim)
    rank = len(ctx.out_shape())
    dim = wrap_dim(dim, rank)
    pairs = zip(tensors, nodes, strict=True)
    parts = [(t, n) for t, n in pairs if len(t.shape) == rank and t.shape[dim] != 0]
    if len(parts) <= _MAX_CHAIN or not ctx.facts().streams:
        return join(ctx, tensors, dim)
    return _cat_pieces(ctx, _runs_in_memory(parts), dim)


def _runs_in_memory(parts: Sequence[tuple[View, Any]]) -> list[list[View]]:
    """Parts, of which neighbours that are in memory anyway stand together: one launch copies
    them. What is made for this alone is computed where it is to lie."""
    runs: list[list[View]] = []
    before = False
    for view, node in parts:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        there = node.op == "placeholder" or name in _EXTERN_READERS or len(node.users) > 1
        if there and before and len(runs[-1]) < _MAX_RUN:
            runs[-1].append(view)
        else:
            runs.append([view])
        before = there
    return runs


def join(ctx: Lowering, tensors: Sequence[View], dim: int) -> View:
    """A chain of masked loads where few pieces are read by loops (which then inline it), else one
    loop a piece, all writing one buffer."""
    rank = len(ctx.out_shape())
    parts = [t for t in tensors if len(t.shape) == rank and t.shape[wrap_dim(dim, rank)] != 0]
    dim = wrap_dim(dim, rank)
    if not parts:
        return fill(ctx, 0)
    # Where neighbours come of different parts, a vector of a host is filled one by one.
    threaded = dim == rank - 1 and all(p.shape[dim] == 1 for p in parts) and ctx.facts().is_host
    if len(parts) <= _MAX_CHAIN and _read_by_loops(ctx.node) and not threaded:
        return _cat_chain(ctx, parts, dim)
    return _cat_pieces(ctx, [[p] for p in parts], dim)


@lower(aten.stack.default)
def stack(ctx: Lowering, tensors: Sequence[View], dim: int = 0) -> View:
    d = wrap_dim(dim, len(tensors[0].shape) + 1)
    return join(
        ctx,
        [
            t.remap((*t.shape[:d], 1, *t.shape[d:]), lambda v: (*v[:d], *v[d + 1 :]))
            for t in tensors
        ],
        d,
    )


def _read_by_loops(node: torch.fx.Node) -> bool:
    """Whether some reader of node is probably a loop (and neither an extern call nor the
    caller)."""
    for user in node.users:
        name = getattr(getattr(user.target, "overloadpacket", None), "__name__", "output")
        if user.op == "output" or name in _EXTERN_READERS:
            continue
        if name not in _VIEWS or _read_by_loops(user):
            return True
    return False


def _starts(parts: Sequence[View], dim: int) -> list[Size]:
    """Where each part starts along dim, and the end."""
    out: list[Size] = [0]
    for p in parts:
        out.append(out[-1] + p.shape[dim])
    return out


def _cat_chain(ctx: Lowering, parts: Sequence[View], dim: int) -> View:
    return result(ctx, lambda ops, i: _chained(ops, parts, dim, i, ctx.out_dtype()))


def _chained(
    ops: Recorder, parts: Sequence[View], dim: int, i: tuple[Expr, ...], dtype: DType
) -> Node:
    """An element of joined parts, as a chain of masked loads."""
    starts = _starts(parts, dim)

    def piece(k: int) -> Node:
        at = (*i[:dim], i[dim] - starts[k], *i[dim + 1 :])
        sides = [compare(ops, "ge", i[dim], starts[k])] if k else []
        sides += [compare(ops, "lt", i[dim], starts[k + 1])] if k + 1 < len(parts) else []
        return load_if(ops, sides, lambda: ops.cast(parts[k].load(ops, at), dtype))

    value = piece(len(parts) - 1)
    for k in reversed(range(len(parts) - 1)):
        value = where(compare(ops, "lt", i[dim], starts[k + 1]), piece(k), value)
    return value


def _cat_pieces(ctx: Lowering, runs: Sequence[Sequence[View]], dim: int) -> View:
    """One loop for each run of parts, all writing one buffer."""
    dtype = ctx.out_dtype()
    start: Size = 0
    buf = ctx.new_buffer(dtype, ctx.out_shape(), ctx.out_strides())
    for run in runs:
        ops, end = Recorder(), _starts(run, dim)[-1]
        vars_ = loop_vars("i", (*run[0].shape[:dim], end, *run[0].shape[dim + 1 :]))
        index = (*vars_[:dim], vars_[dim] + start, *vars_[dim + 1 :])
        ctx.ops.append(
            Pointwise(buf, vars_, _chained(ops, run, dim, vars_, dtype), index, ctx.origin)
        )
        start = start + end
    return ctx.whole(buf)
