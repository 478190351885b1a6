"""A kernel of a large product of matrices, in Triton: text that `kernel/triton/product.py` puts
behind that of product.py, with functions that it calls. It is not imported.

As many programs as the device holds take tiles of the result, one after the other; the loads of the
next tile are under way while one is finished. Factors have sums along k side by side, and are
loaded by descriptors (TMA). Arguments and constants are those of product.py.
"""

import triton
import triton.language as tl


@triton.jit
def described_product(
    left, right, given, outs, left_strides, right_strides, m, n, k, rows: tl.constexpr,
    columns: tl.constexpr, depth: tl.constexpr, stages: tl.constexpr, whole: tl.constexpr,
    group: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = tl.int32 if whole else tl.float32
    x_tiles = tl.make_tensor_descriptor(left, [m, k], [left_strides[1], 1], [rows, depth])
    y_tiles = tl.make_tensor_descriptor(right, [n, k], [right_strides[2], 1], [columns, depth])
    wide, high = tl.cdiv(n, columns), tl.cdiv(m, rows)
    for t in tl.range(tl.program_id(0), wide * high, tl.num_programs(0), flatten=True):
        row, column = tile_at(t, wide, high, group)
        row, column = row * rows, column * columns
        sums = tl.zeros((rows, columns), kind)
        for step in tl.range(0, tl.cdiv(k, depth), num_stages=stages):
            x = x_tiles.load([row, step * depth])
            y = y_tiles.load([column, step * depth])
            sums = tl.dot(x, y.T, sums, out_dtype=kind)
        i = row + tl.arange(0, rows)[:, None]
        j = column + tl.arange(0, columns)[None, :]
        finish(sums, sums, 0, 0, i, j, i < m, j < n, given, outs)
