"""The graph of a compiled frame, kept and made again: its programs, what stands around them, and
Dynamo's graph as Python text for calls that eager takes.

A program is a plan, the keys of its kernels in their store and its constants. The backward program
of a training graph is kept when it is compiled, at the first backward pass; its graph is kept as
text, which the compiler reads where no program is found.
"""

from __future__ import annotations

import json
import secrets
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
from torch._ops import HigherOrderOperator, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from plait import _native, compat
from plait.capture import ladder
from plait.capture.program import compile_captured
from plait.capture.training import native_training
from plait.capture.warm.entry import packed, unpacked
from plait.capture.warm.operators import Formulas
from plait.compat.frame_facts import NotKept, named
from plait.compat.operators import is_foreign, operator_named, operators_of, path_of
from plait.config import Config
from plait.errors import raised_at
from plait.graph.captured import Captured
from plait.graph.text import NO_NODES, GraphReader, GraphWriter, given_text, read_given, tensors_of
from plait.log import STAGES, PassLog
from plait.runtime import trust
from plait.runtime.load import load
from plait.runtime.store import BACKWARDS, KINDS, Kind, Store, key_of
from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.native import encode
from plait.wrapper.program import Artifacts, Loaded

Data = dict[str, Any]
MAX_CONSTANT_NBYTES = 1 << 20
"""Of all constants of a program together."""


@dataclass
class Kept:
    """What a compile of one graph leaves for its entry.

    program: its plan, and what else it is made of. data, pieces: as in `Entry`. name: of the
    entries of its backward program. reason: why it is not kept, or "". n_graphs: that asked for it.
    strict: a bug is raised. trace: Dynamo's, of them. comes_later: its kernels are still being
    built when Dynamo is done."""

    strict: bool = False
    program: tuple[bytes, Artifacts] | None = None
    data: Data | None = None
    pieces: dict[str, bytes] = field(default_factory=dict)
    name: str = field(default_factory=partial(secrets.token_hex, 16))
    reason: str = ""
    n_graphs: int = 0
    trace: weakref.ref[TracingContext] | None = None
    comes_later: bool = False
    _then: Callable[[], None] = lambda: None

    def count(self) -> None:
        """A graph asks. Of a trace that Dynamo gives up, and begins anew, nothing counts."""
        if self.trace is None or self.trace() is not TracingContext.get():
            self.program, self.data, self.pieces = None, None, {}
            self.reason, self.n_graphs, self.trace = "", 0, weakref.ref(TracingContext.get())
        self.n_graphs += 1

    def when_there(self, then: Callable[[], None]) -> None:
        """Calls then: now, or where it comes later, when it does."""
        if self.comes_later:
            self._then = then
        else:
            then()

    def come(self) -> None:
        """It is there now."""
        self.comes_later = False
        self._then()

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
        """The native target, whose plan is kept."""
        plan = encode(program)
        self.program = plan, artifacts
        return load(plan, artifacts.libraries, artifacts.constants, artifacts.callables)


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
    plan, artifacts = kept.program
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
    constants = _tensors_data(dict(enumerate(artifacts.constants)))
    return {"kernels": kernels, "constants": list(constants.values())}, plan


def is_of(kind: Kind, path: Path) -> bool:
    """Whether a file lies where entries of a kind do."""
    return (path.parent.parent.name, path.suffix) == (kind.folder, kind.suffix)


def _tensors_data(tensors: Mapping[Any, torch.Tensor]) -> Data:
    found = {name: _tensor_data(x) for name, x in tensors.items()}
    if sum(len(c["data"]) // 2 for c in found.values()) > MAX_CONSTANT_NBYTES:
        raise NotKept("large constants")
    return found


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


def source_data(gm: GraphModule) -> bytes:
    """Dynamo's graph and those in it, as text. Raises NotKept."""
    if any(n.op == "call_module" for n in _nodes(gm)) or tensors_of(gm):
        raise NotKept("a graph with tensors of its own")
    if any("_checkpoint_context_fn" in g.meta for g in gm.modules() if isinstance(g, GraphModule)):
        raise NotKept("a checkpoint that a function of Python decides on")
    try:
        return json.dumps(_Writer().graph(gm)).encode()
    except ValueError as error:
        raise NotKept(f"a graph with {error}") from None


_BODIES = frozenset(
    "associative_scan autograd_function_apply cond flex_attention invoke_subgraph map_impl scan "
    "tag_activation_checkpoint while_loop wrap".split()
)
"""Operators of higher order that are known by their bodies and arguments alone."""


def _nodes(gm: GraphModule) -> Iterator[Node]:
    """Those of a graph and of the graphs in it."""
    for inner in gm.modules():
        if isinstance(inner, GraphModule):
            yield from inner.graph.nodes


class _Writer(GraphWriter):
    """Of Dynamo's graph: what its nodes call and with what."""

    def target(self, target: Any) -> str:
        if isinstance(target, HigherOrderOperator) and target._name not in _BODIES:
            raise NotKept(f"a graph with {target._name}")
        if isinstance(target, OpOverloadPacket):
            return f"packet {target._qualified_op_name}"
        try:
            return super().target(target)
        except ValueError:
            return json.dumps(_named_data(target))

    def facts(self, node: Node) -> Data:
        return {}

    def value(self, value: Any) -> Any:
        try:
            return super().value(value)
        except ValueError:
            return {"named": _named_data(value)}


class _Reader(GraphReader):
    """Of what `_Writer` has written."""

    def target(self, text: str) -> Callable[..., Any]:
        kind, _, name = text.partition(" ")
        found: Callable[..., Any]
        if kind == "packet":
            space, _, name = name.partition("::")
            found = getattr(getattr(torch.ops, space), name)
        elif text.startswith("["):
            found = named(*json.loads(text))
        else:
            found = super().target(text)
        return found

    def value(self, data: Any, nodes: Mapping[str, Node] = NO_NODES) -> Any:
        if isinstance(data, dict) and "named" in data:
            return named(*data["named"])
        return super().value(data, nodes)


def _named_data(value: Any) -> list[str]:
    """The module and path of a function or class of PyTorch's, or of `...`. Raises NotKept."""
    if value is ...:
        return ["builtins", "Ellipsis"]
    module, path = path_of(value)
    if callable(value) and module.partition(".")[0] not in _LIBRARIES:
        raise NotKept(f"a graph that calls {path}, which Dynamo does not look into")
    if value is None or named(module, path) is not value:
        raise NotKept(f"a graph that names a {type(value).__name__}")
    return [module, path]


def operator_prints(gm: GraphModule) -> dict[str, str]:
    """By name, what a trace of each operator that is not PyTorch's own relies on. Raises
    NotKept."""
    found = {op for n in _nodes(gm) for op in operators_of(n.target) if is_foreign(op)}
    formulas = Formulas()
    return {op._name: formulas.of(op) for op in sorted(found, key=lambda op: op._name)}


def _check_operators(told: Mapping[str, str]) -> None:
    """Raises NotKept where operators are not what they were."""
    formulas = Formulas()
    for name, was in told.items():
        op = operator_named(name)
        if op is None or formulas.of(op) != was:
            raise NotKept(f"the operator {name} is another one")


class Eager:
    """Dynamo's graph by eager, made of its text when it is first called."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._run is None:
            self._run = _Reader(FakeTensorMode(), {}).graph(json.loads(self._text))
        return self._run(*args)


# ------------------------------------------------------------------------------------ training
@dataclass
class Backward:
    """The backward half of a training graph that was made again.

    name: of its entries. text, tensors: its graph. donated: inputs that nobody reads after the last
    pass. flags: that the guards of its frame are of."""

    name: str
    text: str
    tensors: Data
    donated: tuple[int, ...]
    cfg: Config
    flags: compat.precision.Flags = field(default_factory=compat.precision.flags_now)

    def at_first_use(self, may_overwrite: bool) -> _native.Program:
        """The program, found or compiled."""
        donated = self.donated if may_overwrite else ()
        found = find_backward(self.name, donated, self.cfg)
        if found is not None:
            return found
        captured = replace(self._captured(), donated_inputs=donated)
        kept = Kept()
        with compat.precision.noting_flags(self.flags):
            call = compile_captured(captured, self.cfg, kept.target).call
        keep_backward(self.name, donated, kept, self.cfg)
        assert isinstance(call, _native.Program), call
        return call

    def graph(self) -> GraphModule:
        """The graph, for gradients that kernels cannot read."""
        return self._captured().graph

    def _captured(self) -> Captured:
        tensors = {name: _tensor(data) for name, data in self.tensors.items()}
        return read_given(self.text, tensors)[0]


# ------------------------------------------------------------------------------------ backward
def backward_graph(captured: Captured, cfg: Config) -> tuple[bytes, Data]:
    """A backward graph as text, and the tensors in it. Raises NotKept."""
    text = given_text(captured, cfg)
    if text.startswith('{\n"no_text"'):
        raise NotKept("a backward graph that no text holds")
    return text.encode(), _tensors_data(tensors_of(captured.graph))


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
        Store.of(cfg, BACKWARDS).offer(_backward_key(name, donated), packed(data, {"plan": plan}))
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
    kept.pieces["source"] = source_data(gm)
    kept.data = {
        "program": program,
        "operators": operator_prints(gm),
        "around": around,
        "arguments": arguments,
    }


def graph_again(
    data: Mapping[str, Any], pieces: Mapping[str, bytes], cfg: Config
) -> Callable[..., Any]:
    """The callable that Dynamo's code calls. Raises NotKept."""
    _check_operators(data["operators"])
    program = loaded_program(data["program"], pieces["plan"], cfg)
    eager = Eager(pieces["source"])
    around = data["around"]
    marks = [(k, name, frozenset(dims)) for k, name, dims in around.get("marks", ())]
    call: Any = program
    if around["how"] == "direct":
        results = [tuple(r) for r in around["results"]]
        call = _native.Direct(program, eager, results, marks, False)
    elif around["how"] == "training":
        text = pieces["backward"].decode()
        donated = tuple(around["donated"])
        backward = Backward(around["name"], text, around["tensors"], donated, cfg)
        call = native_training(
            program, eager, backward.at_first_use,
            ladder.interpreted_gradients(backward.graph, "backward", cfg), around, marks,
        )  # fmt: skip
    one = partial(ladder.eager_at_calls, eager, "warm", around["kind"], cfg, around["n_ops"])
    if data["arguments"] is not None:
        call = ladder.kept_apart(call, one, [tuple(a) for a in data["arguments"]])
    return ladder.with_tangents(call, one)
