"""`plait.load`: runs what `plait.package` wrote, with nothing of the compiler in the process.

The native half (native/core/package.cpp) verifies the file before anything in it runs: all but
the weights when it is loaded, these before they are first used. Here arguments and results get back
their nesting and weights can be exchanged. A package holds machine code: load only what you trust.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

import plait.runtime.philox  # noqa: F401  (defines operators that programs call)
from plait._native import Package as NativePackage
from plait._native import PackageError
from plait.errors import UserError
from plait.runtime import signature as signatures

__all__ = ["Package", "PackageError", "load"]


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    verify_weights: bool = True,
    machine: str | None = None,
) -> Package:
    """The program in a package, ready to be called.

    device: which GPU a GPU's package runs on, without it the current one. verify_weights: read all
    of the weights and compare them with their checksum before they are used: a GPU's now, others in
    the first call, or `Package.verify`. Everything else is always verified. machine: which of the
    package's kernels, without it the best that run here. Raises PackageError, which says what is
    wrong with the file, or what this machine or process lacks.
    """
    name, place = _path(path), None if device is None else str(device)
    return Package(NativePackage(name, place, verify_weights, _machine(machine)), name)


def _path(path: Any) -> str:
    """The path as text. Raises UserError for what is none."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        what = f"plait.load takes the path of a package, got {type(path).__name__}"
        raise UserError(what, hint='plait.load("model.plait")')
    name = os.fsdecode(path)
    if "\0" in name:
        raise UserError(f"plait.load: the name of {name!r} contains a NUL", hint="another path")
    return name


def _machine(machine: Any) -> str | None:
    """The machine as given. Raises UserError for what is no name."""
    if machine is None or isinstance(machine, str):
        return machine
    what = f"plait.load takes the name of one machine, got machine={machine!r}"
    raise UserError(what, hint='machine="portable"')


def _signature(native: NativePackage, path: str) -> signatures.Signature:
    """How arguments and results are nested. Raises PackageError where that is not to be had or fits
    nothing."""
    try:
        signature = signatures.read(json.loads(native.python))
    except signatures.UnknownClass as error:
        raise PackageError(
            f"{path}: arguments or results are nested in a class unknown here ({error}): import it"
        ) from None
    except Exception as error:  # noqa: BLE001 - what damaged text does to its readers is theirs
        why = f"{type(error).__name__}: {error}"
        raise PackageError(f"{path}: damaged section 'python': {why}") from None
    if signature.tensors != list(native.names) or signatures.result_names(signature) != tuple(
        native.outputs
    ):
        raise PackageError(
            f"{path}: damaged section 'python': it names other arguments or results than the "
            "program"
        )
    return signature


class Package:
    """A loaded program: call it as what was packaged. Several threads may.

    inputs, outputs: names of the tensors that a call takes and gives. weights: parameters and
    buffers by name, a shared one by each of its names; the memory that the program uses, which is
    this process's own: the file never changes. machine: what kernels were chosen for. versions: of
    plait, torch and Python where it was written. A call and `weights` raise PackageError for
    damaged weights.
    """

    def __init__(self, native: NativePackage, path: str) -> None:
        signature = _signature(native, path)
        self.call: Callable[..., Any] = signatures.as_called(native.call, signature)
        self.inputs, self.outputs = tuple(native.names), tuple(native.outputs)
        self._native = native
        self.machine, self.versions = native.machine, native.versions
        self._folded = frozenset(native.folded)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __repr__(self) -> str:
        return (
            f"<plait package for {self.machine}: {', '.join(self.inputs)} -> "
            f"{', '.join(self.outputs)}>"
        )

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return MappingProxyType(self._native.weights)

    def verify(self) -> None:
        """Compares the weights with their checksum now, unless that was done or `load` was told not
        to. Raises PackageError for damaged ones."""
        self._native.verify()

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies values over weights, by name; the others keep theirs. Nothing is changed if one
        does not fit, or if weights that share memory are given different values (UserError)."""
        _require_mapping(weights)
        for name, value in weights.items():
            self._check(name, value)
        # This mode takes neither gradients nor tangents of the values over.
        with torch.inference_mode():
            memory = _memory_of(self.weights.values())
            given: _Given = {}
            for name, value in weights.items():
                mine = self.weights[name]
                given[name] = mine, _read(name, value, mine, memory)
            _check_shared(given)
            for mine, value in given.values():
                _write(mine, value)

    def _check(self, name: str, value: Any) -> None:
        """Raises UserError where there is no such weight, or value is no tensor that fits."""
        if name in self._folded:
            what = f"weight {name!r} was folded into the program"
            raise UserError(what, hint="plait.package(..., fold=False)")
        mine = self.weights.get(name)
        if mine is None:
            hint = f"one of {', '.join(self.weights)}"
            raise UserError(f"there is no weight {name!r}", hint=hint)
        if not isinstance(value, torch.Tensor):
            raise UserError(f"weight {name!r}: expected a tensor, got {type(value).__name__}")
        if kind := _special_kind(value):
            raise UserError(f"weight {name!r}: expected a plain tensor, got {kind}", hint=_PLAIN)
        if value.shape != mine.shape or value.dtype != mine.dtype:
            want, got = (f"{t.dtype} of sizes {tuple(t.shape)}" for t in (mine, value))
            raise UserError(f"weight {name!r}: expected {want}, got {got}")
        if value.is_meta:
            what = f"weight {name!r}: its new value is on the device meta, which keeps no values"
            raise UserError(what, hint=_PLAIN)
        if _end(value) > value.untyped_storage().nbytes():
            raise UserError(f"weight {name!r}: the memory of its new value was freed", hint=_PLAIN)


def _require_mapping(weights: Any) -> None:
    if not isinstance(weights, Mapping):
        what = f"load_weights takes tensors by name, got {type(weights).__name__}"
        raise UserError(what, hint="model.state_dict()")


_PLAIN = "a tensor that has its values in memory, such as model.state_dict() has"


def _special_kind(x: torch.Tensor) -> str:
    """What is special about a tensor that cannot be copied like plain ones, "" if nothing is."""
    if x.layout != torch.strided:
        return f"one of layout {x.layout}"
    if x.is_nested:
        return "a nested one"
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._is_functional_tensor(x):
        return "one of a transform of torch.func"
    computed = type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return f"one of class {type(x).__name__}" if computed else ""


def _end(x: torch.Tensor) -> int:
    """The byte of its storage behind x's last one."""
    steps = ((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return (int(x.storage_offset()) + sum(steps) + 1) * x.itemsize if x.numel() else 0


_Memory = dict[torch.device, tuple[int, int]]


def _memory_of(tensors: Iterable[torch.Tensor]) -> _Memory:
    """By device, the lowest address of all their storages, and that behind the highest."""
    found: _Memory = {}
    for x in tensors:
        first = x.untyped_storage().data_ptr()
        low, high = found.get(x.device, (first, first))
        found[x.device] = min(low, first), max(high, first + x.untyped_storage().nbytes())
    return found


def _read(name: str, value: torch.Tensor, mine: torch.Tensor, memory: _Memory) -> torch.Tensor:
    """value, or a copy of it on mine's device: of what may share memory with a weight, since these
    are about to change, and of what is on a device of another kind, since reading it may fail."""
    first = value.untyped_storage().data_ptr()
    low, high = memory.get(value.device, (0, 0))
    apart = first >= high or first + value.untyped_storage().nbytes() <= low
    if apart and value.device.type in ("cpu", mine.device.type):
        return value
    try:
        return value.to(mine.device, copy=True)
    except Exception as error:  # whatever a device raises
        what = f"weight {name!r}: its new value cannot be read: {error}"
        raise UserError(what, hint=_PLAIN) from error


_Given = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Weights and their new values, by name."""


def _check_shared(given: _Given) -> None:
    """Raises UserError where weights share memory and are given different values for it."""
    groups: dict[tuple[torch.device, int], dict[Any, str]] = {}
    for name, (mine, value) in given.items():
        if mine.numel():
            group = groups.setdefault((mine.device, mine.untyped_storage().data_ptr()), {})
            group.setdefault((_place(mine), _place(value)), name)  # the same value twice agrees
    for group in groups.values():
        members = {name: given[name] for name in group.values()}
        if len(members) > 1 or any(_may_overlap(mine) for mine, _ in members.values()):
            _check_group(members)


def _place(x: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors with the same elements at the same addresses."""
    return x.device, x.dtype, x.data_ptr(), x.shape, x.stride(), x.is_conj(), x.is_neg()


def _may_overlap(x: torch.Tensor) -> bool:
    """Whether some elements of x may share memory. False is certain."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(x.shape, x.stride(), strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


def _check_group(given: _Given) -> None:
    """_check_shared of weights in one storage: tries on a copy of it whether they are all kept."""
    first, _ = next(iter(given.values()))
    storage = first.untyped_storage().clone()  # type: ignore[no-untyped-call]
    copies = {name: _in_storage(storage, mine) for name, (mine, _) in given.items()}

    def write(name: str) -> None:
        _write(copies[name], given[name][1])

    def kept(name: str) -> bool:
        return torch.equal(_bytes(copies[name]), _bytes(given[name][1].to(storage.device)))

    for name in given:
        write(name)
    lost = next((name for name in given if not kept(name)), None)
    if lost is None:
        return
    write(lost)
    who = f"elements of weight {lost!r}"
    if kept(lost):
        for other in given:
            write(lost)
            write(other)
            if not kept(lost):
                who = f"weights {lost!r} and {other!r}"
                break
    what = f"{who} share memory, and are given different values"
    raise UserError(what, hint="equal values, or one of the names")


def _in_storage(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor in storage where `like` is in its own."""
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The bits of all elements: by these a nan equals itself."""
    flat = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    return flat.copy_(x.reshape(-1)).view(torch.uint8)


def _write(weight: torch.Tensor, value: torch.Tensor) -> None:
    """Copies value over weight; where a dimension has the stride 0, its only element in memory."""
    once = tuple(slice(1) if step == 0 else slice(None) for step in weight.stride())
    weight[once].copy_(value[once])
