"""A kernel of a product of matrices, in Triton: text that `kernel/triton/product.py` puts into a
module. It is not imported.

A program takes a tile of the result, of one of a batch of products, and walks along k, or along one
of several parts of it. What is computed of the tile, and where it goes, says the function finish.

Before this text stand those of add_product.py, the function finish, and right_tile and
finish_aligned where they are called.
given: what they load; outs: what is written. Strides are of batch, row and column. Constants:
rows, columns, depth: rows and columns of a tile, and how far a step walks along k
group: rows of tiles that programs go down before they go on to the next column of tiles
kinds: 1, or, where rows of the result start anywhere, how many of them differ in alignment. A tile
    has every so manieth row, and its columns begin where these rows are aligned: up to 7 columns
    further to the left for other rows. The right matrix has columns far apart then
turned: tiles are computed transposed: tensor cores want many rows, and take few columns
half: columns c and c + half make a pair, for the first half of each 2 * half. The first half of a
    tile's columns is one of some pairs, the other what is beside them; 0: there are no pairs
parts: programs that share a walk
row_edge, column_edge, depth_edge: the last tile, or step, may be larger than what is left
stages: of the loop
at_once: steps of one turn of the loop: more than 1 where a step loads few bytes
made: the right matrix is no tensor: the function right_tile makes a tile of it, columns by a step
whole: factors are integers of 8 bits
tf32: how factors in float32 are multiplied, see add_product.py
matrices: so many right matrices have rows of their own, up to the ends that given begins with; 0:
    each has all
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
def tile_at(t, wide, high, group: tl.constexpr):
    """The row and column of tile t, of so many in a row and so many rows of them. Tiles that are
    computed at one time share what they load."""
    band, rest = t // (group * wide), t % (group * wide)
    tall = tl.minimum(high - band * group, group)
    return band * group + rest % tall, rest // tall


@triton.jit
def are_aligned(outs):
    """Whether all that is written starts at a multiple of 16 bytes."""
    bits = outs[0].to(tl.int64)
    for k in tl.static_range(1, len(outs)):
        bits |= outs[k].to(tl.int64)
    return bits % 16 == 0


@triton.jit
def first_of_pair(q, half: tl.constexpr):
    """The first column of pair q."""
    return q // half * (2 * half) + q % half


@triton.jit
def finish_pairs(sums, half: tl.constexpr, p, h, i, j, n, i_inside, given, outs):
    """Finishes a tile of pairs: each half, with the other beside it. j: first columns."""
    rows: tl.constexpr = sums.shape[0]
    near: tl.constexpr = sums.shape[1] // 2
    one, other = tl.split(tl.permute(tl.reshape(sums, (rows, 2, near)), (0, 2, 1)))
    finish(one, other, p, h, i, j, i_inside, j < n, given, outs)
    finish(other, one, p, h, i, j + half, i_inside, j < n, given, outs)


@triton.jit
def walk(
    sums, x_at, y_at, h, i, j, d, r, c, k, first, last, column, right, given, left_strides,
    right_strides, turned: tl.constexpr, row_edge: tl.constexpr, column_edge: tl.constexpr,
    depth_edge: tl.constexpr, depth: tl.constexpr, stages: tl.constexpr, at_once: tl.constexpr,
    made: tl.constexpr, tf32: tl.constexpr, wary: tl.constexpr,
):  # fmt: skip
    """The sums of a tile, along k. i, j: its rows and columns, of which r and c are left. wary: as
    of add_product."""
    for turn in tl.range(first, last, at_once * depth, num_stages=stages):
        for u in tl.static_range(at_once):
            step = turn + u * depth
            s = k - step
            if turned:
                x = tile_of(x_at, i[None, :], d[:, None], left_strides, r, s, row_edge, depth_edge)
                if made:
                    at = column + j[:, None]
                    y = right_tile(h, step // depth, at, j[:, None] < c, right, given)
                else:
                    y = tile_of(
                        y_at, d[None, :], j[:, None], right_strides, s, c, depth_edge, column_edge
                    )
                sums = add_product(sums, y, x, tf32, turned, wary)
            else:
                x = tile_of(x_at, i[:, None], d[None, :], left_strides, r, s, row_edge, depth_edge)
                if made:
                    at = column + j[:, None]
                    z = right_tile(h, step // depth, at, j[:, None] < c, right, given)
                    y = tl.trans(z)
                else:
                    y = tile_of(
                        y_at, d[:, None], j[None, :], right_strides, s, c, depth_edge, column_edge
                    )
                sums = add_product(sums, x, y, tf32, turned, wary)
            x_at += depth * left_strides[2]
            y_at += depth * right_strides[1]
    return sums


@triton.jit
def product(
    left, right, given, outs, left_strides, right_strides, m, n, k, rows: tl.constexpr,
    columns: tl.constexpr, depth: tl.constexpr, turned: tl.constexpr, parts: tl.constexpr,
    row_edge: tl.constexpr, column_edge: tl.constexpr, depth_edge: tl.constexpr,
    stages: tl.constexpr, at_once: tl.constexpr, made: tl.constexpr, whole: tl.constexpr,
    tf32: tl.constexpr, group: tl.constexpr, kinds: tl.constexpr, half: tl.constexpr,
    matrices: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    part = t % parts
    t = t // parts
    if kinds > 1:
        wide, high = tl.cdiv(n + 7, columns), tl.cdiv(m, rows * kinds) * kinds
    else:
        wide, high = tl.cdiv(n, columns), tl.cdiv(m, rows)
    h = t // (wide * high)
    row, column = tile_at(t % (wide * high), wide, high, group)
    i, j, d = tl.arange(0, rows), tl.arange(0, columns), tl.arange(0, depth)
    if half > 0:
        near: tl.constexpr = columns // 2
        pair = column * near
        column = first_of_pair(pair, half)
        j = first_of_pair(pair + j % near, half) + j // near * half - column
    else:
        column *= columns
    if kinds > 1:
        which = row % kinds
        row = row // kinds * (rows * kinds) + which
        column -= which * n % 8
        i *= kinds
    else:
        row *= rows
    steps = tl.cdiv(tl.cdiv(k, depth), parts)
    first = part * steps * depth
    last = tl.minimum(k, first + steps * depth)
    if matrices > 0:  # without rows of its own, a program has nothing to walk along
        begin = tl.load(given[0] + h - 1, h > 0, other=0)
        end = tl.where(h == matrices - 1, m, tl.load(given[0] + h))
        last = tl.where(tl.maximum(begin, row) < tl.minimum(end, row + rows), last, first)
    x_at = at_tile(left, h, row, first, left_strides)
    y_at = at_tile(right, h, first, column, right_strides)
    if kinds > 1:  # columns outside are never stored
        y_column = tl.minimum(tl.maximum(j, -column), n - 1 - column)
    else:
        y_column = j
    kind: tl.constexpr = tl.int32 if whole else tl.float32
    if turned:
        sums = tl.zeros((columns, rows), kind)
    else:
        sums = tl.zeros((rows, columns), kind)
    r, c = m - row, n - column
    sums = walk(
        sums, x_at, y_at, h, i, y_column, d, r, c, k, first, last, column, right, given,
        left_strides, right_strides, turned, row_edge, column_edge, depth_edge, depth, stages,
        at_once, made, tf32, False,
    )  # fmt: skip
    if tf32 == 3:  # noqa: SIM102  (which is known)
        if tl.max(tl.max((sums != sums).to(tl.int32), 1), 0) > 0:
            sums = walk(
                tl.zeros_like(sums), x_at, y_at, h, i, y_column, d, r, c, k, first, last, column,
                right, given, left_strides, right_strides, turned, row_edge, column_edge,
                depth_edge, depth, stages, at_once, made, tf32, True,
            )  # fmt: skip
    if turned:
        sums = tl.trans(sums)
    i = row + i[:, None]
    j = column + j[None, :]
    inside = i < m
    if matrices > 0:
        inside = inside & (i >= begin) & (i < end)
    if half > 0:
        q = first_of_pair(pair + tl.arange(0, near)[None, :], half)
        finish_pairs(sums, half, part, h, i, q, n, inside, given, outs)
    elif kinds > 1:
        if (column >= 0) & (column + columns <= n) & are_aligned(outs):
            finish_aligned(sums, sums, part, h, i, j, inside, j < n, given, outs)
        else:
            finish(sums, sums, part, h, i, j, inside, (j >= 0) & (j < n), given, outs)
    else:
        finish(sums, sums, part, h, i, j, inside, j < n, given, outs)
