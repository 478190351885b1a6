"""How exactly PyTorch's libraries multiply numbers in float32, as flags of the user say.

A flag can change after a compile. Dynamo guards that of products on a GPU; what a pass asks of
others is noted, and becomes a guard of the program that was made by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch._dynamo.guards import install_guard
from torch._dynamo.source import GlobalStateSource
from torch._guards import Guard, TracingContext

Flags = dict[str, str]
"""Which library and what of it ("mkldnn matmul") -> "none", "ieee", "tf32" or "bf16"."""
_noted: ContextVar[Flags | None] = ContextVar("plait_noted_flags", default=None)


@contextmanager
def noting_flags(flags: Flags) -> Iterator[None]:
    """Inside, answers of `asked` are those in flags, where there are any, and are put there."""
    token = _noted.set(flags)
    try:
        yield
    finally:
        _noted.reset(token)


def of_host(op: str) -> str:
    """How a CPU's library may compute a kind of operator, "matmul" or "conv"."""
    return asked(f"mkldnn {op}")


def asked(name: str) -> str:
    """How a library may compute a kind of operator; what a compile is told becomes a guard."""
    flags = _noted.get()
    return _now(name) if flags is None else flags.setdefault(name, _now(name))


def flags_now() -> Flags:
    """All that `of_host` may be asked for."""
    return {name: _now(name) for name in ("mkldnn matmul", "mkldnn conv")}


def float32_flags() -> Flags:
    """The flags of products and convolutions on all devices."""
    names = (f"{library} {op}" for library in ("mkldnn", "cuda") for op in ("matmul", "conv"))
    return {name: _now(name) for name in names}


@contextmanager
def float32_as(library: str, what: str) -> Iterator[None]:
    """Inside, a library may compute products of float32 as "tf32" or "bf16"."""
    before = _now(f"{library} matmul")
    torch._C._set_fp32_precision_setter(library, "matmul", what)
    try:
        yield
    finally:
        torch._C._set_fp32_precision_setter(library, "matmul", before)


def _now(name: str) -> str:
    found: str = torch._C._get_fp32_precision_getter(*name.split())
    return found


def guard_flags(flags: Mapping[str, str]) -> None:
    """Has Dynamo compile the frame again that it is busy with, where a flag differs at a call."""
    if flags and TracingContext.try_get() is not None:
        found = tuple(sorted(flags.items()))
        install_guard(Guard(GlobalStateSource(), partial(FLOAT32_PRECISION, flags=found)))


def FLOAT32_PRECISION(builder: Any, guard: Guard, flags: tuple[tuple[str, str], ...]) -> None:
    """Makes the guard of `guard_flags`."""
    getter = "torch._C._get_fp32_precision_getter"
    code = [f"{getter}({', '.join(map(repr, name.split()))}) == {value!r}" for name, value in flags]
    builder.add_python_lambda_leaf_guard_to_root(code, code, is_epilogue=False)
