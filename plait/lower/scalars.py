"""Rules that take tensors to integers and back, and run-time assertions."""

from __future__ import annotations

import torch

from plait.ir.expr import Expr, Size, atom_of, compare
from plait.lower.bindings import bindings, is_found_float
from plait.lower.core import Lowering, NoRule, View, lower
from plait.lower.integers import item
from plait.lower.symbols import to_size, unranged

aten = torch.ops.aten


@lower(aten._local_scalar_dense.default, aten.item.default, no_loops=True)
def _item(ctx: Lowering, x: View) -> Size | torch.SymFloat:
    val = ctx.node.meta["val"]
    made = bindings(ctx.node)
    if len(made) != 1:
        raise NoRule("the value of a tensor that has no symbol of its own")
    found = made[0].found
    if isinstance(val, torch.SymFloat):
        ctx.floats[atom_of(found).name] = x.remap((), lambda _: (0,) * len(x.shape))
        return val
    item(ctx, x, found)
    return to_size(val)


@lower(aten._assert_scalar.default, no_loops=True)
def _assert_scalar(ctx: Lowering, condition: Size | bool, message: str) -> None:
    given = ctx.node.args[0]
    val = given.meta["val"] if isinstance(given, torch.fx.Node) else given
    if isinstance(val, torch.SymBool) and not any(map(is_found_float, val.node.expr.free_symbols)):
        condition = unranged(val)
    ctx.assert_true(int(condition) if isinstance(condition, bool) else condition, message)


@lower(aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default, no_loops=True)
def _constrain(
    ctx: Lowering, size: Size, *, min: int | None = None, max: int | None = None
) -> None:
    if isinstance(size, Expr):
        if min is not None:
            ctx.assert_true(compare("le", min, size), f"Invalid value range: a size is below {min}")
        if max is not None:
            ctx.assert_true(compare("le", size, max), f"Invalid value range: a size is above {max}")


@lower(aten._assert_tensor_metadata.default, any_dtype=True, no_loops=True)
def _assert_metadata(ctx: Lowering, *_args: object, **_kwargs: object) -> None:
    """Dtypes, sizes and strides were checked when the graph was captured."""
