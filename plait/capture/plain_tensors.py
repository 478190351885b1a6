"""Which tensors a compiled program can take: plain ones, and without tangents."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def special_kind(x: torch.Tensor) -> str:
    """What is special about x, "" if it is a plain strided tensor."""
    if x.layout != torch.strided:
        return f"one of layout {x.layout}"
    if x.is_nested:
        return "a nested one"
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "one of a transform of torch.func, which belongs inside of what is compiled"
    return f"one of class {type(x).__name__}" if is_wrapper(x) else ""


def is_wrapper(x: torch.Tensor) -> bool:
    """Whether x is of a class that wraps other tensors."""
    found: bool = is_traceable_wrapper_subclass(x)
    return found


def forward_mode_level() -> tuple[dict[str, Any], str]:
    """The module variable (dict, name) that is 0 or more while tensors may have forward-mode
    tangents."""
    return vars(forward_ad), "_current_level"


def has_tangent(x: torch.Tensor) -> bool:
    """Whether a tensor carries a tangent of forward-mode differentiation."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x)[1] is not None  # type: ignore[no-untyped-call]
