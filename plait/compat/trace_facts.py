"""What traced functions look at, where Dynamo leaves no guard.

While somebody listens, guards are left where an argument and a global are one object, of what is
looked up in a dict or a set, and where a dict has no item of a key that code takes from it and the
error is caught (`collections.ChainMap` does that); of what Python's own modules hold too, until
`take_of_library` (Dynamo leaves none: nothing changes it in a process). Of the rest there are no
guards: `looked_at` tells it.
"""

from __future__ import annotations

import enum
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import guards as guarding
from torch._dynamo import variables
from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables import builder, functions, nn_module
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import PythonModuleVariable
from torch._guards import TracingContext

from plait.compat.torch_functions import is_torch_code

Answer = tuple[types.ModuleType, str, bool]
"""A module, a name, and whether it has that."""
Asked = tuple[str, str, Sequence[Any], str]
"""A function by its module and name, its arguments, and its result as `result_of` tells it."""


@dataclass
class Looked:
    """calls: of functions, those that raised too: Dynamo's trace, of which there are several where
    it begins anew, and the code. bare: functions and classes with no source, of which a trace reads
    what they hold without a guard; its trace as well. answers: that modules lack a name, and what
    `hasattr` said of them. asked: what functions of `_ASKED` said. of_process: what a trace found
    that is another one in each process, or "". unknown: what it took as it was, or ""."""

    calls: list[tuple[Any, types.CodeType]] = field(default_factory=list)
    bare: list[tuple[Any, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    of_process: str = ""
    unknown: str = ""

    def codes(self, trace: Any) -> list[types.CodeType]:
        """Of the functions that a trace called."""
        return [code for of, code in self.calls if of is trace]

    def unguarded(self, trace: Any) -> list[Any]:
        """The functions and classes without a source that a trace met."""
        return list({id(value): value for of, value in self.bare if of is trace}.values())


_LIBRARY = Path(functools.__file__).parent
"""Python's own modules, which know by identities what they have met (`inspect.unwrap` does)."""
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


def _note_order(value: Any, tx: Any = None) -> None:
    """A trace goes through a value, takes any one out of it, or makes a text of it. tx: Dynamo's
    translator, where it goes through."""
    if isinstance(value, ConstDictVariable):
        value.install_dict_keys_match_guard()  # Dynamo does where code goes through in other ways
    known: Any = variables
    if not isinstance(value, known.SetVariable) or len(value.items) < 2:
        return
    code = None if tx is None or value.source is not None else tx.f_code
    # Polyfills go through the sets of others.
    ours = code is not None and is_torch_code(code) and "polyfills" not in code.co_filename
    if not ours and issubclass(value.python_type(), (set, frozenset)):
        _listening[-1].of_process = "the order of a set"  # texts hash otherwise in each process


def _is_folded() -> bool:
    """Whether a constant is asked for by who makes a text of it, or calls a function with it."""
    frame: Any = sys._getframe(3)  # who called the wrapper of it
    names = []
    for _ in range(3):  # a comprehension may be a frame
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return not {"constant_fold_handler", "create"}.isdisjoint(names)


def _note_addresses() -> None:
    """Notes where code asks for an identity, or gets a text with one."""
    known: Any = variables
    own = known.ConstantVariable.__init__

    @functools.wraps(own)
    def constant(self: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        if _listening and type(value) is str and " at 0x" in value:
            _listening[-1].of_process = "an address in a text"
        own(self, value, *args, **kwargs)

    def identity(self: Any, tx: Any, *_: Any) -> None:
        code = tx.f_code
        if not is_torch_code(code) and Path(code.co_filename).parent != _LIBRARY:
            _listening[-1].of_process = "an identity"

    known.ConstantVariable.__init__ = constant
    _note_when_called(known.BuiltinVariable, "call_id", identity)


def _note_orders() -> None:
    known: Any = variables

    def folded(self: Any) -> None:
        if _is_folded():
            _note_order(self)

    def extended(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> None:
        for given in args if name == "extend" else ():
            _note_order(given.realize(), tx)

    def popped(self: Any, tx: Any, name: str, *_: Any, **__: Any) -> None:
        if name == "pop":
            _note_order(self, tx)

    for kind in (known.SetVariable, known.FrozensetVariable):
        for name in ("unpack_var_sequence", "tp_iter_impl", "repr_impl"):  # not all in each version
            if name in vars(kind) or (kind is known.SetVariable and name in dir(kind)):
                _note_when_called(kind, name, lambda self, tx: _note_order(self, tx))
        if "as_python_constant" in vars(kind):
            _note_when_called(kind, "as_python_constant", folded)
    _note_when_called(known.SetVariable, "call_method", popped)
    _note_when_called(known.ListVariable, "call_method", extended)


def _note_when_called(kind: Any, name: str, note: Callable[..., Any]) -> None:
    own = getattr(kind, name)

    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _listening:
            note(self, *args, **kwargs)
        return own(self, *args, **kwargs)

    setattr(kind, name, method)


_ASKED: tuple[Callable[..., Any], ...] = (
    importlib.util.find_spec, importlib.metadata.version, sys.getrecursionlimit,
    torch.cuda.is_available, torch.cuda.get_device_properties, torch.accelerator.is_available,
    torch.xpu.is_available,
)  # fmt: skip
"""Functions that Dynamo calls while it traces, for their result to stand in the graph, and of which
the result is of the machine or of what is installed there."""


def result_of(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """What a function says, as a text."""
    try:
        found = fn(*args)
    except Exception as error:  # noqa: BLE001 - an answer as well
        return type(error).__name__
    if isinstance(found, importlib.machinery.ModuleSpec):
        return f"{found.name} {found.origin}"
    return str(found)


_of_library: Any = getattr(guarding, "is_from_skip_guard_source", None)


def take_of_library(graph: Any) -> list[Any]:
    """Takes the guards of what Python's own modules hold out of those of Dynamo's graph."""
    found = [g for g in graph.guards if _of_library and _of_library(g.originating_source)]
    for g in found:
        graph.guards.inner.discard(g)
    return found


def _guard_library() -> None:
    if _of_library is not None:
        skipped: Any = guarding
        skipped.is_from_skip_guard_source = lambda of: not _listening and _of_library(of)


def _note_asked(self: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> None:
    fn = getattr(self, "value", None) or getattr(self, "fn", None)
    if fn in _ASKED and not kwargs and all(a.is_python_constant() for a in args):
        given = [a.as_python_constant() for a in args]
        if all(isinstance(a, (str, int)) for a in given):
            asked = fn.__module__, fn.__name__, given, result_of(fn, given)
            _listening[-1].asked.append(asked)


def _note_members(self: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Notes a call of an enum for a value that none of its members has: its own code answers."""
    if issubclass(self.value, enum.Enum) and args and args[0].is_python_constant():
        value = args[0].as_python_constant()
        if not any(m is value or m.value == value for m in self.value):
            _listening[-1].unknown = "what an enum says of a value that it does not have"


def _note_bare() -> None:
    """Notes functions and classes of which Dynamo has no source, and what it takes as constant."""
    known: Any = variables
    own = known.UserDefinedClassVariable.__init__

    def function(self: Any, parent: Any, *_: Any, **__: Any) -> None:
        method = isinstance(self, known.UserMethodVariable)
        if not self.source or (method and not self.source_fn):
            _listening[-1].bare.append((parent.output.tracing_context, self.fn))

    @functools.wraps(own)
    def of_class(self: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        own(self, value, *args, **kwargs)
        if _listening and self.source is None:
            _listening[-1].bare.append((TracingContext.try_get(), value))

    _note_when_called(known.UserFunctionVariable, "bind_args", function)
    _note_when_called(known.UserDefinedClassVariable, "call_function", _note_members)
    known.UserDefinedClassVariable.__init__ = of_class

    def names(self: Any, tx: Any, of: Any) -> None:
        if isinstance(of.realize(), PythonModuleVariable):
            _listening[-1].unknown = "the names of all that a module holds"

    _note_when_called(known.BuiltinVariable, "call_dir", names)
    invoke = functions.invoke_and_store_as_constant

    @functools.wraps(invoke)
    def constant(*args: Any, **kwargs: Any) -> Any:
        if _listening:
            _listening[-1].unknown = "a result that is assumed to be constant"
        return invoke(*args, **kwargs)

    for module in (functions, nn_module):
        vars(module)["invoke_and_store_as_constant"] = constant


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
    _note_orders()
    _note_addresses()
    _note_bare()
    _guard_library()
    for name in (
        "TorchInGraphFunctionVariable",
        "SkipFunctionVariable",
        "PolyfilledFunctionVariable",
    ):
        _note_when_called(getattr(known, name), "call_function", _note_asked)
    dicts.getitem_const_raise_exception_if_absent = get_item
    calls.inline_call_ = inline


_listen()
