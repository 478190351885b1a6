"""Sums of products of tiles, in Triton: text that kernels of products and of attention begin with.
It is not imported.

tf32: factors in float32 are rounded by the function p_tf32, which stands before this text: 1; or
    each is taken for a sum of two that are, of whose products the 3 largest are summed: 3; or they
    are multiplied as they are, without tensor cores: 0. Of the 3 Ootomo and Yokota (2022) tell.
"""

import triton
import triton.language as tl


@triton.jit
def multiplied(x, y, sums, tf32: tl.constexpr):
    """sums + x @ y by one instruction. Of a walk of one step Triton would start the sum with what
    is added to it later, such as a bias, and so round otherwise than where that is added by another
    kernel; it does not where a number of imprecise additions is given, which is of use to 8 bits
    alone."""
    most: tl.constexpr = None if x.dtype.primitive_bitwidth == 8 else 1
    how: tl.constexpr = "tf32" if tf32 else "ieee"
    return tl.dot(x, y, sums, how, max_num_imprecise_acc=most, out_dtype=sums.dtype)


@triton.jit
def in_two(x, wary: tl.constexpr):
    """Two numbers of 10 bits whose sum is x to 21 bits. The second of an infinity is NaN, and so,
    unless wary, of what is so large that it is rounded to one."""
    high = p_tf32(x)
    if wary:
        cut = (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
        high = tl.where(tl.abs(high) == float("inf"), cut, high)
    return high, x - high


@triton.jit
def add_product(sums, x, y, tf32: tl.constexpr, turned: tl.constexpr, wary: tl.constexpr):
    """sums + x @ y. turned: y is of the left matrix: the products of a small part are summed in one
    order all the same. Tensor cores cut off what they sum, so they begin at 0 each time. wary:
    infinities are what eager's are; else NaN may stand for one."""
    if tf32 == 3:
        x, x_rest = in_two(x, wary)
        y, y_rest = in_two(y, wary)
        rest = tl.zeros(sums.shape, tl.float32)
        if turned:
            rest = multiplied(x_rest, y, multiplied(x, y_rest, rest, tf32), tf32)
        else:
            rest = multiplied(x, y_rest, multiplied(x_rest, y, rest, tf32), tf32)
        if wary:  # beside an infinity they mean nothing
            rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)
        sums += multiplied(x, y, rest, tf32)
    elif tf32 == 1:
        sums = multiplied(p_tf32(x), p_tf32(y), sums, tf32)
    else:
        sums = multiplied(x, y, sums, tf32)
    return sums
