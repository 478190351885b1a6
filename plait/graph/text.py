"""A captured graph as text that reads back: what a compile was given, in a form that another
process, or another version of plait, compiles again.

`given_text` writes JSON, a line a node; `read_given` makes the graph again, with fake tensors in a
ShapeEnv of its own. Weights and constants are tensors, not text: the caller keeps `tensors_of`
beside it. A graph that holds what has no text (a Python callable, a tensor without strides) has a
text that says so.
"""

from __future__ import annotations

import builtins
import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import CallMethodKey, ConvertIntKey, DivideByKey
from torch.utils._pytree import SequenceKey
from torch.utils.checkpoint import CheckpointPolicy

from plait import compat
from plait.compat import shapes
from plait.config import Config
from plait.errors import Fallback
from plait.graph.captured import Captured, InputView
from plait.graph.edit import shape_env_of
from plait.runtime.toolchain import detect_isa, isa_of

_KINDS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_SYMBOLIC: dict[str, tuple[type, type]] = {
    "int": (torch.SymInt, int),
    "float": (torch.SymFloat, float),
    "bool": (torch.SymBool, bool),
}
_MODULES = {"operator": operator, "math": math, "builtins": builtins, "torch": torch}
_FIELDS = (
    "name",
    "kind",
    "donated_inputs",
    "bumped_inputs",
    "n_results",
    "wrapper_reason",
    "guarded",
)
_LOCAL = (
    "debug",
    "debug_dir",
    "verify",
    "strict",
    "cache_dir",
    "trust",
    "cpp_compiler",
    "compiler_seconds",
)
NO_NODES: Mapping[str, Node] = {}


def given_text(captured: Captured, cfg: Config) -> str:
    """The text of a graph, the configuration and the machine that it is compiled for, or of why it
    has none."""
    try:
        document = _document(captured)
    except ValueError as error:
        document = {"no_text": f"no text holds {error}"}
    changed = {
        k: v for k, v in asdict(cfg).items() if v != getattr(Config(), k) and k not in _LOCAL
    }
    machine = {
        "isa": detect_isa(cfg.isa).full_name,
        "default_dtype": _name_of(torch.get_default_dtype()),
    }
    return _json({**document, "config": changed, "machine": machine})


def _document(captured: Captured) -> dict[str, Any]:
    if captured.watcher is not None:
        raise ValueError("a callback that watches intermediates")
    vals = (n.meta.get("val") for n in captured.graph.graph.nodes)
    env = next((e for v in vals if (e := shape_env_of(v)) is not None), None)
    writer = GraphWriter()
    return {
        "captured": {name: getattr(captured, name) for name in _FIELDS},
        "ladder": [asdict(step) for step in captured.ladder],
        "views": {
            k: {n: writer.value(v) for n, v in vars(view).items()}
            for k, view in captured.input_views.items()
        },
        "shapes": None if env is None else shapes.stored(env),
        **writer.graph(captured.graph),
    }


def read_given(text: str, tensors: Mapping[str, torch.Tensor]) -> tuple[Captured, Config]:
    """The graph and the configuration of a text, whose vector instructions are named. tensors: what
    `tensors_of` gave. Raises ValueError for a text that is none, or that says why it holds no
    graph."""
    document = json.loads(text)
    if "no_text" in document:
        raise ValueError(document["no_text"])
    cfg = Config(**{**document["config"], "isa": isa_of(document["machine"]["isa"])})
    return _captured(document, tensors), cfg


def _captured(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Captured:
    facts = document["shapes"]
    reader = GraphReader(
        shapes.restored(facts) if facts is not None else FakeTensorMode(allow_non_fake_inputs=True),
        tensors,
    )
    views = {
        int(k): InputView(**{name: reader.value(v) for name, v in view.items()})
        for k, view in document["views"].items()
    }
    fields: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in document["captured"].items()
    }
    ladder = tuple(Fallback(**step) for step in document["ladder"])
    return Captured(reader.graph(document), input_views=views, ladder=ladder, **fields)


def tensors_of(module: GraphModule, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors that a graph and the graphs in it read as attributes, by path."""
    found: dict[str, torch.Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        held = _attribute(module, node.target)
        if isinstance(held, GraphModule):
            found |= tensors_of(held, f"{prefix}{node.target}/")
        elif isinstance(held, torch.Tensor):
            found[prefix + node.target] = held
    return found


def _json(document: Mapping[str, Any]) -> str:
    return (
        "{\n" + ",\n".join(f"{json.dumps(k)}: {_lines(v)}" for k, v in document.items()) + "\n}\n"
    )


def _name_of(thing: object) -> str:
    return str(thing).removeprefix("torch.")


def _lines(value: Any) -> str:
    """JSON of one line, or of a line an item for a list of dicts."""
    if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        return "[\n" + ",\n".join(json.dumps(v) for v in value) + "\n]"
    return json.dumps(value)


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


class GraphWriter:
    """Plain data of a graph. Storages are numbered in the order in which values show them, and so
    are stack traces, of which most stand at many nodes and take most of the text."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        self._traces: dict[str, int] = {}
        self._kept: list[Any] = []  # storages stay alive, so that their addresses stay theirs

    def graph(self, module: GraphModule) -> dict[str, Any]:
        inner = {}
        for node in module.graph.find_nodes(op="get_attr"):
            held = _attribute(module, node.target)
            if isinstance(held, GraphModule):
                inner[node.target] = self.graph(held)
            elif not isinstance(held, torch.Tensor):
                raise ValueError(f"an attribute of type {type(held).__name__}")
        return {
            "class": type(module).__name__,
            "graphs": inner,
            "nodes": [self._node(n) for n in module.graph.nodes],
        }

    def _node(self, node: Node) -> dict[str, Any]:
        target = node.target if isinstance(node.target, str) else self.target(node.target)
        row = {"name": node.name, "op": node.op, "target": target, "args": self.value(node.args)}
        if node.kwargs:
            row["kwargs"] = self.value(dict(node.kwargs))
        return {**row, "meta": self.facts(node)}

    def target(self, target: Any) -> str:
        """What a node calls. Raises ValueError for what has no name."""
        return _target_name(target)

    def facts(self, node: Node) -> dict[str, Any]:
        """What is known of a node."""
        meta = {
            key: write(self, node.meta[key])
            for key, write in _META.items()
            if node.meta.get(key) is not None
        }
        return {key: found for key, found in meta.items() if found is not None}

    def value(self, value: Any) -> Any:
        """An argument, or what a node holds."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Node):
            return {"node": value.name}
        if isinstance(value, FakeTensor):
            return self._tensor(value)
        if isinstance(value, list):
            return [self.value(v) for v in value]
        if isinstance(value, tuple):
            return {"tuple": [self.value(v) for v in value]}
        for name, (symbolic, _) in _SYMBOLIC.items():
            if isinstance(value, symbolic):
                return {name: self._expression(value)}
        for name, kind in _KINDS.items():
            if isinstance(value, kind):
                return {name: _name_of(value)}
        match value:
            case dict():
                return {"dict": [[self.value(k), self.value(v)] for k, v in value.items()]}
            case slice():
                return {"slice": [self.value(v) for v in (value.start, value.stop, value.step)]}
            case complex():
                return {"complex": [value.real, value.imag]}
            case torch.device():
                return {"device": str(value)}
            case OpOverload() | HigherOrderOperator():
                return {"operator": _target_name(value)}
            case CheckpointPolicy():
                return {"policy": value.name}
        raise ValueError(f"a value of type {type(value).__name__}")

    def trace(self, text: str) -> str | int:
        """A stack trace: the first time its text, then its number."""
        if text in self._traces:
            return self._traces[text]
        self._traces[text] = len(self._traces)
        return text

    def _expression(self, value: Any) -> Any:
        if getattr(value.node, "is_nested_int", bool)():
            raise ValueError("the ragged size of a nested tensor")
        return shapes.expression(value.node.expr)

    def _tensor(self, t: Any) -> dict[str, Any]:
        if t.layout != torch.strided or t.is_quantized:
            raise ValueError(f"a tensor of layout {t.layout} and dtype {t.dtype}")
        storage = t.untyped_storage()
        self._kept.append(storage)
        known = self._storages.setdefault(storage._cdata, len(self._storages))
        fields = {
            "tensor": _name_of(t.dtype),
            "size": [self.value(s) for s in t.shape],
            "strides": [self.value(s) for s in t.stride()],
            "offset": self.value(t.storage_offset()),
            "bytes": self.value(storage.nbytes()),
            "device": str(t.device),
            "storage": known,
        }
        flags = {"conj": t.is_conj(), "neg": t.is_neg(), "requires_grad": t.requires_grad}
        return fields | {name: True for name, is_set in flags.items() if is_set}


class GraphReader:
    """Makes a graph again from plain data."""

    def __init__(self, mode: FakeTensorMode, tensors: Mapping[str, torch.Tensor]) -> None:
        self._mode = mode
        self._tensors = tensors
        self._storages: dict[int, Any] = {}
        self._traces: list[str] = []

    def graph(self, data: Mapping[str, Any], prefix: str = "") -> GraphModule:
        root = torch.nn.Module()
        for name, inner in data["graphs"].items():
            _set(root, name, self.graph(inner, f"{prefix}{name}/"))
        graph = Graph()
        made: dict[str, Node] = {}
        for row in data["nodes"]:
            target: Any = row["target"]
            if row["op"] == "call_function":
                target = self.target(target)
            if row["op"] == "get_attr" and target not in data["graphs"]:
                _set(root, target, self._tensors[prefix + target])
            args, kwargs = (
                self.value(row["args"], made),
                self.value(row.get("kwargs", {"dict": []}), made),
            )
            node = made[row["name"]] = graph.create_node(
                row["op"], target, args, kwargs, row["name"]
            )
            node.meta = {
                key: _READ_META.get(key, GraphReader.value)(self, v)
                for key, v in row["meta"].items()
            }
        return compat.tracing.unwritten(root, graph, data["class"])

    def target(self, text: str) -> Callable[..., Any]:
        """What `GraphWriter.target` has named."""
        return _target(text)

    def trace(self, data: str | int) -> str:
        """The stack trace that `GraphWriter.trace` wrote."""
        if isinstance(data, int):
            return self._traces[data]
        self._traces.append(data)
        return data

    def symbol(self, name: str) -> Any:
        """The symbol of that name."""
        return shapes.read(name, shapes.symbols(self._mode))

    def value(self, data: Any, nodes: Mapping[str, Node] = NO_NODES) -> Any:
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        if isinstance(data, list):
            return [self.value(v, nodes) for v in data]
        if "tensor" in data:
            return self._tensor(data)
        ((kind, held),) = data.items()
        if kind in _SYMBOLIC:
            return shapes.scalar(held, self._mode, _SYMBOLIC[kind][1])
        if kind in _KINDS:
            return getattr(torch, held)
        match kind:
            case "node":
                return nodes[held]
            case "tuple":
                return tuple(self.value(v, nodes) for v in held)
            case "dict":
                return {self.value(k, nodes): self.value(v, nodes) for k, v in held}
            case "slice":
                return slice(*(self.value(v, nodes) for v in held))
            case "complex":
                return complex(*held)
            case "device":
                return torch.device(held)
            case "operator":
                return _target(held)
            case "policy":
                return CheckpointPolicy[held]
        raise ValueError(f"{kind!r} is no kind of value")

    def _tensor(self, data: Mapping[str, Any]) -> Any:
        size, strides, offset, nbytes = (
            self.value(data[k]) for k in ("size", "strides", "offset", "bytes")
        )
        device, dtype = data["device"], getattr(torch, data["tensor"])
        with shapes.trusting(self._mode):
            if data["storage"] not in self._storages:
                memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
                self._storages[data["storage"]] = memory.untyped_storage()
            t = torch.empty(0, dtype=dtype, device=device)
            t.set_(self._storages[data["storage"]], offset, size, strides)
            t = torch._conj(t) if data.get("conj") else t
            t = torch._neg_view(t) if data.get("neg") else t
        return t.requires_grad_() if data.get("requires_grad") else t


def _set(root: torch.nn.Module, path: str, value: Any) -> None:
    *above, name = path.split(".")
    for step in above:
        if not hasattr(root, step):
            setattr(root, step, torch.nn.Module())
        root = getattr(root, step)
    if isinstance(value, torch.Tensor):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)


# ------------------------------------------------------------------------------- targets of calls
def _target_name(target: Any) -> str:
    """An operator as namespace::name.overload, a Python function as module:name. Raises ValueError
    for another."""
    if isinstance(target, OpOverload):
        return f"{target._schema.name}.{target._overloadname}"
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target._name}"
    name = getattr(target, "__name__", "")
    for module, held in _MODULES.items():
        if getattr(held, name, None) is target:
            return f"{module}:{name}"
    raise ValueError(f"a call of {getattr(target, '__qualname__', target)}")


def _target(text: str) -> Callable[..., Any]:
    namespace, twice, name = text.partition("::")
    found: Any = None
    if namespace == "higher_order":
        found = getattr(torch.ops.higher_order, name, None)
    elif twice:
        name, _, overload = name.rpartition(".")
        found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    else:
        module, _, name = text.partition(":")
        found = getattr(_MODULES.get(module), name, None)
    if found is None:
        raise ValueError(f"there is no {text} here")
    made: Callable[..., Any] = found
    return made


# ------------------------------------------------------------------------------- facts of nodes
_KEYS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "SequenceKey": (SequenceKey, ("idx",)),
    "CallMethodKey": (CallMethodKey, ("name",)),
    "DivideByKey": (DivideByKey, ("divisor",)),
    "ConvertIntKey": (ConvertIntKey, ()),
}


def _write_bindings(_: GraphWriter, bindings: Mapping[Any, tuple[Any, ...]]) -> Any:
    """The numbers that a node makes when it runs, and where in its result each lies."""
    return [[shapes.expression(s), [_step(key) for key in path]] for s, path in bindings.items()]


def _step(key: Any) -> list[Any]:
    name = type(key).__name__
    if name not in _KEYS:
        raise ValueError(f"a number found by {name}")
    return [name, *(getattr(key, field) for field in _KEYS[name][1])]


def _read_bindings(reader: GraphReader, data: Any) -> Any:
    return {
        reader.symbol(s): tuple(_KEYS[name][0](*args) for name, *args in path) for s, path in data
    }


def _write_custom(_: GraphWriter, custom: Mapping[str, Any]) -> Any:
    """The user's stream; what else users note at nodes changes no program."""
    return {"dict": [["stream", custom["stream"]]]} if "stream" in custom else None


_META: dict[str, Callable[[GraphWriter, Any], Any]] = {
    "val": GraphWriter.value,
    "stack_trace": GraphWriter.trace,
    "unbacked_bindings": _write_bindings,
    "custom": _write_custom,
    "original_aten": lambda writer, v: writer.value(v) if isinstance(v, OpOverload) else None,
    "recompute": GraphWriter.value,
    "ac_graph_id": GraphWriter.value,
    "memory": GraphWriter.value,
}
_READ_META: dict[str, Callable[[GraphReader, Any], Any]] = {
    "stack_trace": GraphReader.trace,
    "unbacked_bindings": _read_bindings,
}
