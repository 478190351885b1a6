"""A product of matrices as one kernel, and what is computed of it, which never reaches memory.

`plait/lower/product.py` records a `Product` as the kernel of an `Extern`,
`plait/schedule/join_readers.py` gives it loops that read it, and the target writes it
(`Target.write_template`).
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.ir.calls import DeviceKernel
from plait.ir.loops import Load, Pointwise, walk

PRODUCT = "product"
"""What results load of the product: an element in float32, of no dimension."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is shared by programs: rows and columns of a tile, how far a step walks along
    k, and in how many parts of k each tile is computed."""

    rows: int
    columns: int
    depth: int
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Product(DeviceKernel):
    """A kernel of a product of matrices. Its operands: left (m, k) and right (k, n), or a batch of
    each; then what results load, `given0`, `given1`, ...

    results: a loop for each result of the launch, over part, batch, row and column of the product,
        which it loads as PRODUCT.
    cut: into tiles, and parts of the sum over k; each part is a product of its own.
    """

    results: tuple[Pointwise, ...]
    cut: Cut

    def fault(self, n_operands: int, outs: tuple[str | None, ...]) -> str:
        """Why it cannot be given so many operands and these results, in words; "" if it can."""
        c = self.cut
        powers = all(n >= 16 and n & (n - 1) == 0 for n in (c.rows, c.columns, c.depth))
        if n_operands < 2 or c.parts < 1 or not powers or not self.results:
            return "a kernel of a product of an unknown kind"
        if outs != tuple(r.out for r in self.results):
            return "a kernel of a product that gives other results than it computes"
        known = {PRODUCT, *(f"given{k}" for k in range(n_operands - 2))}
        for r in self.results:
            loaded = {n.attr.buf for n in walk((r.body,)) if isinstance(n.attr, Load)}
            if len(r.vars) != 4 or r.index is None or loaded - known:
                return "a kernel of a product whose results load what is no operand"
        return ""
