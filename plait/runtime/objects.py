"""Objects that torch's trees know nothing of, as containers: dataclasses, namespaces and objects of
users' classes with what their attributes hold, subclasses of dict, list and tuple, sets, slices,
partial functions, and generators, of which an iterator is made.

`opened` puts a node that the trees know in the place of each, `closed` makes objects again; nothing
is registered for the classes themselves, which stay leaves elsewhere. `__init__` is not run: a new
object gets the attributes that the old one had.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

from plait.errors import Unsupported

_CONTENT = "content"  # the items of a dict, list, tuple or set stand in front of its attributes
_CONTAINERS = (dict, list, tuple, set, frozenset)
_ITERATORS = (types.GeneratorType, map, filter, zip)
_WRITABLE = types.SimpleNamespace(frozen=False)
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "sympy", "triton", "plait"}
_NO_CONTAINERS = (
    torch.Tensor, torch.nn.Module, BaseException, enum.Enum, type, defaultdict,
    str, bytes, int, float, complex,
)  # fmt: skip


class Opened:
    """Stands for an object of a class: the names of its parts and what they hold."""

    def __init__(self, cls: type, names: tuple[str, ...], values: list[Any]) -> None:
        self.cls, self.names, self.values = cls, names, values


def _flatten(x: Opened) -> tuple[list[Any], Any]:
    return x.values, (x.cls, x.names)


def _with_keys(x: Opened) -> tuple[list[tuple[Any, Any]], Any]:
    keys = [pytree.GetAttrKey(name) for name in x.names]
    return list(zip(keys, x.values, strict=True)), (x.cls, x.names)


def _unflatten(values: Iterable[Any], known: tuple[type, tuple[str, ...]]) -> Opened:
    cls, names = known
    return Opened(cls, names, list(values))


pytree.register_pytree_node(Opened, _flatten, _unflatten, flatten_with_keys_fn=_with_keys)


def opened(tree: Any, within: tuple[int, ...] = ()) -> Any:
    """A tree whose objects are such nodes. Raises Unsupported for an object that holds itself."""

    def put(x: Any) -> Any:
        parts = dict(_parts(x))
        if not parts:
            return x
        if id(x) in within:
            raise Unsupported(f"an object of class {type(x).__qualname__} that holds itself")
        values = [opened(value, (*within, id(x))) for value in parts.values()]
        return Opened(type(x), tuple(parts), values)

    # torch's trees take a torch.Size for a tuple.
    return pytree.tree_map(put, tree, is_leaf=lambda x: isinstance(x, torch.Size))


def closed(tree: Any) -> Any:
    """The tree with objects again."""
    return pytree.tree_map(
        lambda x: _made(x) if isinstance(x, Opened) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Opened),
    )


def class_in(spec: pytree.TreeSpec) -> type | None:
    """The class of the first object that a tree has such a node for."""
    if spec.type is Opened:
        cls: type = spec.context[0]
        return cls
    return next((found for child in spec.children() if (found := class_in(child))), None)


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    """What an object is made of, by name; nothing if it is none that can be made again."""
    cls: Any = type(x)
    if isinstance(x, slice):
        yield from (("start", x.start), ("stop", x.stop), ("step", x.step))
    elif cls is functools.partial:
        yield from (("func", x.func), ("args", x.args), ("keywords", x.keywords))
    elif cls is types.MappingProxyType:
        yield _CONTENT, dict(x)
    elif isinstance(x, _ITERATORS):
        yield _CONTENT, list(x)
    elif isinstance(x, _NO_CONTAINERS):
        return
    elif isinstance(x, (dict, list, tuple)):
        base: Any = next(kind for kind in (dict, list, tuple) if isinstance(x, kind))
        yield _CONTENT, base(x)
        yield from _attributes(x)
    elif cls in (set, frozenset):
        if not any(isinstance(value, torch.Tensor) for value in x):
            yield _CONTENT, sorted(x, key=repr)
    elif dataclasses.is_dataclass(x) or cls is types.SimpleNamespace:
        yield from _attributes(x)
    elif cls.__new__ is object.__new__:
        home = cls.__module__
        if home.partition(".")[0] not in _FOREIGN or home.startswith("torch.distributions."):
            yield from _attributes(x)


def _attributes(x: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds by name; nothing of one with slots that may be written, which nobody
    would see."""
    slots = [name for cls in type(x).__mro__ for name in _names(vars(cls).get("__slots__", ()))]
    own = [name for name in slots if name not in ("__dict__", "__weakref__")]
    if not own or getattr(type(x), "__dataclass_params__", _WRITABLE).frozen:
        yield from ((name, getattr(x, name)) for name in own if hasattr(x, name))
        yield from getattr(x, "__dict__", {}).items()


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _made(x: Opened) -> Any:
    parts = dict(zip(x.names, map(closed, x.values), strict=True))
    cls: Any = x.cls
    if cls is slice:
        return slice(*parts.values())
    if cls is functools.partial:
        return functools.partial(parts["func"], *parts["args"], **parts["keywords"])
    if issubclass(cls, _ITERATORS):
        return iter(parts[_CONTENT])
    if cls is types.MappingProxyType:
        return cls(parts[_CONTENT])
    content: Any = parts.pop(_CONTENT) if issubclass(cls, _CONTAINERS) else ()
    if issubclass(cls, (set, frozenset)):
        return cls(content)
    if cls is torch.Size:
        return cls(content) if all(type(n) is int for n in content) else tuple(content)
    made: Any = tuple.__new__(cls, content) if issubclass(cls, tuple) else cls.__new__(cls)
    if issubclass(cls, list):
        list.extend(made, content)
    if issubclass(cls, dict):
        put = OrderedDict.__setitem__ if issubclass(cls, OrderedDict) else dict.__setitem__
        for key, value in content.items():
            put(made, key, value)
    for name, value in parts.items():
        object.__setattr__(made, name, value)
    return made
