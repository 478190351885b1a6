"""Integer expressions for sizes, strides and indices: interned, immutable, in an affine normal
form.

`Size = int | Expr`; `+ - * // %` build expressions, and building simplifies at once, from the
ranges that symbols carry. `core` is the data, `ranges` what is known of values, `simplify` the
arithmetic, `fold` every walk, `text` expressions as Python. Nothing here knows SymPy or torch: the
border to ShapeEnv is `plait/lower/symbols.py`.
"""

from plait.ir.expr.core import INF, Atom, Expr, Mono, Size, atom_of, forget, interned, summands
from plait.ir.expr.fold import (
    BUILD,
    coefficient,
    divisors,
    evaluate,
    fold,
    free_symbols,
    is_contiguous,
    n_functions,
    substitute,
)
from plait.ir.expr.ranges import (
    bounds,
    known_eq,
    known_le,
    known_lt,
    known_nonneg,
    may_be_zero,
    symbol,
)
from plait.ir.expr.simplify import (
    call,
    ceildiv,
    compare,
    contiguous_strides,
    exact_div,
    numel,
    product,
    smax,
    smin,
    total,
)

__all__ = [
    "BUILD", "INF", "Atom", "Expr", "Mono", "Size", "atom_of", "bounds", "call", "ceildiv",
    "coefficient", "compare", "contiguous_strides", "divisors", "evaluate", "exact_div", "fold",
    "forget", "free_symbols", "interned", "is_contiguous", "known_eq", "known_le", "known_lt",
    "known_nonneg", "may_be_zero", "n_functions", "numel", "product", "smax", "smin", "substitute",
    "summands", "symbol", "total",
]  # fmt: skip
