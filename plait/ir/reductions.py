"""The table of reductions: how the values of a loop combine into one result.

One row a reduction. Lowering, the scheduler, the reference evaluator and the emitters read its
fields; a new reduction that combines by an op of `plait/ir/ops.py` is a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from plait.ir.dtypes import DType, b1, bf16, f16, f32, f64, i32, i64


def _zero(_: DType) -> float:
    return 0


def _one(_: DType) -> float:
    return 1


def _least(d: DType) -> float:
    if d.is_float:
        return -math.inf
    return -(1 << (8 * d.nbytes - 1)) if d.kind == "i" else 0


def _greatest(d: DType) -> float:
    if d.is_float:
        return math.inf
    return 1 if d == b1 else (1 << (8 * d.nbytes - (d.kind == "i"))) - 1


@dataclass(frozen=True, slots=True)
class ReductionDef:
    """A row.

    op: the op that combines two values; of positions, the comparison that a better value passes.
    identity: the value to begin with, by dtype: combining it changes nothing.
    meaning: in words.
    on: the kinds of dtypes it is defined for ('f', 'i', 'u', 'b').
    parts: its results, as what follows its name in an `acc` node.
    extreme: of positions, the reduction that gives the value found there.
    scans: whether it may run: a result for every value, of those up to it.
    wide_scan: whether a running one of float32 accumulates in double, as eager's does.
    cycles: CPU cycles of a point besides its value.
    """

    op: str
    identity: Callable[[DType], float]
    meaning: str
    on: str = "fiub"
    parts: tuple[str, ...] = ("",)
    extreme: str = ""
    scans: bool = False
    wide_scan: bool = False
    cycles: float = 0.0

    @property
    def merges(self) -> bool:
        """Whether results of parts combine as values do."""
        return not self.extreme and len(self.parts) == 1

    def accumulates(self, d: DType, running: bool = False) -> DType:
        """The dtype in which values of d are combined."""
        if running:
            return f64 if self.wide_scan and d == f32 else d
        if d == b1 and self.on != "b":
            return i32
        return f32 if d in (f16, bf16) else d

    def gives(self, d: DType) -> DType:
        """The dtype of the results, of values of d."""
        return i64 if self.extreme else d


_POSITION = "i64 position, row-major over the reduced axes, of the first {}; the first NaN wins"

REDUCTIONS: dict[str, ReductionDef] = {
    "sum": ReductionDef(
        "add", _zero, "error no worse than of eager's pairwise sum", scans=True, wide_scan=True
    ),
    "prod": ReductionDef("mul", _one, "product", scans=True, wide_scan=True),
    "max": ReductionDef("max", _least, "NaN wins", scans=True),
    "min": ReductionDef("min", _greatest, "NaN wins", scans=True),
    "any": ReductionDef("or", _zero, "logical or", on="b"),
    "all": ReductionDef("and", _one, "logical and", on="b"),
    "xor": ReductionDef("xor", _zero, "bitwise", on="iub"),
    "argmax": ReductionDef("gt", _least, _POSITION.format("maximum"), extreme="max", cycles=8.0),
    "argmin": ReductionDef("lt", _greatest, _POSITION.format("minimum"), extreme="min", cycles=8.0),
    "welford": ReductionDef(
        "", _zero, "mean, sum of squared deviations from it, and count", on="f",
        parts=(".mean", ".m2", ".count"), cycles=2.5,
    ),
}  # fmt: skip
