"""Where the tensors that a program is bound to are found again, so that one that was replaced is
noticed.

A module's parameters, buffers, other attributes and sub-modules stand in dicts. `Owners` knows
those of the modules that a program uses; the native callable looks whether one of the dicts has
changed, and asks for the tensors only then. What a function takes from elsewhere, a closure or a
global that is a tensor, has no owner: the program keeps the tensor that it was compiled with.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module, ModuleDict, ModuleList, ParameterDict, ParameterList, Sequential

from plait.capture.plain_tensors import special_kind
from plait.capture.wrapped_state import Wrapper, wrapper_of
from plait.errors import InputError

_AGAIN = "plait.compile once more"
_TOLD = sys.version_info < (3, 13)
"""Whether Python tells of `module.x = y` that the module's own dict has changed: since 3.13 it may
not."""
_OF_MODULES = (Sequential, ModuleList, ModuleDict)
_OF_PARAMETERS = (ParameterList, ParameterDict)


def reachable(fn: Callable[..., Any]) -> dict[str, Any]:
    """The modules and tensors that fn may use, by name: fn itself ("" is its name), what its
    closure, globals, defaults and the object that it is a method of hold, and the same of functions
    among these."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", fn)]
    while todo:
        name, x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, (Module, torch.Tensor)):
            found.setdefault(name, x)
        else:
            todo.extend(held(x))
    return found


def held(x: Any) -> Iterator[tuple[str, Any]]:
    """What a function or an object that is called like one refers to, by name."""
    if isinstance(x, functools.partial):
        yield from [("", x.func), *_enumerated("argument", x.args), *x.keywords.items()]
    elif isinstance(x, types.MethodType):
        yield from [("", x.__func__), ("self", x.__self__), *_attributes(x.__self__)]
    elif isinstance(x, types.FunctionType):
        if (x.__module__ or "").partition(".")[0] == "torch":
            return
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            with suppress(ValueError):  # nothing is in it yet
                yield name, cell.cell_contents
        yield from (
            (name, x.__globals__[name]) for name in _names(x.__code__) if name in x.__globals__
        )
        yield from [
            *_enumerated("default", x.__defaults__ or ()),
            *(x.__kwdefaults__ or {}).items(),
        ]
        if (inner := getattr(x, "__wrapped__", None)) is not None:
            yield "", inner
    elif isinstance(call := vars(type(x)).get("__call__"), types.FunctionType):
        yield from [("", call), *_attributes(x)]


def _enumerated(what: str, values: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"{what} {k}", value) for k, value in enumerate(values)]


def _names(code: types.CodeType) -> set[str]:
    """The names that are looked up by code and by the functions inside it."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names}.union(*map(_names, inner))


def _attributes(x: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(x, (Module, torch.Tensor)):
        yield from getattr(x, "__dict__", {}).items()


@dataclass(frozen=True)
class _Slot:
    """An attribute of a module, in one of its dicts.

    number: of its tensor, among those that a program is bound to; None: the attribute is None, and
        has to stay so.
    wrapper, part: the kind of tensor that it is, where the program is bound to one inside of it,
        and which.
    """

    module: Module
    place: dict[str, Any]
    key: str
    name: str
    number: int | None
    wrapper: Wrapper | None = None
    part: int = 0

    def now(self) -> Any:
        """What `module.key` gives, wherever it stands now, or what is in it under this name; None
        where there is no such attribute. Raises InputError where another kind of tensor stands."""
        inside = self.key in self.place
        x = self.place[self.key] if inside else getattr(self.module, self.key, None)
        if self.wrapper is None or x is None:
            return x
        if wrapper_of(x) != self.wrapper:
            what = f"parameter or buffer {self.name!r}: expected a {self.wrapper.kind.__name__}"
            raise InputError(f"{what} as it was when compiled", hint=_AGAIN)
        return list(self.wrapper.parts(x, ""))[self.part][1]


class Owners:
    """The dicts that hold a program's tensors, as they were when it was compiled.

    roots: modules by name.
    bound: the tensors that the program is bound to.
    dicts: those to look at.
    moved: whether dicts did not tell of all attributes when tensors() was called last.
    """

    def __init__(self, roots: Mapping[str, Any], bound: Sequence[torch.Tensor]) -> None:
        self._names: list[str | None] = [None] * len(bound)
        self._numbers = {id(t): k for k, t in enumerate(bound)}
        self.moved = False
        self._slots: list[_Slot] = []
        self._children: list[tuple[str, Module, dict[str, Module | None]]] = []
        dicts: list[dict[str, Any]] = []
        for root, x in roots.items():
            if isinstance(x, Module):
                dicts += self._add(root, x)
            elif id(x) in self._numbers:
                self._names[self._numbers[id(x)]] = root
        self.dicts = tuple({id(d): d for d in dicts}.values())
        del self._numbers  # tensors are no longer needed, nor their ids right

    def _add(self, root: str, top: Module) -> list[dict[str, Any]]:
        """The dicts of a module and of those inside it; none if it holds nothing of the program."""
        slots: list[_Slot] = []
        modules = list(top.named_modules(prefix=root))
        for path, module in modules:
            dot = f"{path}." if path else ""
            for place in (module._parameters, module._buffers, vars(module)):
                for key, t in place.items():
                    if isinstance(t, torch.Tensor) and id(t) in self._numbers:
                        slots.append(_Slot(module, place, key, dot + key, self._numbers[id(t)]))
                    elif wrapper := wrapper_of(t):
                        slots += [
                            _Slot(module, place, key, name, self._numbers[id(x)], wrapper, k)
                            for k, (name, x) in enumerate(wrapper.parts(t, dot + key))
                            if id(x) in self._numbers
                        ]
                    elif t is None and place is not vars(module):
                        slots.append(_Slot(module, place, key, dot + key, None))
        if all(s.number is None for s in slots):
            return []
        for s in slots:
            if s.number is not None:
                self._names[s.number] = self._names[s.number] or s.name
        self._slots += slots
        self._children += [(path, module, dict(module._modules)) for path, module in modules]
        containers = [m._modules for _, m in modules if m._modules or isinstance(m, _OF_MODULES)]
        lists = [m._parameters for _, m in modules if isinstance(m, _OF_PARAMETERS)]
        return [*(s.place for s in slots), *containers, *lists]

    def name_of(self, number: int) -> str:
        """A tensor's name, where one was found."""
        return self._names[number] or f"tensor {number}"

    def tensors(self) -> list[tuple[int, torch.Tensor]]:
        """What stands now where tensors of the program stood, by number. Raises InputError where a
        module is put together otherwise than it was."""
        self.moved = False
        for path, module, children in self._children:
            self._check_children(path, module, children)
        found: dict[int, tuple[_Slot, torch.Tensor]] = {}
        for slot in self._slots:
            now = slot.now()
            self.moved |= slot.key not in slot.place or not (
                _TOLD or slot.place is not vars(slot.module)
            )
            if slot.number is None:
                if now is not None:
                    raise InputError(
                        f"parameter or buffer {slot.name!r} was None when compiled", hint=_AGAIN
                    )
                continue
            _check_tensor(slot.name, now)
            first, before = found.setdefault(slot.number, (slot, now))
            if before is not now:
                what = (
                    f"parameters or buffers {first.name!r} and {slot.name!r} were one tensor when "
                    "compiled"
                )
                raise InputError(f"{what}, they are two now", hint=_AGAIN)
        return [(number, now) for number, (_, now) in found.items()]

    def _check_children(
        self, path: str, module: Module, children: Mapping[str, Module | None]
    ) -> None:
        now = module._modules
        where = f"module {path!r}" if path else "the module"
        if list(now) != list(children):
            what = f"{where} has sub-modules {list(now)}, when compiled it had {list(children)}"
            raise InputError(what, hint=_AGAIN)
        for key, child in children.items():
            if now[key] is not child:
                name = f"{path}.{key}" if path else key
                raise InputError(
                    f"sub-module {name!r} was replaced since it was compiled", hint=_AGAIN
                )
        if isinstance(module, _OF_PARAMETERS):
            known = {s.key for s in self._slots if s.module is module}
            if more := [key for key in module._parameters if key not in known]:
                raise InputError(
                    f"{where} has parameters {more} that it had not when compiled", hint=_AGAIN
                )


def _check_tensor(name: str, x: Any) -> None:
    """Raises InputError unless x may stand for a parameter or buffer."""
    if x is None:
        raise InputError(
            f"parameter or buffer {name!r} was removed since it was compiled", hint=_AGAIN
        )
    if not isinstance(x, torch.Tensor):
        raise InputError(
            f"parameter or buffer {name!r}: expected a tensor, got {type(x).__name__}", hint=_AGAIN
        )
    if kind := special_kind(x):
        raise InputError(
            f"parameter or buffer {name!r}: expected a plain tensor, got {kind}", hint=_AGAIN
        )
