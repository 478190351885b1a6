"""The kinds of fields that instructions have: the one description that everything reads which
handles every instruction alike.

`instructions.py` marks each field with its kind. Walking (`walk.py`), the text form (`text.py`),
the plan of the native target (`native.py`), its reader in C++ (`native/core/instructions.h`) and
the rules that hold for every field (`verify.py`) go by these marks, so that a new instruction needs
no line there.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any


class Kind(Enum):
    """What a field is to a program."""

    DEFINES = "the name of a tensor or an arena that comes into being here"
    SYMBOL = "the name of an integer symbol that comes into being here"
    RESULTS = "the names of results, tensors or symbols; None for one that nobody uses"
    USES = "a tensor that is read, written or referred to"
    ALL_USED = "several of them"
    ARENA = "an arena in which a tensor lies"
    ENDS = "a tensor that is not used from here on"
    OPERAND = "a tensor, size, literal or list"
    OPERANDS = "several operands"
    KEYWORDS = "operands with names"
    OUTPUTS = "what the program returns"
    SOURCE = "an expression, or what is read from a tensor"
    SIZE = "an integer expression"
    SIZES = "several integer expressions"
    DTYPE = "the element type of a tensor; shape and strides follow"
    SHAPE = "its sizes"
    STRIDES = "its strides, as many as sizes"
    KERNEL = "the name of a kernel"
    CONSTANT = "a place in the program's table of tensors"
    CALLABLE = "a place in the program's table of callables"
    OPERATOR = "an operator of PyTorch: 'namespace::name.overload'"
    ERROR = "a class of `checks.ERRORS`"
    CHECKS = "errors with messages"
    DEVICE = "'cpu' or 'cuda:N'"
    TEXT = "words for people"
    INT = "a number"
    FLAG = "true or false"


Field = tuple[str, Kind]


_FIELDS: dict[tuple[type, tuple[Kind, ...]], tuple[Field, ...]] = {}


def fields_of(cls: type, *kinds: Kind) -> tuple[Field, ...]:
    """Name and kind of the fields of an instruction, in order; of these kinds alone, if any are
    given. Raises TypeError for a field without a kind."""
    found = _FIELDS.get((cls, kinds))
    if found is None:
        types = vars(sys.modules[cls.__module__])
        all_fields = [(f.name, _kind_of(cls, f.name, types.get(str(f.type)))) for f in fields(cls)]
        found = tuple(f for f in all_fields if not kinds or f[1] in kinds)
        _FIELDS[cls, kinds] = found
    return found


def _kind_of(cls: type, name: str, annotation: object) -> Kind:
    (kind,) = getattr(annotation, "__metadata__", (None,))
    if not isinstance(kind, Kind):
        raise TypeError(f"{cls.__name__}.{name} has no kind: see plait/wrapper/spec.py")
    return kind


def defaults_of(cls: type) -> dict[str, Any]:
    """The defaults of those fields of an instruction that have one."""
    return {f.name: f.default for f in fields(cls) if f.default is not MISSING}
