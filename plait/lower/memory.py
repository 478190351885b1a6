"""Memory behind values: copies, strides and offsets for operands and results, aliases, and the new
values of inputs.

A `View` maps its elements to those of a buffer; ATen and the caller want strides. These functions
find them, or make a copy that has them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from typing import Any

from plait.devices import facts_of
from plait.ir import expr
from plait.ir.calls import Extern, ExternArg, ListArg, Scalar, TensorArg
from plait.ir.dtypes import LOOP_DTYPES, DType
from plait.ir.expr import Atom, Expr, Size
from plait.ir.layouts import follow
from plait.ir.loops import Alias, Buffer, Load, Mutate, Pointwise, walk
from plait.lower.core import Lowering, NoRule, View

_MAX_ORDERED = 4  # dimensions whose orders are tried to find a copy that holds the same


def copy(
    ctx: Lowering, x: View, strides: tuple[Size, ...] | None = None, fixed: bool = False
) -> View:
    """x in a buffer of its own. Raises NoRule where that needs a loop and there can be none."""
    if x.dtype not in LOOP_DTYPES or not ctx.cfg.kernels:
        return _clone(ctx, x, strides)
    out = ctx.pointwise(x.shape, x.dtype, lambda ops, i: x.load(ops, i), strides, like=x.buf)
    if fixed:
        ctx.fix_layout(out.buf)
    return out


def _clone(ctx: Lowering, x: View, strides: tuple[Size, ...] | None) -> View:
    """A copy of x by calls of ATen: row-major, or with these strides."""
    given = strided(ctx, x)
    if given is None:
        raise NoRule(f"a copy of {x.dtype} elements that no strides describe, without a loop")
    rows = expr.contiguous_strides(x.shape)
    if strides is None or _same_layout(x.shape, strides, rows):
        rowmajor = (("memory_format", Scalar("memory_format", "contiguous_format")),)
        return _called(ctx, x, "aten::clone", (given,), rowmajor, rows)
    sizes = (ListArg(tuple(x.shape)), ListArg(tuple(strides)))
    into = _called(ctx, x, "aten::new_empty_strided", (given, *sizes), (), strides)
    return _called(ctx, x, "aten::copy", (tensor_arg(ctx, into), given), (), strides)


def _called(
    ctx: Lowering,
    like: View,
    op: str,
    args: tuple[ExternArg, ...],
    named: Any,
    strides: tuple[Size, ...],
) -> View:
    """The result of an operator, of like's sizes and dtype."""
    out = ctx.new_buffer(like.dtype, like.shape, strides, True, ctx.buffers[like.buf].device)
    ctx.ops.append(
        Extern((out,), op, args, named, may_keep=False, fallback=False, origin=ctx.origin)
    )
    return ctx.whole(out)


@lru_cache(1 << 12)
def _linear(
    vars_: tuple[Expr, ...], index: tuple[Size, ...], buffer_strides: tuple[Size, ...]
) -> tuple[tuple[Size, ...], Size] | None:
    """The strides and the offset with which an index counts elements of its buffer, or None."""
    rest = flat = expr.total(e * s for e, s in zip(index, buffer_strides, strict=True))
    strides: list[Size] = []
    for v in vars_:
        k = expr.coefficient(flat, expr.atom_of(v))
        if k is None:
            return None
        strides.append(k)
        rest = rest - v * k
    if any(v.symbol in expr.free_symbols(rest) for v in vars_):
        return None
    return tuple(strides), rest


def aligned(ctx: Lowering, x: View, strides: tuple[Size, ...] | None, nbytes: int) -> View:
    """x, or a copy with these strides, where x may begin at another place than a multiple of so
    many bytes: an input does where the caller has it."""
    found, own = _described(ctx, x), x.buf not in ctx.input_buffers and x.buf not in ctx.bases
    at = found.offset if found and own else None
    even = isinstance(at, int) and at * x.dtype.nbytes % nbytes == 0
    return x if even else copy(ctx, x, strides, fixed=True)


def strided(ctx: Lowering, x: View) -> TensorArg | None:
    """x as strides and an offset into its buffer (whose layout is fixed by this), or None where
    no strides describe it."""
    found = _described(ctx, x)
    if found is not None:
        ctx.fix_layout(x.buf)
    return found


def _described(ctx: Lowering, x: View) -> TensorArg | None:
    """The same of its buffer as it is laid out now."""
    lies = ctx.buffers[x.buf].strides
    found = (lies, 0) if ctx.is_whole(x) else _linear(x.vars, x.index, lies)
    if found is None:
        return None
    strides, rest = [*found[0]], found[1]
    # A dimension of size 1 has a variable that is always 0: give it a stride that keeps
    # contiguity checks happy.
    for d in range(len(strides) - 1, -1, -1):
        if x.shape[d] == 1:
            strides[d] = x.shape[d + 1] * strides[d + 1] if d + 1 < len(strides) else 1
    if 0 in x.shape:  # of no elements the first may lie beyond the memory
        rest = 0
    return TensorArg(x.buf, x.shape, tuple(strides), rest)


def tensor_arg(
    ctx: Lowering, x: View, strides: tuple[Size, ...] | None = None, shared: bool = False
) -> TensorArg:
    """x as an extern operand: its own memory where strides describe it (and equal `strides` if
    given), else a copy. shared: which may be one that other operands read too, of the same
    elements in any order of dimensions."""
    _settle_layout(ctx, x, strides)
    for y in (x, *(copies_of(ctx, x) if shared else ())):
        found = _described(ctx, y)
        # What has to be copied anyway keeps a layout that is free: it follows what it is made of.
        if found and _same_layout(x.shape, found.strides, wanted := strides or found.strides):
            ctx.fix_layout(y.buf)
            return replace(found, strides=wanted)
    if strides is not None and 0 in strides:
        return _expanded_copy(ctx, x, strides)
    wanted = strides or _natural(ctx, x)
    made = strided(ctx, copied_once(ctx, x, wanted) if shared else copy(ctx, x, wanted, fixed=True))
    assert made is not None, "a copy with strides of its own is strided"
    return made if strides is None else replace(made, strides=strides)


def lay_out(ctx: Lowering, x: View, strides: tuple[Size, ...]) -> bool:
    """Whether x is memory with these strides, or has now become it. The layout of its buffer is
    fixed by this."""
    _settle_layout(ctx, x, strides)
    found = strided(ctx, x)
    return found is not None and _same_layout(x.shape, found.strides, strides)


def _settle_layout(ctx: Lowering, x: View, strides: tuple[Size, ...] | None) -> None:
    """Gives x's buffer, if its layout is still free and x is all of it, the strides with which
    x is memory as it stands, so that nothing needs a copy. Those that would be neighbours in eager
    are neighbours. Kernels of a GPU do not mind the rest. Where any strides will do, it best lies
    as what it is computed from."""
    b = ctx.buffers[x.buf]
    if (
        b.fixed
        or facts_of(b.device).is_host
        or x.dtype not in LOOP_DTYPES
        or b.strides != expr.contiguous_strides(b.shape)
        or not isinstance(n := expr.numel(x.shape), int)
        or n != expr.numel(b.shape)
    ):
        return
    if strides is not None:
        _take_strides(ctx, x, strides)
        return
    ctx.buffers[x.buf] = _followed(ctx, x.buf)
    found = _described(ctx, x)
    if found is not None and _is_matrix(found):
        return
    ctx.buffers[x.buf] = b
    rows = _natural(ctx, x)
    turned = (*rows[:-2], 1, x.shape[-2]) if len(rows) > 1 else rows
    _take_strides(ctx, x, rows) or _take_strides(ctx, x, turned)


def _take_strides(ctx: Lowering, x: View, target: tuple[Size, ...]) -> bool:
    """Lays x's buffer, row-major now, out so that x has these strides. Returns whether it could."""
    b = ctx.buffers[x.buf]
    if not _is_dense(x.shape, target):
        return False
    new = [
        _stride_of(e, x.vars, target) if size != 1 else 1
        for e, size in zip(x.index, b.shape, strict=True)
    ]
    flat = expr.total(v * t for v, t in zip(x.vars, target, strict=True))
    laid = expr.total(e * s for e, s in zip(x.index, new, strict=True))
    near = zip(eager_strides(ctx, x.buf), new, b.shape, strict=True)
    kept = all(t == 1 for s, t, size in near if s == 1 and size != 1)
    if laid == flat and kept:
        ctx.buffers[x.buf] = replace(b, strides=tuple(new))
    return laid == flat and kept


def _followed(ctx: Lowering, buf: str) -> Buffer:
    """A buffer, laid out as the scheduler would if nothing else wanted it otherwise: as the largest
    tensor that its loop reads, whose own layout may still be free, too."""
    path: list[tuple[Buffer, Pointwise, Load]] = []
    found = ctx.buffers[buf]
    while found.name not in ctx.followed:
        source = _largest_source(ctx, found)
        if source is None:
            break
        path.append((found, ctx.loops[found.name], source))
        found = ctx.buffers[source.buf]
    found = ctx.followed.get(found.name, found)
    for b, loop, source in reversed(path):
        found = ctx.followed[b.name] = follow(b, loop.vars, [(found, source.index)], _number)
    return found


def _largest_source(ctx: Lowering, b: Buffer) -> Load | None:
    """What a buffer of a free layout would lie as; None where nothing else decides that."""
    loop = ctx.loops.get(b.name)
    if loop is None or b.fixed or b.strides != expr.contiguous_strides(b.shape):
        return None
    loads = [n.attr for n in walk((loop.body,)) if isinstance(n.attr, Load)]
    known = [(n, x) for x in loads if isinstance(n := expr.numel(ctx.buffers[x.buf].shape), int)]
    return max(known, key=lambda k: k[0])[1] if known else None


def _number(n: Size) -> int:
    """A stride to sort by; one that is known at the call only counts as small."""
    return n if isinstance(n, int) else 0


def _is_matrix(x: TensorArg) -> bool:
    """Whether the vendor's products take it: neighbours along one of the last two dimensions."""
    return len(x.strides) < 2 or 1 in x.strides[-2:]


def eager_strides(ctx: Lowering, buf: str) -> tuple[Size, ...]:
    """Where elements of a buffer would lie in eager while its own layout is still free."""
    b = ctx.buffers[buf]
    traced = None if b.fixed else ctx.traced.get(buf)
    return b.strides if traced is None or not _is_dense(b.shape, traced) else traced


def step_along(
    ctx: Lowering, x: View, d: int, strides: tuple[Size, ...] | None = None
) -> Size | None:
    """How far apart elements of x lie along a dimension, as far as it is the same everywhere.
    strides: of its buffer, if not those that it has now."""
    strides = strides or ctx.buffers[x.buf].strides
    at = expr.total(e * s for e, s in zip(x.index, strides, strict=True))
    return expr.coefficient(at, expr.atom_of(x.vars[d]))


def _natural(ctx: Lowering, x: View) -> tuple[Size, ...]:
    """Strides for x's elements side by side: row-major, or column-major where neighbours in
    memory are those along the last dimension but one."""
    rows = expr.contiguous_strides(x.shape)
    if len(x.shape) < 2:
        return rows
    near = eager_strides(ctx, x.buf)
    turned = step_along(ctx, x, -2, near) == 1 != step_along(ctx, x, -1, near)
    return (*rows[:-2], 1, x.shape[-2]) if turned else rows


def copied_once(ctx: Lowering, x: View, strides: tuple[Size, ...]) -> View:
    """A copy of x with these strides, which later operands share."""
    for y in copies_of(ctx, x):
        if ctx.is_whole(y) and ctx.buffers[y.buf].strides == strides:
            return y
    made = copy(ctx, x, strides, fixed=True)
    ctx.copies.setdefault(x.buf, []).append((x, made, len(ctx.ops)))
    return made


def copies_of(ctx: Lowering, x: View) -> list[View]:
    """Views of copies made for operands that hold what x holds, and still do."""
    out: list[View] = []
    for seen, made, n in ctx.copies.get(x.buf, ()):
        if any(isinstance(op, Extern) and (op.mutates or op.fence) for op in ctx.ops[n:]):
            continue
        if len(x.shape) != len(seen.shape) or len(x.shape) > _MAX_ORDERED:
            continue
        for order in permutations(range(len(x.shape))):
            point = tuple(x.vars[d] for d in order)
            if tuple(x.shape[d] for d in order) == seen.shape and seen.at(point) == x.index:
                out.append(View(made.buf, x.dtype, x.shape, x.vars, made.at(point)))
    return out


def _expanded_copy(ctx: Lowering, x: View, strides: tuple[Size, ...]) -> TensorArg:
    """A copy of x whose dimensions of stride 0 are stored once."""
    thin = tuple(1 if st == 0 else s for s, st in zip(x.shape, strides, strict=True))
    once = x.remap(thin, lambda v: tuple(0 if t == 1 else e for e, t in zip(v, thin, strict=True)))
    made = copy(ctx, once, tuple(1 if st == 0 else st for st in strides), fixed=True)
    return TensorArg(made.buf, x.shape, strides, 0)


def alias(
    ctx: Lowering,
    x: View,
    dtype: DType,
    shape: tuple[Size, ...],
    strides: tuple[Size, ...],
    offset: Size,
    relative: bool = True,
) -> View:
    """Memory of x seen in another way (as_strided, another dtype). offset: from x's buffer's
    first element (or its storage's start)."""
    ctx.fix_layout(x.buf)
    out = ctx.new_buffer(dtype, shape, strides, True, ctx.buffers[x.buf].device)
    ctx.ops.append(Alias(out, x.buf, offset, relative))
    ctx.bases[out] = x.buf
    return ctx.whole(out)


def seen_as(
    ctx: Lowering,
    x: View,
    dtype: DType,
    shape: tuple[Size, ...],
    strides: tuple[Size, ...],
    first: Size,
) -> View:
    """Memory of x's buffer, from its byte `first` on, as another element type. An offset counts
    elements of that type, and a buffer may begin between two of them (an odd int32 of its
    storage, seen as int64): a view of its own elements goes to that byte first."""
    if first % dtype.nbytes != 0:
        item = x.dtype.nbytes
        end = expr.total((n - 1) * s for n, s in zip(shape, strides, strict=True))
        some = expr.product(expr.smin(n, 1) for n in shape)  # 0 for no elements
        room = (end + 1) * some * dtype.nbytes // item
        x = alias(ctx, x, x.dtype, (room,), (1,), first // item)
        first = 0
    return alias(ctx, x, dtype, shape, strides, first // dtype.nbytes)


def owner_of(ctx: Lowering, buf: str) -> str:
    """The buffer whose memory this one is."""
    while buf in ctx.bases:
        buf = ctx.bases[buf]
    return buf


def finish_mutations(ctx: Lowering) -> None:
    """Records the mutations, once everything that reads old contents is recorded."""
    sources = [
        t
        if ctx.is_whole(source) and source.buf == t
        else _own_buffer(ctx, source)  # written in place
        for t, source in ctx.mutations
    ]
    pairs = zip(ctx.mutations, sources, strict=True)
    ctx.ops.extend(Mutate(target, source) for (target, _), source in pairs)


def _own_buffer(ctx: Lowering, x: View) -> str:
    """A buffer of the graph's own that holds x."""
    mine = ctx.is_whole(x) and x.buf not in ctx.constants and x.buf not in ctx.input_buffers
    return x.buf if mine else copy(ctx, x).buf


def _is_dense(shape: tuple[Size, ...], strides: tuple[Size, ...]) -> bool:
    """Whether strides place the elements side by side, in any order of dimensions."""
    end: Size = 1
    dims = [(t, n) for t, n in zip(strides, shape, strict=True) if isinstance(t, int) and n != 1]
    for stride, n in sorted(dims, key=lambda dim: dim[0]):
        if stride != end:
            return False
        end = end * n
    return end == expr.numel(shape)


def _stride_of(e: Size, vars_: tuple[Expr, ...], strides: tuple[Size, ...]) -> Size:
    """The address, in strides of vars_, of where e first is 1; 0 if no single variable takes it
    there."""
    zero: dict[Atom, Size] = dict.fromkeys(expr.free_symbols(e), 0)
    for v, stride in zip(vars_, strides, strict=True):
        for at in (1, *expr.divisors(e)):
            if v.symbol in zero and expr.substitute(e, {**zero, v.symbol: at}) == 1:
                return stride * at
    return 0


def _same_layout(shape: tuple[Size, ...], a: tuple[Size, ...], b: tuple[Size, ...]) -> bool:
    """Whether two strides place the elements alike: dimensions of size 1 and empty tensors do not
    count."""
    return (
        a == b or 0 in shape or all(s == 1 or x == y for s, x, y in zip(shape, a, b, strict=True))
    )
