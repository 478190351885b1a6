"""The graph of a compiled frame, kept and made again: its programs, what stands around them, and
Dynamo's graph as Python text for calls that eager takes.

A program is a plan, the keys of its kernels in their store and its constants. The backward program
of a training graph is kept when it is compiled, at the first backward pass; its graph is kept as
text, which the compiler reads where no program is found.
"""

from __future__ import annotations

import importlib
import secrets
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule

from plait import _native, compat
from plait.capture import ladder
from plait.capture.program import compile_captured
from plait.capture.training import native_training
from plait.capture.warm.entry import packed, unpacked
from plait.compat.frame_facts import NotKept, named
from plait.config import Config
from plait.errors import raised_at
from plait.graph.captured import Captured
from plait.graph.text import given_text, read_given, tensors_of
from plait.log import STAGES, PassLog
from plait.runtime import trust
from plait.runtime.load import load
from plait.runtime.store import BACKWARDS, KINDS, Kind, Store, key_of
from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.native import encode
from plait.wrapper.program import Artifacts, Loaded
from plait.wrapper.targets import TARGETS

Data = dict[str, Any]
MAX_CONSTANT_NBYTES = 1 << 20
"""Of all constants of a program together."""


@dataclass
class Kept:
    """What a compile of one graph leaves for its entry.

    data, pieces: as in `Entry`. name: of the entries of its backward program. reason: why it is not
    kept, or "". n_graphs: that asked for it. strict: a bug is raised. trace: Dynamo's, of them."""

    strict: bool = False
    program: tuple[WrapperProgram, Artifacts] | None = None
    data: Data | None = None
    pieces: dict[str, bytes] = field(default_factory=dict)
    name: str = field(default_factory=partial(secrets.token_hex, 16))
    reason: str = ""
    n_graphs: int = 0
    trace: weakref.ref[TracingContext] | None = None

    def count(self) -> None:
        """A graph asks. Of a trace that Dynamo gives up, and begins anew, nothing counts."""
        if self.trace is None or self.trace() is not TracingContext.get():
            self.program, self.data, self.pieces = None, None, {}
            self.reason, self.n_graphs, self.trace = "", 0, weakref.ref(TracingContext.get())
        self.n_graphs += 1

    @contextmanager
    def reasons(self) -> Iterator[None]:
        """Notes why something cannot be kept. A compile never fails for that."""
        try:
            yield
        except NotKept as why:
            self.reason = self.reason or str(why)
        except Exception as error:
            if self.strict:
                raise
            self.reason = self.reason or f"{type(error).__name__}: {error} ({raised_at(error)})"

    def target(self, program: WrapperProgram, artifacts: Artifacts) -> Loaded:
        """The native target."""
        self.program = program, artifacts
        return TARGETS["native"](program, artifacts)


_here: ContextVar[Kept | None] = ContextVar("plait_warm_kept", default=None)


@contextmanager
def keeping(strict: bool) -> Iterator[Kept]:
    """What is compiled inside, in this thread, is kept in the result."""
    kept = Kept(strict)
    token = _here.set(kept)
    try:
        yield kept
    finally:
        _here.reset(token)


def kept_here() -> Kept | None:
    """Where a graph that is compiled now leaves what it comes to; None: nowhere."""
    kept = _here.get()
    if kept is not None:
        kept.count()
    return kept


# ------------------------------------------------------------------------------------ programs
def program_data(kept: Kept) -> tuple[Data, bytes]:
    """A program as data, and its plan. Raises NotKept."""
    if kept.program is None:
        raise NotKept("a program that another target runs")
    program, artifacts = kept.program
    if artifacts.callables:
        raise NotKept("a program that calls Python")
    kernels = {}
    for kind, library in artifacts.libraries.items():
        if not isinstance(library, trust.Entry):
            raise NotKept("kernels that lie in no store")
        path = Path(str(library))
        of_kind = next((k.name for k in KINDS if is_of(k, path)), None)
        if of_kind is None:
            raise NotKept("kernels of a kind that no store has")
        kernels[kind] = [of_kind, path.stem]
    constants = [_tensor_data(x) for x in artifacts.constants]
    if sum(len(c["data"]) // 2 for c in constants) > MAX_CONSTANT_NBYTES:
        raise NotKept("large constants")
    return {"kernels": kernels, "constants": constants}, encode(program)


def is_of(kind: Kind, path: Path) -> bool:
    """Whether a file lies where entries of a kind do."""
    return (path.parent.parent.name, path.suffix) == (kind.folder, kind.suffix)


def _tensor_data(x: torch.Tensor) -> Data:
    if x.layout != torch.strided or type(x) is not torch.Tensor:
        raise NotKept(f"a constant of class {type(x).__name__} and layout {x.layout}")
    with compat.tracing.untraced_operators():
        flat = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    if not x.is_contiguous():
        raise NotKept("a constant whose elements do not follow each other")
    return {
        "dtype": str(x.dtype).removeprefix("torch."),
        "shape": list(x.shape),
        "device": str(x.device),
        "data": bytes(flat.tolist()).hex(),
    }


def _tensor(data: Data) -> torch.Tensor:
    raw = bytearray.fromhex(data["data"])
    dtype = getattr(torch, data["dtype"])
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(data["shape"]).to(data["device"])


def loaded_program(data: Data, plan: bytes, cfg: Config) -> _native.Program:
    """The program of `program_data`. Raises NotKept where a kernel is there no more."""
    libraries = {}
    for kind, (name, key) in data["kernels"].items():
        of_kind = next((k for k in KINDS if k.name == name), None)
        found = None if of_kind is None else Store.of(cfg, of_kind).find(key)
        if found is None:
            raise NotKept("its kernels are there no more")
        libraries[kind] = found
    return load(plan, libraries, [_tensor(c) for c in data["constants"]])


# ------------------------------------------------------------------------------------ by eager
_LIBRARIES = ("torch", "plait", "builtins", "_operator", "operator", "math")
"""Packages whose functions graphs may call: `_versions` and `torch_functions` tell of them."""
_OPERATORS = ("aten", "prims", "prim", "plait")
"""Namespaces of operators that come with torch and with plait."""


def source_data(gm: GraphModule) -> tuple[Data, bytes]:
    """Dynamo's graph as Python text, and what its names are. Raises NotKept."""
    if any(n.op in ("get_attr", "call_module") for n in gm.graph.nodes):
        raise NotKept("a graph with tensors or graphs of its own")
    for node in gm.graph.nodes:
        target = node.target
        if isinstance(target, OpOverload):
            target = target.overloadpacket
        if isinstance(target, OpOverloadPacket):
            name = target._qualified_op_name
            if name.partition("::")[0] not in _OPERATORS:
                raise NotKept(f"a graph that calls {name}, whose code nothing tells")
    code = gm.graph.python_code("self")
    names = {name: _named_data(name, value) for name, value in code.globals.items()}
    return names, code.src.encode()


def _named_data(name: str, value: Any) -> list[Any]:
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if isinstance(value, float):
        return ["float", repr(value)]
    for kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return [kind.__name__, str(value).removeprefix("torch.")]
    where = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    library = str(where[0]).partition(".")[0]
    if callable(value) and not isinstance(value, type) and library not in _LIBRARIES:
        raise NotKept(f"a graph that calls {where[1]}, which Dynamo does not look into")
    if value is not None and named(*where) is value:
        return ["object", *where]
    if value is type(None):
        return ["none"]
    raise NotKept(f"a graph that names {name}, a {type(value).__name__}")


def _named(row: Sequence[Any]) -> Any:
    match row:
        case ["module", name]:
            return importlib.import_module(name)
        case ["float", text]:
            return float(text)
        case ["device", text]:
            return torch.device(text)
        case ["object", module, path]:
            return named(module, path)
        case ["none"]:
            return type(None)
        case [_, text]:
            return getattr(torch, text)
    raise NotKept(f"{row} is no name")


class Eager:
    """Dynamo's graph by eager, made of its text when it is first called."""

    def __init__(self, names: Data, text: bytes) -> None:
        self._names, self._text = names, text
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._run is None:
            scope = {name: _named(row) for name, row in self._names.items()}
            exec(self._text.decode(), scope)
            self._run = partial(scope["forward"], torch.nn.Module())
        return self._run(*args)


# ------------------------------------------------------------------------------------ training
@dataclass
class Backward:
    """The backward half of a training graph that was made again.

    name: of its entries. text: its graph. donated: inputs that nobody reads after the last pass."""

    name: str
    text: str
    donated: tuple[int, ...]
    cfg: Config

    def at_first_use(self, may_overwrite: bool) -> _native.Program:
        """The program, found or compiled."""
        donated = self.donated if may_overwrite else ()
        found = find_backward(self.name, donated, self.cfg)
        if found is not None:
            return found
        captured = replace(self._captured(), donated_inputs=donated)
        kept = Kept()
        call = compile_captured(captured, self.cfg, kept.target).call
        keep_backward(self.name, donated, kept, self.cfg)
        assert isinstance(call, _native.Program), call
        return call

    def graph(self) -> GraphModule:
        """The graph, for gradients that kernels cannot read."""
        return self._captured().graph

    def _captured(self) -> Captured:
        return read_given(self.text, {})[0]


# ------------------------------------------------------------------------------------ backward
def backward_text(captured: Captured, cfg: Config) -> bytes:
    """A backward graph as text. Raises NotKept."""
    text = given_text(captured, cfg)
    if text.startswith('{\n"no_text"') or tensors_of(captured.graph):
        raise NotKept("a backward graph that no text holds")
    return text.encode()


def find_backward(name: str, donated: Sequence[int], cfg: Config) -> _native.Program | None:
    """The backward program that was kept for these donated inputs."""
    found = Store.of(cfg, BACKWARDS).read(_backward_key(name, donated))
    if found is None:
        return None
    try:
        data, pieces = unpacked(found)
        return loaded_program(data, pieces["plan"], cfg)
    except NotKept as why:
        _log(cfg).note(STAGES, f"the backward program is not taken: {why}")
        return None


def keep_backward(name: str, donated: Sequence[int], kept: Kept, cfg: Config) -> None:
    """Keeps a backward program. One that cannot be kept is compiled by each process."""
    try:
        data, plan = program_data(kept)
        Store.of(cfg, BACKWARDS).put(_backward_key(name, donated), packed(data, {"plan": plan}))
    except (NotKept, OSError) as why:  # OSError: a full disk
        _log(cfg).note(STAGES, f"the backward program is not kept: {why}")


def _log(cfg: Config) -> PassLog:
    return PassLog(cfg, "backward")


def _backward_key(name: str, donated: Sequence[int]) -> str:
    return key_of((name, "donated" if donated else "kept"))


# ------------------------------------------------------------------------------------ whole graphs
def keep_graph(kept: Kept, gm: GraphModule, around: Data, arguments: Sequence[Any] | None) -> None:
    """Fills kept with a graph whose program it has. around: what stands around the program, as
    `DirectGraph.data` or `TrainingGraph.data` tells it. arguments: what `kept_apart` asks of them.
    Raises NotKept."""
    program, kept.pieces["plan"] = program_data(kept)
    names, kept.pieces["source"] = source_data(gm)
    kept.data = {"program": program, "names": names, "around": around, "arguments": arguments}


def graph_again(
    data: Mapping[str, Any], pieces: Mapping[str, bytes], cfg: Config
) -> Callable[..., Any]:
    """The callable that Dynamo's code calls. Raises NotKept."""
    program = loaded_program(data["program"], pieces["plan"], cfg)
    eager = Eager(data["names"], pieces["source"])
    around = data["around"]
    marks = [(k, name, frozenset(dims)) for k, name, dims in around.get("marks", ())]
    call: Any = program
    if around["how"] == "direct":
        results = [tuple(r) for r in around["results"]]
        call = _native.Direct(program, eager, results, marks, False)
    elif around["how"] == "training":
        text = pieces["backward"].decode()
        backward = Backward(around["name"], text, tuple(around["donated"]), cfg)
        call = native_training(
            program, eager, backward.at_first_use,
            ladder.interpreted_gradients(backward.graph, "backward", cfg), around, marks,
        )  # fmt: skip
    one = partial(ladder.eager_at_calls, eager, "warm", around["kind"], cfg, around["n_ops"])
    if data["arguments"] is not None:
        call = ladder.kept_apart(call, one, [tuple(a) for a in data["arguments"]])
    return ladder.with_tangents(call, one)
