"""Damage to plan bytes that knows their structure: what every word means, and which words belong
together.

Comes from `wrapper/native.py`, whose layout native/core/plan.cpp documents; goes to
`fuzz_plans.py`, which loads and runs what comes out. A damaged plan has a right checksum: nothing
but the reader, the verifier and the loader stand before it.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from plait.wrapper.native import OPCODES
from plait.wrapper.spec import FIELDS, Kind

HEADER = 24
CLASSES = tuple(OPCODES)
INSTRUCTIONS = tuple(cls.__name__ for cls in CLASSES)
"""By opcode."""
TABLES = ("strings", "program", "expressions", "symbols", "slots", "inputs", "kernels", "programs")
EDGES = (
    0,
    1,
    -1,
    2,
    3,
    7,
    17,
    63,
    64,
    65,
    100,
    1 << 31,
    (1 << 31) - 1,
    1 << 40,
    1 << 62,
    -(2**63),
    2**63 - 1,
)


@dataclass(frozen=True)
class Word:
    """A word at `at`: what it means, and the table or instruction that it is part of."""

    at: int
    means: str
    part: str


@dataclass(frozen=True)
class List:
    """The word with a list's count, the words [first, last) of each item, and the words that count
    these in turn."""

    count: int
    items: list[tuple[int, int]]
    lengths: tuple[int, ...]
    part: str


@dataclass
class Layout:
    """A plan taken apart."""

    words: list[int]
    text: bytes
    meaning: list[Word] = field(default_factory=list)
    lists: list[List] = field(default_factory=list)
    bodies: list[tuple[int, int]] = field(default_factory=list)  # of instructions
    programs: list[int] = field(default_factory=list)  # where the words of a subprogram begin


class _Reader:
    def __init__(self, plan: bytes) -> None:
        n = struct.unpack_from("<q", plan, HEADER)[0]
        words = list(struct.unpack_from(f"<{n}q", plan, HEADER + 8))
        self.out = Layout(words, plan[HEADER + 8 + 8 * n :])
        self.at = 0
        self.part = ""
        self.lengths: tuple[int, ...] = ()

    def read(self) -> Layout:
        for part, read in (
            ("strings", lambda: self.list(lambda: self.words("offset", "length"))),
            ("program", lambda: self.words("string", "total", "total", "total")),
            ("expressions", lambda: self.list(self.expression)),
            ("symbols", lambda: self.list(lambda: self.words("string"))),
            ("slots", lambda: self.list(lambda: self.words("string", "dtype"))),
            ("inputs", lambda: self.list(self.input)),
            ("kernels", lambda: self.list(self.kernel)),
        ):
            self.part = part
            read()
        self.part = "body"
        self.list(self.instruction)
        self.part = "programs"
        self.list(self.program)
        assert self.at == len(self.out.words)
        return self.out

    def word(self, means: str) -> int:
        self.out.meaning.append(Word(self.at, means, self.part))
        self.at += 1
        return self.out.words[self.at - 1]

    def words(self, *means: str) -> None:
        for m in means:
            self.word(m)

    def list(self, item: Callable[[], object]) -> None:
        count, part = self.at, self.part
        items = []
        for _ in range(self.word("count")):
            first = self.at
            item()
            self.part = part
            items.append((first, self.at))
        self.out.lists.append(List(count, items, self.lengths, part))

    def program(self) -> None:
        self.out.programs.append(self.at)
        self.words("offset", "length")

    def expression(self) -> None:
        leaf = self.word("operator") < 2
        self.words(*(("number", "number") if leaf else ("expression", "expression")))

    def shape(self) -> None:
        for _ in range(2 * self.word("rank")):
            self.word("expression")

    def input(self) -> None:
        kind = self.word("kind")
        self.word("symbol" if kind == 1 else "slot")
        if kind == 0:
            self.shape()
            self.word("string")

    def kernel(self) -> None:
        self.words("string", "total", "total")
        self.list(lambda: self.words("kind", "string"))
        self.word("string")

    def operand(self) -> None:
        match self.word("operand"):
            case 0 | 12:
                self.word("slot")
            case 1:
                self.word("expression")
            case 3:
                self.word("flag")
            case 4:
                self.word("number")
            case 6:
                self.words("number", "number")
            case 7:
                self.word("dtype")
            case 5 | 8 | 9 | 10:
                self.word("string")
            case 11:
                self.list(self.operand)

    def keyword(self) -> None:
        self.word("string")
        self.operand()

    def result(self) -> None:
        kind = self.word("kind")
        if kind:
            self.word("symbol" if kind == 2 else "slot")

    def instruction(self) -> None:
        first = self.at
        opcode = self.word("opcode")
        self.part = INSTRUCTIONS[opcode]
        self.lengths = (self.at,)
        self.word("length")
        self.fields(CLASSES[opcode])
        self.lengths = ()
        self.out.bodies.append((first, self.at))

    def source(self) -> None:
        if self.word("kind"):
            self.words("slot", "dimension")
        else:
            self.word("expression")

    def fields(self, cls: type) -> None:
        kinds = [kind for _, kind in FIELDS[cls]]
        for kind in kinds:
            match kind:
                case Kind.SHAPE:
                    self.shape()
                case Kind.STRIDES | Kind.FOR_PASSES | Kind.CONDITION:
                    pass  # a part of the shape; not in plans
                case Kind.DTYPE if Kind.DEFINES in kinds:
                    pass  # in the table of slots
                case Kind.SOURCE:
                    self.source()
                case Kind.OPERAND:
                    self.operand()
                case Kind.OPERANDS | Kind.OUTPUTS:
                    self.list(self.operand)
                case Kind.KEYWORDS:
                    self.list(self.keyword)
                case Kind.RESULTS:
                    self.list(self.result)
                case Kind.ALL_USED:
                    self.list(lambda: self.word("slot"))
                case Kind.SIZES:
                    self.list(lambda: self.word("expression"))
                case Kind.PROGRAMS:
                    self.list(lambda: self.word("program"))
                case _:
                    self.words(*_WORDS[kind])


_WORDS = {
    Kind.DEFINES: ("slot",),
    Kind.SYMBOL: ("symbol",),
    Kind.USES: ("slot",),
    Kind.ARENA: ("slot",),
    Kind.ENDS: ("slot",),
    Kind.SIZE: ("expression",),
    Kind.DTYPE: ("dtype",),
    Kind.KERNEL: ("kernel",),
    Kind.CONSTANT: ("constant",),
    Kind.CALLABLE: ("callable",),
    Kind.OPERATOR: ("string", "string"),
    Kind.CONTROL: ("kind",),
    Kind.ERROR: ("kind",),
    Kind.DEVICE: ("string",),
    Kind.TEXT: ("string",),
    Kind.INT: ("number",),
    Kind.FLAG: ("flag",),
}
"""What the words of a field mean."""


def read(plan: bytes) -> Layout:
    """Takes an undamaged plan apart."""
    return _Reader(plan).read()


def write(plan: bytes, words: list[int], text: bytes) -> bytes:
    """The plan's magic and version, with these words and a right checksum."""
    return signed(plan[:HEADER] + struct.pack(f"<{len(words) + 1}q", len(words), *words) + text)


def signed(plan: bytes) -> bytes:
    """The plan with its length and checksum made right."""
    payload = plan[HEADER:]
    return plan[:12] + struct.pack("<IQ", zlib.crc32(payload), len(payload)) + payload


def damage(plan: bytes, layout: Layout, rng: random.Random) -> tuple[bytes, list[str]]:
    """A damaged plan, and the tables and instructions that were damaged."""
    if rng.random() < 0.05:
        return _flip(plan, rng), ["bytes"]
    if layout.programs and rng.random() < 0.4:
        return _inside(plan, layout, rng)
    words, parts = list(layout.words), []
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 4))):
        at = rng.choice(layout.meaning) if rng.random() < 0.3 else _rare(layout, rng)
        words[at.at] = _other(at, layout, words[at.at], rng)
        parts.append(at.part)
    if not parts or rng.random() < 0.1:
        words, part = _restructure(layout, words, rng)
        parts.append(part)
    return write(plan, words, layout.text), parts


def _inside(plan: bytes, layout: Layout, rng: random.Random) -> tuple[bytes, list[str]]:
    """The plan with damage to one of its subprograms."""
    at = rng.choice(layout.programs)
    start, n = layout.words[at : at + 2]
    nested = layout.text[start : start + n]
    changed, parts = damage(nested, read(nested), rng)
    words = list(layout.words)
    words[at + 1] = len(changed)
    for other in layout.programs:
        words[other] += (len(changed) - n) * (words[other] > start)
    text = layout.text[:start] + changed + layout.text[start + n :]
    return write(plan, words, text), parts


def _rare(layout: Layout, rng: random.Random) -> Word:
    """A word of a table or kind of instruction that is chosen first, so that small ones get their
    share."""
    part = rng.choice(sorted({w.part for w in layout.meaning if w.part not in ("strings", "body")}))
    return rng.choice([w for w in layout.meaning if w.part == part])


def _other(word: Word, layout: Layout, value: int, rng: random.Random) -> int:
    """Another value for a word: mostly one that the same word has elsewhere, or near it."""
    alike = [layout.words[w.at] for w in layout.meaning if w.means == word.means]
    way = rng.random()
    if word.means in ("number", "total", "dimension"):
        near = (value + 1, value - 1, value * 2, value // 2, value + 4, value - 4, -value)
        choice = (
            rng.choice(near) if way < 0.5 else rng.choice(EDGES) if way < 0.8 else rng.choice(alike)
        )
    elif word.means in ("kind", "flag", "operand", "operator", "dtype", "opcode"):
        choice = (
            rng.randrange(20)
            if way < 0.5
            else value + rng.choice((-1, 1))
            if way < 0.8
            else rng.choice(alike)
        )
    else:
        choice = (
            rng.choice(alike)
            if way < 0.6
            else value + rng.choice((-1, 1))
            if way < 0.85
            else rng.choice(EDGES)
        )
    return max(-(2**63), min(2**63 - 1, choice))


def _restructure(layout: Layout, words: list[int], rng: random.Random) -> tuple[list[int], str]:
    """An item of a list is dropped, doubled, swapped with its neighbour or put in the place of
    another."""
    lists = [entry for entry in layout.lists if entry.items and entry.part != "strings"]
    parts = sorted({entry.part for entry in lists})
    part = rng.choice(parts)
    chosen = rng.choice([entry for entry in lists if entry.part == part])
    items = [words[a:b] for a, b in chosen.items]
    k = rng.randrange(len(items))
    match rng.choice(("drop", "double", "swap", "copy", "move")):
        case "drop":
            items.pop(k)
        case "double":
            items.insert(k, items[k])
        case "swap":
            items[k - 1], items[k] = items[k], items[k - 1]
        case "copy":
            items[k] = rng.choice(items)
        case "move":
            items.insert(rng.randrange(len(items)), items.pop(k))
    flat = [w for item in items for w in item]
    first, last = chosen.items[0][0], chosen.items[-1][1]
    words = list(words)
    words[chosen.count] += len(items) - len(chosen.items)
    for length in chosen.lengths:
        words[length] += len(flat) - (last - first)
    words[first:last] = flat
    return words, part


def _flip(plan: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(plan)
    for _ in range(rng.choice((1, 1, 2, 8))):
        damaged[rng.randrange(HEADER, len(plan))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.1:
        damaged = damaged[: rng.randrange(HEADER, len(plan))]
    return signed(bytes(damaged))
