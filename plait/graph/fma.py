"""Makes addcmul and addcdiv again of what Dynamo makes of them: an fma of a product or quotient
with a number.

Eager's kernels multiply by the number first, and half types are rounded once, not after every step.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from plait import compat
from plait.graph.edit import aten, value_of

_WHOLE = {aten.mul.Tensor: aten.addcmul.default, aten.div.Tensor: aten.addcdiv.default}


def gather_products(gm: GraphModule) -> int:
    """Rewrites in place; returns how many nodes changed."""
    changed = 0
    for node in gm.graph.nodes:
        if (
            node.op != "call_function"
            or node.target not in compat.decompositions.fused_multiply_add()
        ):
            continue
        product, value, base = node.args
        if not isinstance(product, Node) or product.target not in _WHOLE:
            continue
        number = value_of(value) if isinstance(value, Node) else value
        wide = value_of(node).dtype
        tensors = (base, *product.args)
        if (
            isinstance(number, int | float | torch.SymFloat)
            and wide.is_floating_point
            and all(_is(t, wide) for t in tensors)
        ):
            node.target, node.args, node.kwargs = _WHOLE[product.target], tensors, {"value": value}
            changed += 1
    return changed


def _is(x: object, dtype: torch.dtype) -> bool:
    value = value_of(x) if isinstance(x, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == dtype
