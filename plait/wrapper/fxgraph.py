"""A `torch.fx` graph while it is made: its nodes, and what has a node by now.

`fxnodes.py` adds a program's instructions to it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import isfunction
from typing import Any, assert_never

import torch
from torch.fx import Graph, Node, Tracer
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from plait import compat
from plait.devices import facts_of
from plait.errors import InternalError
from plait.ir.dtypes import DTYPES
from plait.ir.expr import Atom, Expr, Size, fold, free_symbols
from plait.lower.dtypes import TO_TORCH
from plait.runtime import generated
from plait.runtime.functions import FUNCTIONS
from plait.wrapper import instructions as ins
from plait.wrapper.program import Artifacts
from plait.wrapper.walk import sizes

aten = torch.ops.aten

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "div": operator.floordiv, "mod": operator.mod, "min": torch.sym_min, "max": torch.sym_max,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, **FUNCTIONS,
}  # fmt: skip
_COMPARISONS = ("eq", "ne", "lt", "le")


class _Retracer(Tracer):
    """Makes the graph again that a pickled module's code is of: torch.fx itself would run what
    makes a tensor out of numbers only, and all calls would get the same one; and what plait calls
    between operators."""

    def __init__(self) -> None:
        super().__init__(autowrap_functions=tuple(filter(isfunction, vars(generated).values())))

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> Graph:
        """The graph of root's code."""
        with _Recorded(self), compat.tracing.proxies_for_graphs:
            return super().trace(root, concrete_args)


class _Recorded(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        return self.tracer.create_proxy("call_function", func, args, kwargs or {})


Arg = Any
"""What a node takes: a Node, a number, or another constant of torch.fx."""


class FxGraph:
    """The graph so far. env: what tensors and symbols are; a symbol may be a plain int."""

    def __init__(self, program: ins.WrapperProgram, artifacts: Artifacts) -> None:
        self.artifacts = artifacts
        self.root = torch.nn.Module()
        self.graph = Graph(tracer_cls=_Retracer)
        self.fakes = compat.tracing.Fakes()
        self.env: dict[str, Arg] = {}
        self.integers: dict[object, Node] = {}  # each is computed once
        self.devices: dict[str, str] = {}  # of arenas
        self.own: set[str] = set()  # tensors that start where their memory does
        self.promised: dict[str, torch.dtype] = {}  # of results that have no fake value
        self.kernels: dict[str, ins.DefineKernel] = {}
        self.jobs = {
            job.name: job
            for kind, s in artifacts.sources.items()
            if not facts_of(kind).is_host
            for job in s.units
        }
        self.meta: dict[str, Any] = {}  # of the nodes that follow
        self.gpu = ""  # the current one, where the program has chosen one
        self.callers_gpu: Node | None = None
        atoms = [a for i in program.inputs for e in sizes(i) for a in free_symbols(e)]
        atoms += [a for i in program.body for e in sizes(i) for a in free_symbols(e)]
        self.atoms = {a.name: a for a in reversed(atoms)}
        self.symbols: dict[str, Any] = {}

    def effect(
        self,
        function: Any,
        args: tuple[Arg, ...],
        kwargs: Mapping[str, Arg] | None = None,
        name: str | None = None,
    ) -> Node:
        """A node that calls function, whatever that gives."""
        node = self.graph.create_node("call_function", function, args, dict(kwargs or {}), name)
        node.meta.update(self.meta)
        return node

    def call(
        self,
        function: Any,
        args: tuple[Arg, ...],
        kwargs: Mapping[str, Arg] | None = None,
        name: str | None = None,
    ) -> Node:
        """The same with a value: what function makes of its arguments' values."""
        node = self.effect(function, args, kwargs, name)
        # A courtesy, and operators may refuse fake tensors in any way.
        with contextlib.suppress(Exception):
            given = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            if function is torch.sym_ite:
                node.meta["val"] = self._choice(node.name, *given[0])
            else:
                node.meta["val"] = function(*given[0], **given[1])
        return node

    def _choice(self, name: str, condition: Any, one: Any, other: Any) -> Any:
        """A symbol for 1 or 0: as pieces of a formula, products of several take sympy seconds."""
        if isinstance(condition, bool):
            return one if condition else other
        return self.fakes.symbol(name, other, one, int(bool(condition.node.hint)))

    def integer(self, function: Any, *args: Arg, name: str | None = None) -> Node:
        """The node of an integer, the same wherever that is used."""
        key = (function, *args)
        found = self.integers.get(key)
        if found is None:
            found = self.integers[key] = self.call(function, args, name=name)
        return found

    def size(self, e: Size) -> Arg:
        """An expression as a node or a number."""
        return value_of(e, lambda a: self.env[a.name], self.integer)

    def sizes(self, values: Sequence[Size]) -> list[Arg]:
        return [self.size(v) for v in values]

    def symbol(self, a: Atom) -> Any:
        """The SymInt of a symbol."""
        if a.name not in self.symbols:
            self.symbols[a.name] = self.fakes.symbol(
                a.name, a.lo, a.hi, self.artifacts.hints.get(a.name)
            )
        return self.symbols[a.name]

    def annotate(self, **words: str) -> None:
        self.meta["custom"] = {**self.meta.get("custom", {}), **words}  # which torch.fx prints

    def arguments(self, i: ins.CallExtern | ins.CallPython) -> tuple[list[Arg], dict[str, Arg]]:
        return [self.operand(o) for o in i.args], {k: self.operand(o) for k, o in i.kwargs}

    def unpack(self, node: Node, outs: Sequence[str | None]) -> None:
        for k, name in enumerate(outs):
            if name is not None:
                self.env[name] = self.call(operator.getitem, (node, k), name=name)

    def operand(self, o: ins.Operand) -> Arg:
        match o:
            case ins.Ref(name):
                return self.env[name]
            case ins.ValueOf(name):
                return self.call(aten.item.default, (self.env[name],))
            case ins.Literal("complex", text):  # Python has no word for some
                return self.call(complex, tuple(map(float.fromhex, text.split())))
            case ins.Literal():
                return _literal(o)
            case ins.ListOf(items):
                return [self.operand(item) for item in items]
            case int() | Expr():
                return self.size(o)
            case _:
                assert_never(o)


def value_of(e: Size, symbol: Callable[[Atom], Any], apply: Callable[..., Any]) -> Any:
    """The value of an expression where apply(function, *values) computes and symbols have
    values."""

    def atom(a: Atom) -> Any:
        if a.kind == "sym":
            return symbol(a)
        value = apply(_FUNCTIONS[a.kind], *(value_of(x, symbol, apply) for x in (a.a, a.b)))
        return apply(torch.sym_ite, value, 1, 0) if a.kind in _COMPARISONS else value

    return fold(e, atom, None, partial(apply, operator.add), partial(apply, operator.mul))


def _literal(o: ins.Literal) -> Arg:
    match o.kind:
        case "none":
            return None
        case "bool":
            return o.text == "True"
        case "float":
            return float.fromhex(o.text)
        case "str":
            return o.text
        case "device":
            return torch.device(o.text)
        case "dtype":
            return TO_TORCH[DTYPES[o.text]] if o.text in DTYPES else getattr(torch, o.text)
        case "layout" | "memory_format":
            return getattr(torch, o.text)
        case _:
            raise InternalError(f"a literal of unknown kind {o.kind!r}")
