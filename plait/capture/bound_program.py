"""Binds a compiled program to its state: user arguments in, results out, every argument checked.

With a native program the result is the native `Bound` object itself. A program that runs as Python
is bound by `PythonBound`, which makes the same checks with the same words.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from plait import _native
from plait.capture.aliases import Result, view_like
from plait.capture.freeze import FrozenOwners
from plait.capture.owners import Owners
from plait.capture.plain_tensors import has_tangent, special_kind
from plait.capture.trace import Traced
from plait.compat.size_facts import Bounds
from plait.errors import InputError
from plait.graph.captured import Captured
from plait.ir.dtypes import DTYPES
from plait.lower.dtypes import TO_TORCH, from_torch

InputSpec = tuple[Any, ...]
"""("bound", name, Tensor that is bound for good), ("tensor", arg, dtype, shape, strides, device) or
("int", arg, size)."""


_serial = itertools.count()  # makes graph names unique within the process


def captured_from(traced: Traced) -> Captured:
    """A traced program as the compiler takes it."""
    return Captured(
        traced.graph,
        f"export_{next(_serial)}",
        "inference",
        bumped_inputs=traced.mutated,
        input_views=traced.views,
        guarded=False,
    )


def argument_specs(traced: Traced) -> list[InputSpec]:
    """What is checked about the user's tensors and ints."""
    bounds = traced.sizes.bounds
    return [
        ("int", i, _entry(fake, bounds))
        if isinstance(fake, torch.SymInt)
        else tensor_spec(i, fake, bounds)
        for i, fake in enumerate(traced.fakes)
    ]


def tensor_spec(arg: int, fake: torch.Tensor, bounds: dict[str, Bounds]) -> tuple[Any, ...]:
    """What is checked about user argument number `arg`. Sizes that are expressions are checked
    elsewhere."""
    shape = tuple(_entry(s, bounds) for s in fake.shape)
    strides: Any = tuple(_entry(s, {}) for s in fake.stride())
    if fake.is_contiguous() and any(not isinstance(s, int) for s in fake.stride()):
        strides = "contiguous"
    return ("tensor", arg, from_torch(fake.dtype).name, shape, strides, str(fake.device))


def _entry(size: int | torch.SymInt, bounds: dict[str, Bounds]) -> Any:
    if isinstance(size, int):
        return size
    if not size.node.expr.is_symbol:
        return None
    name = str(size.node.expr)
    return (name, *bounds[name]) if name in bounds else name


def bind(
    program: Callable[..., Any],
    specs: Sequence[InputSpec],
    names: Sequence[str],
    single: bool,
    results: Sequence[Result],
    changed: Sequence[int],
    owners: Owners | FrozenOwners,
) -> Callable[..., Any]:
    """A callable of the user's tensors and ints, by position or by name.

    single: return the only result, not a tuple. results: which of them are views of inputs.
    changed: the inputs that the program writes to. owners: of the bound tensors, numbered in the
    order of specs.
    """
    if isinstance(program, _native.Program):
        bound: Callable[..., Any] = _native.Bound(
            program, list(specs), list(names), single, list(results), owners
        )
        return bound
    return PythonBound(program, specs, names, single, results, changed, owners)


@dataclass
class PythonBound:
    """`_native.Bound` for programs that are Python functions; the fields are the arguments of
    `bind`."""

    program: Callable[..., Any]
    specs: Sequence[InputSpec]
    names: Sequence[str]
    single: bool
    results: Sequence[Result]
    changed: Sequence[int]
    owners: Owners | FrozenOwners

    def __post_init__(self) -> None:
        changes_state = any(self.specs[k][0] == "bound" for k in self.changed)
        self.turn: AbstractContextManager[Any] = (
            threading.RLock() if changes_state else nullcontext()
        )
        self.views = [(k, *r[1:]) for k, r in enumerate(self.results) if r[0] == "view"]
        self.bound = [(k, spec[2]) for k, spec in enumerate(self.specs) if spec[0] == "bound"]
        self.layouts = {k: _layout(x) for k, x in self.bound if x.layout == torch.strided}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._ordered(args, kwargs)
        with self.turn:  # calls that change what is bound come one after another
            return self._call(given)

    def _call(self, given: list[Any]) -> Any:
        state = dict(self.bound)
        for number, tensor in self.owners.tensors():
            state[self.bound[number][0]] = tensor
        for position, layout in self.layouts.items():
            now = _layout(state[position])
            if now != layout:
                raise InputError(
                    f"{self._name(position)}: its data is now {_spelled(now)}, "
                    f"the program was compiled for {_spelled(layout)}"
                )
            _check_tangent(self._name(position), state[position])
        symbols: dict[str, int] = {}
        inputs = []
        for k, spec in enumerate(self.specs):
            if spec[0] == "bound":
                inputs.append(state[k])
            else:
                value, what = given[spec[1]], f"input '{self.names[spec[1]]}'"
                if spec[0] == "int":
                    _check_int(what, value, spec[2], symbols)
                else:
                    _, _, dtype, shape, strides, device = spec
                    _check(what, value, dtype, shape, strides, device, symbols)
                inputs.append(value)
        for k in self.changed:
            self._check_apart(k, inputs)
        with torch.no_grad():
            result = list(self.program(*inputs))
            for k, base, _, offset in self.views:
                result[k] = _view(inputs[base], result[k], offset)
        return result[0] if self.single else tuple(result)

    def _check_apart(self, changed: int, inputs: Sequence[Any]) -> None:
        for k, x in enumerate(inputs):
            if k != changed and isinstance(x, torch.Tensor) and _share_memory(inputs[changed], x):
                mine, other = self._name(changed), self._name(k)
                raise InputError(
                    f"inputs {mine} and {other} share memory and {mine} is changed in place: pass "
                    "a copy of one of them"
                )

    def _name(self, position: int) -> str:
        spec = self.specs[position]
        return (
            f"parameter or buffer {spec[1]!r}" if spec[0] == "bound" else repr(self.names[spec[1]])
        )

    def _ordered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if len(args) > len(self.names):
            raise InputError(f"expected {len(self.names)} inputs, got {len(args)}")
        given = dict(zip(self.names, args, strict=False))
        for name, value in kwargs.items():
            if name not in self.names:
                raise InputError(f"there is no input {name!r}")
            if name in given:
                raise InputError(f"input {name!r} was given twice")
            given[name] = value
        for name in self.names:
            if name not in given:
                raise InputError(f"input {name!r} is missing")
        return [given[name] for name in self.names]


def _view(base: torch.Tensor, like: torch.Tensor, offset: int | None) -> torch.Tensor:
    """A view of base where like lies in its storage, or `offset` elements behind base."""
    if base.dtype != like.dtype:
        return view_like(base, like)
    start = like.storage_offset() if offset is None else base.storage_offset() + offset
    return base.as_strided(like.shape, like.stride(), start)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided or not a.numel() or not b.numel():
        return False
    storage = a.untyped_storage()
    if storage.data_ptr() != b.untyped_storage().data_ptr():
        return False
    used = torch.zeros(storage.nbytes(), dtype=torch.uint8)

    def bytes_of(t: torch.Tensor) -> torch.Tensor:
        size = t.element_size()
        strides = (*(s * size for s in t.stride()), 1)
        return used.as_strided((*t.shape, size), strides, t.storage_offset() * size)

    bytes_of(a).fill_(1)
    return bool(bytes_of(b).any())


Layout = tuple[torch.dtype, torch.device, list[int], list[int]]


def _layout(t: torch.Tensor) -> Layout:
    """What kernels have built in of a bound tensor; strides that nothing reads are 1."""
    free = t.numel() == 0
    strides = [1 if free or n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)]
    return t.dtype, t.device, list(t.shape), strides


def _spelled(layout: Layout) -> str:
    dtype, device, sizes, strides = layout
    return f"{_short(dtype)} on {device} with sizes {sizes} and strides {strides}"


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
        wanted = TO_TORCH[DTYPES[dtype]]
        raise InputError(f"{what}: expected dtype {_short(wanted)}, got {_short(value.dtype)}")
    if str(value.device) != device:
        raise InputError(
            f"{what}: expected a plain tensor on device {device}, got one on {value.device}"
        )
    if kind := special_kind(value):
        raise InputError(f"{what}: expected a plain tensor, got {kind}")
    if value.dim() != len(shape):
        raise InputError(f"{what}: expected {len(shape)} dimensions, got {value.dim()}")
    for dim, (want, size) in enumerate(zip(shape, value.shape, strict=True)):
        misfit = _misfit(want, size, symbols)
        if misfit:
            raise InputError(f"{what}: expected size {misfit} in dimension {dim}, got {size}")
    if strides == "contiguous":
        if not value.is_contiguous():
            raise InputError(f"{what}: expected a contiguous tensor, got strides {value.stride()}")
    elif strides is not None and value.numel() > 0:
        for dim, (want, stride) in enumerate(zip(strides, value.stride(), strict=True)):
            misfit = "" if value.shape[dim] <= 1 else _misfit(want, stride, symbols)
            if misfit:
                raise InputError(
                    f"{what}: expected stride {misfit} in dimension {dim}, got {stride}"
                )
    _check_tangent(what, value)


def _check_tangent(what: str, value: torch.Tensor) -> None:
    if has_tangent(value):
        raise InputError(
            f"{what} carries a tangent of forward-mode differentiation, which a compiled program "
            "drops",
            hint="the function itself, or torch.compile, which runs eager there",
        )


def _check_int(what: str, value: Any, want: Any, symbols: dict[str, int]) -> None:
    if type(value) is not int:
        raise InputError(f"{what}: expected an int, got {type(value).__name__}")
    misfit = _misfit(want, value, symbols)
    if misfit:
        raise InputError(f"{what}: expected {misfit}, got {value}")


def _misfit(want: Any, got: int, symbols: dict[str, int]) -> str:
    """What was wanted instead, or "" if got fits."""
    if want is None or want == got:
        return ""
    if isinstance(want, int):
        return str(want)
    name, low, high = want if isinstance(want, tuple) else (want, None, None)
    if symbols.setdefault(name, got) != got:
        return f"{symbols[name]} ({name}, as in an earlier input or dimension)"
    if low is not None and got < low:
        return f"at least {low} ({name})"
    if high is not None and got > high:
        return f"at most {high} ({name})"
    return ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
