"""What there is to say of results besides their numbers, in a form that can be compared: layout,
memory that they share, what autograd knows, what happened to the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


def facts(results: Any, inputs: Sequence[Any], autograd: bool = True) -> list[Any]:
    """One entry for every leaf of the results. autograd: what gradients and views are known of
    counts too."""
    owners: dict[int, str] = {}
    given = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    for k, x in enumerate(given):
        owners.setdefault(_storage(x), f"input {k}")
    out: list[Any] = []
    for k, r in enumerate(pytree.tree_leaves(results)):
        if not isinstance(r, Tensor) or r.layout != torch.strided:
            out.append(type(r).__name__)
            continue
        owner = (
            owners.setdefault(_storage(r), f"result {k}") if r.untyped_storage().nbytes() else ""
        )
        strides = (
            [s for n, s in zip(r.shape, r.stride(), strict=True) if n > 1] if r.numel() else []
        )
        fact: dict[str, Any] = {
            "dtype": r.dtype,
            "sizes": tuple(r.shape),
            "strides": strides,
            "memory": owner,
            "input": next((j for j, x in enumerate(given) if x is r), None),
        }
        if r.numel():
            fact["offset"] = r.storage_offset()
        if autograd:
            fact.update(grad=r.requires_grad, view=owner.startswith("input") and r._is_view())
        out.append(fact)
    return out


def versions(inputs: Sequence[Any]) -> list[int]:
    """How often each tensor among the inputs was written."""
    return [x._version for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
