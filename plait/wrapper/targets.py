"""The table of wrapper targets: each turns a verified WrapperProgram and its tables into something that runs.

A new target is one new file and one row here. What a row returns is called as loaded(*inputs) -> tuple and as
loaded.boxed(list) -> tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from plait.config import Config
from plait.runtime.load import Libraries, load
from plait.wrapper.cpp import load_cpp
from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.native import encode
from plait.wrapper.python import load_python, make_python


class Loaded(Protocol):
    """A program that runs."""

    def __call__(self, *args: Any) -> tuple[object, ...]: ...

    @property
    def boxed(self) -> Callable[[list[object]], tuple[object, ...]]: ...


def _native(
    program: WrapperProgram,
    libraries: Libraries,
    constants: Sequence[torch.Tensor],
    callables: Sequence[Any],
    cfg: Config,
) -> Loaded:
    return load(encode(program), libraries, constants, callables)


def _python(
    program: WrapperProgram,
    libraries: Libraries,
    constants: Sequence[torch.Tensor],
    callables: Sequence[Any],
    cfg: Config,
) -> Loaded:
    return load_python(make_python(program, libraries), libraries, constants, callables)


Target = Callable[[WrapperProgram, Libraries, Sequence[torch.Tensor], Sequence[Any], Config], Loaded]
TARGETS: dict[str, Target] = {"native": _native, "python": _python, "cpp": load_cpp}
