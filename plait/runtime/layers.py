"""Recurrent layers that are called whole: over packed sequences, and over as many steps as a size
says.

ATen's layers are composite: tracing sees their steps, and needs to know how many there are. The
operators here, `plait::gru.data` and the like, have the schemas of ATen's, stand for them while a
program is traced, and are lowered to calls of them (`lower/recurrent.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from plait.runtime.operators import register_fake

_aten = torch.ops.aten
_PACKETS = (_aten.lstm, _aten.gru, _aten.rnn_tanh, _aten.rnn_relu)
LAYERS: tuple[OpOverload, ...] = tuple(
    op for packet in _PACKETS for op in (packet.input, packet.data)
)
"""ATen's layers. `.data` takes packed sequences: all rows, step after step, and how many a step
has."""


def is_packed(layer: OpOverload) -> bool:
    return layer._overloadname == "data"


def _shapes(layer: OpOverload, x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """Results of a layer as ATen lays them out: step after step."""
    hx = args[1] if is_packed(layer) else args[0]
    states: Sequence[torch.Tensor] = hx if isinstance(hx, (list, tuple)) else (hx,)
    batch_first = not is_packed(layer) and args[-1]
    both_ways = args[-1] if is_packed(layer) else args[-2]
    rows = x.transpose(0, 1) if batch_first else x
    out = x.new_empty((*rows.shape[:-1], states[0].shape[-1] * (2 if both_ways else 1)))
    last = (s.new_empty(s.shape) for s in states)
    return out.transpose(0, 1) if batch_first else out, *last


def _define() -> tuple[Any, dict[OpOverload, OpOverload]]:
    library: Any = torch.library.Library("plait", "FRAGMENT")  # type: ignore[no-untyped-call]
    made: dict[OpOverload, OpOverload] = {}
    for layer in LAYERS:
        packet, overload = layer._schema.name.removeprefix("aten::"), layer._overloadname
        name = f"{packet}.{overload}"
        library.define(str(layer._schema).removeprefix("aten::"))
        library.impl(name, layer, "CompositeExplicitAutograd")
        register_fake(library, name, partial(_shapes, layer))
        made[layer] = getattr(getattr(torch.ops.plait, packet), overload)
    return library, made


_LIBRARY, WHOLE = _define()
"""The operators live as long as _LIBRARY. WHOLE: what stands for each layer while it is traced."""
