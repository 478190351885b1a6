"""What another process compares of an operator that is not PyTorch's own: its schema, and all that
the Python functions do that a trace of it runs. Nothing guards on those."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch._ops import OpOverload

from plait.capture.warm.prints import Prints, is_plain
from plait.compat.frame_facts import NotKept
from plait.compat.operators import called_so, is_foreign, operators_of, traced_parts
from plait.compat.torch_functions import LIBRARIES, is_torch_code

_OF_CALLS = ("checked",)
"""Cells by which torch's wrapper of a fake implementation knows whether it was called before."""


class Formulas:
    """One look at the functions of operators, and at all that they call."""

    def __init__(self) -> None:
        self._prints = Prints()
        self._operators = set[str]()
        self._seen: dict[int, int] = {}
        self._found: list[str] = []
        self._alive: list[Any] = []

    def of(self, op: OpOverload) -> str:
        """What a trace of an operator depends on. Raises NotKept."""
        self._operator(op)
        return self._prints.constant(tuple(self._found))

    def _operator(self, op: OpOverload) -> str:
        if is_foreign(op) and op._name not in self._operators:
            self._operators.add(op._name)
            text, parts = traced_parts(op)
            self._found.append(f"{text} {self._value(parts)}")
        return str(op)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        return True

    def _value(self, value: Any) -> str:
        """A value that a function may read."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if operators := operators_of(value):
            return str([self._operator(op) for op in operators])
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, (tuple, list)):
            return f"{type(value).__name__} {[self._value(v) for v in value]}"
        if isinstance(value, Mapping):
            return str([f"{self._value(k)} {self._value(v)}" for k, v in value.items()])
        if isinstance(value, functools.partial):
            return str([self._value(v) for v in (value.func, value.args, value.keywords)])
        if isinstance(value, type) and value.__module__.partition(".")[0] in LIBRARIES:
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, types.BuiltinFunctionType):
            if value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType)):
                return self._prints.identity(value)
        elif isinstance(value, enum.Enum) or is_plain(value):
            return self._prints.identity(value)
        raise NotKept(f"an operator that uses an object of {type(value).__qualname__}")

    def _function(self, fn: types.FunctionType) -> str:
        held = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        known = is_torch_code(fn.__code__)
        cells = [
            self._value(c.cell_contents) for name, c in held if not (known and name in _OF_CALLS)
        ]
        if known:
            return f"{fn.__module__}.{fn.__qualname__} {cells}"
        if self._is_new(fn):
            more = fn.__defaults__, fn.__kwdefaults__ or {}, vars(fn), dict(self._globals(fn))
            self._found.append(f"{self._prints.code(fn.__code__)} {cells} {self._value(more)}")
        return f"function {self._seen[id(fn)]}"

    def _globals(self, fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """What a function may find by the names in its code."""
        names = _names(fn.__code__)
        spaces = set[str](names)
        modules: list[tuple[str, Mapping[str, Any]]] = [("", fn.__globals__)]
        for path, scope in modules:
            for name in sorted(names & scope.keys()):
                value = scope[name]
                yield path + name, value
                if isinstance(value, types.ModuleType):
                    parts = value.__name__.split(".")
                    spaces.add(parts[-1])
                    if parts[0] not in LIBRARIES and self._is_new(value):
                        modules.append((f"{path}{name}.", vars(value)))
        for op in called_so(names, spaces):
            yield op._name, op


def _names(code: types.CodeType) -> frozenset[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    texts = (c for c in code.co_consts if isinstance(c, str))  # of getattr
    return frozenset(code.co_names).union(texts, *inner)
