"""What a traced function asks of where its tensors lie, noted for checks at calls.

Tracing without Dynamo answers `x.storage_offset()` by the example's, and takes a size or stride
that varies for 2 or more. That decides `x.is_contiguous()` without a guard, and whether
`x.reshape(-1)` is a view of x. The latter is asked only where it shows: where one of both is
written and the other one read, or where both are inputs or results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from plait import compat
from plait.capture.found_numbers import IndexByFound
from plait.capture.outside_tensors import value_of
from plait.capture.writes import may_write
from plait.compat.export import ExportEnv
from plait.graph.strides import is_view

_CHANNELS_LAST = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}


def _named(*names: str) -> frozenset[Any]:
    """The functions, methods and operators of these names."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    owned = [getattr(owner, name, None) for owner in (torch, torch.Tensor) for name in names]
    return frozenset((*packets, *overloads, *owned)) - {None}


_RESHAPES = _named("reshape", "reshape_as", "flatten", "ravel")
_CONTIGUOUS = _named("contiguous")


class LayoutNotes(IndexByFound):
    """Inside, `env` learns what is asked."""

    def __init__(self, env: ExportEnv) -> None:
        super().__init__()
        self.env = env
        # Of what, the copy, and what to ask.
        self._copies: list[tuple[torch.Tensor, torch.Tensor, Callable[[], Any]]] = []
        self._stale: set[int] = set()  # memory that had been written, had the copies been views

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.Tensor.storage_offset:
            self.env.asks_offsets = True
        if func is torch.Tensor.is_contiguous:
            bool(_is_dense(*args, **named))
        if self._stale and getattr(func, "__name__", "") != "__get__":
            self._ask(self._stale & _memory((args, named)))
        if isinstance(func, HigherOrderOperator):
            args = pytree.tree_map_only(torch.nn.Parameter, value_of, args)
        made = super().__torch_function__(func, types, args, kwargs)
        if self._copies and (written := _memory(_written(func, args, named))):
            self._stale |= self._near(written) - written
        if func in _RESHAPES or func in _CONTIGUOUS:
            x = args[0] if args else next(iter(named.values()))
            ask = (
                partial(is_view, x, made.shape)
                if func in _RESHAPES
                else partial(_is_dense, *args, **named)
            )
            self._copies += [] if _memory(made) <= _memory(x) else [(x, made, ask)]
        return made

    def ask_of_results(self, inputs: Any, results: Any) -> None:
        """Asks what decides which inputs and results share memory, and which inputs are written."""
        seen = _memory((inputs, results))
        self._ask({key for key in seen if key in self._stale or len(self._near({key}) & seen) > 1})

    def _near(self, memory: set[int]) -> set[int]:
        """This memory, and that which copies of it, or of which it holds copies, lie in."""
        pairs = [_memory((x, y)) for x, y, _ in self._copies]
        more = memory.union(*(pair for pair in pairs if pair & memory))
        return more if more == memory else self._near(more)

    def _ask(self, memory: set[int]) -> None:
        """Asks which copies of this memory would be views. Of what a run finds nothing can be
        asked."""
        near = self._near(memory) if memory else set()
        asked = [copy for copy in self._copies if _memory(copy[:2]) <= near]
        self._copies = [copy for copy in self._copies if not _memory(copy[:2]) <= near]
        for x, y, question in asked:
            if not any(free_unbacked_symbols(n) for n in (*x.shape, *x.stride(), *y.shape)):
                bool(question())


def _memory(tree: Any) -> set[int]:
    tensors = [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
    moved = compat.tracing.is_transformed
    return {
        compat.tracing.storage_of(x) for x in tensors if x.layout == torch.strided and not moved(x)
    }


def _written(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """The arguments that a function may write."""
    if isinstance(func, OpOverloadPacket | OpOverload):
        packet: Any = func
        ops = (
            [func]
            if isinstance(func, OpOverload)
            else [getattr(packet, name) for name in packet.overloads()]
        )
        return (args, kwargs) if any(op._schema.is_mutable for op in ops) else ()
    return (args[:1], kwargs.get("out")) if may_write(func, kwargs) else ()


def _is_dense(x: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    """What `x.is_contiguous(memory_format)` is, as one condition."""
    order: Any = reversed(range(x.dim()))
    if memory_format != torch.contiguous_format:
        order = _CHANNELS_LAST.get(x.dim(), ())
    dense: Any = True
    stride: Any = 1
    for dim in order:
        dense = dense & ((x.shape[dim] == 1) | (x.stride(dim) == stride))
        stride = stride * x.shape[dim]
    return dense
