"""native/core/instructions.h, written from the kinds of fields: the instructions of a plan as
structs, their reader and a walk over their fields.

`python -m tests.instruction_table` writes it; a test proves that it is up to date.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from plait.wrapper.native import OPCODES
from plait.wrapper.spec import FIELDS, Kind


class _Member(NamedTuple):
    """A field in C++: its type, its name and the method of a reader that gives it."""

    type: str
    name: str
    read: str


_TYPES = {
    Kind.DEFINES: ("SlotId", "slot"),
    Kind.SYMBOL: ("int32_t", "symbol"),
    Kind.RESULTS: ("std::vector<Result>", "results"),
    Kind.USES: ("SlotId", "slot"),
    Kind.ALL_USED: ("std::vector<SlotId>", "slots"),
    Kind.ARENA: ("SlotId", "slot"),
    Kind.ENDS: ("SlotId", "slot"),
    Kind.OPERAND: ("Operand", "operand"),
    Kind.OPERANDS: ("std::vector<Operand>", "operands"),
    Kind.KEYWORDS: ("std::vector<KeywordOperand>", "keywords"),
    Kind.OUTPUTS: ("std::vector<Operand>", "operands"),
    Kind.SOURCE: ("Source", "source"),
    Kind.SIZE: ("ExprId", "expr"),
    Kind.SIZES: ("std::vector<ExprId>", "exprs"),
    Kind.DTYPE: ("DType", "dtype"),
    Kind.SHAPE: ("Shape", "shape"),
    Kind.KERNEL: ("int32_t", "kernel"),
    Kind.CONSTANT: ("int32_t", "constant"),
    Kind.CALLABLE: ("int32_t", "callable"),
    Kind.ERROR: ("Check::Error", "error"),
    Kind.CHECKS: ("std::vector<Check>", "checks"),
    Kind.DEVICE: ("std::string", "string"),
    Kind.TEXT: ("std::string", "string"),
    Kind.INT: ("int64_t", "word"),
    Kind.FLAG: ("bool", "flag"),
}
_WALKED = {
    Kind.USES: "uses",
    Kind.ALL_USED: "uses",
    Kind.ARENA: "arena",
    Kind.ENDS: "uses",
    Kind.OPERAND: "operand",
    Kind.OPERANDS: "operand",
    Kind.KEYWORDS: "operand",
    Kind.OUTPUTS: "output",
    Kind.SOURCE: "source",
    Kind.SIZE: "size",
    Kind.SIZES: "size",
    Kind.SHAPE: "shape",
}
"""What a walk over the fields of an instruction calls for each, element by element of a list."""

_HEAD = """\
// native/core/instructions.h: the instructions of a plan, their reader, and a walk over their
// fields. Written by `python -m tests.instruction_table` from plait/wrapper/instructions.py, where
// the meaning of each is written.
#pragma once

#include "operands.h"

// clang-format off

namespace plait {
"""


def header() -> str:
    """The text of the file."""
    made = "".join(map(_struct, OPCODES))
    names = _wrapped(f"using Instr = std::variant<{', '.join(c.__name__ for c in OPCODES)}>;")
    cases = "".join(
        _wrapped(
            f"    case {code}: return {cls.__name__}{{"
            + ", ".join(f"in.{m.read}()" for m in _members(cls))
            + "};"
        )
        for cls, code in OPCODES.items()
    )
    read = (
        "// Braced initialisers are evaluated left to right: fields stand in the order of the "
        "words.\ntemplate <class Reader>\nInstr read_instr(Reader& in, int32_t opcode) {\n"
        f"  switch (opcode) {{\n{cases}"
        '    default: throw PlanError("damaged plan: an unknown opcode");\n  }\n}\n'
    )
    walks = "".join(map(_walk, OPCODES))
    return f"{_HEAD}{made}\n{names}\n{read}{walks}\n}}\n"


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 100, subsequent_indent="        ") + "\n"


def _members(cls: type) -> Iterator[_Member]:
    """The members of an instruction's struct. Those that define a tensor have its element type in
    the table of slots; the strides are a part of the shape."""
    fields = FIELDS[cls]
    defines = any(kind is Kind.DEFINES for _, kind in fields)
    for name, kind in fields:
        if kind is Kind.OPERATOR:
            yield from (_Member("std::string", n, "string") for n in ("op", "overload"))
        elif kind not in (Kind.STRIDES, Kind.FOR_PASSES) and not (kind is Kind.DTYPE and defines):
            of, read = _TYPES[kind]
            yield _Member(of, read if name == "name" else name, read)


def _struct(cls: type) -> str:
    members = "".join(f"  {m.type} {m.name};\n" for m in _members(cls))
    return f"\nstruct {cls.__name__} {{\n{members}}};\n"


def _walk(cls: type) -> str:
    lines = []
    for name, kind in FIELDS[cls]:
        call, field = _WALKED.get(kind), "slot" if name == "name" else name
        if call is None:
            continue
        each = {Kind.KEYWORDS: f"for (const auto& k : i.{field}) v.{call}(k.value);"}.get(kind)
        if each is None and _TYPES[kind][0].startswith("std::vector"):
            each = f"for (const auto& e : i.{field}) v.{call}(e);"
        lines.append(f"  {each or f'v.{call}(i.{field});'}\n")
    named = "const " + cls.__name__ + ("& i, V& v" if lines else "&, V&")
    return f"\ntemplate <class V>\nvoid walk({named}) {{\n{''.join(lines)}}}\n"
