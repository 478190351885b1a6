"""Products under `batch_invariant`: each row of a result is computed the same way, however many
there are.

Comes in: two matrices, or a batch of each. Goes out: their product in float32 by a kernel whose
tiles and steps along k depend on the shape of the right matrix alone, or None where there is no
such kernel: loops compute it then.
"""

from __future__ import annotations

from plait.ir.expr import contiguous_strides, product
from plait.lower.align_rows import aligned, with_even_depth
from plait.lower.core import Lowering, View
from plait.lower.memory import copy, step_along
from plait.lower.product import launch, row_cut


def by_rows(ctx: Lowering, a: View, b: View) -> View | None:
    """a @ b of (..., m, k) and (..., k, n)."""
    return _on_device(ctx, a, b) if ctx.facts().streams else None


# ---------------------------------------------------------------------------------------- on a GPU
def _on_device(ctx: Lowering, a: View, b: View) -> View | None:
    """By a kernel whose sums walk along k in one order, whatever its tiles are."""
    how = row_cut(ctx, a, b)
    if how is None:
        return None
    flops = product((2, *a.shape, b.shape[-1]))
    a, b = (aligned(ctx, _in_rows(ctx, x), flops) for x in with_even_depth(ctx, a, b, flops))
    return launch(ctx, a, b, how)


def _in_rows(ctx: Lowering, x: View) -> View:
    """A matrix whose rows or columns lie side by side: a copy where they do not."""
    if 1 in (step_along(ctx, x, len(x.shape) - 1), step_along(ctx, x, len(x.shape) - 2)):
        return x
    return copy(ctx, x, contiguous_strides(x.shape), fixed=True)
