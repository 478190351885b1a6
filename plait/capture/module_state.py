"""The state of a module while it is traced: tensors in place of its parameters and buffers, and
what its forward assigns to them (`self.n = self.n + 1`).

The program copies an assigned value into the buffer or parameter. Whatever else a call changes in
Python is undone (`python_state.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from plait import compat
from plait.capture.aliases import same_bits
from plait.capture.python_state import Change, Snapshot
from plait.errors import Unsupported

_COMPILED = 'torch.compile(fn, backend="plait")'


@contextmanager
def with_state(
    module: torch.nn.Module, state: Mapping[str, torch.Tensor], given: Sequence[torch.Tensor]
) -> Iterator[dict[str, Any]]:
    """Inside, the module's parameters and buffers, which are `state`, are those given. Each one is
    replaced wherever it is: a layer may be in two places, and a tensor in two layers. Gives what
    was assigned meanwhile, when it is left."""
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


class ModuleRun:
    """One run of a module with other tensors as its state.

    who: the function that traces it.
    before: what an earlier call changed in Python.
    left: what this one changed, which is undone.
    """

    def __init__(self, module: torch.nn.Module, who: str, before: Sequence[Change]) -> None:
        self.module, self.who, self.before = module, who, before
        self.left: list[Change] = []
        self._new: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def state(
        self, state: Mapping[str, torch.Tensor], given: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """As `with_state`. Raises Unsupported where the module assigns what no program can
        assign."""
        before = Snapshot(self.module)
        for change in self.before:
            change.redo()
        try:
            with with_state(self.module, state, given) as assigned:
                yield
        finally:
            self.left = before.changes()
            for change in self.left:
                change.undo()
        if wrong := [change.name for change in self.left if change.of_state]:
            what = (
                f"{self.who} of a module that assigns {wrong[0]!r}, which is no buffer with a value"
            )
            raise Unsupported(
                what, hint=f"register_buffer with a tensor of its size, or {_COMPILED}"
            )
        olds = dict(zip(state, given, strict=True))
        self._new = [
            (olds[name], self._fitting(name, olds[name], new).clone())
            for name, new in assigned.items()
        ]

    def write(self, results: Sequence[Any]) -> list[Any]:
        """Copies what was assigned to where it belongs. Gives the results: those in memory that is
        written lie in one copy of it, as they lay there."""
        copies = {compat.tracing.storage_of(old): (old, old.clone()) for old, _ in self._new}

        def kept(x: Any) -> Any:
            pair = copies.get(compat.tracing.storage_of(x)) if isinstance(x, torch.Tensor) else None
            return x if pair is None else _moved(x, *pair)

        results = [kept(x) for x in results]
        for old, new in self._new:
            old.copy_(new)
        return results

    def _fitting(self, name: str, old: torch.Tensor, new: Any) -> torch.Tensor:
        alike = isinstance(new, torch.Tensor) and (
            (new.dtype, new.device, new.ndim) == (old.dtype, old.device, old.ndim)
            and all(map(statically_known_true, map(operator.eq, new.shape, old.shape)))
        )
        if not alike:
            what = (
                f"{self.who} of a module whose {name!r} gets another size or dtype when it is "
                "called"
            )
            raise Unsupported(what, hint=_COMPILED)
        assert isinstance(new, torch.Tensor), new
        return new


def _moved(x: torch.Tensor, old: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """x, which lies in the memory of old, in the same place of a copy of that; a copy of x alone
    where there is no such place."""
    first = x.storage_offset() - old.storage_offset()
    last = first + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    alike = x.dtype == old.dtype and same_bits(old, x) and old.stride() == copy.stride()
    if alike and guard_or_false(0 <= first) and guard_or_false(last < old.numel()):
        return copy.as_strided(x.shape, x.stride(), first)
    return x.clone()
