"""What a kernel finds wrong at run time, as data: the error that a failed check raises and its
words.

A check is named by a node (`bounded`, `nonzero`) of a loop body; kernels report it by number, the
wrapper carries the list of a kernel's checks, and every target raises the same error as eager does
for the same mistake.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.ir.expr import Size

# The classes that eager raises; the position is the code in a native plan.
ERRORS: tuple[str, ...] = ("IndexError", "RuntimeError")


@dataclass(frozen=True, slots=True)
class Check:
    """error: the class of ERRORS that a failure raises. message: what it says."""

    error: str
    message: str


@dataclass(frozen=True, slots=True)
class Bound:
    """The attribute of a `bounded` node: its value must be in [0, size), else `check` fails."""

    size: Size
    check: Check


ZERO_DIVISION = Check("RuntimeError", "ZeroDivisionError")
OUT_OF_RANGE = Check("IndexError", "index out of range in self")


def out_of_bounds(dim: int, size: Size, error: str = "IndexError", where: str = "") -> Check:
    """The check of an index into dimension `dim`, of that size. where: what eager's message starts
    with."""
    known = f" with size {size}" if isinstance(size, int) else ""
    return Check(error, f"{where}index is out of bounds for dimension {dim}{known}")
