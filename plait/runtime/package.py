"""`plait.load`: runs what `plait.package` wrote, with nothing of the compiler in the process.

The native half (native/core/package.cpp) verifies the file before anything in it runs; here arguments and results get
back their nesting and weights can be exchanged. A package holds machine code: load only what you trust.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
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

    device: which GPU a GPU's package runs on, without it the current one. verify_weights: read all of the weights and
    compare them with their checksum; everything else is always verified. machine: which of the package's kernels,
    without it the best that run here. Raises PackageError, which says what is wrong with the file, or what this machine
    or process lacks.
    """
    name = os.fspath(path)
    return Package(NativePackage(name, None if device is None else str(device), verify_weights, machine), name)


def _signature(native: NativePackage, path: str) -> signatures.Signature:
    """How arguments and results are nested. Raises PackageError where that is not to be had or fits nothing."""
    try:
        signature = signatures.read(json.loads(native.python))
    except signatures.UnknownClass as error:
        raise PackageError(
            f"{path}: arguments or results are nested in a class unknown here ({error}): import it"
        ) from None
    except Exception as error:  # noqa: BLE001 - what damaged text does to its readers is theirs
        why = f"{type(error).__name__}: {error}"
        raise PackageError(f"{path}: damaged section 'python': {why}") from None
    if signature.tensors != list(native.names) or signatures.result_names(signature) != tuple(native.outputs):
        raise PackageError(f"{path}: damaged section 'python': it names other arguments or results than the program")
    return signature


class Package:
    """A loaded program: call it as what was packaged. Several threads may.

    inputs, outputs: names of the tensors that a call takes and gives. weights: parameters and buffers by name, the
    memory that the program uses; it is this process's own, the file never changes. machine: what kernels were chosen
    for. versions: of plait, torch and Python where it was written.
    """

    def __init__(self, native: NativePackage, path: str) -> None:
        signature = _signature(native, path)
        self.call: Callable[..., Any] = signatures.as_called(native.call, signature)
        self.inputs, self.outputs = tuple(native.names), tuple(native.outputs)
        self.weights: Mapping[str, torch.Tensor] = MappingProxyType(dict(native.weights))
        self.machine, self.versions = native.machine, native.versions
        self._folded = frozenset(native.folded)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<plait package for {self.machine}: {', '.join(self.inputs)} -> {', '.join(self.outputs)}>"

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies values over weights, by name; the others keep theirs. Nothing is changed if one does not fit
        (UserError)."""
        for name, value in weights.items():
            mine = self.weights.get(name)
            if name in self._folded:
                raise UserError(f"weight {name!r} was folded into the program", hint="plait.package(..., fold=False)")
            if mine is None:
                raise UserError(f"there is no weight {name!r}", hint=f"one of {', '.join(self.weights)}")
            if not isinstance(value, torch.Tensor):
                raise UserError(f"weight {name!r}: expected a tensor, got {type(value).__name__}")
            if value.shape != mine.shape or value.dtype != mine.dtype:
                want, got = (f"{t.dtype} of sizes {tuple(t.shape)}" for t in (mine, value))
                raise UserError(f"weight {name!r}: expected {want}, got {got}")
        with torch.no_grad():
            for name, value in weights.items():
                self.weights[name].copy_(value)
