"""The kernels that the programs beside this file launch from C++, C and Rust."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


@triton.jit
def softmax_kernel(out, x, n_columns, BLOCK: tl.constexpr):
    """A program a row."""
    row = tl.program_id(0).to(tl.int64) * n_columns
    i = tl.arange(0, BLOCK)
    value = tl.load(x + row + i, i < n_columns, float("-inf"))
    top = tl.exp(value - tl.max(value))
    tl.store(out + row + i, top / tl.sum(top), i < n_columns)
