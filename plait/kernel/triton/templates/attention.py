"""Kernels of attention, in Triton: text that `kernel/triton/attention.py` puts into a module. It is
not imported.

A program takes a block of queries and walks along blocks of keys; for the gradients of keys and
values the other way round. Scores exist as one tile at a time; maxima and sums of exponentials, to
base 2, are updated as it walks. This is FlashAttention-2 (Dao, 2023). Which blocks there are to
walk along is read from tables, as FlexAttention (Dong et al., 2024) has it: first those where some
scores are masked, then those where none is.

Before this text stand those of add_product.py, and constants:
ROWS, COLUMNS: queries and keys in a block
HEADS, GROUP: heads of queries, and how many of them share one of keys
QUERIES: how many there are, where the rows of a block are those of a whole group; else 0
PARTS: programs that share a walk along keys
WIDTH, V_WIDTH, W, V_W: numbers in a key and in a value, and the next powers of two
TABLES: kinds of blocks that tables list: 0 (there are no tables), 1 or 2
SPARSE_ROWS, SPARSE_COLUMNS: queries and keys in a block of the tables
ROW_EDGE, COLUMN_EDGE: the last block may be larger than what is left
SCALE: of products
BEFORE, AFTER: factors before and after score_of, the latter above 0; they give scores to base 2
CAUSAL: a walk ends with the keys at the position of its last query, or begins with the queries at
    that of its first key
MASKS, CHANGES: there is a mask, and a score_of that changes scores
ADDS: gradients of other tensors are summed beside those of queries
STAGES: how loops are compiled
TF32: how products in float32 are made, see add_product.py
BY_ROW: a row of the result has the same bits however tiles are laid out
and the functions score_of and loads_of_score_of, mask_of, gradient_of, add_gradients and power_of,
2 to the power of a number. given: what all but the last load; added: what add_gradients adds to.
Strides are of batch, head, row and number.
"""

import triton
import triton.language as tl

NONE: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def rows_of(
    p, first, r, d, strides, n, width: tl.constexpr, w: tl.constexpr, edge: tl.constexpr
):  # fmt: skip
    """Rows first + r of a matrix with n of them, and 0 outside of it."""
    at = p + first.to(tl.int64) * strides[2] + (r * strides[2] + d * strides[3])
    if edge and w != width:
        x = tl.load(at, (first + r < n) & (d < width), other=0.0)
    elif edge:
        x = tl.load(at, first + r < n, other=0.0)
    elif w != width:
        x = tl.load(at, d < width, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def product_of(x, y):
    return add_product(tl.zeros([x.shape[0], y.shape[1]], tl.float32), x, y, TF32, False, True)


@triton.jit
def of_head(p, strides, b, h):
    return p + (b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1])


@triton.jit
def scores_of(products, loaded, b, h, i, j, m, n, given, part: tl.constexpr):
    """Scores; times AFTER they are logarithms to base 2. part 0 is masked. loaded: what
    loads_of_score_of gives, called before products are made: seen with Triton 3.6, rows of scores
    are laid out as the later of both is, and few threads share a row of products."""
    s = score_of(products * BEFORE, loaded, b, h, i, j, i < m, j < n, given)
    s = tl.broadcast_to(s, products.shape)
    if MASKS and part == 0:
        s = tl.where(mask_of(b, h, i, j, i < m, j < n, given), s, NONE)
    if COLUMN_EDGE:
        s = tl.where(j < n, s, NONE)
    return s


@triton.jit
def shares_of(s, off):
    """Exponentials of scores, with a number taken off their logarithms to base 2; rounded once.
    Sums of a forward pass may be rounded by more than 1: no share is above 1 all the same."""
    x = s - off if AFTER == 1.0 else tl.fma(s, AFTER, -off)
    if BY_ROW and CHANGES and AFTER != 1.0:
        x = tl.where(x > 0, 0.0, x)
    return power_of(x)


@triton.jit
def gradients_of(products, grad, b, h, i, j, m, n, given, part: tl.constexpr):
    """Gradients of products, but for their scale, of those of scores. What is masked, or lies
    outside, has none: its share is 0, but not what score_of may make of it (0 / 0)."""
    if CHANGES:
        grad = gradient_of(products * SCALE, b, h, i, j, grad, i < m, j < n, given)
        grad = tl.broadcast_to(grad, products.shape)
        if MASKS and part == 0:
            grad = tl.where(mask_of(b, h, i, j, i < m, j < n, given), grad, 0.0)
        if ROW_EDGE:
            grad = tl.where(i < m, grad, 0.0)
        if COLUMN_EDGE:
            grad = tl.where(j < n, grad, 0.0)
    return grad


@triton.jit
def add_scores(products, grad, b, h, i, j, m, n, given, added, part: tl.constexpr):
    """Adds what scores that count give to the gradients of other tensors."""
    if ADDS:
        counts = (i < m) & (j < n)
        if MASKS and part == 0:
            counts = counts & mask_of(b, h, i, j, i < m, j < n, given)
        add_gradients(products * SCALE, b, h, i, j, grad, i < m, j < n, counts, given, added)


@triton.jit
def steps_of(
    table, strides, b, h, first, n, part: tl.constexpr, sparse: tl.constexpr,
    sparse_step: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """The steps of a walk, its list, and how many blocks that holds."""
    if TABLES == 0:
        count = tl.cdiv(n, step)
        return count, table, count
    else:
        row = first // sparse
        of: tl.constexpr = 7 * part
        numbers = of_head(table[2 * part], (strides[of], strides[of + 1]), b, h)
        count = tl.load(numbers + row * strides[of + 2])
        index = of_head(table[2 * part + 1], (strides[of + 3], strides[of + 4]), b, h)
        index += row * strides[of + 5]
        steps = count * (sparse_step // step)
        # Of the only block, what lies outside is left out.
        steps = tl.where(n <= sparse_step, tl.minimum(steps, tl.cdiv(n, step)), steps)
        return steps, index, count


@triton.jit
def start_of(
    k, index, strides, count, part: tl.constexpr, sparse_step: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Where step k of a walk begins."""
    if TABLES == 0:
        return k * step
    else:
        at = k // (sparse_step // step)
        block = tl.load(index + at * strides[7 * part + 6], at < count, other=0)
        return block * sparse_step + k % (sparse_step // step) * step


@triton.jit
def store_rows(p, x, first, r, d, strides, n, width: tl.constexpr):
    at = p + first.to(tl.int64) * strides[2] + (r * strides[2] + d * strides[3])
    tl.store(at, x.to(p.dtype.element_ty), (first + r < n) & (d < width))


# ------------------------------------------------------------------------------------------- result
@triton.jit
def sums_of(x):
    """Sums of rows. BY_ROW: always of two numbers, so that Triton, which lays a tile out by what it
    knows of the tensors that formulas load, has no order to choose. Numbers that a thread has side
    by side come first, and then those that it has where products lie."""
    if BY_ROW:
        rows: tl.constexpr = x.shape[0]
        x = tl.sum(tl.reshape(x, (rows, x.shape[1] // 2, 2)), 2)
        for _ in tl.static_range(20):
            if x.shape[1] > 4:
                x = tl.sum(tl.reshape(x, (rows, 2, x.shape[1] // 2)), 1)
        x = tl.sum(tl.reshape(x, (rows, 2, 2)), 2)
    return tl.sum(x, 1)


@triton.jit
def attend(
    acc, total, top, q, k, v, start, b, h, i, k_strides, v_strides, m, n, given, part: tl.constexpr
):  # fmt: skip
    """One block of keys more in the sums of a block of queries."""
    c = tl.arange(0, COLUMNS)
    keys = rows_of(
        k, start, c[None, :], tl.arange(0, W)[:, None], k_strides, n, WIDTH, W, COLUMN_EDGE
    )
    j = start + c[None, :]
    loaded = loads_of_score_of(b, h, i, j, i < m, j < n, given)
    products = product_of(q, keys)
    s = scores_of(products, loaded, b, h, i, j, m, n, given, part)
    new = tl.maximum(top, tl.max(s, 1) * AFTER)
    base = tl.where(new == NONE, 0.0, new)
    shares = shares_of(s, base[:, None])
    shrink = power_of(top - base)
    values = rows_of(
        v, start, c[:, None], tl.arange(0, V_W)[None, :], v_strides, n, V_WIDTH, V_W, COLUMN_EDGE
    )
    total = total * shrink + sums_of(shares)
    acc = acc * shrink[:, None]
    acc = add_product(acc, shares.to(v.dtype.element_ty), values, TF32, False, True)
    return acc, total, new


@triton.jit
def rows_of_program(at, blocks):
    """The heads of a program's rows, the head of their keys, a first position, and positions from
    there. A row that is none has a position after all others."""
    r = tl.arange(0, ROWS)
    if QUERIES == 0:
        h = at // blocks
        return h, h // GROUP, at % blocks * ROWS, r
    else:
        i = tl.where(r < QUERIES * GROUP, r % QUERIES, QUERIES)
        return at * GROUP + tl.minimum(r // QUERIES, GROUP - 1), at, 0 * at, i


@triton.jit
def attention(
    q, k, v, out, sums, tops, table, given, q_strides, k_strides, v_strides, out_strides,
    row_strides, part_strides, table_strides, m, n,
):  # fmt: skip
    """The result, and per query log2 of the sum of exponentials and the greatest score; of one part
    of the keys, if there are parts."""
    piece = tl.program_id(0) % PARTS
    at = tl.program_id(0) // PARTS
    blocks = 1 if QUERIES else tl.cdiv(m, ROWS)
    per_batch = blocks * (HEADS // GROUP if QUERIES else HEADS)
    b = at // per_batch
    h, shared, first, r = rows_of_program(at % per_batch, blocks)
    # Of rows of several heads there is a table for all of them.
    table_h = first if QUERIES else h
    column_h = h[:, None] if QUERIES else h
    i = first + r[:, None]
    k = of_head(k, k_strides, b, shared)
    v = of_head(v, v_strides, b, shared)
    queries = rows_of(
        of_head(q, q_strides, b, column_h), first, r[:, None], tl.arange(0, W)[None, :],
        q_strides, m, WIDTH, W, ROW_EDGE,
    )  # fmt: skip
    acc = tl.zeros([ROWS, V_W], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], NONE, tl.float32)
    for part in tl.static_range(max(TABLES, 1)):
        steps, index, count = steps_of(
            table, table_strides, b, table_h, first, n, part, SPARSE_ROWS, SPARSE_COLUMNS, COLUMNS
        )
        if CAUSAL:
            steps = tl.minimum(steps, tl.cdiv(first + ROWS, COLUMNS))
        own = tl.cdiv(steps, PARTS)
        begin = own * piece
        start = start_of(begin, index, table_strides, count, part, SPARSE_COLUMNS, COLUMNS)
        for step in tl.range(begin, tl.minimum(begin + own, steps), num_stages=STAGES):
            acc, total, top = attend(
                acc, total, top, queries, k, v, start, b, column_h, i, k_strides, v_strides, m, n,
                given, part,
            )  # fmt: skip
            start = start_of(step + 1, index, table_strides, count, part, SPARSE_COLUMNS, COLUMNS)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    out = of_head(out + piece.to(tl.int64) * part_strides[0], out_strides, b, column_h)
    store_rows(out, acc, first, r[:, None], tl.arange(0, V_W)[None, :], out_strides, m, V_WIDTH)
    logs = tl.where(top == NONE, 0.0, top) + tl.log2(total)
    logs = tl.where(top == -NONE, top, logs)  # of an infinite score the exponential is no number
    at = (first + r) * row_strides[2]
    sums = of_head(sums + piece.to(tl.int64) * part_strides[1], row_strides, b, h)
    tl.store(sums + at, logs, first + r < m)
    if tops is not None:
        tops = of_head(tops + piece.to(tl.int64) * part_strides[1], row_strides, b, h)
        tl.store(tops + at, top, first + r < m)


# ------------------------------------------------------------------------------ gradient of queries
@triton.jit
def add_keys(
    acc, q, grad, along, sums, k, v, start, b, h, i, k_strides, v_strides, m, n, given, added,
    part: tl.constexpr,
):  # fmt: skip
    """What a block of keys adds to the gradient of a block of queries."""
    c = tl.arange(0, COLUMNS)[None, :]
    keys = rows_of(k, start, c, tl.arange(0, W)[:, None], k_strides, n, WIDTH, W, COLUMN_EDGE)
    values = rows_of(
        v, start, c, tl.arange(0, V_W)[:, None], v_strides, n, V_WIDTH, V_W, COLUMN_EDGE
    )
    loaded = loads_of_score_of(b, h, i, start + c, i < m, start + c < n, given)
    products = product_of(q, keys)
    shares = shares_of(scores_of(products, loaded, b, h, i, start + c, m, n, given, part), sums)
    found = shares * (product_of(grad, values) - along)
    add_scores(products, found, b, h, i, start + c, m, n, given, added, part)
    found = gradients_of(products, found, b, h, i, start + c, m, n, given, part)
    return add_product(acc, found.to(k.dtype.element_ty), tl.trans(keys), TF32, False, True)


@triton.jit
def gradient_of_queries(
    q, k, v, grad, along, sums, out, table, given, added, q_strides, k_strides, v_strides,
    grad_strides, row_strides, table_strides, out_strides, m, n,
):  # fmt: skip
    """along: per query, the product of the result and its gradient."""
    blocks = tl.cdiv(m, ROWS)
    first = tl.program_id(0) % blocks * ROWS
    b = tl.program_id(0) // blocks // HEADS
    h = tl.program_id(0) // blocks % HEADS
    r = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, W)[None, :]
    i = first + r
    k = of_head(k, k_strides, b, h // GROUP)
    v = of_head(v, v_strides, b, h // GROUP)
    queries = rows_of(of_head(q, q_strides, b, h), first, r, d, q_strides, m, WIDTH, W, ROW_EDGE)
    grads = rows_of(
        of_head(grad, grad_strides, b, h), first, r, tl.arange(0, V_W)[None, :], grad_strides, m,
        V_WIDTH, V_W, ROW_EDGE,
    )  # fmt: skip
    at = i * row_strides[2]
    along = tl.load(of_head(along, row_strides, b, h) + at, i < m, other=0.0)
    sums = tl.load(of_head(sums, row_strides, b, h) + at, i < m, other=0.0)
    sums = tl.where(sums == NONE, 0.0, sums)
    acc = tl.zeros([ROWS, W], tl.float32)
    for part in tl.static_range(max(TABLES, 1)):
        steps, index, count = steps_of(
            table, table_strides, b, h, first, n, part, SPARSE_ROWS, SPARSE_COLUMNS, COLUMNS
        )
        if CAUSAL:
            steps = tl.minimum(steps, tl.cdiv(first + ROWS, COLUMNS))
        start = start_of(0 * steps, index, table_strides, count, part, SPARSE_COLUMNS, COLUMNS)
        for step in tl.range(0, steps, num_stages=STAGES):
            acc = add_keys(
                acc, queries, grads, along, sums, k, v, start, b, h, i, k_strides, v_strides, m, n,
                given, added, part,
            )  # fmt: skip
            start = start_of(step + 1, index, table_strides, count, part, SPARSE_COLUMNS, COLUMNS)
    store_rows(of_head(out, out_strides, b, h), acc * SCALE, first, r, d, out_strides, m, WIDTH)


# --------------------------------------------------------------------- gradients of keys and values
@triton.jit
def add_queries(
    of_keys, of_values, keys, values, q, grad, along, sums, start, b, h, j, q_strides,
    grad_strides, row_strides, m, n, given, part: tl.constexpr,
):  # fmt: skip
    """What a block of queries adds to the gradients of a block of keys; tiles are transposed."""
    r = tl.arange(0, ROWS)
    i = start + r[None, :]
    queries = rows_of(
        q, start, r[None, :], tl.arange(0, W)[:, None], q_strides, m, WIDTH, W, ROW_EDGE
    )
    at = i * row_strides[2]
    if ROW_EDGE:
        along = tl.load(along + at, i < m, other=0.0)
        sums = tl.load(sums + at, i < m, other=0.0)
    else:
        along = tl.load(along + at)
        sums = tl.load(sums + at)
    sums = tl.where(sums == NONE, 0.0, sums)
    loaded = loads_of_score_of(b, h, i, j, i < m, j < n, given)
    products = product_of(keys, queries)
    s = scores_of(products, loaded, b, h, i, j, m, n, given, part)
    if ROW_EDGE:
        s = tl.where(i < m, s, NONE)
    shares = shares_of(s, sums)
    grads = rows_of(
        grad, start, r[:, None], tl.arange(0, V_W)[None, :], grad_strides, m, V_WIDTH, V_W,
        ROW_EDGE,
    )  # fmt: skip
    of_values = add_product(of_values, shares.to(grad.dtype.element_ty), grads, TF32, False, True)
    found = shares * (product_of(values, tl.trans(grads)) - along)
    found = gradients_of(products, found, b, h, i, j, m, n, given, part)
    of_keys = add_product(
        of_keys, found.to(q.dtype.element_ty), tl.trans(queries), TF32, False, True
    )
    return of_keys, of_values


@triton.jit
def gradient_of_keys(
    q, k, v, grad, along, sums, out, v_out, table, given, q_strides, k_strides, v_strides,
    grad_strides, row_strides, table_strides, out_strides, v_out_strides, m, n, batches,
):  # fmt: skip
    """Of keys and values, summed over the heads of queries that share them, and over batches of
    queries if there are as many for one of keys."""
    blocks = tl.cdiv(n, COLUMNS)
    first = tl.program_id(0) % blocks * COLUMNS
    b = tl.program_id(0) // blocks // (HEADS // GROUP)
    shared = tl.program_id(0) // blocks % (HEADS // GROUP)
    c = tl.arange(0, COLUMNS)[:, None]
    d = tl.arange(0, W)[None, :]
    v_d = tl.arange(0, V_W)[None, :]
    keys = rows_of(
        of_head(k, k_strides, b, shared), first, c, d, k_strides, n, WIDTH, W, COLUMN_EDGE
    )
    values = rows_of(
        of_head(v, v_strides, b, shared), first, c, v_d, v_strides, n, V_WIDTH, V_W, COLUMN_EDGE
    )
    of_keys = tl.zeros([COLUMNS, W], tl.float32)
    of_values = tl.zeros([COLUMNS, V_W], tl.float32)
    for member in range(GROUP * batches):
        h = shared * GROUP + member % GROUP
        of_b = b + member // GROUP
        for part in tl.static_range(max(TABLES, 1)):
            steps, index, count = steps_of(
                table, table_strides, of_b, h, first, m, part, SPARSE_COLUMNS, SPARSE_ROWS, ROWS
            )
            begin = first // ROWS if CAUSAL else 0 * steps
            start = start_of(begin, index, table_strides, count, part, SPARSE_ROWS, ROWS)
            for step in tl.range(begin, steps, num_stages=STAGES):
                of_keys, of_values = add_queries(
                    of_keys, of_values, keys, values, of_head(q, q_strides, of_b, h),
                    of_head(grad, grad_strides, of_b, h), of_head(along, row_strides, of_b, h),
                    of_head(sums, row_strides, of_b, h), start, of_b, h, first + c, q_strides,
                    grad_strides, row_strides, m, n, given, part,
                )  # fmt: skip
                start = start_of(step + 1, index, table_strides, count, part, SPARSE_ROWS, ROWS)
    out = of_head(out, out_strides, b, shared)
    store_rows(out, of_keys * SCALE, first, c, d, out_strides, n, WIDTH)
    v_out = of_head(v_out, v_out_strides, b, shared)
    store_rows(v_out, of_values, first, c, v_d, v_out_strides, n, V_WIDTH)
