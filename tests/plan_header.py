"""What the executor in C++ has of the compiler's tables.

native/core/tables.h has the numbers and names that plans are written with.
native/core/instructions.h has the instructions of a plan as structs, their reader and a walk over
their fields, all from the kinds of the fields.

`python -m tests.instruction_table` writes them; a test proves that they are up to date.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from plait.ir.calls import CONTROL_KINDS
from plait.ir.checks import ERRORS
from plait.ir.dtypes import DTYPES
from plait.lower.dtypes import TO_TORCH
from plait.runtime.functions import FUNCTIONS
from plait.wrapper import instructions as ins
from plait.wrapper import native, package
from plait.wrapper.native import OPCODES
from plait.wrapper.spec import FIELDS, Kind


class _Member(NamedTuple):
    """A field in C++: its type, its name and the method of a reader that gives it."""

    type: str
    name: str
    read: str


_ABSENT = Kind.STRIDES, Kind.FOR_PASSES, Kind.CONDITION
"""What plans lack, or have as a part of something else."""
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
    Kind.CONTROL: ("ControlKind", "control"),
    Kind.PROGRAMS: ("std::vector<int32_t>", "programs"),
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
    Kind.ENDS: "ends",
    Kind.OPERAND: "operand",
    Kind.OPERANDS: "operand",
    Kind.KEYWORDS: "operand",
    Kind.OUTPUTS: "output",
    Kind.SOURCE: "source",
    Kind.SIZE: "size",
    Kind.SIZES: "size",
    Kind.SHAPE: "shape",
    Kind.SYMBOL: "symbol",
    Kind.DEFINES: "defines",
    Kind.RESULTS: "result",
}
"""What a walk over the fields of an instruction calls for each, element by element of a list: what
it defines comes last."""
_DEFINING = Kind.SYMBOL, Kind.DEFINES, Kind.RESULTS

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
    all_of = [cls.__name__ for cls in OPCODES]
    names = _wrapped(f"using Instr = std::variant<{', '.join(all_of)}>;")
    listed = textwrap.wrap(" ".join(f"_({name})" for name in all_of), 90)
    names += "\n#define PLAIT_INSTRUCTIONS(_) \\\n  " + " \\\n  ".join(listed) + "\n"
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
        elif kind not in _ABSENT and not (kind is Kind.DTYPE and defines):
            of, read = _TYPES[kind]
            yield _Member(of, read if name == "name" else name, read)


def _struct(cls: type) -> str:
    members = "".join(f"  {m.type} {m.name};\n" for m in _members(cls))
    return f"\nstruct {cls.__name__} {{\n{members}}};\n"


def _walk(cls: type) -> str:
    lines = []
    for name, kind in sorted(FIELDS[cls], key=lambda f: f[1] in _DEFINING):
        call = _WALKED.get(kind)
        if call is None:
            continue
        field = _TYPES[kind][1] if name == "name" else name
        each = {Kind.KEYWORDS: f"for (const auto& k : i.{field}) v.{call}(k.value);"}.get(kind)
        if each is None and _TYPES[kind][0].startswith("std::vector"):
            each = f"for (const auto& e : i.{field}) v.{call}(e);"
        lines.append(f"  {each or f'v.{call}(i.{field});'}\n")
    named = "const " + cls.__name__ + ("& i, V& v" if lines else "&, V&")
    return f"\ntemplate <class V>\nvoid walk({named}) {{\n{''.join(lines)}}}\n"


_WORDS = {"const": "constant", "sym": "symbol", "div": "floordiv", "bool": "boolean",
          "float": "real", "str": "string"}  # fmt: skip
"""Names of tables that C++ has another meaning or a better word for."""

_TABLES = """\
// native/core/tables.h: the numbers and names that plans and packages have. The place of a
// name is its number. Written by `python -m tests.instruction_table` from the tables of the
// writers, plait/wrapper/native.py and plait/wrapper/package.py.
#pragma once

#include <cstdint>

// clang-format off

namespace plait {
"""


def tables() -> str:
    """The text of native/core/tables.h."""
    inputs = (cls.__name__.removesuffix("Input").lower() for cls in ins.INPUTS)
    enums = {
        "DType": (*DTYPES, "kAny"),
        "ExprOp": native.EXPR_OPS,
        "OperandKind": native.OPERANDS,
        "SourceKind": native.SOURCES,
        "ResultKind": native.RESULTS,
        "ErrorKind": (name.removesuffix("Error").lower() for name in ERRORS),
        "InputKind": inputs,
        "ControlKind": CONTROL_KINDS,
    }
    names = [f'"{name}"' for name in (*DTYPES, "any")]
    in_torch = {d.name: str(t).removeprefix("torch.") for d, t in TO_TORCH.items()}
    return "".join(
        (
            _TABLES,
            f"\ninline constexpr uint32_t kPlanVersion = {native.PLAN_VERSION};\n",
            f"inline constexpr uint32_t kPackageVersion = {package.VERSION};\n",
            f"inline constexpr int64_t kSizeFunctions = {len(FUNCTIONS)};\n\n",
            "// How many enumerators E has.\n",
            "template <class E>\ninline constexpr int64_t kCount = 0;\n",
            *(_enum(name, words) for name, words in enums.items()),
            "\n// Of element types by number: bytes, name, name in torch.\n",
            _array("int64_t", "kElementSize", (*(str(d.nbytes) for d in DTYPES.values()), "0")),
            _array("const char*", "kDTypeName", names),
            _array(
                "const char*", "kTorchName", (f'"{in_torch.get(n[1:-1], n[1:-1])}"' for n in names)
            ),
            "\n}\n",
        )
    )


def _enum(name: str, words: Iterable[str]) -> str:
    known = [_WORDS.get(w, w) for w in words]
    return (
        "\n"
        + _wrapped(f"enum class {name} : int32_t {{ {', '.join(known)} }};")
        + f"template <>\ninline constexpr int64_t kCount<{name}> = {len(known)};\n"
    )


def _array(of: str, name: str, values: Iterable[str]) -> str:
    return _wrapped(f"inline constexpr {of} {name}[] = {{{', '.join(values)}}};")
