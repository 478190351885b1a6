"""Kernel times, for the debug ladder and reports: a program that, at its first call, times each of
its kernels, and of its calls of PyTorch's operators, and tells them.

In: a loaded program and what it was loaded from. Out: a program with the same results. The kernels
are timed on copies of the first call's inputs, by the Python target of the same program, and the
random state is put back: the call itself sees nothing of it. A program that calls Python functions,
or operators that may do more than compute (the user's, or those that wait for other ranks), is not
timed, since those would run once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.devices import facts_of
from plait.log import KERNELS, PassLog
from plait.runtime.load import Libraries
from plait.runtime.timing import Boxed, table, time_kernels
from plait.wrapper.calltext import TORCHS_OWN
from plait.wrapper.instructions import CallExtern, DefineKernel, Launch, WrapperProgram
from plait.wrapper.program import Loaded, is_timed, timers


class MeasuredProgram:
    """loaded, after measure(inputs) at its first call."""

    def __init__(self, loaded: Loaded, measure: Callable[[list[Any]], None]) -> None:
        self.loaded = loaded
        todo = [measure]

        def boxed(args: list[object]) -> tuple[object, ...]:
            if todo:
                todo.pop()(args)
            return loaded.boxed(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        self.boxed: Boxed = boxed

    def __call__(self, *args: object) -> tuple[object, ...]:
        return self.boxed(list(args))


def measured(
    log: PassLog,
    loaded: Loaded,
    program: WrapperProgram,
    libraries: Libraries,
    constants: Sequence[torch.Tensor],
) -> Loaded:
    """loaded itself, or where kernel times are to be seen (level 2, or a timer) a program that
    tells them at its first call."""
    if not is_timed(log) or not any(isinstance(i, Launch | CallExtern) for i in program.body):
        return loaded
    if program.n_callables or program.programs:
        return _untimed(log, loaded, "it calls Python or subprograms")
    called = {i.op for i in program.body if isinstance(i, CallExtern)}
    if more := sorted(op for op in called if op.partition("::")[0] not in TORCHS_OWN):
        return _untimed(log, loaded, f"it calls {more[0]}, which may do more than compute")

    devices = {i.device for i in program.body if isinstance(i, DefineKernel)}
    gpus = [torch.device(d).index or 0 for d in sorted(devices) if not facts_of(d).is_host]

    def measure(args: list[Any]) -> None:
        if gpus and torch.cuda.is_current_stream_capturing():
            _untimed(log, loaded, "a CUDA graph is being recorded")
            return
        from plait.wrapper.python import load_python, make_python  # nobody else needs it

        source = make_python(program, libraries, timed=True)
        call = load_python(source, libraries, constants, ()).boxed
        try:
            with torch.random.fork_rng(devices=gpus):
                launches = time_kernels(call, lambda: copies(args))
        except (RuntimeError, IndexError) as error:  # the call itself will say what is wrong
            _untimed(log, loaded, str(error).splitlines()[0])
            return
        for line in table(launches):
            log.note(KERNELS, f"{log.name}: {line}")
        for tell in timers:
            tell(log.name, launches, "")

    return MeasuredProgram(loaded, measure)


def _untimed(log: PassLog, loaded: Loaded, why: str) -> Loaded:
    log.note(KERNELS, f"{log.name}: kernels are not timed: {why}")
    for tell in timers:
        tell(log.name, (), why)
    return loaded


def copies(values: Sequence[Any]) -> list[object]:
    """Tensors on memory of their own with the same layouts; those that share memory share it
    again."""
    memory: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        t = value.detach()
        storage = t.untyped_storage()
        if storage.data_ptr() not in memory:
            memory[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
        made = torch.empty(0, dtype=t.dtype, device=t.device)
        made.set_(memory[storage.data_ptr()], t.storage_offset(), t.shape, t.stride())
        made = torch._conj(made) if t.is_conj() else made
        return torch._neg_view(made) if t.is_neg() else made

    with torch.no_grad():
        return [copy(v) for v in values]
