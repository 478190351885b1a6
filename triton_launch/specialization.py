"""How a call is specialized, as text: `*fp32:D,i32,=1024`; src/specialize.h has the grammar.

Packs and the process that compiles read what C++ writes. Nothing here loads Triton.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

_INTEGERS = {
    f"{k[0]}{n}": f"{'u' if k == 'u' else ''}int{n}" for k in ("i", "u") for n in (8, 16, 32, 64)
}
_FLOATS = {
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64",
    "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2", "fp8e4b15": "fp8e4b15",
    "fp8e4b8": "float8_e4m3fnuz", "fp8e5b16": "float8_e5m2fnuz",
}  # fmt: skip
DTYPES = _INTEGERS | {k: k for k in _FLOATS} | {"u1": "int1"}
"""Triton's names of dtypes, by its short ones."""
TORCH_DTYPES = _INTEGERS | _FLOATS | {"u1": "bool"}
"""Torch's, which has no fp8e4b15."""

DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[(\d+(?:,\d+)*)\]>")


@dataclasses.dataclass(frozen=True)
class DType:
    """A dtype among constants, by Triton's short name."""

    name: str


@dataclasses.dataclass(frozen=True)
class Callee:
    """A function among constants, by its name in the kernel's file."""

    name: str


@dataclasses.dataclass(frozen=True)
class Item:
    """How one argument is specialized. type: Triton's, 'constexpr', or a tuple's items. value: of a
    constant; Ellipsis: the parameter's default."""

    type: str | tuple[Item, ...]
    value: Any = None
    divisible: bool = False


class Reader:
    """Reads items and constants from the front of a text. Its functions raise ValueError."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, sign: str) -> bool:
        found = self.text.startswith(sign, self.at)
        self.at += len(sign) if found else 0
        return found

    def word(self) -> str:
        start = self.at
        if self.text.startswith("tensordesc<", start):
            self.at = self.text.find(">", start) + 1 or len(self.text)
        while self.at < len(self.text) and self.text[self.at] not in ",()=":
            self.at += 1
        if start == self.at:
            raise ValueError(f"nothing is at {self.text[: self.at]!r} of {self.text!r}")
        return self.text[start : self.at]

    def several(self, read: Any) -> tuple[Any, ...]:
        found = []
        while not self.take(")"):
            found.append(read())
            if not self.take(",") and not self.text.startswith(")", self.at):
                raise ValueError(f"a parenthesis is open in {self.text!r}")
        return tuple(found)

    def value(self, stand_in: Callable[[str], Any] = lambda word: None) -> Any:
        """A constant. stand_in: makes something of a word that is a type, or None."""
        if self.take("("):
            return self.several(lambda: self.value(stand_in))
        word = self.word()
        if (made := stand_in(word)) is not None:
            return made
        if word == "?":
            return ...
        if word.startswith("@"):
            return Callee(word[1:])
        if word in DTYPES:
            return DType(word)
        if word in ("nan", "inf", "-inf"):
            return float(word)
        value = ast.literal_eval(word)
        return unquote(value) if isinstance(value, str) else value

    def item(self) -> Item:
        if self.take("="):
            return Item("constexpr", self.value())
        if self.take("("):
            return Item(self.several(self.item))
        word = self.word()
        if (found := DESCRIPTOR.fullmatch(word)) and found[1] in DTYPES:
            return Item(word)
        kind, _, hint = word.partition(":")
        bare = kind.removeprefix("*")
        pointed = bare.removeprefix("k") if bare != kind else bare
        if pointed not in DTYPES or hint not in ("", "D"):
            raise ValueError(
                f"{kind}{':' if hint else ''}{hint} in {self.text!r} is no type of Triton's"
            )
        return Item(kind, divisible=hint == "D")


def read_specialization(text: str) -> list[Item]:
    """The items of a specialization. Raises ValueError."""
    reader = Reader("".join(text.split()))
    found = [reader.item()] if reader.text else []
    while reader.at < len(reader.text):
        if not reader.take(","):
            raise ValueError(f"{text!r} has more than it should after {reader.text[: reader.at]!r}")
        found.append(reader.item())
    return found


def read_options(text: str) -> dict[str, Any]:
    """Options that are written as `num_warps=8;num_stages=2`."""
    return {
        name: Reader(value).value()
        for name, _, value in (o.partition("=") for o in text.split(";") if o)
    }


def write_value(value: Any) -> str:
    """A constant as text. Raises TypeError for what C++ cannot say."""
    if isinstance(value, tuple):
        return f"({','.join(map(write_value, value))})"
    if value is None or isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        text = f"{value:.17g}"
        return text if set(text) & set(".ein") else text + ".0"
    if isinstance(value, str):
        return f"'{quote(value, safe='')}'"
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Callee):
        return f"@{value.name}"
    raise TypeError


def write_item(item: Item) -> str:
    """An item as read_specialization reads it, in the one way that it is written."""
    if isinstance(item.type, tuple):
        return f"({','.join(map(write_item, item.type))})"
    if item.type == "constexpr":
        return "=?" if item.value is ... else f"={write_value(item.value)}"
    return item.type + (":D" if item.divisible else "")
