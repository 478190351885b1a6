"""Vector functions of the prelude, one table an instruction set.

Everything has a version in plain vector extensions that any compiler takes; where g++ makes slow
code of it and an instruction exists, an instruction's builtin is used under g++. vT is one register
of T (see prelude). m: a mask, lanes 0 or -1.
"""

from __future__ import annotations

from plait.kernel.cpu.elementary import elementary
from plait.kernel.cpu.simd.arithmetic import (
    arithmetic,
    extremes,
    lanewise,
    pair_sums,
    random,
    rounding,
)
from plait.kernel.cpu.simd.conversions import conversions, halves
from plait.kernel.cpu.simd.lanes import horizontal, rearranged, scans, shape, tiles
from plait.kernel.cpu.simd.memory import gathers, memory
from plait.runtime.toolchain import Isa


def simd(isa: Isa) -> dict[str, str]:
    """name -> definition, in an order in which later entries use earlier ones."""
    out: dict[str, str] = {}
    for part in (
        shape,
        arithmetic,
        conversions,
        memory,
        rounding,
        pair_sums,
        lanewise,
        halves,
        gathers,
        rearranged,
        horizontal,
        scans,
        tiles,
        random,
    ):
        out.update(part(isa))
    return {**out, **elementary(isa), **extremes(isa)}
