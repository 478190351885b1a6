"""Prints which part a program of a kernel with parts works at, where all parts do the same to other
tensors: their pointers and lengths are arguments.

Parts have their programs one after the other, so a program finds its own by bisection: a handful of
branches, that all threads of it take, whatever the number of parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.schedule.dedup import LENGTH, part_operands
from plait.schedule.plan import Kernel


def choose_part(kernel: Kernel, pointers: Sequence[str], sizes: Sequence[str]) -> list[str]:
    """Lines that give p0, p1, ..., length and program the values that the nest of all parts has in
    the part of this program. pointers, sizes: the kernel's arguments."""
    n, names = len(kernel.parts), [f"p{k}" for k in range(len(kernel.parts[0].args))]
    ends = sizes[-n:]

    def within(first: int, last: int) -> list[str]:
        if first == last:
            bufs, (length,) = part_operands(kernel, first)
            start = f"program - {ends[first - 1]}.to(tl.int64)" if first else "program"
            values = (*(pointers[k] for k in bufs), f"{sizes[length]}.to(tl.int64)", start)
            return [f"{', '.join((*names, LENGTH, 'program'))} = {', '.join(values)}"]
        middle = (first + last) // 2
        return [
            f"if program < {ends[middle]}.to(tl.int64):",
            *(f"    {line}" for line in within(first, middle)),
            "else:",
            *(f"    {line}" for line in within(middle + 1, last)),
        ]

    return ["program = tl.program_id(0).to(tl.int64)", *within(0, n - 1)]
