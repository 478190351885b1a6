"""What a compilation returns: the callable program, and the record of how it came about.

The pipeline (`plait/compile.py`) fills a `CompileRecord` for every graph and hands it to `observe`;
`tools/explain.py` listens by setting `observers` around a compile, `plait.report` in all threads.
Nothing on the path of a call reads any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from plait.config import Config
from plait.devices import facts_of
from plait.errors import Fallback
from plait.log import KERNELS, PassLog
from plait.lower.dtypes import TO_TORCH
from plait.runtime.load import Libraries
from plait.wrapper import instructions as ins
from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.walk import used

if TYPE_CHECKING:  # a program that is loaded needs neither
    from plait.kernel.target import Source
    from plait.runtime.timing import KernelTime
    from plait.schedule.plan import Plan

AS_PYTHON = "the program runs as Python"  # a wrapper_reason


@dataclass(frozen=True)
class CompileRecord:
    """How one graph was compiled.

    kind: 'inference', 'forward' or 'backward'. target: the wrapper target ('native', 'python',
    'fx').
    aten_ops: call_function nodes of the graph that came in. times_ms: step of the pipeline ->
    milliseconds.
    kernel_source: the text that the toolchain saw. cache_hit: the kernel library was found on disk
    (None: no kernels).
    tuned: a line a kernel that was to be tuned. ladder: what has no kernel of ours, and why: each
    operator once.
    wrapper_reason: why Dynamo got AOTAutograd's callable and not the program itself; "" where it
    got the program. frozen: what became of weights that are constants; "" where none are.
    numerics, batch_invariant: options under which it was compiled. modules: the path of the module
    whose code makes a tensor, by its name.
    input_names, result_names: the user's words for what the program takes and returns, by position,
    "" where there are none; empty where nobody listens. compile_id: Dynamo's compile, as
    "frame/number"; "" where it was none."""

    name: str
    kind: str
    target: str
    plan: Plan
    wrapper: WrapperProgram
    aten_ops: int = 0
    times_ms: Mapping[str, float] = field(default_factory=dict)
    kernel_source: str = ""
    cache_hit: bool | None = None
    tuned: tuple[str, ...] = ()
    ladder: tuple[Fallback, ...] = ()
    wrapper_reason: str = ""
    frozen: str = ""
    numerics: str = "default"
    batch_invariant: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)
    input_names: tuple[str, ...] = ()
    result_names: tuple[str, ...] = ()
    compile_id: str = ""

    def module_of(self, made: Iterable[str | None]) -> str:
        """The module whose code makes the first of some buffers of which that is known."""
        return next((self.modules[b] for b in made if b and b in self.modules), "")

    @property
    def fallback_reasons(self) -> dict[str, str]:
        """Why operators are called: those without a lowering rule, or whose rule declined."""
        return {step.what: step.reason for step in self.ladder if step.rung in ("aten", "python")}


@dataclass(frozen=True)
class Artifacts:
    """What stands beside a program's instructions. libraries: files of built kernels; sources:
    their text, by kind of device. constants, callables: the tables that the program numbers. hints:
    what symbols were in the example. cfg: what else is built is built by."""

    libraries: Libraries
    constants: Sequence[torch.Tensor] = ()
    callables: Sequence[Any] = ()
    sources: Mapping[str, Source] = field(default_factory=dict)
    hints: Mapping[str, int] = field(default_factory=dict)
    cfg: Config = field(default_factory=Config.from_env)


class Loaded(Protocol):
    """A program that runs: called as loaded(*inputs) -> tuple and as loaded.boxed(list) ->
    tuple."""

    def __call__(self, *args: Any) -> tuple[object, ...]: ...

    @property
    def boxed(self) -> Callable[[list[object]], tuple[object, ...]]: ...


Target = Callable[[WrapperProgram, Artifacts], Loaded]
"""Turns a verified program into something that runs."""


@dataclass(frozen=True)
class Program:
    """A compiled graph. call(*inputs) -> tuple of outputs; boxed(list of inputs) -> tuple, which
    empties the list first and lets inputs die after their last use. Inputs stand in the order of
    record.wrapper.inputs."""

    call: Callable[..., tuple[object, ...]]
    boxed: Callable[[list[object]], tuple[object, ...]]
    record: CompileRecord


Promise = tuple[str, torch.dtype, str | None] | None
"""Name, dtype and device of an input; device None: any; None where the input is no tensor of a
dtype that is known."""


def promises(program: WrapperProgram) -> list[Promise]:
    """What the Python targets ask of every input, as `find_misfit` in native/torch/frame.cpp asks
    it.

    Attention gives the state of its random numbers on the host, though the fake tensors say
    otherwise: what has no dimensions and is taken by operators only may be anywhere."""
    memory = (ins.Launch, ins.View, ins.Reuse, ins.AssertAlignment)
    touched = {name for i in program.body if isinstance(i, memory) for name in used(i)}
    out: list[Promise] = []
    for i in program.inputs:
        if isinstance(i, ins.TensorInput) and i.dtype in TO_TORCH:
            anywhere = not facts_of(i.device).is_host and not i.shape and i.name not in touched
            out.append((i.name, TO_TORCH[i.dtype], None if anywhere else i.device))
        else:
            out.append(None)
    return out


Observer = Callable[[CompileRecord], None]
observers: ContextVar[tuple[Observer, ...]] = ContextVar("plait_compile_observers", default=())
"""Who wants to know of every graph that this thread compiles."""
observers_of_process: list[Observer] = []
"""The same of all threads."""


def listening() -> tuple[Observer, ...]:
    """Who is told of what this thread compiles."""
    return (*observers.get(), *observers_of_process)


def observe(record: CompileRecord) -> None:
    """Shows a finished compilation to everyone who listens."""
    for observer in listening():
        observer(record)


Timer = Callable[[str, "Sequence[KernelTime]", str], None]
timers: list[Timer] = []
"""Who wants the times of kernels. While there is one, each program that is compiled times its
kernels at its first call; a timer is told the program's name, the launches in order, or why there
are none."""


def is_timed(log: PassLog) -> bool:
    """Whether a program that is compiled now times its kernels."""
    return bool(timers) or log.shows(KERNELS)
