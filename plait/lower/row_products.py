"""Products under `batch_invariant`: each row of a result is computed the same way, however many
there are.

Comes in: two matrices, or a batch of each. Goes out: their product in float32 by a kernel whose
tiles and steps along k depend on the shape of the right matrix alone, or None where there is no
such kernel: loops compute it then.
"""

from __future__ import annotations

from plait.lower.core import Lowering, View


def by_rows(ctx: Lowering, a: View, b: View) -> View | None:
    """a @ b of (..., m, k) and (..., k, n)."""
    return None
