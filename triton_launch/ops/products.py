"""The Triton kernels of products of matrices and vectors, launched by products.cpp, and the tiles
that are tried for each. ACC: the type that sums are made in.
"""

import triton
import triton.language as tl

TILES = (  # BM, BN, BK, num_warps, num_stages
    (128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 4), (64, 256, 64, 4, 4),
    (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4), (64, 64, 128, 4, 4),
    (128, 128, 32, 8, 3), (128, 64, 32, 4, 3), (64, 64, 32, 4, 3), (32, 64, 128, 4, 4),
    (32, 32, 32, 4, 3), (16, 128, 64, 4, 5), (16, 64, 128, 4, 4), (16, 32, 128, 4, 4),
    (16, 16, 256, 4, 4), (16, 16, 32, 4, 3), (64, 16, 64, 4, 4), (32, 16, 256, 4, 3),
)  # fmt: skip
THIN_TILES = (  # of few rows or few columns: those, the others, BK, num_warps, num_stages
    (16, 64, 128, 4, 8), (16, 64, 128, 4, 4), (16, 128, 128, 4, 4), (16, 64, 256, 4, 4),
    (32, 64, 128, 4, 6), (32, 64, 128, 4, 4),
)  # fmt: skip
SHARED = 200 << 10
"""Bytes that tiles may take of a multiprocessor."""
MULTIPROCESSORS = 132


def _config(m, n, k, warps, stages, swapped=False):
    sizes = {"BM": m, "BN": n, "BK": k, "SWAPPED": swapped, "GROUP": 8}
    return triton.Config(sizes, num_warps=warps, num_stages=stages)


WIDE = [_config(*tile) for tile in TILES]
# Tensor cores take many rows and few columns.
THIN = [_config(few, many, *rest, swapped=True) for few, many, *rest in THIN_TILES]
THIN += [_config(many, few, *rest) for few, many, *rest in THIN_TILES]


def fitting(configs, named, **constants):
    """The tiles that are worth a trial. Of thin matrices in half precision, those made for them;
    else, unless tiles are few, the largest of those no larger than the matrices, which suit
    batches; and those of which there are about as many as multiprocessors."""
    most_m, most_n, most_k = (max(16, named[f"{name}_like"]) for name in "mnk")
    itemsize = named["a"].dtype.itemsize

    def fits(c):
        bm, bn, bk = (c.kwargs[name] for name in ("BM", "BN", "BK"))
        nbytes = (bm + bn) * bk * itemsize * c.num_stages
        within = bm <= most_m and bn <= most_n and bk <= max(32, most_k)
        return within and nbytes <= SHARED and bm * bn * itemsize <= 1 << 16

    def area(c):
        return c.kwargs["BM"] * c.kwargs["BN"]

    def distance(c):
        n_tiles = most_m * most_n / area(c) * named["PARTS"]
        return max(n_tiles / MULTIPROCESSORS, MULTIPROCESSORS / n_tiles)

    few = min(most_m, most_n)
    thin = [
        c for c in THIN if itemsize == 2 and few == min(c.kwargs["BM"], c.kwargs["BN"]) and fits(c)
    ]
    wide = sorted(filter(fits, WIDE), key=area, reverse=True)
    large = wide[:3] if named["PARTS"] == 1 else []
    return list(dict.fromkeys([*(thin or large), *sorted(wide, key=distance)[:4]]))


@triton.jit
def _place(tile, n_m, n_n, GROUP: tl.constexpr):
    """Row and column of a tile. Those that follow each other share rows of a and columns of b."""
    band = tile // (GROUP * n_n)
    height = tl.minimum(n_m - band * GROUP, GROUP)
    return band * GROUP + tile % (GROUP * n_n) % height, tile % (GROUP * n_n) // height


@triton.autotune(
    THIN + WIDE, key=["m_like", "n_like", "k_like", "PRECISION", "PARTS"],
    prune_configs_by={"early_config_prune": fitting},
)  # fmt: skip
@triton.jit(do_not_specialize=["m_like", "n_like", "k_like"])
def bmm_kernel(
    a, b, out, M, N, K, m_like, n_like, k_like, a_batch, a_m, a_k, b_batch, b_k, b_n,
    ACC: tl.constexpr, PRECISION: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr,
    UNIT: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAPPED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = a @ b for every batch; out is contiguous. UNIT: as many elements are loaded at once,
    and sizes and strides are multiples of it: but for M unless A_TURNED, and for the strides that
    are 1.

    PARTS: as many programs, of the grid's second dimension, share a tile's K; out then has a
    product of each part, in the type of sums, for total_kernel. SWAPPED: a tile is b.T @ a.T, which
    lets tensor cores have many rows where a has few.

    m_like, ...: powers of two; what is chosen for one size serves all that are like it."""
    if UNIT > 1:  # Triton itself knows of multiples of 16
        N, K = N // UNIT * UNIT, K // UNIT * UNIT
        a_batch, b_batch = a_batch // UNIT * UNIT, b_batch // UNIT * UNIT
        if A_TURNED:
            M, a_k = M // UNIT * UNIT, a_k // UNIT * UNIT
        else:
            a_m = a_m // UNIT * UNIT
        if B_TURNED:
            b_n = b_n // UNIT * UNIT
        else:
            b_k = b_k // UNIT * UNIT
    n_m, n_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    batch = (tl.program_id(0) // (n_m * n_n)).to(tl.int64)
    tile = tl.program_id(0) % (n_m * n_n)
    row, column = _place(tile, n_m, n_n, GROUP)
    m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_k, b_k = tl.cast(a_k, tl.int64), tl.cast(b_k, tl.int64)
    a += batch * a_batch + (m % M).to(tl.int64)[:, None] * a_m + k[None, :] * a_k
    b += batch * b_batch + k[:, None] * b_k + (n % N).to(tl.int64)[None, :] * b_n
    length = K
    if PARTS > 1:
        each = tl.cdiv(tl.cdiv(K, BK), PARTS) * BK
        first = tl.program_id(1).to(tl.int64) * each
        length = tl.minimum(K - first, each).to(K.dtype)
        a += first * a_k
        b += first * b_k
        batch += tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // (n_m * n_n))
    if SWAPPED:
        acc = tl.zeros([BN, BM], ACC)
    else:
        acc = tl.zeros([BM, BN], ACC)
    for left in range(length, 0, -BK):
        av = tl.load(a, (k < left)[None, :], 0.0)
        bv = tl.load(b, (k < left)[:, None], 0.0)
        if SWAPPED:
            acc = tl.dot(bv.T, av.T, acc, input_precision=PRECISION, out_dtype=ACC)
        else:
            acc = tl.dot(av, bv, acc, input_precision=PRECISION, out_dtype=ACC)
        a += BK * a_k
        b += BK * b_k
    out += batch * M * N
    if SWAPPED:
        at, mask = m.to(tl.int64)[None, :] * N + n[:, None], (m < M)[None, :] & (n < N)[:, None]
    else:
        at, mask = m.to(tl.int64)[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["n"])
def total_kernel(parts, out, n, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out = the sum of PARTS arrays of n numbers that lie one after another, always added in the
    same order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, at < n, 0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * n + at, at < n, 0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), at < n)


VECTOR_TILES = (  # ROWS, BK, num_warps, STAGES
    (8, 512, 4, 3), (16, 256, 4, 4), (4, 1024, 4, 1), (4, 2048, 8, 1), (2, 1024, 2, 1),
    (8, 512, 4, 1), (16, 512, 8, 1), (32, 128, 4, 1), (64, 64, 4, 1),
)  # fmt: skip
TURNED_TILES = (
    (32, 256, 8, 3), (32, 256, 8, 1), (32, 128, 4, 4), (32, 64, 4, 1), (64, 64, 4, 4),
    (128, 32, 4, 1),
)  # fmt: skip
"""The same of rows that lie side by side in memory."""


def _vectors(tiles):
    return [triton.Config({"ROWS": r, "BK": k, "STAGES": s}, num_warps=w) for r, k, w, s in tiles]


STRAIGHT, TURNED_ROWS = _vectors(VECTOR_TILES), _vectors(TURNED_TILES)


def least_padded(configs, named, **constants):
    """The tiles for the matrix' layout with which least is computed beyond it."""

    def area(c):
        return max(named["rows_like"], c.kwargs["ROWS"]) * max(named["k_like"], c.kwargs["BK"])

    mine = TURNED_ROWS if named["TURNED"] else STRAIGHT
    least = min(map(area, mine))
    return [c for c in mine if area(c) == least]


@triton.autotune(
    STRAIGHT + TURNED_ROWS, key=["rows_like", "k_like", "TURNED"],
    prune_configs_by={"early_config_prune": least_padded},
)  # fmt: skip
@triton.jit(do_not_specialize=["rows_like", "k_like"])
def matvec_kernel(
    x, v, out, rows, K, rows_like, k_like, x_batch, x_line, v_batch, v_step, ACC: tl.constexpr,
    TURNED: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out = x @ v for every batch, without tensor cores, which would be idle: a vector is one of
    their columns. Rows of x are contiguous, or if TURNED its columns; x_line is from one to the
    next. out is contiguous. UNIT: the length of what is contiguous, x_batch and x_line are
    multiples of it."""
    if UNIT > 1:  # Triton itself knows of multiples of 16
        x_batch, x_line = x_batch // UNIT * UNIT, x_line // UNIT * UNIT
        if TURNED:
            rows = rows // UNIT * UNIT
        else:
            K = K // UNIT * UNIT
    v_step = tl.cast(v_step, tl.int64)
    blocks = tl.cdiv(rows, ROWS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    r = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BK)
    v += batch * v_batch + k * v_step
    x += batch * x_batch
    if TURNED:
        x_line = tl.cast(x_line, tl.int64)
        x += k[:, None] * x_line + r[None, :]
        acc = tl.zeros([BK, ROWS], ACC)
        for first in tl.range(0, K, BK, num_stages=STAGES):
            inside = k < K - first
            xv = tl.load(x, inside[:, None] & (r < rows)[None, :], 0.0).to(ACC)
            acc += xv * tl.load(v, inside, 0.0).to(ACC)[:, None]
            x += BK * x_line
            v += BK * v_step
        y = tl.sum(acc, 0)
    else:
        x += (r % rows).to(tl.int64)[:, None] * x_line + k[None, :]
        acc = tl.zeros([ROWS, BK], ACC)
        for first in tl.range(0, K, BK, num_stages=STAGES):
            inside = k < K - first
            xv = tl.load(x, inside[None, :], 0.0).to(ACC)
            acc += xv * tl.load(v, inside, 0.0).to(ACC)[None, :]
            x += BK
            v += BK * v_step
        y = tl.sum(acc, 1)
    tl.store(out + batch * rows + r, y.to(out.dtype.element_ty), r < rows)


TMA_TILES = (  # BM, BN, BK, num_warps, num_stages
    (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 4, 5),
    (64, 256, 64, 4, 4), (128, 64, 64, 4, 6), (64, 128, 64, 4, 5), (64, 128, 128, 4, 3),
    (64, 64, 128, 4, 6), (64, 32, 128, 4, 6),
)  # fmt: skip


def balanced(configs, named, **constants):
    """The tiles with which the multiprocessor that has most of them has least to do, larger ones
    first."""
    worth_of_load = 64  # multiplications in the time of it

    def work(c):
        bm, bn = c.kwargs["BM"], c.kwargs["BN"]
        n_tiles = -(-named["m_like"] // bm) * -(-named["n_like"] // bn)
        return -(-n_tiles // MULTIPROCESSORS) * (bm * bn + worth_of_load * (bm + bn)), -bm * bn

    return sorted(configs, key=work)[:6]


def set_blocks(named):
    """The descriptors' blocks are the tiles of a configuration."""
    m, n, k = (named[name] for name in ("BM", "BN", "BK"))
    for name, block in (
        ("a", [k, m] if named["A_TURNED"] else [m, k]),
        ("b", [n, k] if named["B_TURNED"] else [k, n]), ("out", [m, n])
    ):  # fmt: skip
        named[name].block_shape = [1] * (len(named[name].block_shape) - 2) + block


@triton.jit
def _in_memory(
    x, batch, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BATCHED: tl.constexpr
):
    if BATCHED:
        tile = x.load([batch, row, column]).reshape(ROWS, COLUMNS)
    else:
        tile = x.load([row, column])
    return tile


@triton.jit
def _tile_of(
    x, batch, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr,
    BATCHED: tl.constexpr
):  # fmt: skip
    """Of matrices; TURNED: which are transposed in memory."""
    if TURNED:
        tile = _in_memory(x, batch, column, row, COLUMNS, ROWS, BATCHED).T
    else:
        tile = _in_memory(x, batch, row, column, ROWS, COLUMNS, BATCHED)
    return tile


@triton.autotune(
    [triton.Config({"BM": m, "BN": n, "BK": k, "GROUP": 8}, num_warps=w, num_stages=s,
                   pre_hook=set_blocks)
     for m, n, k, w, s in TMA_TILES],
    key=["m_like", "n_like", "k_like", "A_TURNED", "B_TURNED"],
    prune_configs_by={"early_config_prune": balanced},
)  # fmt: skip
@triton.jit(do_not_specialize=["m_like", "n_like", "k_like"])
def bmm_tma_kernel(
    a, b, out, batches, M, N, K, m_like, n_like, k_like, A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr, BATCHED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same by tensor descriptors, of two dimensions unless BATCHED. A program walks tiles: it
    loads the next one's first blocks while it stores."""
    n_m, n_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), batches * n_m * n_n, tl.num_programs(0)):
        batch = tile // (n_m * n_n)
        row, column = _place(tile % (n_m * n_n), n_m, n_n, GROUP)
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            av = _tile_of(a, batch, row * BM, k, BM, BK, A_TURNED, BATCHED)
            bv = _tile_of(b, batch, k, column * BN, BK, BN, B_TURNED, BATCHED)
            acc = tl.dot(av, bv, acc)
        c = acc.to(out.dtype)
        if BATCHED:
            out.store([batch, row * BM, column * BN], c.reshape(1, BM, BN))
        else:
            out.store([row * BM, column * BN], c)
