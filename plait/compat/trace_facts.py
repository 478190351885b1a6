"""What traced functions look at, where Dynamo leaves no guard.

While somebody listens, guards are left where an argument and a global are one object, of what is
looked up in a dict or a set, and where a dict has no item of a key that code takes from it and the
error is caught (`collections.ChainMap` does that). Of the rest there are no guards: `looked_at`
tells it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch._dynamo import variables
from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables import builder
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import PythonModuleVariable

Answer = tuple[types.ModuleType, str, bool]
"""A module, a name, and whether it has that."""


@dataclass
class Looked:
    """calls: of functions, those that raised too: Dynamo's trace, of which there are several where
    it begins anew, and the code. answers: that modules lack a name, and what `hasattr` said of
    them."""

    calls: list[tuple[Any, types.CodeType]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def codes(self, trace: Any) -> list[types.CodeType]:
        """Of the functions that a trace called."""
        return [code for of, code in self.calls if of is trace]


_listening: list[Looked] = []  # of one thread at a time: Dynamo compiles under a lock


@contextmanager
def looked_at() -> Iterator[Looked]:
    """Inside, what traces look at comes into the result."""
    looked = Looked()
    _listening.append(looked)
    try:
        yield looked
    finally:
        _listening.remove(looked)


def _guard_keys(kind: Any) -> None:
    """Has what is looked up in a dict or a set guarded: Dynamo hashes it first."""
    own = kind.__contains__

    @functools.wraps(own)
    def contains(self: Any, key: Any) -> Any:
        lazy = _listening and isinstance(key, LazyVariableTracker)
        return own(self, key.realize() if lazy else key)

    kind.__contains__ = contains


def _listen() -> None:
    has, get = PythonModuleVariable.call_obj_hasattr, PythonModuleVariable.var_getattr
    item = ConstDictVariable.getitem_const_raise_exception_if_absent
    call = InliningInstructionTranslator.inline_call_
    builders: Any = builder
    same = builders.make_dupe_guard

    @functools.wraps(has)
    def has_name(self: Any, tx: Any, name: str) -> Any:
        for looked in _listening[-1:]:
            looked.answers.append((self.value, name, hasattr(self.value, name)))
        return has(self, tx, name)

    @functools.wraps(get)
    def get_name(self: Any, tx: Any, name: str) -> Any:
        try:
            return get(self, tx, name)
        except ObservedAttributeError:
            for looked in _listening[-1:]:
                looked.answers.append((self.value, name, False))
            raise

    @functools.wraps(item)
    def get_item(self: Any, tx: Any, key: Any) -> Any:
        if _listening and key.realize() not in self:
            self.install_dict_contains_guard(tx, [key])
        return item(self, tx, key)

    @functools.wraps(call)
    def inline(self: Any) -> Any:
        for looked in _listening[-1:]:
            looked.calls.append((self.output.tracing_context, self.f_code))
        return call(self)

    @functools.wraps(same)
    def one_object(source: Any, other: Any) -> Any:
        found = same(source, other)
        if _listening and found is None and other is not None and other != source:
            return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=other)
        return found

    builders.make_dupe_guard = one_object
    changed: Any = PythonModuleVariable, ConstDictVariable, InliningInstructionTranslator
    modules, dicts, calls = changed
    modules.call_obj_hasattr, modules.var_getattr = has_name, get_name
    known: Any = variables
    for kind in (ConstDictVariable, known.SetVariable):
        _guard_keys(kind)
    dicts.getitem_const_raise_exception_if_absent = get_item
    calls.inline_call_ = inline


_listen()
