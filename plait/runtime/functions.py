"""Functions of sizes that are no polynomial, quotient or bound: what Python's operators and `math`
make of them.

A float is written as the 64 bits of its double, read as an integer: `real(3)` is the word of 3.0.
So every expression of sizes stays one of integers, and a target needs nothing but a call for each
name. The order of the table is the numbering in plans; `native/core/functions.cpp` computes the
same.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable


def bits(x: float) -> int:
    """The word of a double."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def number(word: int) -> float:
    """The double that a word stands for."""
    return float(struct.unpack("<d", struct.pack("<q", word))[0])


_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "bit_and": operator.and_, "bit_or": operator.or_, "bit_xor": operator.xor,
    "shift_left": operator.lshift, "shift_right": operator.rshift,
    "power": lambda a, b: int(a ** _natural(b)),
}  # fmt: skip
_OF_INTEGERS: dict[str, Callable[[int, int], float]] = {
    "real": lambda a, _: float(a),
    "true_div": operator.truediv,
}
_OF_ONE: dict[str, Callable[[float], float]] = {
    "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "log2": math.log2, "sin": math.sin,
    "cos": math.cos, "tan": math.tan, "asin": math.asin, "acos": math.acos, "atan": math.atan,
    "sinh": math.sinh, "cosh": math.cosh, "tanh": math.tanh, "asinh": math.asinh, "real_abs": abs,
    "real_trunc": lambda x: float(math.trunc(x)),
}  # fmt: skip
_OF_TWO: dict[str, Callable[[float, float], float]] = {
    "real_add": operator.add, "real_mul": operator.mul, "real_div": operator.truediv,
    "real_power": math.pow, "real_min": min, "real_max": max,
}  # fmt: skip
_TO_INTEGER: dict[str, Callable[[float], int]] = {
    "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "round": round,
}  # fmt: skip
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "real_eq": operator.eq, "real_ne": operator.ne, "real_lt": operator.lt, "real_le": operator.le,
}  # fmt: skip


def _natural(b: int) -> int:
    if b < 0:
        raise ValueError("a size to a negative power")
    return b


def _rounded(word: int, digits: int) -> int:
    return bits(round(number(word), _natural(digits)))


def _named(name: str, function: Callable[[int, int], int]) -> Callable[[int, int], int]:
    """A function of two words that fits into one. Raises OverflowError where the result does
    not."""

    def call(a: int, b: int) -> int:
        result = int(function(a, b))
        if not -(2**63) <= result < 2**63:
            raise OverflowError(f"{name} of sizes does not fit into 64 bits")
        return result

    call.__name__ = call.__qualname__ = f"size_{name}"
    return call


FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    name: _named(name, function)
    for name, function in (
        *_INTEGERS.items(),
        *((k, lambda a, b, f=f: bits(f(a, b))) for k, f in _OF_INTEGERS.items()),
        *((k, lambda a, _, f=f: bits(f(number(a)))) for k, f in _OF_ONE.items()),
        *((k, lambda a, b, f=f: bits(f(number(a), number(b)))) for k, f in _OF_TWO.items()),
        ("real_round", _rounded),
        *((k, lambda a, _, f=f: f(number(a))) for k, f in _TO_INTEGER.items()),
        *((k, lambda a, b, f=f: f(number(a), number(b))) for k, f in _COMPARE.items()),
    )
}
"""Name -> what it makes of two words (functions of one ignore the second)."""
