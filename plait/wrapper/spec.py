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
    CONTROL = "a kind of control flow, of `calls.CONTROL_KINDS`"
    PROGRAMS = "places among the program's subprograms"
    OPERATOR = "an operator of PyTorch: 'namespace::name.overload'"
    ERROR = "a class of `checks.ERRORS`"
    CHECKS = "errors with messages"
    DEVICE = "'cpu' or 'cuda:N'"
    TEXT = "words for people"
    INT = "a number"
    FLAG = "true or false"
    FOR_PASSES = "true or false, which no target reads: plans lack it"
    CONDITION = "an integer expression, which no target reads: plans lack it"


Field = tuple[str, Kind]


class Select(dict[type, tuple[Field, ...]]):
    """Name and kind of the fields of an instruction, in order: `select[cls]`. Of these kinds alone,
    if any are given. Raises TypeError for a field without a kind."""

    def __init__(self, *kinds: Kind) -> None:
        super().__init__()
        self.kinds = kinds

    def __missing__(self, cls: type) -> tuple[Field, ...]:
        types = vars(sys.modules[cls.__module__])
        found = [(f.name, _kind_of(cls, f.name, types.get(str(f.type)))) for f in fields(cls)]
        self[cls] = tuple(f for f in found if not self.kinds or f[1] in self.kinds)
        return self[cls]


FIELDS = Select()
"""All fields."""


def _kind_of(cls: type, name: str, annotation: object) -> Kind:
    (kind,) = getattr(annotation, "__metadata__", (None,))
    if not isinstance(kind, Kind):
        raise TypeError(f"{cls.__name__}.{name} has no kind: see plait/wrapper/spec.py")
    return kind


def defaults_of(cls: type) -> dict[str, Any]:
    """The defaults of those fields of an instruction that have one."""
    return {f.name: f.default for f in fields(cls) if f.default is not MISSING}
