"""Products under `batch_invariant`: each row of a result is computed the same way, however many
there are.

Comes in: two matrices, or a batch of each. Goes out: their product in float32 by a kernel whose
tiles and steps along k depend on the shape of the right matrix alone, or None where there is no
such kernel: loops compute it then.
"""

from __future__ import annotations

from plait.ir.calls import Extern, TensorArg
from plait.ir.dtypes import bf16, f16, f32
from plait.ir.expr import Expr, Size, contiguous_strides, product
from plait.ir.product import Panels
from plait.lower.align_rows import aligned, with_even_depth
from plait.lower.core import Lowering, View
from plait.lower.exact import ALWAYS
from plait.lower.memory import copy, step_along, tensor_arg
from plait.lower.product import call, launch, row_cut
from plait.runtime.packed import panel_width

_KEPT = (
    "aten::matmul", "aten::_grouped_mm", "aten::_scaled_dot_product_", "higher_order::flex_",
    "plait::packed_", "plait::scaled_conv", "plait::depthwise_conv",
)  # fmt: skip


def keeps_rows(call: Extern) -> bool:
    """Whether a row of what a call gives has the same bits in any batch, by construction: of
    kernels of ours, of what moves elements, and of convolutions of one image. What a library does
    with more rows it does not say."""
    if call.kernel is not None:
        return call.op.startswith(_KEPT)
    if call.op.startswith(_KEPT) and call.outs[0] is None and "backward" not in call.op:
        return True  # sums of attention, for its backward pass alone
    if call.control is not None:  # its graphs have calls of their own
        return True
    if call.is_operator and call.op.partition("::")[2].partition(".")[0] in ALWAYS:
        return True
    images = next((a for a in call.args if isinstance(a, TensorArg)), None)
    one = images is not None and images.shape[0] == 1
    return one and call.op.startswith(("aten::convolution", "aten::_convolution"))


def by_rows(ctx: Lowering, a: View, b: View, rounds: bool) -> View | None:
    """a @ b of (..., m, k) and (..., k, n). rounds: to the dtype of a, where the kernel can."""
    if ctx.facts().is_host:
        return _by_host(ctx, a, b, rounds)
    return _on_device(ctx, a, b) if ctx.facts().streams else None


# --------------------------------------------------------------------------------------- on a host
def _by_host(ctx: Lowering, a: View, b: View, rounds: bool) -> View | None:
    """The product by a kernel that packs a panel of the right matrix at a time."""
    *batch, m, k = a.shape
    n = b.shape[-1]
    if not (isinstance(k, int) and isinstance(n, int) and k > 0 and n > 0):
        return None
    if not ctx.facts().eager_cpu or a.dtype not in (f32, bf16, f16) or b.dtype != a.dtype:
        return None
    if len(batch) > 1:
        return None
    rows, own = product((*batch, m)), contiguous_strides(a.shape)
    given = tensor_arg(ctx, b)
    if 1 not in given.strides[-2:]:
        given = tensor_arg(ctx, b, contiguous_strides(b.shape))
    out = ctx.new_buffer(a.dtype if rounds else f32, (*batch, m, n), fixed=True)

    def place(v: tuple[Expr, ...]) -> tuple[Size, ...]:
        _, _, i, j = v
        return (i // m, i % m, j) if batch else (i, j)

    label = f"plait_loose_mm_{k}x{n}"
    args = (tensor_arg(ctx, a, own), given, rows, m)
    how = Panels(k, n, panel_width(n), form="loose")
    return call(ctx, ("aten::matmul", label), args, out, (1, 1, rows, n), place, k, how)


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
