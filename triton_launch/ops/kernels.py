"""The Triton kernels of plait's operators, launched by triton_launch/ops/cuda.cpp; those of
products of matrices stand in products.py, and are launched by products.cpp.

The process that compiles loads this file, and with it neither plait.ops nor torch. Indices that may
pass 2**31 are 64-bit ones: of rows always, of columns where a flag says so. ACC: the type that sums
are made in. Tiles are ROWS x BLOCK; LOOPED: a row is longer than BLOCK.
"""

import triton
import triton.language as tl

from triton_launch.ops.products import *  # noqa: F403  (whoever loads this finds all kernels)


# ---------------------------------------------------------------------------------------------- add
@triton.jit
def _offset(k, n_0, n_1, n_2, s_0, s_1, s_2, s_3, DIMS: tl.constexpr):
    """Of outer element k, the first of DIMS dimensions being the fastest."""
    at = k * 0
    if DIMS == 1:
        at += k * s_0
    if DIMS > 1:
        at += k % n_0 * s_0
        k = k // n_0
    if DIMS == 2:
        at += k * s_1
    if DIMS > 2:
        at += k % n_1 * s_1
        k = k // n_1
    if DIMS == 3:
        at += k * s_2
    if DIMS > 3:
        at += k % n_2 * s_2 + k // n_2 * s_3
    return at[:, None]


@triton.jit(do_not_specialize=[f"{t}_{k}" for t in "nxyo" for k in range(4)])
def add_kernel(
    x, y, out, real: tl.float64, whole: tl.int64, alpha_real: tl.float64, alpha_whole: tl.int64,
    inner, outer, x_step, y_step, out_step, n_0, n_1, n_2, x_0, x_1, x_2, x_3, y_0, y_1, y_2, y_3,
    o_0, o_1, o_2, o_3, DIMS: tl.constexpr, COMMON: tl.constexpr, COMPUTE: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """x + alpha * y of any strides, where x or y may be a number. The innermost dimension is
    `inner`; DIMS are around it, whose sizes and strides are numbered from within."""
    blocks = tl.cdiv(inner, COLS)
    row, col = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if WIDE:
        row, col = row.to(tl.int64), col.to(tl.int64)
    rows, cols = row * ROWS + tl.arange(0, ROWS), (col * COLS + tl.arange(0, COLS))[None, :]
    mask = (rows < outer)[:, None] & (cols < inner)
    if x is None:
        a = tl.cast(real, COMPUTE) if COMPUTE.is_floating() else tl.cast(whole, COMPUTE)
    else:
        at = _offset(rows, n_0, n_1, n_2, x_0, x_1, x_2, x_3, DIMS) + cols * x_step
        a = tl.load(x + at, mask).to(COMMON).to(COMPUTE)
    if y is None:
        b = tl.cast(real, COMPUTE) if COMPUTE.is_floating() else tl.cast(whole, COMPUTE)
    else:
        at = _offset(rows, n_0, n_1, n_2, y_0, y_1, y_2, y_3, DIMS) + cols * y_step
        b = tl.load(y + at, mask).to(COMMON).to(COMPUTE)
    alpha = tl.cast(alpha_real, COMPUTE) if COMPUTE.is_floating() else tl.cast(alpha_whole, COMPUTE)
    v = a + alpha * b
    v = v != 0 if COMMON == tl.int1 else v.to(COMMON)
    tl.store(
        out + _offset(rows, n_0, n_1, n_2, o_0, o_1, o_2, o_3, DIMS) + cols * out_step, v, mask
    )


# -------------------------------------------------------------------------------------------- norms
@triton.jit
def _summed(x, residual, x_at, residual_at, mask, SUM: tl.constexpr, ACC: tl.constexpr):
    """x + residual as it is rounded when it is stored."""
    v = tl.load(x + x_at, mask, 0.0)
    if residual is not None:
        v = (v.to(ACC) + tl.load(residual + residual_at, mask, 0.0).to(ACC)).to(SUM)
    return v.to(ACC)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, residual, weight, out, total, rstd, rows, n, x_row, residual_row, eps: tl.float64,
    ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    """total = x + residual (x without one), out = total / rms(total) * weight."""
    SUM: tl.constexpr = out.dtype.element_ty
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    alive = (r < rows)[:, None]
    x_at, out_at = (r * x_row)[:, None], (r * n)[:, None]
    residual_at = (r * residual_row)[:, None]
    squares = tl.zeros([ROWS], ACC)
    for first in range(0, n, BLOCK):
        k = (first + tl.arange(0, BLOCK))[None, :]
        mask = alive & (k < n)
        v = _summed(x, residual, x_at + k, residual_at + k, mask, SUM, ACC)
        if residual is not None:
            tl.store(total + out_at + k, v.to(SUM), mask)
        squares += tl.sum(v * v, 1)
        if not LOOPED:
            scale = tl.rsqrt(squares / n + eps.to(ACC))
            y = v * scale[:, None]
            if weight is not None:
                y *= tl.load(weight + k, k < n, 0.0).to(ACC)
            tl.store(out + out_at + k, y.to(SUM), mask)
    scale = tl.rsqrt(squares / n + eps.to(ACC))
    tl.store(rstd + r, scale, r < rows)
    if LOOPED:
        for first in range(0, n, BLOCK):
            k = (first + tl.arange(0, BLOCK))[None, :]
            mask = alive & (k < n)
            y = _summed(x, residual, x_at + k, residual_at + k, mask, SUM, ACC) * scale[:, None]
            if weight is not None:
                y *= tl.load(weight + k, k < n, 0.0).to(ACC)
            tl.store(out + out_at + k, y.to(SUM), mask)


@triton.jit
def _normalized(g, s, weight, scale, g_at, s_at, k, mask, n, ACC: tl.constexpr):
    """The gradient of the normalized row, times its weight, and the row."""
    xhat = tl.load(s + s_at, mask, 0.0).to(ACC) * scale
    gv = tl.load(g + g_at, mask, 0.0).to(ACC)
    wg = gv
    if weight is not None:
        wg = gv * tl.load(weight + k, k < n, 0.0).to(ACC)
    return gv, wg, xhat


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward_kernel(
    g, g_total, s, weight, rstd, dx, dw, rows, n, s_row, ACC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    """dx: the gradient of total. dw: a row of partial sums for each program, zeros before where
    LOOPED."""
    pid = tl.program_id(0).to(tl.int64)
    acc = tl.zeros([ROWS, BLOCK], ACC)
    for first_row in range(pid * ROWS, rows, tl.num_programs(0) * ROWS):
        r = first_row + tl.arange(0, ROWS)
        alive = (r < rows)[:, None]
        s_at, g_at = (r * s_row)[:, None], (r * n)[:, None]
        scale = tl.load(rstd + r, r < rows, 0.0)[:, None]
        dot = tl.zeros([ROWS], ACC)
        for first in range(0, n, BLOCK):
            k = (first + tl.arange(0, BLOCK))[None, :]
            mask = alive & (k < n)
            gv, wg, xhat = _normalized(g, s, weight, scale, g_at + k, s_at + k, k, mask, n, ACC)
            dot += tl.sum(wg * xhat, 1)
            if dw is not None:
                if LOOPED:
                    to = dw + pid * n + k
                    tl.store(to, tl.load(to, k < n, 0.0) + tl.sum(gv * xhat, 0)[None, :], k < n)
                else:
                    acc += gv * xhat
            if not LOOPED:
                d = scale * (wg - xhat * (dot / n)[:, None])
                if g_total is not None:
                    d += tl.load(g_total + g_at + k, mask, 0.0).to(ACC)
                tl.store(dx + g_at + k, d.to(dx.dtype.element_ty), mask)
        if LOOPED:
            for first in range(0, n, BLOCK):
                k = (first + tl.arange(0, BLOCK))[None, :]
                mask = alive & (k < n)
                gv, wg, xhat = _normalized(g, s, weight, scale, g_at + k, s_at + k, k, mask, n, ACC)
                d = scale * (wg - xhat * (dot / n)[:, None])
                if g_total is not None:
                    d += tl.load(g_total + g_at + k, mask, 0.0).to(ACC)
                tl.store(dx + g_at + k, d.to(dx.dtype.element_ty), mask)
    if dw is not None and not LOOPED:
        k = tl.arange(0, BLOCK)
        tl.store(dw + pid * n + k, tl.sum(acc, 0), k < n)


# ------------------------------------------------------------------------------------------ softmax
@triton.jit
def _lines(outer, inner, n, x_outer, FLAT: tl.constexpr, ROWS: tl.constexpr):
    """Of this program's lines of n elements: where each starts in x and in a contiguous result, and
    whether it exists.

    FLAT: inner is 1 and lines are whole rows. Else a program has lines that lie beside each
    other."""
    blocks = 1 if FLAT else tl.cdiv(inner, ROWS)
    o = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    x_at, y_at, alive = o * x_outer + i, o * n * inner + i, i < inner
    if FLAT:
        r = o * ROWS + i
        x_at, y_at, alive = r * x_outer, r * n, r < outer
    return x_at[:, None], y_at[:, None], alive[:, None]


@triton.jit
def _along(first, inner, FLAT: tl.constexpr, BLOCK: tl.constexpr):
    """Positions in a line, and how far into memory they are."""
    k = (first + tl.arange(0, BLOCK))[None, :]
    at = k
    if not FLAT:
        at = k.to(tl.int64) * inner
    return k, at


@triton.jit
def _shift(top):
    """What is subtracted before an exponential: of a line that is all -inf so far, nothing."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit(do_not_specialize=["outer"])
def softmax_kernel(
    x, y, outer, inner, n, x_outer, ACC: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    """Softmax over the middle one of (outer, n, inner)."""
    OUT: tl.constexpr = y.dtype.element_ty
    x_at, y_at, alive = _lines(outer, inner, n, x_outer, FLAT, ROWS)
    if not LOOPED:
        k, at = _along(0, inner, FLAT, BLOCK)
        mask = alive & (k < n)
        v = tl.load(x + x_at + at, mask, float("-inf")).to(ACC)
        e = tl.exp(v - _shift(tl.max(v, 1))[:, None])
        tl.store(y + y_at + at, (e / tl.sum(e, 1)[:, None]).to(OUT), mask)
    else:
        top = tl.full([ROWS], float("-inf"), ACC)
        total = tl.zeros([ROWS], ACC)
        for first in range(0, n, BLOCK):
            k, at = _along(first, inner, FLAT, BLOCK)
            v = tl.load(x + x_at + at, alive & (k < n), float("-inf")).to(ACC)
            new = tl.maximum(top, tl.max(v, 1))
            shift = _shift(new)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(v - shift[:, None]), 1)
            top = new
        shift = _shift(top)[:, None]
        for first in range(0, n, BLOCK):
            k, at = _along(first, inner, FLAT, BLOCK)
            mask = alive & (k < n)
            v = tl.load(x + x_at + at, mask, float("-inf")).to(ACC)
            tl.store(y + y_at + at, (tl.exp(v - shift) / total[:, None]).to(OUT), mask)


@triton.jit(do_not_specialize=["outer"])
def softmax_backward_kernel(
    g, y, dx, outer, inner, n, ACC: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    """dx = y * (g - sum(g * y)) along the middle one of (outer, n, inner); all are contiguous."""
    OUT: tl.constexpr = dx.dtype.element_ty
    at, _, alive = _lines(outer, inner, n, n * inner, FLAT, ROWS)
    dot = tl.zeros([ROWS], ACC)
    for first in range(0, n, BLOCK):
        k, along = _along(first, inner, FLAT, BLOCK)
        mask = alive & (k < n)
        gv = tl.load(g + at + along, mask, 0.0).to(ACC)
        yv = tl.load(y + at + along, mask, 0.0).to(ACC)
        dot += tl.sum(gv * yv, 1)
        if not LOOPED:
            tl.store(dx + at + along, (yv * (gv - dot[:, None])).to(OUT), mask)
    if LOOPED:
        for first in range(0, n, BLOCK):
            k, along = _along(first, inner, FLAT, BLOCK)
            mask = alive & (k < n)
            gv = tl.load(g + at + along, mask, 0.0).to(ACC)
            yv = tl.load(y + at + along, mask, 0.0).to(ACC)
            tl.store(dx + at + along, (yv * (gv - dot[:, None])).to(OUT), mask)


# ------------------------------------------------------------------------------------------- rotary
@triton.jit
def _angles(table, position, half, alive, inside, HALF: tl.constexpr):
    k = tl.arange(0, HALF)
    v = tl.load(table + position.to(tl.int64) * half + k, (k < half) & inside & alive, float("nan"))
    return v[None, :]


@triton.jit(do_not_specialize=["length", "n_positions", "offset"])
def rotary_kernel(
    x, cos, sin, offsets, out, length, heads, dim, half, n_positions, offset, x_strides,
    out_strides, ACC: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotates pairs of (batch, length, heads, dim) by the angles of their position; what is beyond
    2 * half stays.

    A position that the tables lack gives NaN. REST: a power of two that holds the elements which
    stay, or 0."""
    blocks = tl.cdiv(heads, HEADS)
    line = tl.program_id(0) // blocks
    b, s = line // length, line % length
    position = s + offset
    if offsets is not None:
        position += tl.load(offsets + b)
    inside = (position >= 0) & (position < n_positions)
    h = (tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS))[:, None]
    c = _angles(cos, position, half, True, inside, HALF).to(ACC)
    a = _angles(sin, position, half, True, inside, HALF).to(ACC)
    if INVERSE:
        a = -a
    b, s = b.to(tl.int64), s.to(tl.int64)
    x += b * x_strides[0] + s * x_strides[1] + h.to(tl.int64) * x_strides[2]
    out += b * out_strides[0] + s * out_strides[1] + h.to(tl.int64) * out_strides[2]
    OUT: tl.constexpr = out.dtype.element_ty
    if INTERLEAVED:
        k = tl.arange(0, 2 * HALF)[None, :]
        mask = (h < heads) & (k < 2 * half)
        one, two = tl.split(tl.reshape(tl.load(x + k, mask, 0.0).to(ACC), [HEADS, HALF, 2]))
        both = tl.reshape(tl.join(one * c - two * a, two * c + one * a), [HEADS, 2 * HALF])
        tl.store(out + k, both.to(OUT), mask)
    else:
        k = tl.arange(0, HALF)[None, :]
        mask = (h < heads) & (k < half)
        one = tl.load(x + k, mask, 0.0).to(ACC)
        two = tl.load(x + half + k, mask, 0.0).to(ACC)
        tl.store(out + k, (one * c - two * a).to(OUT), mask)
        tl.store(out + half + k, (two * c + one * a).to(OUT), mask)
    if REST:
        k = (2 * half + tl.arange(0, REST))[None, :]
        mask = (h < heads) & (k < dim)
        tl.store(out + k, tl.load(x + k, mask), mask)


# ------------------------------------------------------------------------------------ cross entropy
@triton.jit(do_not_specialize=["rows", "ignore"])
def cross_entropy_kernel(
    x, target, weight, weight_sum, loss, lse, partial, rows, n, x_row, ignore,
    smoothing: tl.float64, ACC: tl.constexpr, SMOOTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of each row and its log-sum-exp; or with `partial`, for each program the sum of
    its losses and, behind those of all programs, of its weights. A target that is no class gives
    NaN."""
    losses, weights = tl.zeros([ROWS], ACC), tl.zeros([ROWS], ACC)
    for first_row in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        r = first_row + tl.arange(0, ROWS)
        at = r.to(tl.int64) * x_row
        t = tl.load(target + r, r < rows, 0)
        valid = (r < rows) & (t != ignore)
        top = tl.full([ROWS], float("-inf"), ACC)
        total, plain = tl.zeros([ROWS], ACC), tl.zeros([ROWS], ACC)
        for first in range(0, n, BLOCK):
            k = (first + tl.arange(0, BLOCK))[None, :]
            mask = valid[:, None] & (k < n)
            v = tl.load(x + at[:, None] + k, mask, float("-inf")).to(ACC)
            new = tl.maximum(top, tl.max(v, 1))
            shift = _shift(new)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(v - shift[:, None]), 1)
            top = new
            if SMOOTH:
                v = tl.where(mask, v, 0.0)
                if weight is not None:
                    v *= tl.load(weight + k, k < n, 0.0).to(ACC)
                plain += tl.sum(v, 1)
        log = _shift(top) + tl.log(total)
        known = valid & (t >= 0) & (t < n)
        picked = tl.load(x + at + t, known, float("nan")).to(ACC)
        w = tl.full([ROWS], 1.0, ACC)
        if weight is not None:
            w = tl.load(weight + t, known, 0.0).to(ACC)
        v = w * (log - picked)
        if SMOOTH:
            share = smoothing.to(ACC)
            all_weights = tl.full([ROWS], n, ACC)
            if weight_sum is not None:
                all_weights = tl.full([ROWS], 0.0, ACC) + tl.load(weight_sum).to(ACC)
            v = (1 - share) * v + share / n * (log * all_weights - plain)
        v = tl.where(valid, v, 0.0)
        tl.store(lse + r, log, r < rows)
        if partial is None:
            tl.store(loss + r, v.to(loss.dtype.element_ty), r < rows)
        else:
            losses += v
            weights += tl.where(valid, w, 0.0)
    if partial is not None:
        tl.store(partial + tl.program_id(0), tl.sum(losses, 0))
        tl.store(partial + tl.num_programs(0) + tl.program_id(0), tl.sum(weights, 0))


@triton.jit(do_not_specialize=["n"])
def cross_entropy_total_kernel(partial, loss, total, n, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """The loss of all rows from partial sums, and the weight of all."""
    k = tl.arange(0, BLOCK)
    v = tl.sum(tl.load(partial + k, k < n, 0.0), 0)
    w = tl.sum(tl.load(partial + n + k, k < n, 0.0), 0)
    tl.store(total, w)
    if MEAN:
        v = v / w
    tl.store(loss, v.to(loss.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "ignore"])
def cross_entropy_backward_kernel(
    g, x, target, weight, weight_sum, lse, total, dx, rows, n, x_row, g_row, ignore,
    smoothing: tl.float64, ACC: tl.constexpr, SMOOTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of x. total: what the loss was divided by, or None."""
    blocks = tl.cdiv(n, BLOCK)
    r = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    k = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    t = tl.load(target + r, r < rows, 0)
    valid = (r < rows) & (t != ignore)
    known = valid & (t >= 0) & (t < n)
    scale = tl.load(g + r.to(tl.int64) * g_row, valid, 0.0).to(ACC)
    if total is not None:
        scale = scale / tl.load(total)
    scale = tl.where(valid, scale, 0.0)
    mask = (r < rows)[:, None] & (k < n)
    v = tl.load(x + (r.to(tl.int64) * x_row)[:, None] + k, mask & valid[:, None], 0.0).to(ACC)
    p = tl.exp(v - tl.load(lse + r, valid, 0.0)[:, None])
    w = tl.full([ROWS], 1.0, ACC)
    if weight is not None:
        w = tl.load(weight + t, known, 0.0).to(ACC)
    if SMOOTH:
        share = smoothing.to(ACC)
        w = w * (1 - share)
        each = tl.full([1, BLOCK], 1.0, ACC)
        all_weights = tl.full([ROWS], n, ACC)
        if weight is not None:
            each = tl.load(weight + k, k < n, 0.0).to(ACC)
            all_weights = tl.full([ROWS], 0.0, ACC) + tl.load(weight_sum).to(ACC)
        d = p * (w + share / n * all_weights)[:, None] - share / n * each
    else:
        d = p * w[:, None]
    d -= tl.where(k == t[:, None], w[:, None], 0.0)
    d = tl.where(valid[:, None], d * scale[:, None], 0.0)
    tl.store(dx + (r.to(tl.int64) * n)[:, None] + k, d.to(dx.dtype.element_ty), mask)
