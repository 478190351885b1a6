"""Programs that are no models: control flow, optimizer steps, users' kernels, and so on.

A module a subject has PROGRAMS: by name, what makes a program for a device ("cpu", "cuda").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Program:
    """What is called, and with what.

    grad: whether autograd is on.
    part: the module that is compiled, where that is not all of fn.
    fused: makes what does the same by kernels that PyTorch has for all of it: the peer "fused".
    exact: the error of a result: its greatest distance from that of float64, by the greatest
        number of that.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    grad: bool = False
    part: Any = None
    fused: Callable[[], Callable[..., Any]] | None = None
    exact: Callable[[Any], float] | None = None
