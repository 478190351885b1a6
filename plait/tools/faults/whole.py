"""Results and gradients of a compiled module as its caller sees them, beside eager's and float64's:
what is wrong there and in no kernel comes from how graphs were made and put together."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from plait.capture.backend import plait_backend
from plait.capture.flat_module import FunctionModule
from plait.capture.recompiles import Recompiles
from plait.config import Config
from plait.tools.explain import fresh_caller
from plait.tools.faults.evaluate import WIDER, Unknown
from plait.tools.faults.measure import HALF, Worst, jitter, worst_of
from plait.tools.faults.recorded import call_bound, copied

Call = tuple[Sequence[Any], Mapping[str, Any]]
Way = Mapping[str, Any] | None
"""What plait.compile is given besides a module and its example; None: torch.compile compiles it."""


class _Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Operators are given float64 in place of smaller floats, and are asked for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            if isinstance(x, Tensor) and not func._schema.is_mutable:
                return x.to(WIDER.get(x.dtype, x.dtype))
            return WIDER.get(x, x) if isinstance(x, torch.dtype) else x

        args, kwargs = tree_map(wide, (args, kwargs or {}))
        return func(*args, **kwargs)


def as_module(fn: Callable[..., Any]) -> torch.nn.Module | None:
    """fn as something that may be called again and again: a module, which can be copied, or a
    function that holds nothing which a call may change; None for any other."""
    if isinstance(fn, torch.nn.Module):
        return fn
    return FunctionModule(fn) if _holds_nothing(fn, set()) else None


_FIXED = (ModuleType, type, BuiltinFunctionType, int, float, str, torch.dtype, torch.device)
_OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator)


def _holds_nothing(fn: object, seen: set[int]) -> bool:
    if fn is None or id(fn) in seen or isinstance(fn, (*_FIXED, *_OPERATORS)):
        return True
    seen.add(id(fn))
    if not isinstance(fn, FunctionType):
        return False
    if (fn.__module__ or "").partition(".")[0] == "torch":
        return True
    held = [c.cell_contents for c in fn.__closure__ or ()]
    held += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    held += [fn.__globals__[n] for n in _names(fn.__code__) if n in fn.__globals__]
    return all(_holds_nothing(x, seen) for x in held)


def _names(code: CodeType) -> set[str]:
    """The globals and attributes that a function reads, and those within it."""
    within = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return {*code.co_names}.union(*within)


def wrong_whole(
    module: torch.nn.Module, call: Call, cfg: Config, way: Way = None
) -> tuple[str, Worst] | None:
    """The first result or gradient that is wrong, and where; None if none is. The module must
    draw no random numbers; it and the arguments stay as they are. What plait.compile makes of it
    has no gradients. Raises Unknown where float64 cannot tell."""

    @cache
    def values(wide: bool, seed: int) -> dict[str, Tensor]:
        one, inputs = copy.deepcopy(module), copied(call)
        if not wide:
            return _seen(one, one, inputs)
        for x in [*one.parameters(), *one.buffers()]:
            x.data = _off(x.data, seed)
        inputs = tree_map(lambda x: _wide_leaf(x, seed), inputs)
        with _Wide():  # type: ignore[no-untyped-call]  # of torch
            return _seen(one, one, inputs)

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return plait_backend(gm, inputs, options=vars(cfg), recompiles=Recompiles())

    one = copy.deepcopy(module)
    if way:
        results = call_bound(one, {**way, "options": vars(cfg), "mode": None}, *copied(call))
        shown = (x for x in tree_leaves(results) if isinstance(x, Tensor))
        got = {f"result {k}": x for k, x in enumerate(shown)}
    else:
        got = _seen(one, torch.compile(fresh_caller(one), backend=backend), copied(call))
    try:
        known = values(False, 0)  # control flow has gradients of zeros where eager has none
        for name, x in got.items():
            if name in known and (found := worst_of(name, x, values)):
                return name, found
    except (RuntimeError, KeyError) as error:
        raise Unknown(re.split(r"\n| and mode ", str(error))[0]) from error
    return None


def _off(x: Tensor, seed: int) -> Tensor:
    wide = x.to(WIDER.get(x.dtype, x.dtype))
    if not seed or not x.is_floating_point():
        return wide
    return jitter(x, HALF.get(x.dtype, 2.0**-24), seed)


def _wide_leaf(x: Any, seed: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    return _off(x.detach(), seed).requires_grad_(x.requires_grad)


def _seen(module: torch.nn.Module, run: Any, call: Call) -> dict[str, Tensor]:
    """Results and gradients by name, and what the call leaves in arguments and buffers."""
    args, kwargs = call
    results = [x for x in tree_leaves(run(*args, **kwargs)) if isinstance(x, Tensor)]
    ends = [x for x in results if x.requires_grad]
    given = [x for x in tree_leaves(call) if isinstance(x, Tensor)]
    kept = {f"argument {k} afterwards": x for k, x in enumerate(given) if not x.requires_grad}
    kept |= {f"{k} afterwards": x for k, x in module.named_buffers()}
    wanted = {f"argument {k}": x for k, x in enumerate(given) if x.requires_grad}
    wanted |= {k: x for k, x in module.named_parameters() if x.requires_grad}
    found = {f"result {k}": x.detach() for k, x in enumerate(results)} | kept
    if ends and wanted:
        ones = [torch.ones_like(x) for x in ends]
        grads = torch.autograd.grad(ends, [*wanted.values()], ones, allow_unused=True)
        named = zip(wanted, grads, strict=True)
        found |= {f"the gradient of {k}": g for k, g in named if g is not None}
    return found
