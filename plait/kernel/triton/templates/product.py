"""A kernel of a product of matrices, in Triton: text that `kernel/triton/product.py` puts into a
module. It is not imported.

A program takes a tile of the result, of one of a batch of products, and walks along k, or along one
of PARTS of it. What is computed of the tile, and where it goes, says the function finish.

Before this text stand constants:
ROWS, COLUMNS, DEPTH: rows and columns of a tile, and how far a step walks along k
TURNED: tiles are computed transposed: tensor cores want many rows, and take few columns
PARTS: programs that share a walk
ROW_EDGE, COLUMN_EDGE, DEPTH_EDGE: the last tile, or step, may be larger than what is left
STAGES: of the loop
MADE: the right matrix is no tensor: the function right_tile makes a tile of it, columns by a step
and the function finish. given: what it loads; outs: what it writes. Strides are of batch, row and
column.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(
    p, r, c, strides, r_end, c_end, r_edge: tl.constexpr, c_edge: tl.constexpr
):  # fmt: skip
    """Elements of a matrix at rows r and columns c, one of both a column; 0 outside of it."""
    at = p + (r * strides[1] + c * strides[2])
    if r_edge and c_edge:
        x = tl.load(at, (r < r_end) & (c < c_end), other=0.0)
    elif r_edge:
        x = tl.load(at, r < r_end, other=0.0)
    elif c_edge:
        x = tl.load(at, c < c_end, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def at_tile(p, h, r, c, strides):
    """Where a tile begins: element (r, c) of matrix h of a batch."""
    return p + (
        h.to(tl.int64) * strides[0] + r.to(tl.int64) * strides[1] + c.to(tl.int64) * strides[2]
    )


@triton.jit
def product(left, right, given, outs, left_strides, right_strides, m, n, k):
    t = tl.program_id(0)
    part = t % PARTS
    t = t // PARTS
    wide, high = tl.cdiv(n, COLUMNS), tl.cdiv(m, ROWS)
    column, row, h = (t % wide) * COLUMNS, (t // wide) % high * ROWS, t // (wide * high)
    steps = tl.cdiv(tl.cdiv(k, DEPTH), PARTS)
    first = part * steps * DEPTH
    last = tl.minimum(k, first + steps * DEPTH)
    i, j, d = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    x_at = at_tile(left, h, row, first, left_strides)
    y_at = at_tile(right, h, first, column, right_strides)
    if TURNED:
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    r, c = m - row, n - column
    for step in tl.range(first, last, DEPTH, num_stages=STAGES):
        s = k - step
        if TURNED:
            x = tile_of(x_at, i[None, :], d[:, None], left_strides, r, s, ROW_EDGE, DEPTH_EDGE)
            if MADE:
                y = right_tile(h, step // DEPTH, column + j[:, None], j[:, None] < c, right, given)
            else:
                y = tile_of(
                    y_at, d[None, :], j[:, None], right_strides, s, c, DEPTH_EDGE, COLUMN_EDGE
                )
            sums = tl.dot(y, x, sums)
        else:
            x = tile_of(x_at, i[:, None], d[None, :], left_strides, r, s, ROW_EDGE, DEPTH_EDGE)
            if MADE:
                z = right_tile(h, step // DEPTH, column + j[:, None], j[:, None] < c, right, given)
                y = tl.trans(z)
            else:
                y = tile_of(
                    y_at, d[:, None], j[None, :], right_strides, s, c, DEPTH_EDGE, COLUMN_EDGE
                )
            sums = tl.dot(x, y, sums)
        x_at += DEPTH * left_strides[2]
        y_at += DEPTH * right_strides[1]
    if TURNED:
        sums = tl.trans(sums)
    i, j = row + i[:, None], column + j[None, :]
    finish(sums, part, h, i, j, i < m, j < n, given, outs)
