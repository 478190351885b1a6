"""Graphs that a function is compiled into, as text, with what they were called with: from there on
each is compiled alone, in as many ways as one likes.

The text is that of `plait replay` (`graph/text.py`).
"""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from plait.capture import export
from plait.capture.backend import plait_backend
from plait.capture.export import record_of
from plait.capture.program import compile_captured
from plait.capture.recompiles import Recompiles
from plait.compat.frames import guards_unmeasured
from plait.config import Config
from plait.graph.captured import Captured
from plait.graph.text import read_given
from plait.pipelines import LEAVABLE, clean_graph
from plait.tools.explain import edges_of, fresh_caller, now, run_backward
from plait.tools.faults.evaluate import draws
from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.program import Artifacts, Loaded, Program
from plait.wrapper.show import GIVEN, GIVEN_TENSORS
from plait.wrapper.targets import TARGETS


def changes(cfg: Config) -> dict[str, Any]:
    """The options that differ from the defaults."""
    return {k: v for k, v in vars(cfg).items() if v != getattr(Config(), k)}


def told(cfg: Config) -> dict[str, Any]:
    """Those that a script has to give: that change what is built, or that the environment does not
    say."""
    env, built = Config.from_env(), changes(cfg).keys() & dict(cfg.key()).keys()
    return {k: v for k, v in vars(cfg).items() if k in built or v != getattr(env, k)}


@dataclass(frozen=True)
class Recorded:
    """A graph that was compiled: what plait was given as text, and what it was called with
    first."""

    name: str
    text: str
    tensors: Mapping[str, Tensor]
    inputs: tuple[Any, ...] | None

    @property
    def why_unknown(self) -> str:
        """What is in the way of calling it again; "" if nothing is."""
        if self.inputs is None:
            return "which plait did not run"
        return "which has no text" if '"no_text"' in self.text else ""

    def save(self, file: Path) -> None:
        """For `load_recorded`, in another process."""
        torch.save((self.name, self.text, dict(self.tensors), self.inputs), file)

    def captured(self) -> Captured:
        """The graph as it came, a new one each time."""
        return read_given(self.text, self.tensors)[0]

    def bare(self, cfg: Config) -> GraphModule:
        """The graph after the passes that nothing can do without."""
        return clean_graph(self.captured(), replace(cfg, without=",".join(LEAVABLE))).graph

    def draws(self, cfg: Config) -> bool:
        """Whether it has random numbers."""
        return bool(self.why_unknown) or any(map(draws, self.bare(cfg).graph.nodes))

    def copies(self) -> tuple[Any, ...]:
        """Inputs for a call."""
        assert self.inputs is not None, f"{self.name} was not called"
        return tuple(copied(list(self.inputs)))


def load_recorded(file: Path) -> Recorded:
    """What `Recorded.save` wrote."""
    return Recorded(*torch.load(file, weights_only=True))


class Recorder:
    """Compiles as plait does, but without kernels, and keeps each graph with what it is called with
    first: what is wrong with kernels is not in the way."""

    def __init__(self, cfg: Config) -> None:
        self.folder = tempfile.TemporaryDirectory()
        plain: Any = {"kernels": False, "wrapper": "python", "while_building": "wait"}
        self.cfg = replace(cfg, **plain, debug_dir=self.folder.name)
        self.calls: dict[str, tuple[Any, ...]] = {}
        self.recompiles = Recompiles()  # none of the user's

    def backend(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """For torch.compile."""
        chosen, own = vars(self.cfg), self.recompiles
        return plait_backend(gm, inputs, options=chosen, target=self._target, recompiles=own)

    def bound(self, captured: Captured) -> Program:
        """For plait.compile."""
        return compile_captured(captured, self.cfg, self._target)

    def _target(self, program: WrapperProgram, artifacts: Artifacts) -> Loaded:
        return _Recorder(program.name, TARGETS["python"](program, artifacts), self.calls)

    def graphs(self) -> list[Recorded]:
        """Those that ran, in order, and then those that did not."""
        root = Path(self.folder.name)
        rest = sorted(p.name for p in root.iterdir() if (p / GIVEN).is_file())
        names = [*self.calls, *(n for n in rest if n not in self.calls)]
        return [_read(root / name, self.calls.get(name)) for name in names]


Prepared = Callable[[Config], Config]
"""With which configuration graphs are recorded that are compiled with a given one."""
Graphs = list[tuple[Recorded, Config]]
"""Graphs, and how each is compiled."""


@dataclass
class Recording:
    """Records what is compiled. options, mode: on top of those that it is compiled with."""

    options: Mapping[str, Any] | None
    mode: str | None = None
    prepared: Prepared = lambda cfg: cfg
    recorders: list[tuple[Recorder, Config]] = field(default_factory=list)

    def recorder(self, cfg: Config) -> Recorder:
        """For what is compiled by this configuration."""
        cfg = cfg.with_options(self.options, self.mode)
        self.recorders.append((Recorder(self.prepared(cfg)), cfg))
        return self.recorders[-1][0]

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Inside, what plait.compile is given is recorded, and there are files of all graphs:
        Dynamo keeps what it compiled, and so recorders, for as long as it likes."""
        try:
            with mock.patch.object(
                export, "compile_captured", lambda captured, cfg: self.recorder(cfg).bound(captured)
            ):
                yield
        finally:
            for recorder, _ in self.recorders:
                recorder.folder.cleanup()

    @property
    def graphs(self) -> Graphs:
        """What was recorded."""
        return [(g, cfg) for recorder, cfg in self.recorders for g in recorder.graphs()]


def record(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    recording: Recording,
    dynamic: bool | None = None,
) -> Graphs:
    """The graphs of fn, which is called once, on copies of its arguments; what plait.compile
    returned is compiled anew. dynamic: as for torch.compile."""
    args, kwargs, own = copied(args), copied(dict(kwargs)), fn.__wrapped__ if record_of(fn) else fn
    own = copy.deepcopy(own) if isinstance(own, torch.nn.Module | ExportedProgram) else own
    with recording.bound(), guards_unmeasured():
        if record_of(fn):
            call_bound(own, fn.given, args, kwargs)
            return recording.graphs
        recorder = recording.recorder(Config.from_env())
        compiled = torch.compile(fresh_caller(own), backend=recorder.backend, dynamic=dynamic)
        since = now()
        result = compiled(*args, **kwargs)
        if not any(name.startswith("backward") for name in recorder.calls):
            run_backward(result, edges_of(result, since))
        return recording.graphs


def call_bound(
    fn: Any, given: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What fn gives for these arguments, compiled by plait.compile for them, given that."""
    example = None  # an exported program has its own
    if not isinstance(fn, ExportedProgram):
        if args and kwargs:
            names = inspect.signature(getattr(fn, "forward", fn)).parameters
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs}
        example = kwargs or args
    return export.compile(fn, example, **given)(*args, **kwargs)


def _read(folder: Path, inputs: tuple[Any, ...] | None) -> Recorded:
    tensors = folder / GIVEN_TENSORS
    held = torch.load(tensors, weights_only=True) if tensors.is_file() else {}
    return Recorded(folder.name, (folder / GIVEN).read_text(), held, inputs)


class _Recorder:
    """A program that keeps what it was called with first."""

    def __init__(self, name: str, loaded: Loaded, calls: dict[str, tuple[Any, ...]]) -> None:
        def boxed(args: list[Any]) -> tuple[Any, ...]:
            calls.setdefault(name, copied(tuple(args)))
            made: tuple[Any, ...] = loaded.boxed(args)
            return made

        boxed._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it
        self.boxed: Any = boxed

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        made: tuple[Any, ...] = self.boxed(list(args))
        return made


def copied(values: Any) -> Any:
    """The same nest, with tensors of their own that lie as these do."""

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        made = x.detach().clone() if x.layout != torch.strided else _as_laid_out(x.detach())
        return made.requires_grad_(x.requires_grad) if x.is_leaf else made

    return tree_map(own, values)


def _as_laid_out(x: Tensor) -> Tensor:
    if type(x) is not Tensor or any(
        s == 0 and n > 1 for n, s in zip(x.shape, x.stride(), strict=True)
    ):
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
