"""Losses of margins, in place of PyTorch's own decompositions.

These take labels behind the first -1 for class 0, give a margin that is met exactly a gradient, and
keep NaNs; eager does none of this. Like PyTorch's they are decomposed before autograd. They stand
in the table behind the checks of operands (refuse.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import plait.graph.refuse  # noqa: F401 - what is refused is looked at first
from plait import compat

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # at::Reduction
_demand: Any = torch._check


def _rows(x: Tensor) -> Tensor:
    rows: Tensor = torch.atleast_2d(x)  # type: ignore[no-untyped-call]
    _demand(rows.shape[1] != 0, lambda: f"rows without numbers: {x.shape}")
    return rows


def _reduced(each: Tensor, reduction: int) -> Tensor:
    return each if reduction == _NONE else each.mean() if reduction == _MEAN else each.sum()


def _multi_margin(
    x: Tensor, target: Tensor, p: Any = 1, margin: Any = 1,
    weight: Tensor | None = None, reduction: int = _MEAN,
) -> Tensor:  # fmt: skip
    rows, labels = _rows(x), target.reshape(target.shape or (1,))
    _demand(p in (1, 2), lambda: "only p == 1 and p == 2 supported")
    _demand(labels.shape == rows.shape[:1], lambda: f"target of inconsistent size {target.shape}")
    labels = labels.unsqueeze(1)
    z = margin - rows.gather(1, labels) + rows
    others = torch.arange(rows.shape[1], device=x.device) != labels
    z = torch.where((z > 0) & others, z, 0)
    z = z if p == 1 else z * z
    if weight is not None:
        _demand(weight.numel() == rows.shape[1], lambda: "a weight for each class is needed")
        z = z * weight[labels]
    return _reduced(z.mean(1), reduction)


def _multilabel_margin(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    rows, labels = _rows(x), _rows(target)
    _demand(target.shape == x.shape, lambda: f"target of inconsistent size {target.shape}")
    counted = (labels == -1).cumsum(1) == 0
    labels = torch.where(counted, labels, 0)
    found = labels.unsqueeze(2) == torch.arange(rows.shape[1], device=x.device)
    is_target = (found & counted.unsqueeze(2)).any(1)
    z = 1 - rows.gather(1, labels).unsqueeze(2) + rows.unsqueeze(1)
    z = torch.where((z > 0) & counted.unsqueeze(2) & ~is_target.unsqueeze(1), z, 0)
    each = z.sum((1, 2)) / rows.shape[1]
    return _reduced(each, reduction), is_target.to(x.dtype).reshape(target.shape)


def _instead(checks: Callable[[Any], Any] | None, run: Callable[..., Any], _: Any) -> Any:
    return run if checks is None else checks(run)


for _op, _run in (
    (aten.multi_margin_loss.default, _multi_margin),
    (aten.multilabel_margin_loss_forward.default, _multilabel_margin),
):
    compat.decompositions.CHECKS[_op] = partial(
        _instead, compat.decompositions.CHECKS.get(_op), _run
    )
