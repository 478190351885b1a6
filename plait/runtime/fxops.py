"""What an FX graph of plait calls besides public operators: the meaning of nodes that torch has no
operator for.

    plait::launch(library, kernel, reads, writes, order, sizes, work_ns, parallel, checks)
        Runs a CPU kernel of the library at a path. Its tensors are `reads` followed by `writes`, in
        the order that the positions `order` give ([]: as they stand); `sizes` are its integers.
        work_ns, parallel: how it is split over threads. checks: 'Error: message' of each of its
        run-time checks.
    plait::require(holds, message, values, error)
        Error unless holds; marks {} of message are values.
    plait::require_layout(x, name, dtype, shape, strides, origin)
        RuntimeError unless x is so. origin: what made x, for the error.
    plait::require_aligned(x, name, nbytes)
        RuntimeError unless x starts at a multiple of nbytes.
    plait::require_finite(x, name, origin, infinities)
        RuntimeError if x holds a NaN or, if they count, an infinity.
    plait::bump_version(x)
        x was written: its autograd version goes up.

All run as in the Python target, by `runtime/generated.py`. No graph optimisation of torch.fx drops
them.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import lru_cache
from typing import Any

import torch
from torch.fx.node import has_side_effect

from plait.runtime import generated
from plait.runtime.operators import register_fake
from plait.runtime.source import executed

_outer: ContextVar[generated.Keys | None] = ContextVar("plait_fx_outer", default=None)


@contextmanager
def python_below_autograd() -> Iterator[None]:
    """`generated.below_autograd`, with Python functions of graphs called in the dispatch state of
    who enters."""
    token = _outer.set(generated.dispatch_state())
    try:
        with generated.below_autograd():
            yield
    finally:
        _outer.reset(token)


class PythonFunction(torch.nn.Module):
    """A Python function as a module that a graph calls; gives its results in one list."""

    _is_impure = True  # to torch.fx

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> list[object]:
        """The results from left to right, lists laid open."""
        outer = _outer.get()
        if outer is None:
            return generated.flat(self.function(*args, **kwargs))
        return generated.flat(generated.python_call(outer, self.function, *args, **kwargs))


def with_scratch(run: Callable[..., Any]) -> Callable[..., Any]:
    """run, with memory of the current device for kernels of Triton that ask for some."""

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device="cuda")  # aligned to 512 bytes

    def within(*args: Any) -> Any:
        import triton

        triton.set_allocator(allocate)
        return run(*args)

    return lambda *args: copy_context().run(within, *args)


@lru_cache(maxsize=1024)
def triton_function(name: str, text: str) -> Any:
    """Function `name` of a module of Triton's language. Imports Triton; equal texts give one
    function."""
    return executed(text, name, {"__name__": name}, name)


@lru_cache(maxsize=4096)
def _kernel(library: str, name: str, checks: tuple[str, ...]) -> generated.CpuKernel:
    split = [check.split(": ", 1) for check in checks]
    return generated.kernel(
        library, name, [(getattr(builtins, error), message) for error, message in split]
    )


def _launch(
    library: str,
    kernel: str,
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    order: Sequence[int] = (),
    sizes: Sequence[int] = (),
    work_ns: int = 0,
    parallel: bool = True,
    checks: Sequence[str] | None = None,
) -> None:
    tensors = [*reads, *writes]
    order = order or range(len(tensors))
    written = [k for k, at in enumerate(order) if at >= len(reads)]
    run = _kernel(library, kernel, tuple(checks or ()))
    run([tensors[at] for at in order], sizes, work_ns, parallel, written)


def _require(
    holds: int, message: str, values: Sequence[int] = (), error: str = "RuntimeError"
) -> None:
    generated.require(holds, message, *values, error=getattr(builtins, error))


_OPERATORS: dict[str, Callable[..., None]] = {
    "launch(str library, str kernel, Tensor[] reads, Tensor(a!)[] writes, int[] order=[], "
    "SymInt[] sizes=[], SymInt work_ns=0, bool parallel=True, str[]? checks=None) -> ()": _launch,
    "require(SymInt holds, str message, SymInt[] values=[], "
    "str error='RuntimeError') -> ()": _require,
    "require_layout(Tensor x, str name, ScalarType? dtype, SymInt[] shape, SymInt[] strides, "
    "str origin='') -> ()": generated.require_layout,
    "require_aligned(Tensor x, str name, int nbytes) -> ()": generated.require_aligned,
    "require_finite(Tensor x, str name, str origin, "
    "bool infinities) -> ()": generated.require_finite,
    "bump_version(Tensor(a!) x) -> ()": generated.bump_version,
}


def _register() -> Any:
    library: Any = torch.library.Library("plait", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema, run in _OPERATORS.items():
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, run, "CompositeExplicitAutograd")
        for lazy in ("Conjugate", "Negative"):
            # Kernels are handed values by `generated`.
            library.impl(name, torch.library.fallthrough_kernel, lazy)
        register_fake(library, name, lambda *args, **kwargs: None)
        has_side_effect(getattr(torch.ops.plait, name).default)
    return library


_LIBRARY = _register()  # the operators live as long as this object
