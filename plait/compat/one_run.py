"""Tracing a function with AOTAutograd in one run of it.

torch runs a function to see which inputs it writes, and once more to trace it. The run that is
traced shows the same: torch is told that nothing is written, and what was written when it asks,
after the run. `RunFirst` where it asks before: of inputs that share memory which is written, of
inputs that get another form, of effects; and where a size or a number is found at run time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._functorch import aot_autograd as _torchs
from torch._functorch._aot_autograd.functional_utils import has_data_mutation, has_metadata_mutation
from torch.utils import _python_dispatch

from plait.compat.shared import Shared
from plait.compat.tracing import storage_of

aot_autograd: Any = _torchs
_dispatch: Any = _python_dispatch
_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL


class RunFirst(Exception):
    """A function of which torch has to know more before it is traced."""


class OneRun:
    """The forward function of a module that is run once. run: what it is, of functional tensors."""

    def __init__(self, run: Callable[..., tuple[Any, ...]], shape_env: Any) -> None:
        self._run, self._shape_env = run, shape_env
        self._refused = False
        self._meta: Any = None
        self._inputs: Sequence[Any] = ()

    def begin(self, inputs: Sequence[Any], meta: Any) -> None:
        """inputs: as they are before the run. meta: what torch is told of a function that writes
        none of them and has no results."""
        self._inputs, self._meta = inputs, meta

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        modes = _modes()
        for name in _FOUND:
            setattr(self._shape_env, name, self._refuse)
        try:
            results = self._run(*given)
        finally:
            for name in _FOUND:
                delattr(self._shape_env, name)
            if _modes() != modes:
                self._refused = True
                _set_modes(*modes)
        tokens = _dispatch._detect_infra_mode(_FUNCTIONAL)._tokens
        if self._refused or tokens or self._shape_env.var_to_range:
            raise RunFirst
        written = self._written(given)
        meta = self._meta
        for k in written:
            meta.input_info[k] = replace(meta.input_info[k], mutates_data=True)
        meta.mutated_inp_runtime_indices = written
        meta.num_mutated_inp_runtime_indices = len(written)
        meta.output_info = [None] * len(results)  # torch looks how many there are
        return results

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Stands for what makes a number that is found at run time. The function may catch what it
        raises."""
        self._refused = True
        raise RunFirst

    def _written(self, given: Sequence[Any]) -> list[int]:
        """The positions of inputs that were written. Raises RunFirst where others share their
        memory, or where one has another form."""
        users = Counter(map(storage_of, self._inputs))
        written = []
        for k, (x, before) in enumerate(zip(given, self._inputs, strict=True)):
            if has_metadata_mutation(x, before, check_only_storage_mutation=False):
                raise RunFirst
            if has_data_mutation(x):
                if users[storage_of(before)] > 1:
                    raise RunFirst
                written.append(k)
        return written


def _modes() -> tuple[bool, bool, list[tuple[str, bool, torch.dtype]]]:
    """Those of torch that a function may leave other than they were."""
    casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
    return torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), casts


def _set_modes(grad: bool, cache: bool, casts: list[tuple[str, bool, torch.dtype]]) -> None:
    torch.set_grad_enabled(grad)
    torch.set_autocast_cache_enabled(cache)
    for device, enabled, dtype in casts:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


_DEVICES = "cpu", "cuda"
_FOUND = "create_unbacked_symint", "create_unbacked_symfloat", "create_unbacked_symbool"
_collect = aot_autograd.run_functionalized_fw_and_collect_metadata


def _collected(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """What torch knows of a function before it is traced, as a function of its inputs."""
    one = getattr(getattr(f, "_orig_mod", None), "one_run", None)
    if not isinstance(one, OneRun):
        return _collect(f, **options)  # type: ignore[no-any-return]

    def of_nothing(*inputs: Any) -> Any:
        meta = _collect(lambda *_: (), **options)(*inputs)
        one.begin(inputs, meta)
        return meta

    return of_nothing


def _set(collect: Callable[..., Any]) -> None:
    aot_autograd.run_functionalized_fw_and_collect_metadata = collect


one_run = Shared(lambda: _set(_collected), lambda: _set(_collect))
"""Inside, the forward function of a module that has it as its `one_run`, too, is run once."""
