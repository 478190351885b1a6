"""Operators that are not PyTorch's own: what a trace of a call of one depends on.

Its kernels are no part of that: a program calls those that are registered when it runs."""

from __future__ import annotations

import types
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch._decomp import global_decomposition_table
from torch._library import simple_registry
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.node import _get_qualified_name

from plait.compat.frame_facts import NotKept, named

_OWN = ("aten", "prims", "prim", "plait")
"""Namespaces of operators that come with torch and with plait."""
_RUN = ("CPU", "CUDA", "HIP", "XPU", "MPS", "MkldnnCPU", "CompositeExplicitAutograd")
"""Keys of kernels that a program calls."""
_TRACED = (
    "Autograd", "AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView", "Meta",
    "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional", "Functionalize",
    "Python", "PreDispatch", "AutocastCPU", "AutocastCUDA", "FuncTorchBatched", "BackendSelect",
)  # fmt: skip
"""Keys of kernels that a trace runs or that decide what it sees."""
_OF_DEFINITIONS = ("Autograd", "ADInplaceOrView", "Meta", "AutocastCPU", "AutocastCUDA")
"""Those that `torch.library.custom_op` makes of the functions that it was given."""


def path_of(value: Any) -> tuple[str, str]:
    """The module and path by which a function or class is found; those of a function of C++ may
    not be its own."""
    found = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, types.BuiltinFunctionType) and named(*found) is not value:
        full = _get_qualified_name(value)
        found = "torch", full.removeprefix("torch.")
    return str(found[0]), str(found[1])


def operators_of(value: Any) -> list[OpOverload]:
    """The operators that a value of Python stands for."""
    if isinstance(value, CustomOpDef):
        value = value._opoverload
    if isinstance(value, OpOverloadPacket):
        return [getattr(value, name) for name in value.overloads()]  # type: ignore[no-untyped-call]
    return [value] if isinstance(value, OpOverload) else []


def operator_named(full: str) -> OpOverload | None:
    """The operator of this name ("space::name.overload"), if it is there."""
    if full not in torch._C._dispatch_get_all_op_names():
        return None
    space, _, path = full.partition("::")
    name, _, overload = path.partition(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
    return found


def is_foreign(op: OpOverload) -> bool:
    """Whether an operator is neither PyTorch's nor plait's."""
    return op.namespace not in _OWN


def called_so(names: Set[str], spaces: Set[str]) -> list[OpOverload]:
    """The operators that are not PyTorch's own of these names in these namespaces: those that a
    function with these names in it may call by attributes of torch.ops."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        space, _, path = full.partition("::")
        if space not in _OWN and space in spaces and path.partition(".")[0] in names:
            found.append(operator_named(full))
    return [op for op in found if op is not None]


def traced_parts(op: OpOverload) -> tuple[str, Mapping[str, Any]]:
    """What a trace of an operator depends on: a text, and functions and values by what they are.
    Raises NotKept for one whose code another library has, or nothing tells."""
    name = op._name
    held = [k for k in _TRACED if torch._C._dispatch_has_kernel_for_dispatch_key(name, k)]
    made: Any = OPDEFS.get(name)
    entry: Any = simple_registry.singleton.find(name)
    parts: dict[str, Any] = {"kernels of Python": dict(op.py_kernels)}
    known: tuple[str, ...] = ()
    if made is not None:
        known = _OF_DEFINITIONS
        for part in ("abstract", "setup_context", "backward", "vmap"):
            parts[part] = getattr(made, f"_{part}_fn")
        parts["modes"] = dict(made._torch_dispatch_fns)
        parts["autocast"] = dict(getattr(made, "_autocast_dtype", {}))
    elif entry.fake_impl.kernel is not None:
        known = ("Meta",)
        parts["abstract"] = entry.fake_impl.kernel.func
        parts["modes"] = dict(entry.torch_dispatch_rules._data)
    elif any(torch._C._dispatch_has_kernel_for_dispatch_key(name, k) for k in _RUN[-1:]):
        raise NotKept(f"the operator {name}, of which a kernel tells the results")
    foreign = [k for k in held if k not in known]
    if foreign:
        raise NotKept(f"the operator {name}, whose code for {foreign[0]} nothing tells")
    tables = {kind: table.get(op) for kind, table in global_decomposition_table.items()}
    parts["decompositions"] = {kind: fn for kind, fn in tables.items() if fn is not None}
    effect = getattr(entry, "effect", None)
    text = f"{op._schema} {sorted(map(str, op.tags))} {held} {getattr(effect, 'effect', None)}"
    return text, parts
