"""The code that runs in place of a frame's own, as bytes, and the functions that it calls for what
is left of the frame after a graph break.

Dynamo makes such a function of the code of the frame and compiles its first call as a frame of its
own. What it makes the next ones of, where that frame breaks again, is kept beside the code of each:
Dynamo makes it again for the code that came out of an entry.
"""

from __future__ import annotations

import inspect
import marshal
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch._dynamo import resume_execution
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.utils import ExactWeakKeyDictionary

from plait.compat.frame_facts import RESUMED, NotKept, Traced

_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_made: Any = ExactWeakKeyDictionary()
"""Code of what is left of a frame -> the code that it is made of, and how."""
_read: Any = ExactWeakKeyDictionary()
"""A frame's first code -> the codes of what is left of it that came out of entries, by their bytes:
two entries of one function share what is left, as two compiles do."""


# ------------------------------------------------------------------------------------ of Dynamo
def _note_resumed() -> None:
    own: Any = ContinueExecutionCache.lookup.__func__  # type: ignore[attr-defined]

    def lookup(cls: Any, code: types.CodeType, *how: Any) -> types.CodeType:
        made: types.CodeType = own(cls, code, *how)
        if made not in _made:  # what is left of a frame that was resumed is made of the first code
            _made[made] = code, how
        return made

    ContinueExecutionCache.lookup = classmethod(lookup)  # type: ignore[method-assign,assignment]


_note_resumed()


def _first(code: types.CodeType) -> types.CodeType:
    """What a frame's code is made of: itself, but for what is left of another frame."""
    return _made[code][0] if code in _made else code


def known_to_dynamo(code: types.CodeType) -> None:
    """Dynamo may now compile a frame of this code, which may have come out of an entry."""
    known: Any = ContinueExecutionCache.generated_code_metadata
    if code in _made and code not in known:
        first, how = _made[code]
        known[code] = known[ContinueExecutionCache.lookup(first, *how)]


# ------------------------------------------------------------------------------------ as bytes
def with_code(traced: Traced, result: Any, frame: Any) -> Traced:
    """traced with the code that Dynamo's result of the compile of a frame holds, and the functions
    that it calls for what is left. Raises NotKept."""
    guarded = getattr(result, "guarded_code", None)
    if guarded is None:
        raise NotKept("Dynamo skips the function")
    installed = {
        name: (kind, _resumed_data(frame.globals[name], frame) if kind == RESUMED else value)
        for name, (kind, value) in traced.installed.items()
    }
    return replace(traced, code=_to_bytes(guarded.code, frame.globals), installed=installed)


def _resumed_data(value: Any, frame: Any) -> list[str]:
    """How a global for what is left of a frame is used, and its code and the way it was made."""
    use, code, scope = "function", value, frame.globals
    if isinstance(value, types.CodeType):
        use = "code"  # the frame's own code makes a function of the one that it holds
    elif value.__closure__:
        held = inspect.getclosurevars(value).nonlocals
        use, code, scope = "with cells", held.get("code"), held.get("f_globals")
    else:
        code, scope = value.__code__, value.__globals__
    nested = getattr(torch._dynamo.config, "nested_graph_breaks", False)
    if code not in _made or scope is not frame.globals or nested:
        raise NotKept("a graph break in a function that is called or a comprehension")
    first, how = _made[code]
    if first is not _first(frame.code):
        raise NotKept("a graph break whose rest is made of other code")
    return [use, _to_bytes((code, how), {}).hex()]


def resumed_again(data: list[str], frame: Any, name: str) -> tuple[Any, types.CodeType]:
    """What the global is to hold here, and its code."""
    use, written = data
    first = _first(frame.code)
    if first not in _read:
        _read[first] = {}
    if written not in _read[first]:
        code, how = _from_bytes(bytes.fromhex(written), {})
        _made[code], _read[first][written] = (first, how), code
    code = _read[first][written]
    if use == "code":
        return code, code
    if use == "function":
        return types.FunctionType(code, frame.globals, name), code

    def with_cells(cells: tuple[types.CellType, ...]) -> types.FunctionType:
        return types.FunctionType(code, frame.globals, name, None, cells)

    return with_cells, code


def code_of(traced: Traced, frame: Any) -> types.CodeType:
    """The code of `with_code`."""
    code: types.CodeType = _from_bytes(traced.code, frame.globals)
    return code


def _to_bytes(value: Any, scope: Mapping[str, Any]) -> bytes:
    try:
        return marshal.dumps(_plain(value, scope))
    except ValueError:
        raise NotKept("code that holds an object of this process") from None


def _from_bytes(data: bytes, scope: Mapping[str, Any]) -> Any:
    return _again(marshal.loads(data), scope)


def _plain(value: Any, scope: Mapping[str, Any]) -> Any:
    """Code and what it holds, as Python writes it down: a dict of one item stands for what it
    cannot. scope: the globals of the frame."""
    if isinstance(value, types.CodeType):
        return value.replace(co_consts=_plain(value.co_consts, scope))
    if type(value) is tuple:
        return tuple(_plain(v, scope) for v in value)
    if isinstance(value, _NAMED):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if value is scope:
        return {"globals": ()}
    name = type(value).__name__
    if is_dataclass(value) and getattr(resume_execution, name, None) is type(value):
        return {name: tuple(_plain(getattr(value, f.name), scope) for f in fields(value))}
    if isinstance(value, Mapping):
        raise NotKept("code that holds a dict")
    return value


def _again(value: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(value, types.CodeType):
        return value.replace(co_consts=_again(value.co_consts, scope))
    if isinstance(value, tuple):
        return tuple(_again(v, scope) for v in value)
    if not isinstance(value, dict):
        return value
    ((name, held),) = value.items()
    if name == "globals":
        return scope
    if isinstance(held, str):
        return torch.device(held) if name == "device" else getattr(torch, held)
    made: Callable[..., Any] = getattr(resume_execution, name)
    return made(*_again(held, scope))
