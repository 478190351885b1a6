"""Calls of Python as text, for a module that runs by itself: operators with their subgraphs and
constants.

In: a program's callables. Out: the source of a function that makes them again. What no text stands
for (a Triton kernel of the user's, a hook) is named instead.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule

from plait import compat
from plait.lower.pycall import PythonCall

TORCHS_OWN = frozenset({"aten", "prims", "prim", "plait"})
"""Namespaces of operators that every process has."""


class _NoText(Exception):
    """Carries what cannot be written."""


class _Text(str):
    """A value as text, a leaf of a tree."""


@dataclass
class CallTexts:
    """The source of `python_calls(constants)`, which gives the callables.

    constants: those that the program has, then those that the callables need. operators: the names
    of those that are not torch's own. missing: what no text stands for, or "".
    """

    callables: Sequence[Any]
    constants: list[torch.Tensor]
    lines: list[str] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    missing: str = ""

    def __post_init__(self) -> None:
        if not self.callables:
            return
        try:
            body = [line for k, call in enumerate(self.callables) for line in self._call(k, call)]
        except _NoText as error:
            self.missing = str(error)
            return
        made = ", ".join(f"call_{k}" for k in range(len(self.callables)))
        doc = '"""What the program calls as Python."""'
        self.lines = [
            "def python_calls(constants):",
            *(f"    {s}" if s else "" for s in (doc, *body, f"return [{made}]")),
        ]

    def _call(self, number: int, call: Any) -> list[str]:
        if not isinstance(call, PythonCall):
            raise _NoText(f"a Python object of class {type(call).__name__}")
        before: list[str] = []
        args = [f"a{k}" for k in range(len(call.holes))]
        texts = dict(zip(call.holes, args, strict=True))
        leaves = [
            _Text(texts[k] + ".item()" * (k in call.items))
            if k in texts
            else self._value(x, f"g{number}_{k}", before)
            for k, x in enumerate(call.leaves)
        ]
        given, named = pytree.tree_unflatten(leaves, call.tree)
        inside = [*map(_nested, given), *(f"{key}={_nested(x)}" for key, x in named.items())]
        operator = self._value(call.op, "", before)
        result = f"rt.settled({operator}({', '.join(inside)}), {call.strides!r})"
        return [*before, f"def call_{number}({', '.join(args)}):", f"    return {result}", ""]

    def _value(self, x: Any, name: str, before: list[str]) -> _Text:
        """One value. before: gets the lines that make a subgraph, of that name."""
        match x:
            case (
                None
                | bool()
                | int()
                | str()
                | torch.dtype()
                | torch.layout()
                | torch.memory_format()
            ):
                return _Text(repr(x))
            case float() | complex():
                return _Text(repr(x) if x - x == 0 else f"{type(x).__name__}({str(x)!r})")
            case torch.device():
                return _Text(f"torch.device({str(x)!r})")
            case torch.Tensor() if type(x) in (torch.Tensor, torch.nn.Parameter):
                self.constants.append(x)
                return _Text(f"constants[{len(self.constants) - 1}]")
            case GraphModule():
                before += self._graph(x, name)
                return _Text(name)
            case OpOverload():
                self._uses(x)
                return _Text(f"torch.ops.{x}")
        known = (
            isinstance(x, HigherOrderOperator)
            and getattr(torch.ops.higher_order, x.__name__, None) is x
        )
        if known:
            return _Text(f"torch.ops.higher_order.{x.__name__}")
        raise _NoText(f"an object of class {type(x).__name__}")

    def _graph(self, gm: GraphModule, name: str) -> list[str]:
        """A module that is like the graph's."""
        before: list[str] = []
        attributes: list[str] = []
        for node in gm.graph.nodes:
            if node.op in ("get_attr", "call_module"):
                if "." in str(node.target):
                    raise _NoText(f"a subgraph with the attribute {node.target}")
                value = self._value(getattr(gm, str(node.target)), f"{name}_{node.target}", before)
                attributes.append(f"self.{node.target} = {value}")
            if isinstance(node.target, OpOverload):
                self._uses(node.target)
        code = gm.graph.python_code("self")
        init = [
            "def __init__(self):",
            "    super().__init__()",
            *(f"    {a}" for a in dict.fromkeys(attributes)),
        ]
        source = [s for s in code.src.splitlines() if s.strip()]
        body = [*init, "", *source]
        used = {
            key: x
            for key, x in code.globals.items()
            if re.search(rf"\b{re.escape(key)}\b", code.src)
        }
        made = [
            f"class {name}(torch.nn.Module):",
            *(f"    {s}" if s else "" for s in body),
            "",
            f"{name} = {name}()",
            "",
        ]
        return [*before, *_imports(used), *made]

    def _uses(self, op: OpOverload) -> None:
        if op.namespace not in TORCHS_OWN:
            self.operators.append(op._name)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {s}" if s else "" for s in lines]


def _nested(x: Any) -> str:
    """Tuples, lists and dicts of texts."""
    if isinstance(x, _Text):
        return x
    if type(x) is dict:
        return f"{{{', '.join(f'{key!r}: {_nested(v)}' for key, v in x.items())}}}"
    if not isinstance(x, (tuple, list)) or hasattr(x, "_fields"):
        raise _NoText(f"a container of class {type(x).__name__}")
    inner = ", ".join(map(_nested, x))
    return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' * (len(x) == 1)})"


def _imports(names: Mapping[str, Any]) -> list[str]:
    """What makes the names of a subgraph's code known. Raises _NoText for what has no place to be
    had from."""
    lines = []
    for name, x in names.items():
        if name == "torch" or getattr(builtins, name, None) is x:
            continue
        if isinstance(x, float):
            lines.append(f"{name} = float({str(x)!r})")
        elif isinstance(x, ModuleType):
            lines.append(f"import {x.__name__} as {name}")
        elif x is type(None):
            lines.append(f"{name} = type(None)")
        elif getattr(x, "__module__", None) and getattr(x, "__name__", None):
            lines.append(f"from {x.__module__} import {x.__name__} as {name}")
        else:
            raise _NoText(f"a subgraph that uses {name}, of class {type(x).__name__}")
    return lines


def header(operators: Sequence[str]) -> list[str]:
    """Lines that tell which operators have to be defined, and by what."""
    homes = {
        op: compat.tracing.operator_home(op.partition(".")[0]) for op in dict.fromkeys(operators)
    }
    named = [f"    {op}" + (f", defined by {home}" if home else "") for op, home in homes.items()]
    what = (
        "It calls operators that are not torch's own: import what defines them at the head of "
        "this file."
    )
    return ["", what, *named] if named else []
