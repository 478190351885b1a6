"""A kernel of a large product of matrices, in Triton: text that `kernel/triton/product.py` puts
behind that of product.py, with functions that it calls. It is not imported.

As many programs as the device holds take tiles of the result, one after the other; the loads of the
next tile are under way while one is finished. Factors have sums along k side by side, and are
loaded by descriptors (TMA). Arguments and constants are those of product.py; kinds divides m.
flat: loops over tiles and steps are one, which the compiler cannot make where kinds differ
"""

import triton
import triton.language as tl


@triton.jit
def described_product(
    left, right, given, outs, left_strides, right_strides, m, n, k, rows: tl.constexpr,
    columns: tl.constexpr, depth: tl.constexpr, stages: tl.constexpr, whole: tl.constexpr,
    group: tl.constexpr, kinds: tl.constexpr, flat: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = tl.int32 if whole else tl.float32
    y_tiles = tl.make_tensor_descriptor(right, [n, k], [right_strides[2], 1], [columns, depth])
    if kinds > 1:
        wide, high = tl.cdiv(n + 7, columns), tl.cdiv(m, rows * kinds) * kinds
        x_tiles = tl.make_tensor_descriptor(
            left, [m // kinds, kinds, k], [kinds * left_strides[1], left_strides[1], 1],
            [rows, 1, depth],
        )  # fmt: skip
    else:
        wide, high = tl.cdiv(n, columns), tl.cdiv(m, rows)
        x_tiles = tl.make_tensor_descriptor(left, [m, k], [left_strides[1], 1], [rows, depth])
    for t in tl.range(tl.program_id(0), wide * high, tl.num_programs(0), flatten=flat):
        row, column = tile_at(t, wide, high, group)
        which = row % kinds
        row = row // kinds * rows
        column = column * columns - which * n % 8 if kinds > 1 else column * columns
        sums = tl.zeros((rows, columns), kind)
        for step in tl.range(0, tl.cdiv(k, depth), num_stages=stages):
            if kinds > 1:
                x = x_tiles.load([row, which, step * depth]).reshape(rows, depth)
            else:
                x = x_tiles.load([row, step * depth])
            y = y_tiles.load([column, step * depth])
            sums = tl.dot(x, y.T, sums, out_dtype=kind)
        i = row * kinds + which + kinds * tl.arange(0, rows)[:, None]
        j = column + tl.arange(0, columns)[None, :]
        if kinds > 1:
            if (column >= 0) & (column + columns <= n) & are_aligned(outs):
                finish_aligned(sums, 0, 0, i, j, i < m, j < n, given, outs)
            else:
                finish(sums, 0, 0, i, j, i < m, (j >= 0) & (j < n), given, outs)
        else:
            finish(sums, 0, 0, i, j, i < m, j < n, given, outs)
