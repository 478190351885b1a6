"""Products of matrices, and convolutions, with weights packed into panels, as one kernel each.

`plait/lower/packed.py` records a `PackedProduct` as the kernel of an `Extern`,
`plait/schedule/epilogues.py` gives it what is computed of its results, and the target writes it
(`Target.write_template`).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from plait.ir.attention import Formula, formula_text, read_formula
from plait.ir.calls import DeviceKernel
from plait.ir.expr.text import Scope, SymbolReader
from plait.ir.product import PRODUCT


@dataclass(frozen=True, slots=True)
class Window:
    """The points of an image that a filter is laid over."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def is_point(self) -> bool:
        """Whether every point of the image is met once, by itself."""
        return (self.kernel, self.stride, self.padding) == ((1, 1), (1, 1), (0, 0))


@dataclass(frozen=True, slots=True)
class PackedProduct(DeviceKernel):
    """One product: result[m, n] is the sum of x[m, k] * matrix[k, n] over k, or what the epilogue
    makes of it. All numbers are f32.

    Its operands: x, row-major, or an image with channels innermost; the panels; what the epilogue
    loads. Its sizes: rows of the result; of an image the height and width, then those of the
    result, each row of which is one of its points.

    depth: numbers of a row of x, or channels of an image.
    columns: of the result.
    width: of a panel.
    window: over an image; None for rows.
    epilogue: over m and n; it loads `product` and `given0`, `given1`, ... at [m, n].
    """

    depth: int
    columns: int
    width: int
    window: Window | None = None
    epilogue: Formula | None = None

    def fault(self, n_operands: int, n_sizes: int, n_results: int) -> str:
        """Why it cannot be given these, in words; "" if it can."""
        if n_results != 1 or n_sizes != (1 if self.window is None else 5):
            return "a product with other results or sizes than one has"
        given = {f"given{k}" for k in range(n_operands - 2)} | {PRODUCT}
        loaded = frozenset((PRODUCT,)) if self.epilogue is None else self.epilogue.loaded
        if n_operands < 2 or not loaded <= given:
            return "a product whose epilogue loads what is no operand"
        if min(self.depth, self.columns, self.width) < 1:
            return "a product of nothing"
        return ""


def packed_text(p: PackedProduct, scope: Scope) -> str:
    """A kernel as an expression that `read_packed` reads."""
    w, epilogue = p.window, p.epilogue and formula_text(p.epilogue, scope)
    window = None if w is None else (w.kernel, w.stride, w.padding, w.dilation)
    return (
        f"PackedProduct(name={p.name!r}, depth={p.depth}, columns={p.columns}, width={p.width}, "
        f"window={window!r}, epilogue={epilogue!r})"
    )


def read_packed(call: ast.Call, symbols: SymbolReader) -> PackedProduct:
    """The kernel of an expression. Raises TextError."""
    facts = {k.arg or "": ast.literal_eval(k.value) for k in call.keywords}
    if facts.get("window") is not None:
        facts["window"] = Window(*facts["window"])
    if facts.get("epilogue") is not None:
        facts["epilogue"] = read_formula(facts["epilogue"], call, symbols)
    return PackedProduct(**facts)
