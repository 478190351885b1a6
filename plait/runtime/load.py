"""Plan bytes, a kernel library and the tables beside them become a callable program.

This is all that a compiled program needs: nothing of the compiler is imported here. The classes
live in the extension `plait._native`; docs/native-interface.md says what they take and return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch  # torch's libraries have to be in the process before the extension

import plait.runtime.philox  # noqa: F401  (defines operators that programs call)
from plait._native import Bound, LoadError, PlanError, Program, arena_stats, trim_arenas
from plait._native import Library as NativeLibrary
from plait.runtime import mathtable
from plait.runtime.trust import Library, loadable

__all__ = [
    "Bound",
    "Libraries",
    "LoadError",
    "PlanError",
    "Program",
    "arena_stats",
    "load",
    "trim_arenas",
]

Libraries = Mapping[str, Library]
"""Kind of device ('cpu', 'cuda') -> the file with a program's kernels for it."""
ENTRY = "plait_run"
"""The function of a generated program."""


def load(
    plan: bytes,
    libraries: Libraries,
    constants: Sequence[torch.Tensor] = (),
    callables: Sequence[object] = (),
    generated: Library | None = None,
    entry: str = ENTRY,
) -> Program:
    """Verifies the plan and binds it to this process.

    constants, callables: the tables that the plan numbers. generated: a library that
    `wrapper/cpp.py` made; its function `entry`, which is the same program, then runs instead.

    Raises PlanError for damaged bytes, LoadError where a kernel, operator or table entry is
    missing.
    """
    host, gpu, code = (
        None if library is None else loadable(library)
        for library in (libraries.get("cpu"), libraries.get("cuda"), generated)
    )
    kernels = None if host is None else NativeLibrary(host, mathtable.NAMES)
    return Program(plan, kernels, list(constants), list(callables), gpu, code, entry)
