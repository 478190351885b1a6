"""A kernel of a product of matrices, in Triton: text that `kernel/triton/product.py` puts into a
module. It is not imported.

A program takes a tile of the result, of one of a batch of products, and walks along k, or along one
of several parts of it. What is computed of the tile, and where it goes, says the function finish.

Before this text stand the function finish, and right_tile where it is called. given: what they
load; outs: what is written. Strides are of batch, row and column. Constants:
rows, columns, depth: rows and columns of a tile, and how far a step walks along k
turned: tiles are computed transposed: tensor cores want many rows, and take few columns
parts: programs that share a walk
row_edge, column_edge, depth_edge: the last tile, or step, may be larger than what is left
stages: of the loop
made: the right matrix is no tensor: the function right_tile makes a tile of it, columns by a step
whole: factors are integers of 8 bits
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
        x = tl.load(at, (r < r_end) & (c < c_end), other=0)
    elif r_edge:
        x = tl.load(at, r < r_end, other=0)
    elif c_edge:
        x = tl.load(at, c < c_end, other=0)
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
def product(
    left, right, given, outs, left_strides, right_strides, m, n, k, rows: tl.constexpr,
    columns: tl.constexpr, depth: tl.constexpr, turned: tl.constexpr, parts: tl.constexpr,
    row_edge: tl.constexpr, column_edge: tl.constexpr, depth_edge: tl.constexpr,
    stages: tl.constexpr, made: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    part = t % parts
    t = t // parts
    wide, high = tl.cdiv(n, columns), tl.cdiv(m, rows)
    column, row, h = (t % wide) * columns, (t // wide) % high * rows, t // (wide * high)
    steps = tl.cdiv(tl.cdiv(k, depth), parts)
    first = part * steps * depth
    last = tl.minimum(k, first + steps * depth)
    i, j, d = tl.arange(0, rows), tl.arange(0, columns), tl.arange(0, depth)
    x_at = at_tile(left, h, row, first, left_strides)
    y_at = at_tile(right, h, first, column, right_strides)
    kind: tl.constexpr = tl.int32 if whole else tl.float32
    if turned:
        sums = tl.zeros((columns, rows), kind)
    else:
        sums = tl.zeros((rows, columns), kind)
    r, c = m - row, n - column
    for step in tl.range(first, last, depth, num_stages=stages):
        s = k - step
        if turned:
            x = tile_of(x_at, i[None, :], d[:, None], left_strides, r, s, row_edge, depth_edge)
            if made:
                y = right_tile(h, step // depth, column + j[:, None], j[:, None] < c, right, given)
            else:
                y = tile_of(
                    y_at, d[None, :], j[:, None], right_strides, s, c, depth_edge, column_edge
                )
            sums = tl.dot(y, x, sums, out_dtype=kind)
        else:
            x = tile_of(x_at, i[:, None], d[None, :], left_strides, r, s, row_edge, depth_edge)
            if made:
                z = right_tile(h, step // depth, column + j[:, None], j[:, None] < c, right, given)
                y = tl.trans(z)
            else:
                y = tile_of(
                    y_at, d[:, None], j[None, :], right_strides, s, c, depth_edge, column_edge
                )
            sums = tl.dot(x, y, sums, out_dtype=kind)
        x_at += depth * left_strides[2]
        y_at += depth * right_strides[1]
    if turned:
        sums = tl.trans(sums)
    i, j = row + i[:, None], column + j[None, :]
    finish(sums, part, h, i, j, i < m, j < n, given, outs)
