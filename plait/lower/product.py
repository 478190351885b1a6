"""Products of few rows, and those of few results, on a GPU: kernels of ours, which read matrices at
the rate of memory and give results in float32 to the loops that read them.

A product of one row or column is a reduction like any other; of a few it is a `Product`. Where it
has few results, many programs share the walk along k, and a reduction adds up what they give, in
order: the same bits at each run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from plait import compat
from plait.devices import DEVICES
from plait.graph.refused_kernels import is_refused
from plait.ir.calls import Extern, ExternArg, Operator
from plait.ir.dtypes import DType, bf16, f16, f32, i8, i32, u8
from plait.ir.expr import Expr, Size, product, symbol
from plait.ir.loops import Load, Pointwise, cast, node, walk
from plait.ir.product import PRODUCT, Cut, Panels, Product
from plait.lower.core import Lowering, View
from plait.lower.dtypes import compute_dtype
from plait.lower.memory import step_along, tensor_arg
from plait.lower.product_cost import finishes_sooner, is_uneven, may_pay, pays

# Measured on an H200 (benchmarks/products_gpu.py rows split), weights not in its cache.
_FEW_ROWS = 64
"""Rows up to which the other matrix comes from memory no slower than the vendor's kernels have
it."""
_MEASURED_ROWS = 128
"""Up to which the two are measured, where tuning is asked for. Of factors of 8 bits the vendor's
takes three times as long."""
_LEAST_COLUMNS, _LEAST_DEPTH = 64, 128  # of such a product
_LEAST_LARGE = 1 << 19  # elements of a product that tiles of 128 x 128 share
_MULTIPROCESSORS = DEVICES["cuda"].multiprocessors
_PROGRAMS = 128  # about as many as an H100 has multiprocessors
_FEW_TILES = 32  # leave most of them idle
_MOST_PARTS, _LEAST_PARTS = 64, 4  # of a walk along k: a second kernel adds them up
_MOST_FLAT, _MOST_SQUARE = 1 << 17, 1 << 14  # elements of a product whose walks are shared
_FLAT_ROWS, _FLAT_DEPTH = 128, 3072
"""Rows up to which a flat one has so many, and how long its sums are if they are more than a few:
128 x 768 x 3072 takes 6.1 us instead of 7.9 (H200)."""
_STEPS = 2  # of a program, at least
_LONG = 8192
"""Terms of a sum from which on a program alone on its multiprocessor has more on the way by longer
steps: 16 x 4096 x 14336 takes 54 µs instead of 56 (H100)."""
_MEDIUM = (
    (128, 128, 64, 132), (64, 128, 64, 72), (64, 64, 128, 72), (32, 64, 128, 32),
)  # fmt: skip
"""Rows, columns and depth of tiles, and how many there are at least: fewer leave multiprocessors
idle that smaller ones do not."""
_ROW_TILES = ((128, 256, 64, 1.88), (128, 128, 64, 1.0), (64, 128, 64, 0.65), (64, 64, 128, 0.44))
"""Tiles of products whose rows keep their bits, and how long one for each multiprocessor takes
(H200, benchmarks/row_tiles_gpu.py). The first is fast where programs load by descriptors."""
_FEW_WIDE = 36  # tiles of 64 columns from which on narrower ones are slower, at few rows
_IN_TWO_FEW = 512
"""Tiles of 16 x 32 from which on larger ones are faster, at few rows, where factors are taken for
two numbers (H200, benchmarks/row_tiles_gpu.py): 32 x 2048 x 5632 takes 41 us so, 88 by 32 x 64."""
_LEAST_STEP = 16  # along k
_IN_TWO_DEPTH = 32  # of tiles of products in float32 by 3 of numbers of 10 bits: bits depend on it
_ALIGNED = 16  # bytes that rows start at multiples of
_CONVERTING = 512  # programs that convert codes: benchmarks/quantised_gpu.py
_FAR = 24  # ops before a product that may unpack its matrix


def is_vector(ctx: Lowering, a: View, b: View) -> bool:
    """Whether a product has one row or column, and the numbers of a sum lie side by side in the
    matrix; in float32 also where those of different sums do."""
    if not (ctx.facts().streams and ctx.cfg.kernels) or a.dtype not in (f16, bf16, f32):
        return False
    x, along, across = (b, -2, -1) if a.shape[-2] == 1 else (a, -1, -2)
    if 1 not in (a.shape[-2], b.shape[-1]) or _codes(ctx, b) > 1:
        return False
    return step_along(ctx, x, along) == 1 or (a.dtype == f32 and step_along(ctx, x, across) == 1)


def _codes(ctx: Lowering, x: View) -> int:
    """How many elements of a matrix each number in memory holds, of which loops make it: 1 of codes
    of 8 bits, 2 of those of 4; 0 where it is no such matrix."""
    size, todo = product(x.shape), {x.buf}
    if not isinstance(size, int) or not size:
        return 0
    for op in reversed(ctx.ops[-_FAR:]):
        if not isinstance(op, Pointwise) or op.out not in todo:
            continue
        todo.remove(op.out)
        for n in walk((op.body,)):
            if not isinstance(n.attr, Load):
                continue
            todo.add(n.attr.buf)
            stored = product(ctx.buffers[n.attr.buf].shape)
            each = size // stored if isinstance(stored, int) and stored else 0
            if n.dtype in (i8, u8) and each in (1, 2, 4) and each * stored == size:
                return each
    return 0


def cut(
    ctx: Lowering, a: View, b: View, dtypes: tuple[DType, ...] = (f16, bf16, f32),
    tunes: bool | None = None,
) -> Cut | None:  # fmt: skip
    """How a kernel of ours computes a product; None where ATen does it better. dtypes: of factors
    that it takes. tunes: whether the two are to be measured; None: as the user says."""
    found = _cut(ctx, a, b, dtypes, ctx.cfg.autotune if tunes is None else tunes)
    if found is None or a.dtype != f32:
        return found
    # As many bytes a step.
    return replace(found, depth=max(_LEAST_STEP, found.depth // 2), tf32=1)


def row_cut(ctx: Lowering, a: View, b: View) -> Cut | None:
    """How a kernel of ours computes a product of which a row keeps its bits in any batch: all sums
    walk along k once. None where it has no such kernel, whatever rows there are."""
    shapes = (*a.shape, *b.shape)
    if not (ctx.facts().streams and ctx.cfg.kernels) or a.dtype not in (f16, bf16, f32):
        return None
    if b.dtype != a.dtype or len(a.shape) not in (2, 3) or len(b.shape) != len(a.shape):
        return None
    if 0 in shapes or b.shape[-1] == 1 or is_refused(ctx.node):
        return None
    *batch, m, n = map(compat.tracing.hint_of, ctx.node.meta["val"].shape)
    far = step_along(ctx, a, len(a.shape) - 1) == step_along(ctx, b, len(b.shape) - 2) == 1
    found = _row_tile(math.prod(batch), m, n, far)
    if a.dtype != f32:
        return found
    if is_rounded():
        columns, depth = min(found.columns, 128), max(_LEAST_STEP, found.depth // 2)
        return replace(found, columns=columns, depth=depth, tf32=1)
    rows, columns = _row_tile_in_two(math.prod(batch), m, n, far)
    return Cut(rows, columns, _IN_TWO_DEPTH, tf32=3)


def _row_tile(batch: int, m: int, n: int, far: bool) -> Cut:
    """The tile of products of m rows and n columns. No bit depends on it: it may follow how many
    there are (H200: every tile, number of warps and instruction of tensor cores gives the same).
    far: numbers of a sum lie side by side in both factors."""
    if m <= _FEW_ROWS:
        wide = batch * -(-n // 64) >= _FEW_WIDE or not far
        return Cut(_power(m), 64, 128) if wide else Cut(min(32, _power(m)), 16, 256)

    def cost(tile: tuple[int, int, int, float]) -> float:
        rows, columns, _, time = tile
        return time * -(-batch * -(-m // rows) * -(-n // columns) // _MULTIPROCESSORS)

    tiles = _ROW_TILES if far and batch == 1 else _ROW_TILES[1:]  # by descriptors alone
    rows, columns, depth, _ = min(tiles, key=cost)
    return Cut(rows, columns, depth)


def _row_tile_in_two(batch: int, m: int, n: int, far: bool) -> tuple[int, int]:
    """Rows and columns of the same where each factor is taken for two numbers of 10 bits."""
    if m <= _FEW_ROWS and batch * -(-m // 16) * -(-n // 32) < _IN_TWO_FEW:
        return 16, 32
    many = batch * -(-m // 128) * -(-n // 64) >= _MULTIPROCESSORS
    return _power(m) if m <= _FEW_ROWS else 128 if far and many else 64, 64


def is_rounded() -> bool:
    """Whether the user lets factors in float32 be rounded to 10 bits."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _cut(ctx: Lowering, a: View, b: View, dtypes: tuple[DType, ...], tunes: bool) -> Cut | None:
    sizes = (*a.shape, b.shape[-1])
    if not (ctx.facts().streams and ctx.cfg.kernels) or a.dtype not in dtypes:
        return None
    known = [n for n in sizes if isinstance(n, int)]
    if len(known) < len(sizes) or b.dtype != a.dtype or len(a.shape) > 3 or 0 in known:
        return None
    if is_refused(ctx.node) or not _is_matrix(ctx, a) or not _is_matrix(ctx, b):
        return None
    *batch, m, k, n = known
    if a.dtype == f32 and (m > _FEW_ROWS or not is_rounded()):
        return None
    usual = _usual(ctx, a, b, batch, (m, n, k))
    if usual is not None or not tunes:
        return usual
    if not batch and a.dtype != i8 and not may_pay(ctx, (m, n, k)):
        return None
    if not batch and (large := _large(ctx, a, b, (m, n, k), True)):
        return large
    return cut_of(math.prod(batch), m, n, k, _MEASURED_ROWS if batch else m)


def _usual(
    ctx: Lowering, a: View, b: View, batch: Sequence[int], sizes: tuple[int, int, int]
) -> Cut | None:
    """How a kernel of ours computes a product where nothing is measured. sizes: m, n and k."""
    m, n, k = sizes
    if not batch and (large := _large(ctx, a, b, sizes, False)):
        return large
    is_wide = n >= _LEAST_COLUMNS and k >= _LEAST_DEPTH
    if is_wide and m <= _FEW_ROWS and a.dtype != f32 and _codes(ctx, b):
        return _cut_of_codes(math.prod(batch), m, n, k)
    found = cut_of(math.prod(batch), m, n, k, _MEASURED_ROWS if a.dtype == i8 else _FEW_ROWS)
    if found or batch or a.dtype == i8 or not is_wide:
        return found
    return medium_cut(m, n) if finishes_sooner(ctx, sizes) else None


def medium_cut(m: int, n: int) -> Cut | None:
    """Tiles as large as leave few multiprocessors idle; None where the smallest ones leave most."""
    for rows, columns, depth, least in _MEDIUM:
        if -(-m // rows) * -(-n // columns) >= least:
            return Cut(rows, columns, depth)
    return None


def cut_of(batch: int, m: int, n: int, k: int, most_rows: int = _FEW_ROWS) -> Cut | None:
    """How a kernel of ours computes products of (m, k) and (k, n): long sums of few results in
    parts of k, and those of few rows; None for others."""
    rows, columns = _power(m), _power(n)
    depth = 256 if rows + columns <= 64 else 128
    tiles = batch * -(-m // rows) * -(-n // columns)
    steps = -(-k // depth)
    parts = min(_PROGRAMS // tiles, _MOST_PARTS, steps // _STEPS)
    if parts > 1:  # none has nothing to do
        parts = -(-steps // -(-steps // parts))
    most = _FEW_ROWS if k < _FLAT_DEPTH else _FLAT_ROWS
    few = batch * m * n <= (_MOST_FLAT if min(m, n) <= most else _MOST_SQUARE)
    if n > 1 and parts >= _LEAST_PARTS and few:
        return Cut(rows, columns, depth, parts)
    if m > most_rows or n < _LEAST_COLUMNS or k < _LEAST_DEPTH:
        return None
    while tiles < _FEW_TILES and rows > 16:
        rows, tiles = rows // 2, tiles * 2
    if rows == 64 and tiles < _PROGRAMS * 3 // 4:
        columns = 32
    if rows == 16 and tiles <= _PROGRAMS and k >= _LONG:
        depth = 256
    return Cut(rows, columns, depth)


def _large(ctx: Lowering, a: View, b: View, sizes: tuple[int, int, int], tunes: bool) -> Cut | None:
    """How a kernel of ours computes a product that takes all of the device, where tuning is asked
    for or that is sooner."""
    m, n, k = sizes
    if m <= _least_rows(ctx, a, n) or m * n < _LEAST_LARGE or k < _LEAST_DEPTH:
        return None
    far = step_along(ctx, a, 1) == step_along(ctx, b, 0) == 1
    if not (far or tunes) or not pays(ctx, a.dtype, sizes, tunes):
        return None
    if a.dtype != i8 and m <= _MEASURED_ROWS:  # of 128 rows: 31 us instead of 35 (H200)
        return Cut(128, 128, 64)
    return Cut(128, 128 * a.dtype.nbytes, 128 // a.dtype.nbytes)


def _least_rows(ctx: Lowering, a: View, n: int) -> int:
    """Up to how many rows tiles are small: they load the right matrix once for each row of tiles,
    which is slow where it has many columns."""
    return _FEW_ROWS if a.dtype != i8 and is_uneven(ctx, n) else _MEASURED_ROWS


def _cut_of_codes(batch: int, m: int, n: int, k: int) -> Cut:
    """To convert is work, for which there are enough programs."""
    rows, depth = _power(m), 128
    columns = 32 if rows <= 32 else 64
    tiles = batch * -(-m // rows) * -(-n // columns)
    steps = -(-k // depth)
    parts = max(1, min(_CONVERTING // tiles, steps // _LEAST_PARTS))
    return Cut(rows, columns, depth, -(-steps // -(-steps // parts)))


def _power(n: int) -> int:
    """The length of a tile along n."""
    return min(64, max(16, 1 << (n - 1).bit_length()))


def _is_matrix(ctx: Lowering, x: View) -> bool:
    """Whether rows or columns of a matrix lie side by side, and start at multiples of 16 bytes."""
    steps = [step_along(ctx, x, d) for d in range(len(x.shape))]
    *outer, row, column = steps
    pitch = row if column == 1 else column if row == 1 else None
    aligned = _ALIGNED // x.dtype.nbytes
    return all(s is not None and s % aligned == 0 for s in (*outer, pitch))


def launch(ctx: Lowering, a: View, b: View, how: Cut, operator: Operator | None = None) -> View:
    """The product, by a kernel of ours: in float32, or in int32 of factors of 8 bits. operator:
    what may be faster."""
    given = (tensor_arg(ctx, a), tensor_arg(ctx, b))
    shape, parts = (*a.shape[:-1], b.shape[-1]), how.parts
    several = (parts,) if parts > 1 else ()
    out = ctx.new_buffer(i32 if a.dtype == i8 else f32, (*several, *shape), None, True)
    sizes = (parts, *((1,) * (3 - len(shape))), *shape)

    def place(v: tuple[Expr, ...]) -> tuple[Size, ...]:
        return (*v[: len(several)], *v[4 - len(shape) :])

    made = call(
        ctx, ("aten::matmul", "product"), given, out, sizes, place, a.shape[-1], how, operator
    )
    if parts == 1:
        return made
    return ctx.reduce(shape, (parts,), "sum", lambda ops, i, r: made.load(ops, (*r, *i)))


def launch_grouped(ctx: Lowering, a: View, b: View, ends: View) -> View | None:
    """The product of rows up to each of the ends, which ascend, by a matrix of their own: in
    float32. None where ATen does it better: of few rows each matrix is read once, by all of
    them."""
    known = [n for n in (*a.shape, *b.shape) if isinstance(n, int)]
    if not (ctx.facts().streams and ctx.cfg.kernels) or (len(a.shape), len(b.shape)) != (2, 3):
        return None
    if a.dtype not in (f16, bf16) or b.dtype != a.dtype or len(known) < 5 or 0 in known:
        return None
    (m, k), (matrices, _, n) = known[:2], known[2:]
    if is_refused(ctx.node) or not _is_matrix(ctx, a) or not _is_matrix(ctx, b):
        return None
    how: Cut | None
    if ctx.cfg.batch_invariant:  # whoever has the rows
        how = _row_tile(matrices, min(_FEW_ROWS, -(-m // matrices)), n, True)
    else:
        how = cut_of(matrices, m, n, k)
        if m > _FEW_ROWS or how is None or n < _LEAST_COLUMNS or k < _LEAST_DEPTH:
            return None
    given = (tensor_arg(ctx, a), tensor_arg(ctx, b), tensor_arg(ctx, ends, (1,)))
    out = ctx.new_buffer(f32, (m, n), None, True)
    how, sizes = replace(how, parts=1, matrices=matrices), (1, 1, m, n)
    return call(ctx, ("aten::_grouped_mm", "rows_product"), given, out, sizes, _rows, k, how)


def _rows(v: tuple[Expr, ...]) -> tuple[Size, ...]:
    return v[2:]


def call(
    ctx: Lowering, names: tuple[str, str], args: tuple[ExternArg, ...], out: str,
    sizes: tuple[Size, ...], place: Callable[[tuple[Expr, ...]], tuple[Size, ...]], k: Size,
    how: Cut | Panels, operator: Operator | None = None,
) -> View:  # fmt: skip
    """A launch that stores a product. names: of the operator and the kernel. sizes: parts, batch,
    rows and columns. place: where an element of it is stored. k: of how many numbers it is a
    sum. operator: what may be faster."""
    vars_ = tuple(symbol(name, extent=n) for name, n in zip("pbij", sizes, strict=True))
    dtype = ctx.buffers[out].dtype
    body = cast(node("load", (), Load(PRODUCT, ()), compute_dtype(dtype)), dtype)
    result = Pointwise(out, vars_, body, place(vars_), ctx.origin)
    op, label = names
    kernel = Product(f"{label}.{ctx.name}.{ctx.node.name}", (result,), how, None, operator)
    flops = product((2, *sizes[1:], k))
    ctx.ops.append(
        Extern(
            (out,), op, args, may_keep=False, kernel=kernel, fallback=False,
            flops=flops, origin=ctx.origin,
        )
    )  # fmt: skip
    return ctx.whole(out)
