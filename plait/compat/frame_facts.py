"""What Dynamo found out about a frame as plain data: its guards, what they are guards of, and the
code that runs in place of the frame's own.

Dynamo's guards bind objects of one process. The sources, kinds and arguments of guards have a form
that another process reads; `Values` finds what lies there, `frames.py` has Dynamo's own builder
make the guards anew.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch._dynamo import guards as guarding
from torch._dynamo import source
from torch._guards import Guard, Source
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils.weak import TensorWeakRef

COMPILED, _BUILTINS, _RESUME = "__compiled_fn", "__builtins_dict__", "__resume"
RESUMED = "resumed"
"""The kind of a global that holds what is left of a frame after a graph break."""
SIZES = "SHAPE_ENV"
STATE_KINDS = frozenset(
    "DETERMINISTIC_ALGORITHMS GRAD_MODE DEFAULT_DEVICE GLOBAL_STATE TORCH_FUNCTION_STATE "
    "AUTOGRAD_SAVED_TENSORS_HOOKS FUNCTORCH_STACK_MATCH DUAL_LEVEL FLOAT32_PRECISION".split()
)
"""Guards of what `ambient_state` and flags tell."""
ATTRIBUTE_BY_SOURCE = "attr" not in inspect.signature(guarding.GuardBuilder.HASATTR).parameters
"""Whether the source of a guard HASATTR is that of the attribute, as in torch 2.11."""


class NotKept(Exception):
    """What Dynamo found out cannot be written down, or not be checked in another process; the text
    says what of it."""


@dataclass(frozen=True)
class Guarded:
    """One guard as data. source: its number. more: the arguments of its kind, by name. built:
    whether Dynamo makes it in each process; the others hold between processes only."""

    source: int
    kind: str
    more: Mapping[str, Any]
    built: bool = True


@dataclass(frozen=True)
class Traced:
    """What a compile of a frame came to, but for its graph.

    sources: a row each, its class and fields; a source stands behind those that it is reached by.
    places: of each source, the Python expression of its value and the number of the source that is
    `_` in it, or -1.
    key_order: dicts whose order counts. layouts: sizes and strides of inputs by source, None where
    they vary. sizes: what must hold of those, as Python and for people.
    imports: name of a global -> module. installed: other globals that the code needs, each with its
    kind and value. code: what runs in place of the frame's own."""

    sources: Sequence[tuple[str, Mapping[str, Any]]]
    places: Sequence[tuple[str, int]]
    guards: Sequence[Guarded]
    key_order: Sequence[int]
    layouts: Sequence[tuple[int, Sequence[int | None], Sequence[int | None]]]
    imports: Mapping[str, str]
    installed: Mapping[str, tuple[str, Any]]
    sizes: tuple[Sequence[str], Sequence[str]] = ((), ())
    code: bytes = b""


# ------------------------------------------------------------------------------------ writing
_OF_VALUES = frozenset(
    "EQUALS_MATCH CONSTANT_MATCH NONE_MATCH BOOL_MATCH TYPE_MATCH DICT_CONTAINS DICT_NOT_CONTAINS "
    "SET_CONTAINS SET_NOT_CONTAINS SEQUENCE_LENGTH DICT_LENGTH DICT_KEYS_MATCH MAPPING_KEYS_CHECK "
    "HASATTR NOT_PRESENT_IN_GENERIC_DICT".split()
)
"""Guards of values, and not of which object there is."""


def written(graph: Any, of_library: Sequence[Guard] = ()) -> Traced:
    """What Dynamo found out about a frame, before its guards are made. of_library: guards of what
    Python's own modules hold, which Dynamo does not make. Raises NotKept."""
    if graph.aotautograd_guards:
        raise NotKept("arguments that share memory")
    writer = _Writer()
    guards = []
    added = [g for g in of_library if g.create_fn_name() in _OF_VALUES]
    for guard in sorted((*graph.guards, *added), key=Guard.sort_key):
        kind = guard.create_fn_name()
        if kind == SIZES:
            continue  # see sizes
        given = guard.create_fn
        more: Mapping[str, Any] = {}
        if isinstance(given, functools.partial):
            if given.args:
                raise NotKept(f"a guard {kind} with arguments of its own")
            more = {k: writer.value(v) for k, v in given.keywords.items()}
        of: Any = guard.originating_source
        if kind == "HASATTR" and ATTRIBUTE_BY_SOURCE:
            of = of.base if isinstance(of, source.NNModuleSource) else of
            if isinstance(of, source.CodeSource):
                continue  # every function has code
            if not isinstance(of, source.AttrSource):
                raise NotKept("a guard that does not tell its attribute")
            of, more = of.base, {"attr": of.member}
        guards.append(Guarded(writer.source(of), kind, more, guard not in added))
    if torch._dynamo.config.enable_cpp_symbolic_shape_guards and graph.shape_env.guards:
        raise NotKept("conditions on sizes in C++")
    layouts = [
        (writer.source(s), _numbers(facts["size"]), _numbers(facts["stride"]))
        for s, facts in graph.input_source_to_sizes_strides.items()
    ]
    scope = graph.global_scope
    return Traced(
        writer.rows,
        writer.places,
        guards,
        sorted(writer.source(s) for s in graph.guard_on_key_order),
        layouts,
        dict(graph.import_sources),
        {name: _installed(name, scope[name]) for name in sorted(graph.installed_globals)},
    )


def _numbers(sizes: Sequence[Any]) -> list[int | None]:
    """None: a size that varies."""
    return guarding.convert_to_concrete_values(sizes)


def _installed(name: str, value: Any) -> tuple[str, Any]:
    """What a global that Dynamo made holds."""
    if name.startswith(COMPILED):
        return "graph", None
    if name.startswith(_BUILTINS):
        return "builtins", None
    if name.startswith(_RESUME):
        return RESUMED, None  # its code is told when the frame's own is known
    if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
        return "module", value.__name__
    where = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if named(*where) is value and value is not None:
        return "object", list(where)
    raise NotKept(f"a global of type {type(value).__name__} that Dynamo makes")


def named(module: Any, path: Any) -> Any:
    """What a module of this process calls so, or None."""
    found = sys.modules.get(module) if isinstance(module, str) else None
    for name in path.split(".") if isinstance(path, str) and found is not None else ():
        found = inspect.getattr_static(found, name, None)
    return found


_fields = functools.cache(fields)


class _Writer:
    """Numbers sources as they are met."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Mapping[str, Any]]] = []
        self.places: list[tuple[str, int]] = []
        self._numbers: dict[Source, int] = {}

    def source(self, s: Source) -> int:
        """The number of a source."""
        if s not in self._numbers:
            cls = type(s)
            if getattr(source, cls.__name__, None) is not cls or not is_dataclass(s):
                raise NotKept(f"a source of class {cls.__name__}")
            held = [(f, getattr(s, f.name)) for f in _fields(cls)]
            row = {f.name: self.value(v) for f, v in held if f.init}
            bases = [v for _, v in held if isinstance(v, Source)]
            self.rows.append((cls.__name__, row))
            self.places.append(self._place(_name(s), bases))
            self._numbers[s] = len(self.rows) - 1
        return self._numbers[s]

    def _place(self, name: str, bases: Sequence[Source]) -> tuple[str, int]:
        if len(bases) == 1:
            rest = name.replace(_name(bases[0]), "_")
            if not any(root in rest for root in ("L[", "G[")):
                return rest, self._numbers[bases[0]]
        return name, -1

    def value(self, v: Any) -> Any:
        """A field of a source or an argument of a guard."""
        if v is None or isinstance(v, (bool, int, float, str)):
            return v
        if isinstance(v, bytes):
            return {"bytes": v.hex()}
        if isinstance(v, Source):
            return {"source": self.source(v)}
        if isinstance(v, tuple):
            return {"tuple": [self.value(x) for x in v]}
        if isinstance(v, Enum) and named(type(v).__module__, type(v).__qualname__) is type(v):
            return {"enum": [type(v).__module__, type(v).__qualname__, v.name]}
        if isinstance(v, slice):
            return {"slice": [self.value(x) for x in (v.start, v.stop, v.step)]}
        if isinstance(v, TensorWeakRef):
            return {"tensor": None}  # that of the guard's source
        if isinstance(v, type) and named(v.__module__, v.__qualname__) is v:
            return {"object": [v.__module__, v.__qualname__]}
        raise NotKept(f"a source or guard with a {type(v).__name__}")


def _name(s: Source) -> str:
    found = s.name
    return found if isinstance(found, str) else found()


# ------------------------------------------------------------------------------------ values
class Values:
    """The values of sources in a frame of this process.

    Raises NotKept for a source that has none here."""

    def __init__(self, traced: Traced, frame_globals: Mapping[str, Any], locals: Any) -> None:
        self._places = traced.places
        made = {**imported(traced), **installed_here(traced)}
        known: dict[str, Any] = {**guarding._get_closure_vars()}
        self._scope = {**known, "G": _Globals(frame_globals, made), "L": locals}
        self._inner = {"__builtins__": builtins, **known}
        self._found: dict[int, Any] = {}

    def __getitem__(self, number: int) -> Any:
        if number not in self._found:
            text, base = self._places[number]
            try:
                if base < 0:
                    self._found[number] = eval(_compiled(text), self._scope)
                else:
                    self._inner["_"] = self[base]
                    self._found[number] = eval(_compiled(text), self._inner)
            except Exception as error:
                raise NotKept(f"{self.name(number)} is not there: {error}") from error
        return self._found[number]

    def unmet(self, conditions: Sequence[str]) -> str:
        """The first condition on sizes that does not hold, or ""."""
        scope = {**SYMPY_INTERP, **self._scope}
        return next((c for c in conditions if not eval(_compiled(c), scope)), "")

    def name(self, number: int) -> str:
        """As users would write it."""
        text, base = self._places[number]
        return text if base < 0 else re.sub(r"\b_\b", lambda _: self.name(base), text, count=1)


@functools.cache
def _compiled(text: str) -> types.CodeType:
    return compile(text, "<source>", "eval")


class _Globals:
    """A frame's globals with those that Dynamo is going to add."""

    def __init__(self, own: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        self._own, self._made = own, made

    def __getitem__(self, name: str) -> Any:
        return self._made[name] if name in self._made else self._own[name]


def imported(traced: Traced) -> dict[str, Any]:
    """The modules that the code names."""
    return {name: sys.modules[_module(m)] for name, m in traced.imports.items()}


def installed_here(traced: Traced) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, value) in traced.installed.items():
        if kind == "builtins":
            found[name] = vars(builtins)
        elif kind == "module":
            found[name] = sys.modules[_module(value)]
        elif kind == "object":
            found[name] = named(*value)
    return found


def decoded(v: Any, source_of: Callable[[int], Any], tensor: Any = None) -> Any:
    """A field of a source or an argument of a guard. source_of: what stands for a source, by
    number. tensor: what stands for the guard's own tensor. Raises NotKept."""
    if not isinstance(v, Mapping):
        return v
    ((kind, held),) = v.items()
    match kind:
        case "source":
            return source_of(held)
        case "bytes":
            return bytes.fromhex(held)
        case "tuple":
            return tuple(decoded(x, source_of) for x in held)
        case "enum":
            module, path, name = held
            return named(_module(module), path)[name]
        case "slice":
            return slice(*(decoded(x, source_of) for x in held))
        case "object":
            return named(_module(held[0]), held[1])
        case "tensor":
            return tensor
    raise NotKept(f"a value of kind {kind}")


def arguments(guard: Guarded, values: Values) -> dict[str, Any]:
    """The arguments of a guard's kind, with the values of sources."""
    return {k: decoded(v, values.__getitem__) for k, v in guard.more.items()}


def _module(name: str) -> str:
    """The module of that name, imported."""
    try:
        return importlib.import_module(name).__name__
    except ImportError as error:
        raise NotKept(f"a module is missing: {error}") from error
