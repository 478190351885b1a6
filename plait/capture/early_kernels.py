"""Python kernels that torch gives operators before autograd.

They decompose an operator before any table of decompositions is asked, and by rules of their own:
what eager's kernel refuses, they may take. While AOTAutograd traces, `early_changes` puts before
each of them the look at operands that the table would have put there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from plait import compat
from plait.capture import recurrent
from plait.capture.resampling import AUTOGRAD, COMPOSITE, whole
from plait.compat.shared import Shared
from plait.config import Config

Kernels = Mapping[Any, Callable[..., Any]]  # by dispatch key
_EARLY = frozenset((AUTOGRAD, COMPOSITE))
_aten = torch.ops.aten
_POSITIONS = (_aten.where.default, _aten.nonzero_numpy.default)
_OTHER_WHILE_TRACED = (_aten.max_pool1d.default, *_POSITIONS)
"""Operators whose own decomposition in C++ asks whether they are traced, and takes more then, or
gives views that cannot be written."""


@cache
def early_operators() -> tuple[OpOverload, ...]:
    """ATen's operators with such kernels, which torch registers when it is imported, and those
    that are given one."""
    packets = [p for p in vars(torch.ops.aten).values() if isinstance(p, OpOverloadPacket)]
    found = [op for p in packets for op in vars(p).values() if isinstance(op, OpOverload)]
    early = (op for op in found if _EARLY & op.py_kernels.keys())
    return (*early, *_OTHER_WHILE_TRACED)


def early_kernels(change: Callable[[OpOverload, Kernels], Kernels]) -> Shared:
    """A context in which the early kernels of an operator are change(op, kernels)."""
    before: list[tuple[OpOverload, Kernels]] = []

    def make() -> None:
        for op in early_operators():
            before.append((op, dict(op.py_kernels)))
            own = {COMPOSITE: partial(op._op_dk, COMPOSITE)}
            _set_kernels(op, change(op, before[-1][1] or own))

    def undo() -> None:
        while before:
            _set_kernels(*before.pop())

    return Shared(make, undo)


def _set_kernels(op: Any, kernels: Kernels) -> None:
    """Replaces the kernels of an operator that are Python, and forgets which one was found for
    which key."""
    if op.py_kernels != kernels:
        op.py_kernels.clear()
        op.py_kernels.update(kernels)
        op._dispatch_cache.clear()


def _positions(x: torch.Tensor) -> list[torch.Tensor]:
    """Where x is not 0. A write to what `unbind` gives asks for its size as a number."""
    found = (x if x.dim() else x.unsqueeze(0)).nonzero()
    return [found.select(1, d) for d in range(found.shape[1])]


def _changed(op: OpOverload, kernels: Kernels, by_rows: bool = False) -> Kernels:
    if op in _POSITIONS:
        return {COMPOSITE: _positions}
    kernels = recurrent.kernels_of(op, whole(op, kernels), by_rows)
    around = compat.decompositions.CHECKS.get(op)
    if around is None:
        return kernels
    return {key: around(k) if key in _EARLY else k for key, k in kernels.items()}


_REWRITTEN = (
    "upsample",
    "_upsample",
    "multi_margin",
    "multilabel_margin",
    "hardshrink",
    "softshrink",
)
"""How operators begin whose kernels in Python are others than eager's."""


def _as_eager(op: OpOverload, kernels: Kernels) -> Kernels:
    if op._schema.name.removeprefix("aten::").startswith(_REWRITTEN):
        return {key: kernel for key, kernel in kernels.items() if key not in _EARLY}
    return _changed(op, kernels)


early_changes = early_kernels(_changed)
"""Inside, operands are looked at; interpolation and recurrent layers are kept whole where that is
better."""
_eager_kernels = early_kernels(_as_eager)  # the same, and what has kernels in eager stays whole
# The same, but for layers that oneDNN computes by the batch.
_row_kernels = early_kernels(partial(_changed, by_rows=True))


def early_kernels_of(cfg: Config) -> Shared:
    """The context in which a configuration's graphs are traced."""
    if cfg.keeps_bits:
        return _eager_kernels
    return _row_kernels if cfg.batch_invariant else early_changes
