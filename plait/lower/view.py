"""Views: every rule here only rewrites an index and records no loop.

A view op in ATen shares memory; here it is a map from the view's logical index to its buffer's.
Reshapes of any tensor are views too (eager may copy there): the index is cut into groups of
dimensions of equal size, and only within a group is it taken apart by division and remainder.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from plait import compat
from plait.errors import refusal
from plait.graph.edit import base_of
from plait.ir import expr
from plait.ir.dtypes import LOOP_DTYPES, DType
from plait.ir.expr import Expr, Size
from plait.lower.bindings import bindings
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.dtypes import from_torch
from plait.lower.integers import is_found_size, require_index
from plait.lower.memory import alias, owner_of, seen_as, tensor_arg
from plait.lower.symbols import to_size, to_sizes

aten = torch.ops.aten
prims = torch.ops.prims


def wrap_dim(dim: int, rank: int) -> int:
    """dim counted from the front; a tensor without dimensions has dimension 0 and -1."""
    return dim % max(rank, 1)


# ------------------------------------------------------------------------------------------ reshape
@lru_cache(1 << 12)
def reshape_index(
    old: tuple[Size, ...], new: tuple[Size, ...], at: tuple[Size, ...]
) -> tuple[Size, ...]:
    """The index into shape `old` of the element that is at index `at` of shape `new` (same number
    of elements, row-major)."""
    index: list[Size] = [0] * len(old)
    if 0 in old or 0 in new:
        return tuple(index)
    i = [d for d, s in enumerate(old) if s != 1]
    j = [d for d, s in enumerate(new) if s != 1]
    while i:
        n_old, n_new = _group(tuple(old[d] for d in i), tuple(new[d] for d in j))
        mine, theirs = i[len(i) - n_old :], j[len(j) - n_new :]
        del i[len(i) - n_old :], j[len(j) - n_new :]
        flat = flatten(tuple(new[d] for d in theirs), [at[d] for d in theirs])
        for d, e in zip(mine, unflatten(tuple(old[d] for d in mine), flat), strict=True):
            index[d] = e
    return tuple(index)


def _group(old: tuple[Size, ...], new: tuple[Size, ...]) -> tuple[int, int]:
    """How many trailing dimensions of each make the smallest group with provably equal products;
    all if none can be proved."""
    if not new:
        return len(old), 0
    a, b, n_a, n_b = old[-1], new[-1], 1, 1
    while not expr.known_eq(a, b):
        if n_a < len(old) and expr.exact_div(b, a) is not None:
            n_a += 1
            a = a * old[-n_a]
        elif n_b < len(new) and expr.exact_div(a, b) is not None:
            n_b += 1
            b = b * new[-n_b]
        else:
            return len(old), len(new)
    return n_a, n_b


def flatten(shape: tuple[Size, ...], at: Sequence[Size]) -> Size:
    """The row-major position of an index. A shape with a dimension of size 0 has no index, so no
    step is guarded."""
    flat: Size = 0
    for s, e in zip(shape, at, strict=True):
        flat = flat * s + e
    return flat


def unflatten(shape: tuple[Size, ...], flat: Size) -> tuple[Size, ...]:
    """The index at a row-major position, which is promised to lie inside."""
    out: list[Size] = []
    for s in reversed(shape[1:]):
        out.append(flat % s)
        flat = flat // s
    return (flat, *reversed(out)) if shape else ()


def reshape(x: View, shape: tuple[Size, ...]) -> View:
    """x seen with another shape of the same number of elements."""
    return x if shape == x.shape else x.remap(shape, lambda v: reshape_index(x.shape, shape, v))


@lower(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default,
    aten._reshape_alias.default, aten.view_copy.default, any_dtype=True,
)  # fmt: skip
def _view(ctx: Lowering, x: View, *_: object, **__: object) -> View:
    return reshape(x, ctx.out_shape())


@lower(aten.alias.default, aten.detach.default, prims.view_of.default,
       aten.resolve_conj.default, aten.resolve_neg.default, any_dtype=True)  # fmt: skip
def _same(ctx: Lowering, x: View) -> View:
    return x


# ---------------------------------------------------------------------------------------- permuting
def permute(x: View, dims: Sequence[int]) -> View:
    """Dimension k of the result is dimension dims[k] of x."""
    order = [wrap_dim(d, len(x.shape)) for d in dims]
    place = {d: k for k, d in enumerate(order)}
    return x.remap(
        tuple(x.shape[d] for d in order), lambda v: tuple(v[place[d]] for d in range(len(order)))
    )


@lower(aten.permute.default, aten.permute_copy.default, any_dtype=True)
def _permute(ctx: Lowering, x: View, dims: Sequence[int]) -> View:
    return permute(x, dims)


@lower(aten.transpose.int, any_dtype=True)
def _transpose(ctx: Lowering, x: View, dim0: int, dim1: int) -> View:
    if not x.shape:
        return x
    order = list(range(len(x.shape)))
    a, b = wrap_dim(dim0, len(order)), wrap_dim(dim1, len(order))
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


@lower(aten.t.default, any_dtype=True)
def _t(ctx: Lowering, x: View) -> View:
    return permute(x, range(len(x.shape) - 1, -1, -1))


@lower(aten.movedim.int, any_dtype=True)
def _movedim(ctx: Lowering, x: View, source: Sequence[int], destination: Sequence[int]) -> View:
    rank = len(x.shape)
    to = {wrap_dim(d, rank): wrap_dim(s, rank) for s, d in zip(source, destination, strict=True)}
    rest = iter(d for d in range(rank) if d not in to.values())
    return permute(x, [to[k] if k in to else next(rest) for k in range(rank)])


# ------------------------------------------------------------------------- adding and dropping dims
@lower(aten.expand.default, aten.expand_copy.default, any_dtype=True)
def _expand(ctx: Lowering, x: View, size: Sequence[Size], implicit: bool = False) -> View:
    shape = ctx.out_shape()
    skip = len(shape) - len(x.shape)
    return x.remap(
        shape,
        lambda v: tuple(
            0 if s == 1 and n != 1 else e
            for e, s, n in zip(v[skip:], x.shape, shape[skip:], strict=True)
        ),
    )


def drop_dims(x: View, dims: set[int]) -> View:
    """x without some dimensions of size 1."""
    kept = [d for d in range(len(x.shape)) if d not in dims]
    place = {d: k for k, d in enumerate(kept)}
    return x.remap(
        tuple(x.shape[d] for d in kept),
        lambda v: tuple(v[place[d]] if d in place else 0 for d in range(len(x.shape))),
    )


@lower(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, any_dtype=True)
def _squeeze(ctx: Lowering, x: View, dim: int | Sequence[int] | None = None) -> View:
    rank = len(x.shape)
    dims = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    return drop_dims(
        x, {d for d in (wrap_dim(d, rank) for d in dims) if d < rank and x.shape[d] == 1}
    )


def add_dim(x: View, dim: int) -> View:
    """x with a new dimension of size 1 at dim."""
    return x.remap((*x.shape[:dim], 1, *x.shape[dim:]), lambda v: (*v[:dim], *v[dim + 1 :]))


@lower(aten.unsqueeze.default, any_dtype=True)
def _unsqueeze(ctx: Lowering, x: View, dim: int) -> View:
    return add_dim(x, dim % (len(x.shape) + 1))


# -------------------------------------------------------------------------------------------- parts
def part(x: View, dim: int, start: Size, size: Size, step: Size = 1) -> View:
    """Elements start, start + step, ... of x along dim, `size` of them."""
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return x.remap(shape, lambda v: (*v[:dim], start + v[dim] * step, *v[dim + 1 :]))


def clamp_start(start: Size | None, size: Size, length: Size, step: Size) -> Size:
    """Where a slice of a dimension of `size` begins. length: of the slice (-1: not known), which
    often proves that nothing needs clamping."""
    if start is None:
        return 0
    if expr.bounds(start)[1] < 0 or (isinstance(start, int) and start < 0):
        start = size + start
    elif expr.bounds(start)[0] < 0:
        start = start + size * expr.compare("lt", start, 0)
    if (
        length != -1
        and step == 1
        and expr.known_le(start + length, size)
        and expr.known_le(0, start)
    ):
        return start
    return expr.smin(expr.smax(start, 0), size)


@lower(aten.slice.Tensor, any_dtype=True)
def _slice(
    ctx: Lowering,
    x: View,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> View:
    dim = wrap_dim(dim, len(x.shape))
    length = ctx.out_shape()[dim]
    for b in bindings(ctx.node):  # bounds that are values of tensors make a new size
        if b.path == (("size", dim),) and b.found.symbol is not None:
            first = clamp_start(start, x.shape[dim], -1, step)
            last = clamp_start(x.shape[dim] if end is None else end, x.shape[dim], -1, step)
            ctx.computed[b.found.symbol.name] = expr.ceildiv(expr.smax(last - first, 0), step)
    return part(x, dim, clamp_start(start, x.shape[dim], length, step), length, step)


@lower(aten.narrow_copy.default, any_dtype=True)
def _narrow(ctx: Lowering, x: View, dim: int, start: Size, length: Size) -> View:
    dim = wrap_dim(dim, len(x.shape))
    if is_found_size(ctx, start, length, x.shape[dim]):
        # ATen checks that there is one.
        raise NoRule("a part of a tensor that depends on its values")
    return part(x, dim, wrap_index(start, x.shape[dim]), length)


def wrap_index(index: Size, size: Size) -> Size:
    """A Python index counted from the front."""
    lo, hi = expr.bounds(index)
    if lo >= 0:
        return index
    if hi < 0:
        return index + size
    return index + size * expr.compare("lt", index, 0)


@lower(aten.select.int, any_dtype=True)
def _select(ctx: Lowering, x: View, dim: int, index: Size) -> View:
    dim = wrap_dim(dim, len(x.shape))
    require_index(ctx, index, dim, x.shape[dim])
    at = wrap_index(index, x.shape[dim])
    return x.remap((*x.shape[:dim], *x.shape[dim + 1 :]), lambda v: (*v[:dim], at, *v[dim:]))


@lower(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default,
       aten.tensor_split.sections, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
       aten.unsafe_chunk.default, any_dtype=True)  # fmt: skip
def _split(ctx: Lowering, x: View, _sizes: object, dim: int = 0) -> tuple[View, ...]:
    dim = wrap_dim(dim, len(x.shape))
    out: list[View] = []
    start: Size = 0
    for val in ctx.node.meta["val"]:
        size = to_size(val.shape[dim])
        out.append(part(x, dim, start, size))
        start = start + size
    return tuple(out)


@lower(aten.unbind.int, aten.unbind_copy.int, any_dtype=True)
def _unbind(ctx: Lowering, x: View, dim: int = 0) -> tuple[View, ...]:
    dim = wrap_dim(dim, len(x.shape))
    n = x.shape[dim]
    if not isinstance(n, int):
        raise NoRule("unbind of a dimension of unknown size")
    return tuple(_select(ctx, x, dim, k) for k in range(n))


@lower(aten.diagonal.default, any_dtype=True)
def _diagonal(ctx: Lowering, x: View, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    a, b = wrap_dim(dim1, len(x.shape)), wrap_dim(dim2, len(x.shape))

    def at(v: tuple[Expr, ...]) -> tuple[Size, ...]:
        rest = iter(v[:-1])
        own: dict[int, Size] = {a: v[-1] + max(-offset, 0), b: v[-1] + max(offset, 0)}
        return tuple(own[d] if d in own else next(rest) for d in range(len(x.shape)))

    return x.remap(ctx.out_shape(), at)


@lower(aten.unfold.default, any_dtype=True)
def _unfold(ctx: Lowering, x: View, dimension: int, size: int, step: int) -> View:
    d = wrap_dim(dimension, len(x.shape))
    if not x.shape:
        return x.remap(ctx.out_shape(), lambda v: ())
    return x.remap(ctx.out_shape(), lambda v: (*v[:d], v[d] * step + v[-1], *v[d + 1 : -1]))


# ----------------------------------------------------------------------- memory seen in another way
_BEYOND = "as_strided beyond the tensor that it is given"


@lower(aten.as_strided.default, aten.as_strided_copy.default, any_dtype=True)
def _as_strided(
    ctx: Lowering,
    x: View,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> View:
    """A map of positions in the storage: through the memory order of the tensor that owns all of
    it, where there is one."""
    node = _owner(ctx)
    meta, given = node.meta["val"], node.op == "placeholder"
    owner: View = ctx.env[node]
    source = ctx.node.args[0]
    assert isinstance(source, torch.fx.Node), source
    offset = storage_offset  # a copy lies elsewhere: without one it is where the operand begins
    if offset is None:
        offset = to_size(source.meta["val"].storage_offset())
    shape = tuple(size)
    if is_found_size(ctx, *shape, *stride, offset, *x.shape):
        raise NoRule("memory at places that depend on values")  # ATen checks that it is there
    first = to_size(meta.storage_offset())
    inside = offset - first
    span = expr.total((s - 1) * st for s, st in zip(shape, stride, strict=True))
    within = expr.known_le(0, inside) and expr.known_lt(inside + span, expr.numel(owner.shape))
    # An input's storage may be larger than the input, and nobody checks where it begins there.
    fits = not given or (storage_offset is None and within)
    if not given and not within:
        _require_room(ctx, shape, stride, offset, span)
    order = dense_order(to_sizes(meta.shape), to_sizes(meta.stride()))
    if order is not None and fits and owner.dtype == x.dtype:
        dense = tuple(owner.shape[d] for d in order)

        def at(v: tuple[Expr, ...]) -> tuple[Size, ...]:
            flat = inside + expr.total(e * st for e, st in zip(v, stride, strict=True))
            by_dim = dict(zip(order, unflatten(dense, flat), strict=True))
            return tuple(by_dim[d] for d in range(len(order)))

        return owner.remap(shape, at)
    if not given or ctx.buffers[owner.buf].strides != to_sizes(meta.stride()):
        raise NoRule(_BEYOND)  # what a subprogram is given may lie otherwise than traced
    if storage_offset is None:
        return alias(ctx, ctx.whole(owner.buf), x.dtype, shape, tuple(stride), inside)
    return alias(ctx, ctx.whole(owner.buf), x.dtype, shape, tuple(stride), offset, relative=False)


def _require_room(
    ctx: Lowering, shape: Sequence[Size], stride: Sequence[Size], offset: Size, span: Size
) -> None:
    """What eager checks of a storage that an operator made, and tracing does not: fake storages
    grow. Elements of no number lie anywhere."""
    like = _owner(ctx, any_dtype=True).meta["val"]
    sizes = to_sizes(like.shape)
    if dense_order(sizes, to_sizes(like.stride())) is None:
        raise NoRule(_BEYOND)
    nbytes = ctx.out_meta().element_size()
    end = (offset + (span + 1)) * nbytes
    room = expr.numel(sizes) * like.element_size()
    holds = expr.smax(
        expr.compare("eq", expr.numel(tuple(shape)), 0), expr.compare("le", end, room)
    )
    of = f"sizes {list(shape)}, strides {list(stride)}, storage offset {offset}"
    says = f"setStorage: {of}, and itemsize {nbytes} requiring a storage size of {{}} are out of"
    says = f"{says} bounds for storage of size {{}}"
    if holds == 0:
        raise refusal(RuntimeError())(says.format(end, room))
    ctx.assert_true(holds, says, (end, room))


def _owner(ctx: Lowering, any_dtype: bool = False) -> torch.fx.Node:
    """The value at the root of the views that led here: as far up as nodes share one storage. Of
    the dtype that these have, unless any_dtype."""
    node = ctx.node.args[0]
    assert isinstance(node, torch.fx.Node), node
    storage = compat.tracing.storage_of(node.meta["val"])
    while node.op == "call_function" and node.args and isinstance(node.args[0], torch.fx.Node):
        val = node.args[0].meta.get("val")
        if (
            not isinstance(val, torch.Tensor)
            or compat.tracing.storage_of(val) != storage
            or not (any_dtype or val.dtype == node.meta["val"].dtype)
        ):
            break
        node = node.args[0]
    return node


def dense_order(shape: tuple[Size, ...], strides: tuple[Size, ...]) -> list[int] | None:
    """The dimensions from outermost to innermost in memory if a tensor fills its memory without
    gaps, else None.

    Where a size may be 0, PyTorch counts it as 1 in strides."""
    order: list[int] = [d for d, s in enumerate(shape) if s == 1]
    left = [d for d, s in enumerate(shape) if s != 1]
    wanted: tuple[Size, ...] = (1,)
    while left:
        inner = next(
            (d for d in reversed(left) if any(expr.known_eq(strides[d], n) for n in wanted)), None
        )
        if inner is None:
            return None
        order.append(inner)
        left.remove(inner)
        wanted = tuple(strides[inner] * n for n in (shape[inner], expr.smax(shape[inner], 1)))
    return order[::-1]


@lower(aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default, any_dtype=True)
def _reinterpret(ctx: Lowering, x: View, dtype: torch.dtype | None = None) -> View:
    to = ctx.out_dtype()
    if x.dtype == to:
        return x
    if (
        x.dtype in LOOP_DTYPES
        and to in LOOP_DTYPES
        and x.dtype.nbytes == to.nbytes
        and "b" not in (x.dtype.kind, to.kind)
    ):
        return ctx.pointwise(x.shape, to, lambda ops, i: ops.bitcast(x.load(ops, i), to))
    given = ctx.node.args[0]
    assert isinstance(given, torch.fx.Node), given
    if from_torch(given.meta["val"].dtype) != x.dtype:
        raise NoRule("memory of an element type that loops do not know")
    memory = tensor_arg(ctx, x, to_sizes(given.meta["val"].stride()))
    strides = to_sizes(ctx.out_meta().stride())
    root = owner_of(ctx, memory.buf)
    if to.nbytes > x.dtype.nbytes and root in ctx.input_buffers:
        if 0 in x.shape:  # no element is there to tell where: PyTorch counts on, from the input
            like, base = given.meta["val"], base_of(given).meta["val"]
            behind = bytes_behind(base, like.storage_offset(), like)
            _require_place(ctx, root, behind, x.dtype, to)
        else:
            _require_place(ctx, memory.buf, memory.offset * x.dtype.nbytes, x.dtype, to)
    first = memory.offset * x.dtype.nbytes
    return seen_as(ctx, ctx.whole(memory.buf), to, ctx.out_shape(), strides, first)


def bytes_behind(base: torch.Tensor, offset: int | torch.SymInt, like: torch.Tensor) -> Size:
    """How many bytes `offset`, in elements of like from the start of base's storage, lies behind
    base's first element."""
    first = to_size(base.storage_offset()) * base.element_size()
    return to_size(offset) * like.element_size() - first


def _require_place(ctx: Lowering, buf: str, first: Size, given: DType, to: DType) -> None:
    """Asserts that the byte `first` of memory of an input is where one of these larger elements may
    begin, as eager does: no guard looks at where an input begins in its storage."""
    begin = expr.symbol(f"{buf}_offset")
    ctx.symbols[f"{buf}_offset"] = (buf, "offset", 0)
    at = (begin * ctx.buffers[buf].dtype.nbytes + first) // given.nbytes
    ratio = to.nbytes // given.nbytes
    said = f"a storage offset of {{}} must be divisible by {ratio} to view {given} as {to}"
    ctx.assert_true(expr.compare("eq", at % ratio, 0), said, (at,))
