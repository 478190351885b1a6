"""A kernel of a large product of matrices, in Triton: text that `kernel/triton/product.py` puts
behind that of product.py, with functions that it calls. It is not imported.

As many programs as the device holds take tiles of the result, one after the other; the loads of the
next tile are under way while one is finished. Factors are loaded by descriptors (TMA): in memory
the numbers of a row of the left one lie side by side, and of the right one those of a column or of
a row. Arguments and constants are those of product.py, and
across: of the right factor those of a row do
piece: columns of a tile that are finished at once
"""

import triton
import triton.language as tl


@triton.jit
def finish_by_pieces(sums, piece: tl.constexpr, i, column, m, n, given, outs):
    """Finishes a tile that begins at a column, so many of its columns at a time: they pass through
    memory that is beside that of steps."""
    if sums.shape[1] > piece:
        rows: tl.constexpr = sums.shape[0]
        near: tl.constexpr = sums.shape[1] // 2
        one, other = tl.split(tl.permute(tl.reshape(sums, (rows, 2, near)), (0, 2, 1)))
        finish_by_pieces(one, piece, i, column, m, n, given, outs)
        finish_by_pieces(other, piece, i, column + near, m, n, given, outs)
    else:
        j = column + tl.arange(0, sums.shape[1])[None, :]
        finish(sums, sums, 0, 0, i, j, i < m, j < n, given, outs)


@triton.jit
def described_product(
    left, right, given, outs, left_strides, right_strides, m, n, k, rows: tl.constexpr,
    columns: tl.constexpr, depth: tl.constexpr, stages: tl.constexpr, whole: tl.constexpr,
    group: tl.constexpr, piece: tl.constexpr, across: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = tl.int32 if whole else tl.float32
    x_tiles = tl.make_tensor_descriptor(left, [m, k], [left_strides[1], 1], [rows, depth])
    if across:
        y_tiles = tl.make_tensor_descriptor(right, [k, n], [right_strides[1], 1], [depth, columns])
    else:
        y_tiles = tl.make_tensor_descriptor(right, [n, k], [right_strides[2], 1], [columns, depth])
    wide, high = tl.cdiv(n, columns), tl.cdiv(m, rows)
    for t in tl.range(tl.program_id(0), wide * high, tl.num_programs(0), flatten=True):
        row, column = tile_at(t, wide, high, group)
        row, column = row * rows, column * columns
        sums = tl.zeros((rows, columns), kind)
        for step in tl.range(0, tl.cdiv(k, depth), num_stages=stages):
            x = x_tiles.load([row, step * depth])
            if across:
                y = y_tiles.load([step * depth, column])
            else:
                y = y_tiles.load([column, step * depth]).T
            sums = add_product(sums, x, y, 0, False, False)
        i = row + tl.arange(0, rows)[:, None]
        finish_by_pieces(sums, piece, i, column, m, n, given, outs)
