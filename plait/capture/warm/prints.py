"""What another process compares of a value that a trace relied on: a text, equal where a trace
would have come to the same.

A guard binds an object of one process by its address. The text says of it what a trace can see: of
a function and a class all of their code, of other things what a guard of that kind asks.
"""

from __future__ import annotations

import abc
import builtins
import collections
import enum
import functools
import hashlib
import importlib
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.nn.parameter import is_lazy

from plait.compat.frame_facts import STATE_KINDS, NotKept
from plait.compat.torch_functions import LIBRARIES, is_library_code, is_torch_code

_ABC: Any = importlib.import_module("_abc")  # knows which classes were registered
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator, CustomOpDef)
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_OF_NO_USE = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __annotations__ __abstractmethods__ _abc_impl "
    "__static_attributes__ __firstlineno__ __parameters__ __orig_bases__".split()
)
"""Attributes of classes that no trace reads, or that are told otherwise."""


class Prints:
    """One look at the objects of this process; they do not change while it lasts.

    whole: objects tell the names of their attributes, functions their annotations. held: functions
    tell the numbers that they close over, and classes theirs. codes: all that was looked at."""

    def __init__(self, whole: bool = False, held: bool = False) -> None:
        self.whole = whole
        self.held = held
        self.codes: set[types.CodeType] = set()
        self._known: dict[int, str] = {}
        self._alive: list[Any] = []  # so that addresses stay theirs

    def of(self, kind: str, value: Any, more: Mapping[str, Any]) -> str:
        """What a guard of this kind relies on. more: its arguments; sources among them are values
        already. Raises NotKept for what another process cannot compare."""
        if kind in STATE_KINDS:
            return ""
        asked = _ASKED.get(kind)
        if asked is None:
            raise NotKept(f"a guard of kind {kind}")
        return asked(self, value, more)

    def identity(self, value: Any) -> str:
        """Which object it is, and of functions and classes all that they do."""
        if isinstance(value, enum.Enum):
            return f"{self.identity(type(value))} {value._name_} {self.constant(value._value_)}"
        if isinstance(value, (*_PLAIN, *_NAMED)):
            kind: Any = next(k for k in (*_PLAIN, *_NAMED) if isinstance(value, k))
            cls = "" if type(value) is kind else self.identity(type(value))
            return f"{cls}{kind.__name__} {kind.__repr__(value)}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, _OPERATORS):
            return f"operator {value}"
        if isinstance(value, type):
            return self._once(value, self._of_class, f"class {_path(value)}")
        if isinstance(value, types.FunctionType):
            return self._once(value, self._of_function, f"function {_path(value)}")
        if isinstance(value, types.CodeType):
            return self.code(value)
        if isinstance(value, types.MethodType):
            return f"method {self.identity(value.__func__)} {self.identity(type(value.__self__))}"
        if isinstance(value, _BUILTIN):
            owner = getattr(value, "__self__", None) or getattr(value, "__objclass__", None)
            whose = owner if isinstance(owner, (type, types.ModuleType)) else type(owner)
            return f"builtin {_path(value)} {getattr(whose, '__name__', '')}"
        if isinstance(value, (property, functools.cached_property)):
            return self._part(value)
        if isinstance(value, (staticmethod, classmethod)):
            return f"{type(value).__name__} {self.identity(value.__func__)}"
        if isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
            return f"partial {list(value.keywords)} {[self.identity(v) for v in parts]}"
        if isinstance(inner := getattr(value, "__wrapped__", None), types.FunctionType):
            return f"{_path(type(value))} of {self.identity(inner)}"
        raise NotKept(f"an object of {_path(type(value))}, by its identity")

    def constant(self, value: Any) -> str:
        """A value that is compared by ==."""
        if isinstance(value, (tuple, list)):
            return f"{type(value).__name__} {[self.constant(v) for v in value]}"
        if isinstance(value, (set, frozenset)):
            return f"{type(value).__name__} {sorted(self.constant(v) for v in value)}"
        if isinstance(value, dict):
            items = [(self.constant(k), self.constant(v)) for k, v in value.items()]
            return f"{type(value).__name__} {items}"
        if isinstance(value, slice):
            return f"slice {[self.constant(v) for v in (value.start, value.stop, value.step)]}"
        return self.identity(value)

    def keys(self, value: Any) -> str:
        """Those of a dict, in their order."""
        kinds = (collections.OrderedDict, dict)  # the former has an order of its own
        of_kind = next((kind.keys for kind in kinds if isinstance(value, kind)), list)
        if not hasattr(value, "__iter__"):
            raise NotKept(f"the keys of {_path(type(value))}")
        return f"{_path(type(value))} {[self.constant(k) for k in of_kind(value)]}"

    def code(self, code: types.CodeType) -> str:
        """All that a code does, wherever it stands in its file."""
        return self._once(code, self._of_code, "")

    def kind_of(self, value: Any, depth: int = 3) -> Any:
        """What kind of value an argument is, for a key: guards tell the rest."""
        if isinstance(value, torch.nn.Module):
            parts = hashlib.blake2b(digest_size=16)
            for name, m in value.named_modules():
                parts.update(f"{name} {_path(type(m))}".encode())
            for name, x in (*value.named_parameters(), *value.named_buffers()):
                shape = () if is_lazy(x) else tuple(x.shape)
                parts.update(f"{name} {x.dtype} {x.device} {shape}".encode())
            return f"{_path(type(value))} {parts.hexdigest()}"
        if isinstance(value, torch.Tensor):
            return f"{_path(type(value))} {value.dtype} {value.device} {value.dim()}"
        if type(value) in (tuple, list) and depth:
            return [_path(type(value)), *(self.kind_of(v, depth - 1) for v in value)]
        if type(value) is dict and depth:
            items = [
                (str(k) if is_plain(k) else _path(type(k)), self.kind_of(v, depth - 1))
                for k, v in value.items()
            ]
            return [_path(type(value)), items]
        if isinstance(value, types.FunctionType):
            return f"function {_path(value)}"
        return _path(type(value))

    def knows(self, value: Any) -> bool:
        """Whether all of a function or class was told."""
        return id(value) in self._known

    # ------------------------------------------------------------------------------------ objects
    def _once(self, value: Any, make: Callable[[Any], str], meanwhile: str) -> str:
        """make(value) as a digest. meanwhile: what it is to parts of itself."""
        if id(value) not in self._known:
            self._alive.append(value)
            self._known[id(value)] = meanwhile
            digest = hashlib.blake2b(make(value).encode("utf-8", "surrogatepass"), digest_size=16)
            self._known[id(value)] = f"{meanwhile} {digest.hexdigest()}"
        return self._known[id(value)]

    def _of_code(self, code: types.CodeType) -> str:
        self.codes.add(code)
        constants = [
            self.code(c) if isinstance(c, types.CodeType) else self.constant(c)
            for c in code.co_consts
        ]
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        table = getattr(code, "co_exceptiontable", b"")
        return f"{code.co_name} {names} {counts} {code.co_code!r} {table!r} {constants}"

    def _of_function(self, fn: types.FunctionType) -> str:
        defaults = [self._part(v) for v in fn.__defaults__ or ()]
        by_name = {k: self._part(v) for k, v in (fn.__kwdefaults__ or {}).items()}
        cells = [self._cell(c) for c in fn.__closure__ or ()]
        inner = getattr(fn, "__wrapped__", None)
        wrapped = self.identity(inner) if isinstance(inner, types.FunctionType) else ""
        shadowed = shadowed_names(fn.__code__, fn.__globals__)
        # No guard tells that an attribute is not there, or what the annotations are.
        names = [name for name in vars(fn) if not name.startswith(_OF_DYNAMO)]
        notes = fn.__annotations__ if self.whole else ""
        return (
            f"{self.code(fn.__code__)} {defaults} {by_name} {cells} {wrapped} {shadowed} {names} "
            f"{notes}"
        )

    def _cell(self, cell: Any) -> str:
        try:
            return self._part(cell.cell_contents, plain=self.held)
        except ValueError:
            return "empty"

    def _part(self, value: Any, plain: bool = True) -> str:
        """What a function or class holds. What it does is told; of other things the kind, since
        guards ask for what a trace has read of them. plain: numbers and texts are told too."""
        if isinstance(value, property):
            return f"property {[self._part(f) for f in (value.fget, value.fset, value.fdel)]}"
        if isinstance(value, functools.cached_property):
            return f"cached property {self._part(value.func)}"
        if isinstance(value, (types.FunctionType, staticmethod, classmethod, functools.partial)):
            try:
                return self.identity(value)
            except NotKept:
                return _path(type(value))
        if isinstance(inner := getattr(value, "__wrapped__", None), types.FunctionType):
            return f"{_path(type(value))} of {self.identity(inner)}"
        if isinstance(value, types.MethodType):
            # A context manager as a decorator: its state is in the object.
            held = sorted(vars(value.__self__).items()) if _is_torch(value.__self__) else []
            state = [f"{k} {v!r}" for k, v in held if isinstance(v, (*_PLAIN, *_NAMED))]
            return f"{self._part(value.__func__)} {_path(type(value.__self__))} {state}"
        if isinstance(value, type):
            users = value.__module__.partition(".")[0] not in LIBRARIES
            return self.identity(value) if self.held and users else _path(value)
        if isinstance(value, types.ModuleType):
            return _path(value)
        if plain and type(value) in (list, tuple):
            return f"{type(value).__name__} {[self._part(v) for v in value]}"
        if plain and type(value) is dict:
            return str([f"{self._part(k)} {self._part(v)}" for k, v in value.items()])
        if plain:
            with suppress(NotKept):
                return self.constant(value)
        return _path(type(value))

    def _read(self, method: Any) -> list[str]:
        """The globals that a method of an enum may read: Dynamo calls it, untraced, for the text of
        a member."""
        if not isinstance(method, types.FunctionType) or is_library_code(method.__code__):
            return []
        scope = method.__globals__
        names = sorted(scope.keys() & set(method.__code__.co_names))
        return [f"{name} {self._part(scope[name])}" for name in names]

    def _of_class(self, cls: type) -> str:
        if vars(cls).get("_is_runtime_protocol") and cls.__module__ != "typing":
            raise NotKept(f"{_path(cls)}, a protocol: which attributes an object had")
        if any(_is_users(inspect.getattr_static(*asked, None)) for asked in _checks(cls)):
            raise NotKept(f"{_path(cls)}, which says itself what is of it")
        # Most often guards ask for what classes hold, but metaclasses.
        plain = self.held or issubclass(cls, type)
        kinds = [
            [f"{k} {self._part(v, plain)}" for k, v in sorted(vars(c).items())
             if k not in _OF_NO_USE]
            for c in cls.__mro__ if _is_python(c)
        ]  # fmt: skip
        meta = "" if type(cls) is type else self.identity(type(cls))
        more = ""
        if issubclass(cls, enum.Enum):
            held = cls.__members__.items()
            more = str([f"{name} {self._part(vars(m))}" for name, m in held])
            more += str([self._read(f) for c in cls.__mro__ for f in vars(c).values()])
        elif isinstance(cls, abc.ABCMeta):
            more = str(sorted(_path(c) for c in _registered(cls)))
        return f"{cls.__name__} {[_path(c) for c in cls.__mro__]} {kinds} {meta} {more}"


def _checks(cls: type) -> list[tuple[type, str]]:
    """Where the methods stand that `isinstance` and `issubclass` call: Dynamo does, untraced."""
    return [(type(cls), "__instancecheck__"), (type(cls), "__subclasscheck__"),
            (cls, "__subclasshook__")]  # fmt: skip


def _is_users(method: Any) -> bool:
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    return code is not None and not is_library_code(code)


def is_plain(value: Any) -> bool:
    """Whether a value is all that its `Prints.identity` says."""
    return isinstance(value, (*_PLAIN, *_NAMED))


def shadowed_names(code: types.CodeType, scope: Mapping[str, Any]) -> list[str]:
    """The built-in names in a code that its module gives another meaning: no guard tells them."""
    names = {name for name in code.co_names if name in scope and hasattr(builtins, name)}
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            names.update(shadowed_names(c, scope))
    return sorted(names)


def _registered(cls: abc.ABCMeta) -> set[type]:
    """The classes that count as subclasses of an abstract class because somebody said so."""
    found: set[type] = set()
    for c in (cls, *type.__subclasses__(cls)):  # type: ignore[arg-type]
        if isinstance(c, abc.ABCMeta):
            registry = _ABC._get_dump(c)[0]
            found.update(made for ref in registry if (made := ref()) is not None)
            if c is not cls:
                found.update(_registered(c))
    return found


def same_objects(guarded: Iterable[tuple[str, Any]]) -> str:
    """Which of the objects that guards are of are the same one, with their classes and with the
    keys of dicts whose keys are guarded. guarded: kinds of guards and values."""
    first: dict[int, int] = {}
    found = []
    for kind, value in guarded:
        keys = list(value) if kind in ("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK") else []
        classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
        found += [first.setdefault(id(x), len(first)) for x in (value, *classes, *keys)]
    return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "__dict__")


def _is_python(cls: type) -> bool:
    """Whether a class was made by Python code, which may have been edited."""
    return bool(cls.__flags__ & 1 << 9) and cls.__module__ not in ("builtins", "abc", "typing")


def _path(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    return f"{getattr(value, '__module__', '')}.{name}"


_OF_DYNAMO = ("_dynamo", "_torchdynamo")
"""How the names of attributes begin that Dynamo leaves on functions."""
_OF_TRACES = ("_dynamo_static_input_type",)
"""Attributes that a trace itself leaves on tensors."""


def _tensor(prints: Prints, x: Any, more: Mapping[str, Any]) -> str:
    """more: "layout": sizes and strides as the guard has them, None where they vary; without it all
    count."""
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_nested:
        raise NotKept("a tensor that has no strides")
    if type(x) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise NotKept(f"a tensor of class {type(x).__name__}")
    marks = sorted(n for n in vars(x) if n.startswith("_dynamo_") and n not in _OF_TRACES)
    dynamic = [f"{name} {getattr(x, name)}" for name in marks]
    given = more.get("layout") or (x.shape, x.stride())
    sizes, strides = (
        [None if want is None else n for want, n in zip(wanted, own, strict=True)]
        if len(wanted) == len(own) else list(own)
        for wanted, own in zip(given, (x.shape, x.stride()), strict=True)
    )  # fmt: skip
    facts = x.dtype, x.device, sizes, strides, x.requires_grad, x.is_leaf, x.is_conj()
    keys = torch._C._dispatch_keys(x)
    return f"{type(x).__name__} {facts} {x.is_neg()} {x.is_inference()} {keys} {dynamic}"


def _keys(prints: Prints, value: Any, _: Mapping[str, Any]) -> str:
    return prints.keys(value)


def _argument(more: Mapping[str, Any], name: str) -> Any:
    if name not in more:  # an older torch tells it by the source
        raise NotKept(f"a guard that does not tell its {name}")
    return more[name]


def _static(value: Any, name: str) -> str:
    return str(name in getattr(value, "__dict__", ()))


def _holds(kinds: tuple[type, ...], value: Any, key: Any) -> str:
    """Whether a value of one of these kinds holds key."""
    kind: Any = next((kind for kind in kinds if isinstance(value, kind)), None)
    return f"no {kinds[0].__name__}" if kind is None else str(kind.__contains__(value, key))


_SETS = (set, frozenset)


def _length(value: Any) -> str:
    return str(len(value)) if hasattr(value, "__len__") else "no length"


def _is_same(prints: Prints, value: Any, more: Mapping[str, Any]) -> str:
    return str(all(value is other for other in more.values()))


def _kind(prints: Prints, value: Any, _: Mapping[str, Any]) -> str:
    tells = prints.whole or _computes_attributes(type(value))
    names = list(vars(value)) if tells and hasattr(value, "__dict__") else ""
    return f"{prints.identity(type(value))} {names} {_hidden(value)}"


_TABLES = ("_parameters", "_buffers", "_modules")
"""Where a module looks for an attribute that is not its own, in this order."""


def _hidden(value: Any) -> str:
    """The names of what a module holds and another attribute hides: no guard tells them."""
    if not isinstance(value, torch.nn.Module):
        return ""
    tables = [t for t in (vars(value), *map(vars(value).get, _TABLES)) if t]
    names = [name for k, t in enumerate(tables) for name in t if any(name in u for u in tables[:k])]
    return str(names or "")


def _computes_attributes(cls: type) -> bool:
    """Whether a class has code of its own for attributes that are not there: no guard tells that
    one was not."""
    code = getattr(inspect.getattr_static(cls, "__getattr__", None), "__code__", None)
    return code is not None and not is_torch_code(code)


def _identity(prints: Prints, value: Any, _: Mapping[str, Any]) -> str:
    return prints.identity(value)


def _constant(prints: Prints, value: Any, _: Mapping[str, Any]) -> str:
    return prints.constant(value)


_ASKED: Mapping[str, Callable[[Prints, Any, Mapping[str, Any]], str]] = {
    "TYPE_MATCH": _kind,
    "ID_MATCH": _identity,
    "CLASS_MATCH": _identity,
    "FUNCTION_MATCH": _identity,
    "CLOSURE_MATCH": _identity,
    "BUILTIN_MATCH": _identity,
    "MODULE_MATCH": _identity,
    "CONSTANT_MATCH": _constant,
    "EQUALS_MATCH": _constant,
    "BOOL_MATCH": _constant,
    "NONE_MATCH": _constant,
    "TENSOR_MATCH": _tensor,
    "DICT_KEYS_MATCH": _keys,
    "MAPPING_KEYS_CHECK": _keys,
    "DICT_CONTAINS": lambda _, v, more: _holds((dict,), v, _argument(more, "key")),
    "DICT_NOT_CONTAINS": lambda _, v, more: _holds((dict,), v, _argument(more, "key")),
    "SET_CONTAINS": lambda _, v, more: _holds(_SETS, v, _argument(more, "key")),
    "SET_NOT_CONTAINS": lambda _, v, more: _holds(_SETS, v, _argument(more, "key")),
    "HASATTR": lambda _, v, more: str(hasattr(v, _argument(more, "attr"))),
    "NOT_PRESENT_IN_GENERIC_DICT": lambda _, v, more: _static(v, _argument(more, "attr")),
    "SEQUENCE_LENGTH": lambda _, v, __: f"{_path(type(v))} {_length(v)}",
    "DICT_LENGTH": lambda _, v, __: f"{_path(type(v))} {_length(v)}",
    "EMPTY_NN_MODULE_HOOKS_DICT": lambda _, v, __: _length(v),
    "DUPLICATE_INPUT": _is_same,
    "OBJECT_ALIASING": _is_same,
}
"""What a guard of each kind relies on."""


def named_function(code: types.CodeType, modules: Mapping[str, Any]) -> tuple[str, str] | None:
    """The module and path by which the function of a code, or the class that it stands in, is
    found. modules: by file."""
    home = modules.get(code.co_filename)
    path = getattr(code, "co_qualname", code.co_name).partition(".<locals>")[0]
    found = home
    for name in path.split("."):
        found = inspect.getattr_static(found, name, None)
    return None if home is None or found is None else (home.__name__, path)
