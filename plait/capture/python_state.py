"""What a function keeps in Python from one call to the next: attributes of modules and objects,
items of lists and dicts.

A program keeps no such state: what a traced call changed is undone. So the result of a call must
not depend on what earlier calls left. That is tested: the function is traced once more with their
changes in place, where `LEFT_OVER` stands for tensors and numbers and raises when it is read. Where
that gives another program, the function is refused.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule
from torch.nn import Module

from plait.capture.owners import held
from plait.compat.tracing import is_stand_in

_ABSENT = object()
_STATE = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PASSED_OVER = frozenset(vars(Module())) - {*_HOOKS}
# Lists of its parameters, which nn.RNN makes anew when they change.
_OF_RNN = ("_flat_weights", "_flat_weight_refs")
# Modules whose objects are not looked into; `types` has SimpleNamespace.
_FOREIGN = (sys.stdlib_module_names - {"types"}) | {"torch", "numpy", "sympy", "triton"}
_CALLABLE = (types.FunctionType, types.MethodType, functools.partial)
_CONTAINERS = (dict, OrderedDict, defaultdict, list)
_PLAIN = (
    int, float, complex, str, bytes, type(None), type, types.ModuleType, torch.Tensor, torch.dtype,
    torch.device,
)  # fmt: skip


class _LeftOver(torch.Tensor):
    """Stands for a tensor or number that a call left. A sum with it is another one, for the sake of
    counters; all else raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("a call asks for what the one before it left")

    def __add__(self, other: Any) -> Any:
        return self

    __radd__ = __iadd__ = __add__


LEFT_OVER: torch.Tensor = torch.Tensor._make_subclass(_LeftOver, torch.empty(0))


@dataclass(frozen=True)
class Change:
    """A change that a call made in a dict or a list.

    name: of what changed.
    place: the dict or list.
    key: of the dict; None for a list, whose items are all in old and new.
    old, new: the values before and after.
    of_state: what changed is a parameter, a buffer or a module.
    """

    name: str
    place: Any
    key: Any
    old: Any
    new: Any
    of_state: bool

    def undo(self) -> None:
        self._put(self.old)

    def redo(self) -> None:
        """Makes it as the call left it, but with LEFT_OVER for what it computed."""
        if self.key is None:
            self._put([x if any(x is y for y in self.old) else _left(x) for x in self.new])
        else:
            self._put(_left(self.new))

    def _put(self, value: Any) -> None:
        if self.key is None:
            self.place[:] = value
        elif value is _ABSENT:
            self.place.pop(self.key, None)
        else:
            self.place[self.key] = value


class Snapshot:
    """The dicts and lists that fn can reach, with what they hold now. deep: through any objects
    that objects hold."""

    def __init__(self, fn: Any, deep: bool = False) -> None:
        self._before = [
            (name, kind, place, list(place) if isinstance(place, list) else dict(place))
            for name, kind, place in _places(fn, deep)
        ]

    def changes(self) -> list[Change]:
        """What has changed since."""
        found: list[Change] = []
        for name, kind, place, old in self._before:
            if isinstance(old, list):
                if len(old) != len(place) or not all(map(_same, old, place)):
                    found.append(Change(name, place, None, old, list(place), False))
                continue
            for key in {**old, **place}:
                was, now = old.get(key, _ABSENT), place.get(key, _ABSENT)
                if key not in _OF_RNN and not _same(was, now):
                    found.append(
                        Change(_named(name, kind, key), place, key, was, now, kind == "state")
                    )
        return found


def _places(fn: Any, deep: bool) -> Iterator[tuple[str, str, Any]]:
    """The name, kind and value of dicts and lists that fn can reach: "state" of modules,
    "attributes", "items"."""
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", fn)]
    while todo:
        name, x = todo.pop()
        if id(x) in seen or isinstance(x, _PLAIN):
            continue
        seen.add(id(x))
        if isinstance(x, Module):
            own = {key: value for key, value in vars(x).items() if key not in _PASSED_OVER}
            state = [vars(x)[key] for key in _STATE if isinstance(vars(x).get(key), dict)]
            yield from [*((name, "state", place) for place in state), (name, "attributes", vars(x))]
            todo += [
                (_named(name, "attributes", key), value)
                for key, value in {**own, **x._modules}.items()
            ]
            todo.append((name, getattr(type(x), "forward", None)))
        elif type(x) in _CONTAINERS or isinstance(x, tuple):
            if not isinstance(x, tuple):
                yield name, "items", x
            items = x.items() if isinstance(x, dict) else enumerate(x)
            todo += [
                (_named(name, "items", key), value)
                for key, value in items
                if not isinstance(value, _PLAIN)
            ]
        elif isinstance(x, _CALLABLE):
            todo += held(x)
        elif hasattr(x, "__dict__") and type(x).__module__.partition(".")[0] not in _FOREIGN:
            yield name, "attributes", vars(x)
            inner = [
                (key, value) for key, value in vars(x).items() if deep or type(value) in _CONTAINERS
            ]
            todo += [(_named(name, "attributes", key), value) for key, value in inner]


def _named(name: str, kind: str, key: Any) -> str:
    if kind == "items":
        return f"{name}[{key!r}]"
    return f"{name}.{key}" if name else str(key)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str)) and a == b)


def _left(value: Any) -> Any:
    """value with LEFT_OVER for tensors and numbers."""
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return pytree.tree_map(
        lambda x: LEFT_OVER if isinstance(x, torch.Tensor) or type(x) in numbers else x, value
    )


def settled(first: list[Change], second: list[Change]) -> bool:
    """Whether two calls one after the other left the same, but for what nobody asks for."""
    a, b = (
        {(c.name, c.key): c.new for c in changes if c.key is not None}
        for changes in (first, second)
    )
    return a.keys() == b.keys() and all(
        _same(x, b[key]) for key, x in a.items() if isinstance(x, (bool, str))
    )


def same_program(a: GraphModule, b: GraphModule) -> bool:
    """Whether two graphs do the same, with the same constants."""
    names = dict.fromkeys(str(n.target) for n in a.graph.nodes if n.op == "get_attr")
    return str(a.graph) == str(b.graph) and all(
        _same_constant(getattr(a, n), getattr(b, n)) for n in names
    )


def _same_constant(a: Any, b: Any) -> bool:
    if isinstance(a, GraphModule) and isinstance(b, GraphModule):
        return same_program(a, b)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a is b:
        return a is b
    alike = not (is_stand_in(a) or is_stand_in(b)) and (a.dtype, a.device) == (b.dtype, b.device)
    return alike and torch.equal(a, b)
