"""Operators that torch makes of others, where its steps ask what a trace cannot tell.

Inside `composites_traced` they are made of others here: distances whose algorithm goes by sizes
that vary, and covariances, whose steps look at values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey

from plait.compat.shared import Shared

aten = torch.ops.aten
_KEY = DispatchKey.CompositeImplicitAutograd


def _cdist(
    x: torch.Tensor, y: torch.Tensor, p: float = 2.0, compute_mode: int | None = None
) -> Any:
    """Of many rows torch takes a product of matrices. The operator decides when it runs."""
    rows = [n for z in (x, y) for n in z.shape[-2:-1]]
    if all(isinstance(n, int) for n in rows) or not x.is_floating_point() or x.dtype != y.dtype:
        return aten.cdist.default._op_dk(_KEY, x, y, p, compute_mode)
    return aten._cdist_forward(x, y, float(p), compute_mode)


def _cov(
    x: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> Any:
    if fweights is not None or aweights is not None or x.dim() > 2 or x.dtype == torch.bool:
        named = {"correction": correction, "fweights": fweights, "aweights": aweights}
        return aten.cov.default._op_dk(_KEY, x, **named)
    x = x.view(1, -1) if x.dim() < 2 else x
    n = x.shape[1]
    apart = x - (x.sum(1) / n).unsqueeze(1)
    product = apart @ apart.t().conj()
    free: Any = torch.sym_max
    return (product / free(n - correction, 0)).squeeze()


_MADE: dict[Any, Callable[..., Any]] = {aten.cdist.default: _cdist, aten.cov.default: _cov}


def _set() -> None:
    for op, made in _MADE.items():
        op.py_kernels[_KEY] = made
        op._dispatch_cache.clear()


def _unset() -> None:
    for op in _MADE:
        del op.py_kernels[_KEY]
        op._dispatch_cache.clear()


composites_traced = Shared(_set, _unset)
