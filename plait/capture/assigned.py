"""Tensors that a module's forward assigns anew (`self.n = self.n + 1`), while it is traced.

A buffer or parameter that is assigned is written: the program copies the new value into it. Any other
tensor that a module keeps is no input of the program. Where it was a tensor before, the program would
read the old one for ever: that is Unsupported. Where it was none, it stays so, and a warning says that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx.experimental.symbolic_shapes import guard_or_false

from plait.capture.aliases import same_bits
from plait.compat import is_stand_in
from plait.errors import Unsupported, warn_once

_ABSENT = object()
_WEIGHTS_OF_RNN = "_flat_weights"  # a list of its parameters, which nn.RNN makes anew when they change
_OWN = ("_parameters", "_buffers", "_modules")
_COMPILED = 'torch.compile(fn, backend="plait")'
_Before = list[tuple[torch.nn.Module, dict[str, Any], list[str]]]


@contextmanager
def with_state(
    module: torch.nn.Module, state: Mapping[str, torch.Tensor], given: Sequence[torch.Tensor]
) -> Iterator[dict[str, Any]]:
    """Inside, the module's parameters and buffers, which are `state`, are those given. Each one is replaced wherever it
    is: a layer may be in two places, and a tensor in two layers. Gives what was assigned meanwhile, when it is left."""
    others = {id(x): (name, new) for (name, x), new in zip(state.items(), given, strict=True)}
    stores = [store for part in module.modules() for store in (part._parameters, part._buffers)]
    places = [(store, key, x) for store in stores for key, x in store.items() if id(x) in others]
    for store, key, x in places:
        store[key] = others[id(x)][1]  # type: ignore[assignment]
    assigned: dict[str, Any] = {}
    try:
        yield assigned
    finally:
        for store, key, x in places:
            name, new = others[id(x)]
            if (found := store.get(key)) is not new:
                assigned[name] = found
            store[key] = x  # type: ignore[assignment]


class Holding:
    """Runs a module with other tensors as its state. who: the function that traces it."""

    def __init__(self, module: torch.nn.Module, who: str) -> None:
        self.module, self.who = module, who
        self._new: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def state(self, state: Mapping[str, torch.Tensor], given: Sequence[torch.Tensor]) -> Iterator[None]:
        """As `with_state`. Raises Unsupported where the module assigns what no program can assign."""
        before = _attributes(self.module)
        try:
            with with_state(self.module, state, given) as assigned:
                yield
        finally:
            replaced, made = _restore(before)
        if replaced:
            what = f"{self.who} of a module that assigns {replaced[0]!r}, which is no buffer with a value"
            raise Unsupported(what, hint=f"register_buffer with a tensor of its size, or {_COMPILED}")
        if made:
            names = ", ".join(map(repr, made))
            warn_once(f"{self.who}: a call of the module assigns {names}, one of the program does not")
        olds = dict(zip(state, given, strict=True))
        self._new = [(olds[name], self._fitting(name, olds[name], new).clone()) for name, new in assigned.items()]

    def write(self, results: Sequence[Any]) -> list[Any]:
        """Copies what was assigned to where it belongs. Gives the results: those in memory that is
        written lie in one copy of it, as they lay there."""
        copies = {_storage(old): (old, old.clone()) for old, _ in self._new}

        def kept(x: Any) -> Any:
            pair = copies.get(_storage(x)) if isinstance(x, torch.Tensor) else None
            return x if pair is None else _moved(x, *pair)

        results = [kept(x) for x in results]
        for old, new in self._new:
            old.copy_(new)
        return results

    def _fitting(self, name: str, old: torch.Tensor, new: Any) -> torch.Tensor:
        alike = isinstance(new, torch.Tensor) and (new.dtype, new.device) == (old.dtype, old.device)
        if not alike or any(isinstance(n, torch.SymInt) for n in new.shape) or new.shape != old.shape:
            what = f"{self.who} of a module whose {name!r} gets another size or dtype when it is called"
            raise Unsupported(what, hint=_COMPILED)
        assert isinstance(new, torch.Tensor)
        return new


def _attributes(module: torch.nn.Module) -> _Before:
    """Of each module inside: its attributes, and the names of buffers that are None."""
    return [
        (part, dict(part.__dict__), [name for name, x in part._buffers.items() if x is None])
        for part in module.modules()
    ]


def _restore(before: _Before) -> tuple[list[str], list[str]]:
    """Takes away tensors of the trace, which mean nothing after it. Gives the names of what was a tensor
    or buffer before, and of other attributes."""
    replaced: list[str] = []
    made: list[str] = []
    for part, old, empty in before:
        for name, value in list(part.__dict__.items()):
            was = old.get(name, _ABSENT)
            if name in _OWN or value is was or not any(map(is_stand_in, _tensors(value))):
                continue
            if was is _ABSENT:
                del part.__dict__[name]
            else:
                part.__dict__[name] = was
            if name != _WEIGHTS_OF_RNN:
                (replaced if _tensors(was) else made).append(name)
        for name in empty:
            if part._buffers.get(name) is not None:
                part._buffers[name] = None
                replaced.append(name)
    return replaced, made


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (torch.Tensor, list, tuple, dict)):
        return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
    return []


def _moved(x: torch.Tensor, old: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """x, which lies in the memory of old, in the same place of a copy of that; a copy of x alone where
    there is no such place."""
    first = x.storage_offset() - old.storage_offset()
    last = first + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    alike = x.dtype == old.dtype and same_bits(old, x) and old.stride() == copy.stride()
    if alike and guard_or_false(0 <= first) and guard_or_false(last < old.numel()):
        return copy.as_strided(x.shape, x.stride(), first)
    return x.clone()


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata) if x.layout == torch.strided else 0
