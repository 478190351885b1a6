"""Binds a compiled program to its state: user arguments in, results out, every argument checked.

With a native program the result is the native `Bound` object itself. A program that runs as Python is bound by
`PythonBound`, which makes the same checks with the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait import _native
from plait.errors import InputError
from plait.lower.dtypes import from_torch

InputSpec = (
    Any  # a Tensor that is bound for good, or ("tensor", arg, dtype, shape, strides, device)
)


def tensor_spec(
    arg: int, fake: torch.Tensor, bounds: dict[str, tuple[int, int | None]]
) -> tuple[Any, ...]:
    """What is checked about user argument number `arg`. Sizes that are expressions are checked elsewhere."""
    shape = tuple(_entry(s, bounds) for s in fake.shape)
    strides: Any = tuple(_entry(s, {}) for s in fake.stride())
    if fake.is_contiguous() and any(not isinstance(s, int) for s in fake.stride()):
        strides = "contiguous"
    return ("tensor", arg, from_torch(fake.dtype).name, shape, strides, str(fake.device))


def _entry(size: int | torch.SymInt, bounds: dict[str, tuple[int, int | None]]) -> Any:
    if isinstance(size, int):
        return size
    if not size.node.expr.is_symbol:
        return None
    name = str(size.node.expr)
    return (name, *bounds[name]) if name in bounds else name


def bind(
    program: Callable[..., Any], specs: Sequence[InputSpec], names: Sequence[str], single: bool
) -> Callable[..., Any]:
    """A callable of the user's tensors, by position or by name. single: return the only result, not a tuple."""
    if isinstance(program, _native.Program):
        bound: Callable[..., Any] = _native.Bound(program, list(specs), list(names), single)
        return bound
    return PythonBound(program, specs, names, single)


class PythonBound:
    """`_native.Bound` for programs that are Python functions."""

    def __init__(
        self,
        program: Callable[..., Any],
        specs: Sequence[InputSpec],
        names: Sequence[str],
        single: bool,
    ) -> None:
        self.program = program
        self.specs = tuple(specs)
        self.names = tuple(names)
        self.single = single

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._ordered(args, kwargs)
        symbols: dict[str, int] = {}
        inputs = []
        for spec in self.specs:
            if isinstance(spec, torch.Tensor):
                inputs.append(spec)
            else:
                _, arg, dtype, shape, strides, device = spec
                _check(
                    f"input {self.names[arg]!r}", given[arg], dtype, shape, strides, device, symbols
                )
                inputs.append(given[arg])
        with torch.no_grad():
            result = self.program(*inputs)
        return result[0] if self.single else tuple(result)

    def _ordered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if len(args) + len(kwargs) != len(self.names):
            raise InputError(f"expected {len(self.names)} arguments, got {len(args) + len(kwargs)}")
        rest = self.names[len(args) :]
        for name in kwargs:
            if name not in rest:
                raise InputError(f"unexpected argument {name!r}")
        return [*args, *(kwargs[name] for name in rest)]


def _check(
    what: str,
    value: Any,
    dtype: str,
    shape: Any,
    strides: Any,
    device: str,
    symbols: dict[str, int],
) -> None:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{what}: expected a tensor, got {type(value).__name__}")
    if from_torch(value.dtype).name != dtype:
        raise InputError(f"{what}: expected dtype {dtype}, got {from_torch(value.dtype).name}")
    if str(value.device) != device:
        raise InputError(f"{what}: expected device {device}, got {value.device}")
    if value.dim() != len(shape):
        raise InputError(f"{what}: expected {len(shape)} dimensions, got {value.dim()}")
    for dim, (want, size) in enumerate(zip(shape, value.shape, strict=True)):
        name, low, high = want if isinstance(want, tuple) else (want, None, None)
        if isinstance(name, str):
            name = symbols.setdefault(name, size)
        if name is not None and name != size:
            raise InputError(f"{what}: expected size {name} in dimension {dim}, got {size}")
        if (low is not None and size < low) or (high is not None and size > high):
            raise InputError(
                f"{what}: size {size} in dimension {dim} is outside of [{low}, {high}]"
            )
    _check_strides(what, value, strides, symbols)


def _check_strides(what: str, value: torch.Tensor, strides: Any, symbols: dict[str, int]) -> None:
    if strides is None:
        return
    if strides == "contiguous":
        if not value.is_contiguous():
            raise InputError(f"{what}: expected a contiguous tensor, got strides {value.stride()}")
        return
    for dim, (want, stride) in enumerate(zip(strides, value.stride(), strict=True)):
        if isinstance(want, str):
            want = symbols.get(want)
        if want is not None and want != stride and value.shape[dim] > 1:
            raise InputError(f"{what}: expected stride {want} in dimension {dim}, got {stride}")
