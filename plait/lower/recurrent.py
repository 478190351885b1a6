"""Recurrent layers that are called whole (`runtime/layers.py`): calls of ATen's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch._ops import OpOverload

from plait.lower.core import Lowering, lower
from plait.lower.extern import call_op
from plait.runtime.layers import WHOLE


def _lower(layer: OpOverload, ctx: Lowering, *args: Any, **kwargs: Any) -> Any:
    node = ctx.node
    return call_op(ctx, layer, args, kwargs, node.meta["val"], given=(node.args, node.kwargs))


for _layer, _whole in WHOLE.items():
    _rule: Callable[..., Any] = partial(_lower, _layer)
    lower(_whole, any_dtype=True)(_rule)
