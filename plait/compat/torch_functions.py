"""Whether PyTorch's own Python functions are those that it brought.

Dynamo puts calls of them into its graph without a look inside, and AOTAutograd runs them: what they
call is traced, and nothing guards on it.
"""

from __future__ import annotations

import marshal
import re
import sys
import sysconfig
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.modules.module
import torch.overrides
import typing_extensions
from torch._dynamo.variables.functions import PolyfilledFunctionVariable

from plait.compat.frame_facts import NotKept

_TORCH, _LIBRARY = f"{Path(torch.__file__).parent}/", f"{sysconfig.get_path('stdlib')}/"
_HOMES = _TORCH, typing_extensions.__file__, "<frozen"
"""Where the code of its functions, and of what they are decorated with, stands; so may Python's
library and, for code that is made of text, nowhere."""
_OF_OTHERS = re.compile("/(site|dist)-packages/|/(site|user)customize.py")
"""What stands in the folder of Python's library and is no part of it."""
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_C: Any = torch._C
_SPACES: tuple[Any, ...] = (
    torch, torch.Tensor, torch._tensor, torch.functional, torch.nn.functional, torch.nn.init,
    torch.nn.Module, torch.nn.modules.module, torch.autograd.Function, torch.linalg, torch.fft,
    torch.special, torch.overrides, torch._jit_internal, _C, _C._nn, _C._linalg,
    _C._fft, _C._special, torch._VF,
)  # fmt: skip


LIBRARIES = {"torch", "plait", *sys.stdlib_module_names}
"""Packages of which the version is told."""


def is_library_code(code: types.CodeType) -> bool:
    """Whether a code stands in a file of PyTorch, or of Python's library."""
    return is_library_file(code.co_filename)


def is_library_file(file: str) -> bool:
    """Whether a file is one of PyTorch, or of Python's library."""
    return file.startswith(_HOMES) or (
        file.startswith(_LIBRARY) and not _OF_OTHERS.search(file[len(_LIBRARY) - 1 :])
    )


def _is_brought(code: types.CodeType) -> bool:
    return is_library_code(code) or code.co_filename == "<string>"


def _is_known(name: str, space: Any) -> bool:
    """Whether PyTorch itself may call what a class or module of it calls so: not what others have
    added to a class."""
    if not isinstance(space, type) or any(name in vars(c) for c in space.__mro__[1:]):
        return True
    file = str(sys.modules[space.__module__].__file__)
    return re.search(rf"\b{name}\b", _text(file)) is not None


@cache
def _text(file: str) -> str:
    return Path(file).read_text(encoding="utf-8", errors="replace")


def torch_functions() -> str:
    """What stands where PyTorch's functions stood, as a text. Raises NotKept where it is somebody
    else's code."""
    found = []
    for space in _SPACES:
        for name, value in vars(space).items():
            kind = type(value)
            if kind is types.FunctionType:
                code = value.__code__
                if not _is_brought(code):
                    if _is_known(name, space):
                        raise NotKept(f"{space.__name__}.{name}, which is not PyTorch's own")
                    continue  # PyTorch does not call what others add
                made = marshal.dumps(code).hex() if code.co_filename == "<string>" else ""
                found.append(f"{name} {code.co_filename} {code.co_firstlineno} {made}")
            elif kind in _BUILT_IN and value.__name__ != name:
                found.append(f"{name} {value.__name__}")
        found.append("")
    for replaced, fn in PolyfilledFunctionVariable._get_polyfill_handlers().items():
        code = getattr(getattr(fn, "__torch_dynamo_polyfill__", None), "__code__", None)
        if code is not None and not _is_brought(code):
            raise NotKept(f"{code.co_qualname}, which is traced in the place of {replaced}")
    for op, run in torch._decomp.decomposition_table.items():
        code = getattr(run, "__code__", None)
        if code is not None and not _is_brought(code) and _is_aten(op):
            raise NotKept(f"a decomposition of {op}, which is not PyTorch's own")
    kernels = sorted(k for k in torch.library._impls - _made_late() if k.startswith("aten/"))
    hooks = vars(sys.modules["torch.nn.modules.module"])
    if any(v for name, v in hooks.items() if name.startswith("_global_") and name[-5:] == "hooks"):
        raise NotKept("hooks of all modules")
    return "\n".join((*found, *kernels))


def _is_aten(op: Any) -> bool:
    return getattr(op, "namespace", "") in ("aten", "prims")


def _made_late() -> set[str]:
    """The kernels that torch itself registers when `torch.func.vmap` is first called."""
    homes = "torch._functorch.predispatch", "torch._functorch.vmap"  # the latter is older
    libraries = (getattr(sys.modules.get(m), "VMAP_DECOMPOSITIONS_LIB", None) for m in homes)
    return {kernel for library in libraries if library for kernel in library._op_impls}


def is_torch_code(code: types.CodeType) -> bool:
    """Whether a code stands in a file of PyTorch."""
    return code.co_filename.startswith(_TORCH)
